"""A task's groups for other tools: JSON lines and safetensors; see `docs/saving.md`."""

from redrb.stream.exchange.export import Exported, export_task
from redrb.stream.exchange.imports import Imported, import_task

__all__ = ["Exported", "Imported", "export_task", "import_task"]
