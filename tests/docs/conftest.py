"""Fixtures of the tests of README, docs and examples."""

from __future__ import annotations

from tests.docs.markdown import one_rank, registries

__all__ = ["one_rank", "registries"]
