from __future__ import annotations
import contextlib
@contextlib.contextmanager
def planted(fault):
    yield
