"""Takes of data-parallel ranks: one batch a step, dealt to all ranks."""
