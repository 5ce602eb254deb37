"""`make test-all` is stopped and gone on with: tests/resume.py in a small checkout of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
import os, signal
from pathlib import Path
import pytest

@pytest.fixture
def late():
    yield
    assert not Path("bad").exists()

def test_passes(): pass
def test_fails(): assert Path("mended").exists()
def test_is_skipped(): pytest.skip("nothing here")
def test_fails_at_its_end(late): pass
def test_stops():
    if Path("stop").exists():
        os.kill(os.getpid(), signal.SIGINT)
def test_after(): pass
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / ".gitignore").write_text(".cache/\n__pycache__/\nbad\nmended\nstop\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    options = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *options, *arguments], cwd=folder, check=True, capture_output=True)


def run(folder: Path, *arguments: str) -> tuple[int, dict[str, str], str]:
    """(exit code, outcome of each test that ran, all that was printed)."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.resume", "-p", "no:cacheprovider", "-c", os.devnull]
    command += [f"--rootdir={folder}", *arguments, "test_it.py"]
    # else each start loads every plugin there is
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    ran = dict(re.findall(r"^test_it\.py::(\w+) ([A-Z]+)", done.stdout, re.M))
    ran |= {name: word for word, name in re.findall(r"^\[gw\d\].* ([A-Z]+) test_it\.py::(\w+)", done.stdout, re.M)}
    return done.returncode, ran, done.stdout + done.stderr


def test_what_passed_is_not_run_again_and_the_rest_is(checkout):
    # Red when a test counts as passed before its end, when a skipped one counts, and when nothing left is a failure.
    (checkout / "stop").touch()
    (checkout / "bad").touch()
    code, ran, text = run(checkout)
    assert code == 2 and "test_after" not in ran, text
    for name in ("stop", "bad"):
        (checkout / name).unlink()
    code, ran, text = run(checkout)
    rest = {"test_fails": "FAILED", "test_is_skipped": "SKIPPED", "test_fails_at_its_end": "PASSED", "test_stops": "PASSED"}
    assert (code, ran) == (1, {**rest, "test_after": "PASSED"}), text
    assert "1 tests passed before on the same code" in text
    (checkout / "mended").touch()
    assert run(checkout)[:2] == (0, {"test_fails": "PASSED", "test_is_skipped": "SKIPPED"})
    code, ran, text = run(checkout, "-k", "not skipped")
    assert (code, ran) == (0, {}) and "6 deselected" in text


@pytest.mark.slow
def test_another_file_commit_or_line_runs_all_again(checkout):
    # Red when the commit or a file that is not committed is left out of the state.
    chosen = ("-k", "passes or after")
    both = {"test_passes": "PASSED", "test_after": "PASSED"}
    assert run(checkout, *chosen)[:2] == (0, both)
    assert run(checkout, *chosen)[:2] == (0, {})
    (checkout / "new.py").write_text("")
    assert run(checkout, *chosen)[:2] == (0, both)
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "two")
    assert run(checkout, *chosen)[:2] == (0, both)


@pytest.mark.slow
def test_a_damaged_record_leaves_out_only_what_it_names_and_one_that_cannot_be_written_is_told(checkout):
    # Red when a line that was cut off counts (it is another test's name here), when what follows is written behind it, and when
    # bytes that are no text are read as such.
    (checkout / "test_it.py").write_text("def test_a(): pass\ndef test_ab(): pass\n")
    assert run(checkout)[0] == 0
    (record,) = (checkout / ".cache" / "test-all").iterdir()
    record.write_bytes(b"\xff\x00\ntest_it.py::test_ab\ntest_it.py::test_a")
    assert run(checkout)[:2] == (0, {"test_a": "PASSED"})
    assert run(checkout)[:2] == (0, {})
    record.unlink()
    record.mkdir()
    code, ran, text = run(checkout)
    assert (code, ran) == (4, {}) and f"{record} cannot be used: Is a directory" in text and "Traceback" not in text
    assert run(checkout, "--collect-only")[0] == 4


@pytest.mark.slow
def test_two_workers_leave_out_the_same_tests_and_one_that_dies_is_replaced(checkout):
    pytest.importorskip("xdist")
    (checkout / "test_it.py").write_text(
        "import os\nimport pytest\n@pytest.mark.parametrize('n', range(8))\ndef test_of_many(n):\n    if n == 5: os._exit(1)\n"
    )
    code, _, text = run(checkout, "-p", "xdist", "-n", "2")
    assert code == 1 and "7 passed" in text and "1 failed" in text, text
    code, _, text = run(checkout, "-p", "xdist", "-n", "2")
    assert code == 1 and "passed" not in text.splitlines()[-1] and "1 failed" in text, text


def test_no_checkout_is_told(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_passes(): pass\n")
    code, _, text = run(tmp_path)
    assert code == 4 and "is no git checkout" in text and "Traceback" not in text
