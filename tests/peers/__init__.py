"""Tests of other projects, run unchanged on redrb: `make test-peers PEERS=folder`."""
