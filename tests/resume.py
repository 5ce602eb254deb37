"""`pytest -p tests.resume`: a test that passed before is not run again while commit, files and packages are the same.

So `make test-all` may be stopped (Ctrl-C) and gone on with. A test that failed, was skipped or was cut off runs again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

FOLDER = Path(".cache/test-all")
"""Below pytest's root: one file for each state, with the name of a test that passed on each line."""


def state(root: Path) -> str:
    """Of the commit, every file that git does not ignore, Python and its packages: 16 hexadecimal digits."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout

    try:
        head, names = git("rev-parse", "HEAD"), git("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    except (OSError, subprocess.CalledProcessError) as error:
        raise pytest.UsageError(f"-p tests.resume: {root} is no git checkout with a commit: {error}") from None
    packages = sorted({f"{one.name}=={one.version}" for one in importlib.metadata.distributions()})
    found = hashlib.sha256("\n".join([head, sys.version, platform.platform(), *packages]).encode())
    for name in sorted(set(names.split("\0")) - {""}):
        path = root / name
        found.update(name.encode() + b"\0" + (hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b""))
    return found.hexdigest()[:16]


class Resume:
    """Leaves out what passed before, and where `out` is given writes down what passes now."""

    def __init__(self, passed: set[str], file: Path | None = None, out: IO[str] | None = None) -> None:
        self.passed = passed
        self.file = file
        self.out = out
        self.called: set[str] = set()

    def pytest_report_header(self) -> str:
        return f"{len(self.passed)} tests passed before on the same code and are not run again unless you delete {self.file}"

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        before = [item for item in items if item.nodeid in self.passed]
        if before:
            config.hook.pytest_deselected(items=before)
            items[:] = [item for item in items if item.nodeid not in self.passed]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        # a worker that replaces one which died must leave out the same tests as the others, whatever has passed since
        node.workerinput["passed"] = sorted(self.passed)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.called.add(report.nodeid)
        if self.out is not None and report.when == "teardown" and report.passed and report.nodeid in self.called:
            self.out.write(report.nodeid + "\n")
            self.out.flush()

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.passed:
            session.exitstatus = pytest.ExitCode.OK
        if self.out is not None:
            self.out.close()


def opened(file: Path, write: bool) -> Resume:
    """A line that was cut off, or is not UTF-8, names no test: the beginning of a name may be that of another."""
    out = None
    try:
        kept = file.read_bytes() if file.exists() else b""
        if write:
            file.parent.mkdir(parents=True, exist_ok=True)
            out = file.open("a", encoding="utf-8")
            out.write("" if kept.endswith(b"\n") or not kept else "\n")
    except OSError as error:
        what = f"{file} cannot be used: {error.strerror}. Remove {FOLDER} or make it writable"
        raise pytest.UsageError(f"-p tests.resume: {what}") from None
    return Resume(set(kept.decode(errors="replace").split("\n")[:-1]), file, out)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        resume = Resume(set(config.workerinput["passed"]))
    else:
        resume = opened(config.rootpath / FOLDER / state(config.rootpath), not config.option.collectonly)
    config.pluginmanager.register(resume, "passed before")
