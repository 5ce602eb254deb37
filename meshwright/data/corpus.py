"""Text that is already on this machine, so that a first run needs no download.

`embedded`     CPython's documentation topics and the source of its standard library (without tests): about 12 MB of English
               and Python, the same for every machine with the same CPython.
`embedded:zh`  Chinese manual pages, poems and the Debian reference, where Debian's packages for them are installed.
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from meshwright.data.streams import blocks
from meshwright.errors import DataError, Finding

__all__ = ["KINDS", "NAMES", "documents", "files"]

NAMES = ("embedded", "embedded:zh")
KINDS = ("topics", "manual", "sayings")
"""Formats that only the embedded text has: documentation topics, roff manual pages, entries between lines of `%`."""

LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "pydoc_data"}

ROOT = Path("/")
DEBIAN_LISTS = ROOT / "var/lib/dpkg/info"
DEBIAN_PACKAGES = (("manpages-zh",), ("fortunes-zh", "fortune-zh"), ("debian-reference-zh-cn",))
"""Each under the names that releases of Debian gave it."""


def files(name: str) -> tuple[list[tuple[Path, str]], list[Finding]]:
    """(path, format) of each file of an embedded corpus, and what is missing."""
    return _python_files() if name == "embedded" else _chinese_files()


def _python_files() -> tuple[list[tuple[Path, str]], list[Finding]]:
    import pydoc_data.topics

    library = Path(sysconfig.get_paths()["stdlib"])
    found: list[tuple[Path, str]] = [(Path(pydoc_data.topics.__file__), "topics")]
    for here, folders, names in os.walk(library):
        folders[:] = sorted(folder for folder in folders if folder not in LEFT_OUT)
        found += [(Path(here, file), "txt") for file in sorted(names) if file.endswith(".py")]
    if len(found) < 100:
        what = f"only {len(found) - 1} sources of the standard library; this Python was installed without them"
        return [], [Finding("embedded", what, "Name a corpus of your own")]
    return [pair for pair in found if pair[1] != "txt" or _is_text(pair[0])], []


def _is_text(path: Path) -> bool:
    """The library has a few files in old encodings on purpose."""
    try:
        return bool(path.read_bytes().decode("utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return False


def _chinese_files() -> tuple[list[tuple[Path, str]], list[Finding]]:
    found: list[tuple[Path, str]] = []
    missing = []
    for names in DEBIAN_PACKAGES:
        listed = [DEBIAN_LISTS / f"{name}.list" for name in names]
        lists = [file for file in listed if file.is_file()]
        here = [pair for file in lists for pair in _of_package(file.read_text(encoding="utf-8").splitlines())]
        if not here:
            missing.append(names[0])
        found += here
    if missing:
        what = f"the text of {', '.join(missing)} is not under /usr/share"
        fix = f"Install it: apt-get install {' '.join(missing)}"
        return [], [Finding("embedded:zh", what, fix)]
    return found, []


def _of_package(listed: list[str]) -> Iterator[tuple[Path, str]]:
    for name in sorted(listed):
        path = ROOT / name.lstrip("/")
        if name.startswith("/usr/share/man/zh_CN/") and name.endswith(".gz"):
            kind = "manual"
        elif name.startswith("/usr/share/games/fortunes/") and not path.suffix:
            kind = "sayings"
        elif name.endswith("debian-reference.zh-cn.txt.gz"):
            kind = "txt"
        else:
            continue
        if path.is_file() and not path.is_symlink():  # a link repeats a text that is there under its own name
            yield path, kind


def documents(path: Path, kind: str) -> Iterator[tuple[int, str]]:
    """(physical line, text) of each document of a file of one of KINDS. Raises DataError for a damaged file."""
    if kind == "topics":
        from pydoc_data.topics import topics

        yield from enumerate((topics[name] for name in sorted(topics)), start=1)
        return
    try:
        text = b"".join(blocks(path)).decode("utf-8")
    except UnicodeDecodeError:
        raise DataError(findings=[Finding(str(path), "not UTF-8", "Install its package again")]) from None
    if kind == "manual":
        yield 1, plain_manual(text)
        return
    line = 1
    for entry in text.split("\n%\n"):
        yield line, ESCAPE.sub("", entry)
        line += entry.count("\n") + 2


ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
ROFF_COMMENT = re.compile(r"^[.'] *\\\".*$|\\\".*$", re.MULTILINE)
ROFF_MACRO = re.compile(r"^[.'] *de .*?^\.\.\s*$", re.MULTILINE | re.DOTALL)
ROFF_TEXT = {
    "SH",
    "SS",
    "Sh",
    "Ss",
    "B",
    "I",
    "BR",
    "BI",
    "IR",
    "IB",
    "RB",
    "RI",
    "SM",
    "SB",
    "TP",
    "IP",
    "Nm",
    "Nd",
    "It",
    "Ql",
}
ROFF_ESCAPE = re.compile(r"\\(?:f(?:\[[^]]*\]|\(..|.)|s[-+]?\d|[&/,|^%c:]|\*(?:\[[^]]*\]|\(..|.))")
ROFF_NAMED = {
    "\\-": "-",
    "\\(co": "(c)",
    "\\(bu": "*",
    "\\(em": "--",
    "\\(en": "-",
    "\\(aq": "'",
    "\\(dq": '"',
    "\\e": "\\",
    "\\ ": " ",
}


def plain_manual(text: str) -> str:
    """The readable part of a roff manual page: headings and text without requests, macros and font changes."""
    text = ROFF_COMMENT.sub("", ROFF_MACRO.sub("", text))
    lines = []
    for line in text.split("\n"):
        if line[:1] in (".", "'"):
            name, _, rest = line[1:].strip().partition(" ")
            if name not in ROFF_TEXT:
                continue
            line = rest.replace('"', "").strip()
            if name in ("SH", "SS", "Sh", "Ss") and line:
                line = "\n" + line
        line = ROFF_ESCAPE.sub("", line)
        for escape, plain in ROFF_NAMED.items():
            line = line.replace(escape, plain)
        if line.strip():
            lines.append(line.rstrip())
    return "\n".join(lines).lstrip("\n") + "\n"
