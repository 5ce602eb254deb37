"""What labels and losses agree on."""

from __future__ import annotations

__all__ = ["IGNORE"]

IGNORE = -100
"""Label of a position that is no target."""
