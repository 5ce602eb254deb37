"""The checks of `doctor`, each turned bad once, and the two commands."""

from __future__ import annotations

import json
import resource
import shutil
from collections import namedtuple

import pytest

from meshwright.cli import main
from meshwright.distributed import checks
from meshwright.distributed.checks import check_machine, check_selftest
from meshwright.distributed.inventory import Device, take_inventory
from meshwright.distributed.selftest import Link, SelfTest, run_selftest

Usage = namedtuple("Usage", "total used free")


def states(found) -> dict[str, str]:
    return {check.name: check.state for check in found}


@pytest.fixture(scope="module")
def machine():
    return take_inventory()


def test_this_machine_passes_and_every_problem_says_what_to_do(machine, tmp_path):
    found = check_machine(machine, {}, tmp_path)
    assert not [check for check in found if check.state == "fail"]
    assert {"python", "torch", "pydantic", "devices", "disk here", "open files", "host name", "clock"} <= set(states(found))
    assert all(check.fix for check in found if check.state != "ok")


def test_little_space_is_a_warning_and_hardly_any_prevents(machine, tmp_path, monkeypatch):
    for free, state in ((1 << 20, "fail"), (1 << 30, "warn"), (1 << 40, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda where, free=free: Usage(1 << 41, 0, free))
        assert states(check_machine(machine, {}, tmp_path))["disk here"] == state


def test_few_open_files_prevent(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 4096))
    found = next(check for check in check_machine(machine, {}, tmp_path) if check.name == "open files")
    assert found.state == "fail" and found.fix == "ulimit -n 4096"


def test_a_dependency_outside_its_range_is_named_with_the_remedy(machine, tmp_path, monkeypatch):
    real = checks.metadata.version
    old = {"torch": "2.10.1", "numpy": "1.26"}
    monkeypatch.setattr(checks.metadata, "version", lambda name: old.get(name) or real(name))
    found = {check.name: check for check in check_machine(machine, {}, tmp_path)}
    assert found["torch"].state == "fail" and found["torch"].fix.startswith("pip install 'torch")
    assert found["numpy"].state == "ok"


def test_odd_variables(machine, tmp_path):
    env = {"NCCL_SOCKET_IFNAME": "nope0", "GLOO_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "RANK": "3"}
    found = states(check_machine(machine, env, tmp_path))
    assert found["NCCL_SOCKET_IFNAME"] == "fail" and "GLOO_SOCKET_IFNAME" not in found
    assert found["NCCL_P2P_DISABLE"] == "warn" and found["leftovers"] == "warn"
    quiet = states(check_machine(machine, {"NCCL_SOCKET_IFNAME": "^docker", "NCCL_P2P_DISABLE": "0"}, tmp_path))
    assert "NCCL_SOCKET_IFNAME" not in quiet and "NCCL_P2P_DISABLE" not in quiet


def test_a_busy_device_and_small_shared_memory_are_seen(machine, tmp_path, monkeypatch):
    import dataclasses

    gpus = tuple(Device(index, "GPU", 80 << 30, free << 30, "9.0") for index, free in enumerate((79, 10)))
    big = dataclasses.replace(machine, device_type="cuda", devices=gpus)
    monkeypatch.setattr(shutil, "disk_usage", lambda where: Usage(64 << 20, 0, 1 << 40))
    found = {check.name: check for check in check_machine(big, {}, tmp_path)}
    assert found["devices"].state == "warn" and "device 1" in found["devices"].fix
    assert found["shared memory"].state == "warn" and "--shm-size" in found["shared memory"].fix


def test_the_verdict_on_a_selftest():
    good = Link((0, 1), 1e-5, 1e11, True)
    assert check_selftest(SelfTest("cuda", 2, (good,), 3.0)).state == "ok"
    slow = Link((0, 2), 1e-5, 1e10, True)
    assert "0-2" in check_selftest(SelfTest("cuda", 3, (good, slow), 3.0)).found
    assert check_selftest(SelfTest("cuda", 3, (good, slow), 3.0)).state == "warn"
    wrong = Link((1, 2), 1e-5, 1e11, False)
    assert check_selftest(SelfTest("cuda", 3, (good, wrong), 3.0)).state == "fail"
    assert not SelfTest("cuda", 3, (good, wrong), 3.0).good
    assert check_selftest(SelfTest("cpu", 2, (), 60.0, "2 ranks did not finish within 60 s")).state == "fail"


def test_a_selftest_starts_ranks_and_brings_back_what_they_measured():
    test = run_selftest("cpu", 2, timeout=60.0)
    assert test.good, test.error
    (link,) = test.links
    assert link.ranks == (0, 1) and link.latency_s > 0 and link.bytes_per_s > 0


def test_a_selftest_ends_in_time():
    test = run_selftest("cpu", 2, timeout=0.5)
    assert not test.good and "did not finish within 0.5 s" in test.error and test.seconds < 5.0


def test_devices_prints_a_table_and_json(capsys):
    assert main(["devices", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cores"] >= 1 and found["memory_total"] > 0 and found["backend"]
    assert main(["devices"]) == 0
    assert "cpu" in capsys.readouterr().out


def test_doctor_ends_with_1_if_something_prevents_training(capsys, monkeypatch):
    monkeypatch.setattr(
        "meshwright.distributed.selftest.run_selftest", lambda *_: SelfTest("cpu", 2, (), 1.0, "a [red] reason")
    )
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"] and found["checks"][-1]["state"] == "fail"
    assert main(["doctor"]) == 1
    assert "a [red] reason" in capsys.readouterr().out
