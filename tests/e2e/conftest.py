"""No run outlives its test, also when the test fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.helpers import Command


@pytest.fixture(autouse=True)
def no_run_outlives_its_test() -> Iterator[None]:
    yield
    while Command.started:
        Command.started.pop().end()
