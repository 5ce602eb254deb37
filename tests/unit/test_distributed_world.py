"""A world of one: no port, groups given, always destroyed; a wait that ends and says for whom."""

from __future__ import annotations

import socket
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from meshwright.distributed.environment import World
from meshwright.distributed.mesh import AxisGroups, build_mesh, coordinate, data_rank
from meshwright.distributed.reduce import agree, broadcast_json, gather_json, sum_scalars
from meshwright.distributed.rendezvous import parse_endpoint, prepare
from meshwright.distributed.world import init_world
from meshwright.errors import DeviceError, LayoutError, MeshwrightError
from meshwright.spec.layout import Layout


def test_one_process_has_groups_a_mesh_and_collectives():
    with init_world(World()) as ranks:
        assert (ranks.rank, ranks.size, ranks.device, ranks.backend) == (0, 1, torch.device("cpu"), "gloo")
        assert len({ranks.group, ranks.control, ranks.checkpoint}) == 3
        mesh = build_mesh(Layout(), "cpu")
        assert mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        assert coordinate(mesh) == dict.fromkeys(mesh.mesh_dim_names, 0) and data_rank(mesh) == (0, 1)
        assert AxisGroups(mesh).data.size() == 1
        assert sum_scalars([1.5], ranks.control) == [1.5]
        assert gather_json({"a": None}, ranks.control) == [{"a": None}]
        assert broadcast_json([1], ranks.control) == [1]
        agree("x", ranks.control, "the letter")
        with pytest.raises(LayoutError, match=r"dp_shard 2 .* = 2 ranks, but 1 were started"):
            build_mesh(Layout(dp_shard=2), "cpu")
        with pytest.raises(MeshwrightError, match="initialized already"), init_world(World()):
            pass
    assert not dist.is_initialized()


def test_groups_are_destroyed_after_a_failure_too_and_the_next_run_can_start():
    for _ in range(2):
        with pytest.raises(ValueError, match="a planted failure"), init_world(World()):
            raise ValueError("a planted failure")
        assert not dist.is_initialized()


def test_a_wait_for_ranks_ends_and_names_them():
    start = time.monotonic()
    with pytest.raises(DeviceError, match=r"rank 0 waited \d+ s for ranks 1, 2 of 3, which did not arrive"):  # noqa: SIM117
        with init_world(World(0, 3, 0, 3, master_port=_free_port()), join_timeout=1.0):
            pass
    assert time.monotonic() - start < 10.0 and not dist.is_initialized()


def test_a_wait_for_rank_0_ends_and_names_its_address():
    port = _free_port()
    with pytest.raises(DeviceError, match=rf"127.0.0.1:{port}: rank 1 of 2 could not meet the others within 1 s"):  # noqa: SIM117
        with init_world(World(1, 2, 1, 2, master_port=port), join_timeout=1.0):
            pass


def test_one_process_takes_no_port():
    before = _listening()
    with init_world(World()):
        store_ports = {port for address, port in _listening() - before if address in ("0.0.0.0", "::")}
        assert not store_ports  # gloo's own sockets are bound to one address and found by the kernel


def _listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("tcp")
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_meeting_places_are_read():
    assert parse_endpoint("node0:29400") == ("node0", 29400)
    assert parse_endpoint("[fe80::1]:80") == ("fe80::1", 80)
    for wrong in ("node0", "node0:", ":80", "node0:0", "node0:70000", "node0:x"):
        with pytest.raises(DeviceError, match="is no HOST:PORT"):
            parse_endpoint(wrong)


@pytest.mark.slow
def test_a_program_that_listens_and_says_nothing_is_no_meeting_place(capfd):
    # Red when torch asks in this process (its pages on stderr), and without the alarm (a wait without end).
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port, before = silent.getsockname()[1], time.monotonic()
        with pytest.raises(DeviceError, match=f"port {port} is taken by another program"):
            prepare(2, f"127.0.0.1:{port}")
    assert time.monotonic() - before < 60 and capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_the_store_of_another_launcher_is_a_meeting_place():
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert not prepare(2, f"127.0.0.1:{store.port}").host
