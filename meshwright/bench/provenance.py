"""What a result was made with: commit, version, command."""

from __future__ import annotations

import datetime
import os
import shlex
import subprocess
import sys
from pathlib import Path

from meshwright import __version__

__all__ = ["VARIABLE", "provenance"]

VARIABLE = "MESHWRIGHT_COMMIT"


def provenance() -> dict[str, str]:
    """commit: of the checkout that the package lies in, with `+changed` where files differ from it; without one what
    MESHWRIGHT_COMMIT says, which a copy without its history can be given."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return ""
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD") if (root / ".git").exists() else os.environ.get(VARIABLE, "")
    changed = "+changed" if (root / ".git").exists() and commit and git("status", "--porcelain", "--untracked-files=no") else ""
    return {
        "meshwright": __version__,
        "commit": commit + changed,
        "command": shlex.join(["meshwright", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
