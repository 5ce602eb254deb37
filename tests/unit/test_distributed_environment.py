"""Whose variables are believed, whose are ignored, and that contradictions are all named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.distributed.environment import Nodes, World, expand_hosts, read_nodes, read_world
from meshwright.errors import DeviceError

ELASTIC = {
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "node[02-04,07]",
}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "HOSTNAME": "job-worker-2",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}


def test_nothing_set_is_one_process():
    assert read_world({}) == World() and World().world == 1


def test_the_elastic_agent_is_believed():
    assert read_world(ELASTIC) == World(5, 8, 1, 4, 1, 2, "node0", 29500, "elastic", 2, "abc", True)


def test_leftovers_are_ignored_and_named(capsys):
    stale = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "192.0.2.10", "MASTER_PORT": "29500", "LOCAL_RANK": "3"}
    assert read_world(stale) == World()
    err = capsys.readouterr().err
    assert all(f"{key}={value}" in err for key, value in stale.items()) and "leftovers" in err
    read_world(stale, warn=False)
    assert capsys.readouterr().err == ""


def test_leftovers_in_a_pod_of_no_training_job_are_ignored(capsys):
    assert read_world({**POD, "HOSTNAME": "notebook-0"}) == World()
    assert "RANK=3" in capsys.readouterr().err


def test_a_slurm_task_finds_its_place_and_all_tasks_the_same_meeting_place():
    world = read_world(SLURM)
    assert (world.rank, world.world, world.local_rank, world.local_world, world.node, world.nodes) == (6, 7, 0, 1, 3, 4)
    assert world.master_addr == "node02" and world.source == "slurm"
    first = read_world({**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "RANK": "5"})
    assert (first.master_addr, first.master_port, first.local_world) == ("node02", world.master_port, 2)
    other_step = read_world({**SLURM, "SLURM_STEP_ID": "4"})
    assert other_step.master_port != world.master_port


def test_slurm_takes_another_name_of_the_first_host_but_no_strangers():
    assert read_world({**SLURM, "MASTER_ADDR": "node02-ib0"}).master_addr == "node02-ib0"
    assert read_world({**SLURM, "MASTER_ADDR": "192.0.2.10"}).master_addr == "node02"


def test_a_slurm_batch_script_is_no_task():
    batch = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NODELIST": "node[1-8]"}
    assert read_world(batch) == World()


def test_a_kubernetes_pod_is_believed():
    world = read_world(POD)
    assert (world.rank, world.world, world.node, world.nodes, world.local_world) == (3, 4, 3, 4, 1)
    assert (world.master_addr, world.master_port, world.source) == ("job-master-0", 23456, "kubernetes")


def test_machines_that_each_start_a_launcher():
    slurm = {**SLURM, "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}
    assert read_nodes(slurm) == Nodes(4, f"node02:{read_world(slurm).master_port}", "slurm")
    assert read_nodes(SLURM) is None
    assert read_nodes({**POD, "PET_NNODES": "4", "PET_NPROC_PER_NODE": "8"}) == Nodes(4, "job-master-0:23456", "kubernetes")
    assert read_nodes({}) is None and read_nodes(ELASTIC) is None


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (
            {**ELASTIC, "RANK": "x", "WORLD_SIZE": "", "MASTER_ADDR": ""},
            ["RANK: 'x'", "WORLD_SIZE: ''", "MASTER_ADDR: is not set"],
        ),
        ({**ELASTIC, "RANK": "9", "LOCAL_RANK": "4"}, ["rank 9 is outside 0..7", "local_rank 4 is outside 0..3"]),
        ({**ELASTIC, "MASTER_PORT": "70000", "GROUP_RANK": "2"}, ["port 70000 of node0", "node 2 is outside 0..1"]),
        ({k: v for k, v in ELASTIC.items() if k != "LOCAL_WORLD_SIZE"}, ["LOCAL_WORLD_SIZE: is not set"]),
        ({**SLURM, "SLURM_STEP_NODELIST": "node02", "SLURM_STEP_NUM_TASKS": "8"}, ["names 1 hosts", "adds up to 7"]),
        ({**POD, "RANK": "0"}, ["RANK: 0 does not belong to pod job-worker-2"]),
        ({**POD, "PET_NPROC_PER_NODE": "8"}, ["8 ranks a pod", "--nproc 8"]),
    ],
)
def test_contradictions_are_all_named(env, words):
    with pytest.raises(DeviceError) as caught:
        read_world(env)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node[01-04,07]", ["node01", "node02", "node03", "node04", "node07"]),
        ("a1,b[2-3],c", ["a1", "b2", "b3", "c"]),
        ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
        ("gpu[9-11].site.org", ["gpu9.site.org", "gpu10.site.org", "gpu11.site.org"]),
        ("", []),
    ],
)
def test_host_lists(text, hosts):
    assert expand_hosts(text) == hosts


@given(st.integers(0, 99999), st.integers(0, 40), st.integers(1, 6))
def test_a_range_has_every_number_once_and_keeps_its_width(first, more, width):
    low = str(first).zfill(width)
    hosts = expand_hosts(f"n[{low}-{first + more}]")
    assert [int(host[1:]) for host in hosts] == list(range(first, first + more + 1))
    assert all(len(host) - 1 >= len(low) for host in hosts)
