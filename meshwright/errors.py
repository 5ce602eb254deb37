"""What can go wrong, as types.

MeshwrightError                 exit 1   a failure of ours, or of the machine
├── UserError                   exit 2   the user can mend it; shown without a traceback
│   ├── ConfigError                      keys and values; carries every finding at once
│   ├── DataError                        a corpus, a tokenizer, a prepared folder
│   ├── LayoutError                      numbers that do not divide, strategies a model cannot have
│   ├── CheckpointError                  missing, damaged or incompatible checkpoints
│   └── DeviceError                      devices that are not there, ports, folders, disk space
├── RankFailure                          a rank of the run died; carries its rank and exit code
└── NumericsError                        the loss or the gradients are not finite and the policy is to stop
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DeviceError",
    "Finding",
    "LayoutError",
    "MeshwrightError",
    "NumericsError",
    "RankFailure",
    "UserError",
    "counted",
    "not_json",
]


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """ "1 document", "2,000 documents", "0 entries"."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def not_json(error: ValueError | RecursionError) -> str:
    """Why `json` did not read a text, in words for whoever wrote it."""
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 at byte {error.start}"
    return f"is not JSON: {error}" if isinstance(error, json.JSONDecodeError) else "has a number of too many digits"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: where (file, key), what (with the numbers), and what to do about it."""

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}. {self.fix}" if self.fix else text


class MeshwrightError(Exception):
    """Root of every error this package raises on purpose."""

    exit_code = 1


class UserError(MeshwrightError):
    """Something the user can mend. Printed as it is, never with a traceback."""

    exit_code = 2

    def __init__(self, message: str = "", findings: Iterable[Finding] = ()):
        self.findings = tuple(dict.fromkeys(findings))  # the same file may serve twice, as when it is trained on and held out
        lines = [message] if message else []
        lines += [str(finding) for finding in self.findings]
        super().__init__("\n".join(lines))

    def __reduce__(self):  # exceptions cross process borders by pickle, which would call __init__ with the text only
        return (_rebuild, (type(self), str(self), self.findings))


def _rebuild(kind: type[UserError], text: str, findings: tuple[Finding, ...]) -> UserError:
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    error.findings = findings
    return error


class ConfigError(UserError):
    """Unknown keys, wrong values, settings that contradict each other."""


class DataError(UserError):
    """A corpus, tokenizer or prepared folder that cannot be used."""


class LayoutError(UserError):
    """Numbers that do not divide, or a strategy that the model cannot have."""


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged or does not fit."""


class DeviceError(UserError):
    """Devices, ports, folders or space that are not there."""


class RankFailure(MeshwrightError):
    """A rank ended the run. `exit_code` is the first culprit's own (128 + signal for a signal)."""

    def __init__(self, message: str, rank: int | None = None, exit_code: int = 1):
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


class NumericsError(MeshwrightError):
    """Loss or gradients are not finite, and the policy says stop."""
