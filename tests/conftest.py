"""Shared by every test: one thread, a clean environment, and the pool of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; ranks on few cores must not fight for them
for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
    os.environ.pop(_name, None)

from tests.ranks.pool import Pools  # noqa: E402


def pytest_itemcollected(item: pytest.Item) -> None:
    """Which tests stay together where workers run beside each other (`--dist loadgroup`): those of one file, which share what
    its fixtures made, and all that use the pool of ranks. Two pools at once would only take the cores from each other."""
    if not item.config.pluginmanager.hasplugin("xdist"):
        return
    pool = "ranks" in getattr(item, "fixturenames", ())
    item.add_marker(pytest.mark.xdist_group("ranks" if pool else item.path.name))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """`ranks(n).run(function, *args, timeout=60)`: the results of `function` on n gloo ranks, in rank order."""
    pools = Pools()
    yield pools
    pools.close()
