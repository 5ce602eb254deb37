"""A script of one's own under `meshwright launch`, torchrun and plain Python: the same loss, clear errors, nothing left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import meshwright
from tests.e2e.helpers import Command

pytestmark = pytest.mark.alone

SCRIPT = str(Path(__file__).parent / "scripts" / "own.py")


def loss_of(text: str) -> str:
    found = re.search(r"loss (\d\.\d+) of (\d) source (\w+)", text)
    assert found is not None, text
    return found[1]


def test_importing_the_package_loads_nothing_heavy():
    heavy = "{'torch', 'numpy', 'pydantic', 'typer'}"
    code = f"import sys, meshwright; print(sorted({heavy} & set(sys.modules)), meshwright.__version__)"
    assert Command("-c", code, start=()).wait().out.startswith("[] ")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = meshwright.nothing


def test_one_device_and_two_ranks_have_the_same_loss():
    alone = Command(start=(SCRIPT,)).wait()
    two = Command("launch", "--nproc", 2, SCRIPT).wait()
    assert loss_of(alone.out) == loss_of(two.out) and "of 1 source single" in alone.out and "of 2 source elastic" in two.out


@pytest.mark.slow
def test_torchrun_starts_it_too():
    many = Command("--nproc-per-node", 2, "--standalone", SCRIPT, start=("-m", "torch.distributed.run")).wait()
    assert loss_of(many.out) == loss_of(Command(start=(SCRIPT,)).wait().out)


def test_an_error_of_the_script_keeps_its_traceback_and_ends_all():
    failed = Command("launch", "--nproc", 2, SCRIPT, "traceback").wait(1)
    assert "ZeroDivisionError: the user's own" in failed.err and "own.py" in failed.err and "rank 1 failed" in failed.err


def test_what_the_user_can_mend_is_one_message_without_a_traceback():
    check_mended(Command("launch", "--nproc", 2, SCRIPT, "config").wait(2))
    assert "there is no such file" in Command("launch", "no-such.py", "--option").wait(2).err


@pytest.mark.slow
def test_the_same_without_a_launcher_and_an_exit_code_of_the_script():
    check_mended(Command(start=(SCRIPT, "config")).wait(2))
    assert "exit code 7" in Command("launch", "--nproc", 1, SCRIPT, "exit").wait(7).err


@pytest.mark.parametrize(
    ("mistake", "said", "line"),
    [
        ("order", "no micro-batch was begun", "run.update()"),
        pytest.param("device", "there is no abacus device", "mw.init(", marks=pytest.mark.slow),
        pytest.param("plain", "outside of a micro-batch", "model(torch.ones(2, 3)).sum().backward()", marks=pytest.mark.slow),
        pytest.param("nan", "step 1: loss or gradients are not finite", "run.step(", marks=pytest.mark.slow),
    ],
)
def test_what_this_package_says_has_the_line_of_the_script_and_no_traceback(mistake: str, said: str, line: str):
    """Mutation tried: only what a UserError says is told so."""
    done = Command(start=(str(Path(SCRIPT).with_name("mistaken.py")), mistake)).wait(2 if mistake == "device" else 1)
    first, place = done.err.strip().splitlines()
    assert said in first and "mistaken.py, line" in place and line in place


@pytest.mark.slow
def test_a_rank_that_ends_its_loop_early_leaves_nobody_waiting():
    """Mutation tried: torch's barrier alone, in which rank 1 waits half an hour for rank 0, and that one for the step."""
    done = Command("launch", "--nproc", 2, str(Path(SCRIPT).with_name("uneven.py"))).wait(1)
    assert "rank 0 failed" in done.err and "closed by peer" in done.err
    log = Path(re.findall(r"\S+rank0\.log", done.err)[-1]).with_name("rank1.log").read_text(encoding="utf-8")
    assert "rank 1 waited 3 s at the end of the run: rank 0 has not come there" in log and "as many steps" in log


def check_mended(done: Command) -> None:
    assert "is no torch.optim.Optimizer" in done.err and "Traceback" not in done.err
