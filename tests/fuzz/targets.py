"""The readers of foreign input that are fuzzed, by name."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from tests.fuzz import decoder, gateway, manifests, queries, records, saved_tasks, tables, urls

TARGETS: dict[str, ModuleType] = {
    "decoder": decoder,
    "manifests": manifests,
    "saved_tasks": saved_tasks,
    "queries": queries,
    "urls": urls,
    "records": records,
    "tables": tables,
    "gateway": gateway,
}
"""Each has `one_input(data)`, which raises for a defect, and `seeds()`."""

CORPUS = Path(__file__).parent / "corpus"
"""A directory for each target, with inputs that reach different code; tests run them all."""


def inputs(name: str) -> list[bytes]:
    """Return the seeds of a target, and the inputs of its corpus."""
    kept = [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]
    return [*TARGETS[name].seeds(), *kept]
