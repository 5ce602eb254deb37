"""What the tests of this folder share: blocks and commands of a Markdown file, and running a command in this process."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line on which it begins."""

    language: str
    text: str
    line: int


def blocks(path: Path, language: str | None = None) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = [
        Block(match[1], match[2], text.count("\n", 0, match.start()) + 1)
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]
    fences = len(re.findall(r"^```", text, re.MULTILINE))
    assert fences == 2 * len(found), f"{path}: a block is not closed, or not at the margin"
    return [block for block in found if language in (None, block.language)]


def commands(path: Path) -> list[str]:
    """Lines of the bash blocks, without comments, continued lines joined."""
    lines = "\n".join(block.text for block in blocks(path, "bash")).replace("\\\n", " ").splitlines()
    return [without for line in lines if (without := without_comment(line))]


def without_comment(line: str) -> str:
    return re.sub(r"(^|\s)#.*", "", line).rstrip()


def arguments(command: str) -> list[str] | None:
    """Arguments of the `meshwright` in a command (`torchrun ... -m meshwright train x` gives train, x); None without one."""
    words = shlex.split(command)
    return words[words.index("meshwright") + 1 :] if "meshwright" in words else None


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """`meshwright train` runs in this process, as the only rank that an elastic agent started."""
    values = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for key, value in {**values, "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "docs"}.items():
        monkeypatch.setenv(key, value)


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    import sys

    from meshwright.models import registry
    from meshwright.train import objectives

    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(objectives, "_FACTORIES", dict(objectives._FACTORIES))
    for name in [name for name in sys.modules if name.startswith("meshwright_user_")]:  # else the file is not run again
        monkeypatch.delitem(sys.modules, name)
