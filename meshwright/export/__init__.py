"""Models for other tools: export, reload, compare."""
