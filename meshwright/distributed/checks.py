"""Checks of a machine before it trains: each says what it found and, if that is a problem, what to do."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from meshwright.distributed.environment import STALE
from meshwright.distributed.inventory import Machine, driver_gpus
from meshwright.distributed.selftest import SelfTest
from meshwright.errors import counted

__all__ = ["Check", "check_machine", "check_selftest"]

GIB = 1 << 30
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "NCCL_DEBUG": "TRACE",
}
"""Settings for finding a fault that make every step slow when they stay."""


@dataclass(frozen=True)
class Check:
    """state: "ok"; "warn", something is slower or less than it could be; "fail", training is prevented."""

    name: str
    state: str
    found: str
    fix: str = ""


def check_machine(machine: Machine, env: Mapping[str, str] = os.environ, folder: Path = Path(".")) -> list[Check]:
    """Every check that needs no ranks."""
    checks = [Check("python", "ok", machine.python), *_versions(), _devices(machine), *_space(folder), _shared_memory(machine)]
    checks += [_open_files(), _locked_memory(), _host_name(), _clock(folder), *_variables(env)]
    return checks


def check_selftest(test: SelfTest) -> Check:
    name = f"collectives ({test.ranks} ranks, {test.device})"
    if test.error:
        return Check(
            name, "fail", test.error, "See the message; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME may name a wrong interface"
        )
    wrong = [link.ranks for link in test.links if not link.right]
    if wrong:
        shown = ", ".join("-".join(map(str, ranks)) for ranks in wrong)
        return Check(
            name, "fail", f"wrong sums between ranks {shown}", "Do not train on these devices; look at their links and memory"
        )
    pairs = [link for link in test.links if len(link.ranks) == 2]
    slow, fast = min(pairs, key=lambda link: link.bytes_per_s), max(pairs, key=lambda link: link.bytes_per_s)
    found = (
        f"{counted(len(pairs), 'pair')} right in {test.seconds:.1f} s; "
        f"latency up to {max(p.latency_s for p in pairs) * 1e6:.0f} us, "
        f"all-reduce {slow.bytes_per_s / GIB:.2f} to {fast.bytes_per_s / GIB:.2f} GiB/s"
    )
    # shared cores make the times of CPU ranks uneven by nature
    if test.device != "cpu" and slow.bytes_per_s < fast.bytes_per_s / 4:
        pair = "-".join(map(str, slow.ranks))
        return Check(
            name, "warn", f"{found}; ranks {pair} are the slowest", "Keep such devices in different data-parallel ranks"
        )
    return Check(name, "ok", found)


def _versions() -> Iterator[Check]:
    """Every dependency against the range that this package declares for it."""
    for requirement in metadata.requires("meshwright") or []:
        if ";" in requirement:  # an extra
            continue
        found = re.match(r"[\w.-]+", requirement)
        name = found.group(0) if found else requirement
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Check(name, "fail", "not installed", f"pip install '{requirement}'")
            continue
        bounds = re.findall(r"(>=|<)\s*([\d.]+)", requirement)
        good = all((_numbers(version) >= _numbers(at)) == (sign == ">=") for sign, at in bounds)
        yield Check(name, "ok", version) if good else Check(name, "fail", version, f"pip install '{requirement}'")


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"[\d.]+", version)
    numbers = [int(part) for part in found.group(0).split(".") if part] if found else [0]
    return tuple(numbers + [0] * (4 - len(numbers)))


def _devices(machine: Machine) -> Check:
    if machine.devices:
        names = ", ".join(
            f"{d.index}: {d.name}, {d.memory_free / GIB:.1f} of {d.memory_total / GIB:.1f} GiB free" for d in machine.devices
        )
        busy = [str(d.index) for d in machine.devices if d.memory_free < 0.5 * d.memory_total]
        if busy:
            return Check("devices", "warn", names, f"Other programs use device {', '.join(busy)}; choose with --devices")
        return Check("devices", "ok", names)
    driver, gpus = driver_gpus()
    if gpus:
        what = f"torch {machine.torch} finds no accelerator, but driver {driver} knows {gpus} GPUs"
        return Check(
            "devices", "warn", what, "Install a torch build for this driver, and see that CUDA_VISIBLE_DEVICES is not empty"
        )
    return Check(
        "devices", "ok", f"no accelerator; {machine.cores} cores, {machine.memory_total / GIB:.1f} GiB: training on the CPU"
    )


def _space(folder: Path) -> Iterator[Check]:
    for name, where in (("disk here", folder), ("disk for temporary files", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(where).free
        found = f"{free / GIB:.1f} GiB free in {where.resolve()}"
        if not os.access(where, os.W_OK):
            yield Check(name, "fail", f"{where.resolve()} cannot be written", "Choose another folder, or change its rights")
        elif free < 0.25 * GIB:
            yield Check(name, "fail", found, "Free some space: checkpoints and shards cannot be written")
        elif free < 5 * GIB:
            yield Check(name, "warn", found, "A checkpoint takes 12 bytes a parameter or more; free some space")
        else:
            yield Check(name, "ok", found)


def _shared_memory(machine: Machine) -> Check:
    where = Path("/dev/shm")
    if not where.is_dir():
        return Check("shared memory", "warn", "there is no /dev/shm", "NCCL and data workers are slower without it")
    total = shutil.disk_usage(where).total
    found = f"{total / GIB:.2f} GiB in /dev/shm"
    if total < GIB:
        state = "warn" if machine.devices else "ok"
        return Check(
            "shared memory", state, found, "In a container give --shm-size=8g or --ipc=host" if state == "warn" else ""
        )
    return Check("shared memory", "ok", found)


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 256:
        return Check("open files", "fail", f"limit {soft}", f"ulimit -n {min(hard, 65536)}")
    if soft < 1024:
        return Check("open files", "warn", f"limit {soft}", f"ulimit -n {min(hard, 65536)}")
    return Check("open files", "ok", f"limit {soft}")


def _locked_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft / GIB:.2f} GiB"
    if soft != resource.RLIM_INFINITY and Path("/sys/class/infiniband").is_dir():
        return Check("locked memory", "warn", found, "InfiniBand registers memory: ulimit -l unlimited")
    return Check("locked memory", "ok", found)


def _host_name() -> Check:
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        fix = "Ranks of one machine meet on the loopback; for several machines add the name to /etc/hosts or DNS"
        return Check("host name", "warn", f"{name} does not resolve: {error}", fix)
    return Check("host name", "ok", f"{name} is {address}")


def _clock(folder: Path) -> Check:
    """The clock against that of the file system, which on a shared one is another machine's."""
    now = time.time()
    if now < 1_735_689_600:  # 2025
        return Check("clock", "warn", time.strftime("%Y-%m-%d %H:%M", time.gmtime(now)), "Set the clock")
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as probe:
            skew = abs(os.stat(probe.name).st_mtime - time.time())
    except OSError as error:
        return Check("clock", "warn", f"not compared: {error.strerror}", "Run it in a folder that can be written")
    if skew > 5:
        return Check(
            "clock", "warn", f"{skew:.0f} s apart from the file system's", "Synchronize the machines, for example by chrony"
        )
    return Check("clock", "ok", f"within {max(skew, 0.1):.1f} s of the file system's")


def _variables(env: Mapping[str, str]) -> Iterator[Check]:
    import psutil

    interfaces = list(psutil.net_if_addrs())
    for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # NCCL takes prefixes, "=" for an exact name and "^" for all but these; gloo takes names
        for name in [part for part in env.get(key, "").split(",") if part and not part.startswith("^")]:
            wanted = name.removeprefix("=")
            if not any(each == wanted or (key.startswith("NCCL") and each.startswith(wanted)) for each in interfaces):
                yield Check(key, "fail", f"there is no interface {wanted}", f"Unset it, or use one of {', '.join(interfaces)}")
    for key, value in _SLOW.items():
        if env.get(key, "").upper() == value:
            yield Check(key, "warn", f"is {env[key]}, which is for finding faults and slows every step", f"unset {key}")
    stale = [key for key in STALE if key in env]
    if stale and "TORCHELASTIC_RUN_ID" not in env:
        yield Check("leftovers", "warn", f"{', '.join(stale)} set in this shell; ignored", f"unset {' '.join(stale)}")
    if env.get("CUDA_VISIBLE_DEVICES") == "":
        yield Check("CUDA_VISIBLE_DEVICES", "warn", "is empty: every GPU is hidden", "unset CUDA_VISIBLE_DEVICES")
