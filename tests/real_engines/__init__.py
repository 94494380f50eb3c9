"""Tests with a real inference server, too large for CI: `make test-engines VLLM=folder`."""
