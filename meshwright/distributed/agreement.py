"""Ranks that were started with something else than the others: found by a digest each, exchanged at the start, and named."""

from __future__ import annotations

import hashlib
import json
import socket
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from meshwright.distributed.reduce import gather_json
from meshwright.errors import Finding, UserError

__all__ = ["refuse_different", "source_digests"]

SHOWN = 3
"""Differences that a message names, of each part and rank."""


def refuse_different(parts: Mapping[str, Mapping[str, str]], group: dist.ProcessGroup) -> None:
    """Raises UserError on every rank where ranks differ: which one, in which part, in what. Collective over a gloo group.

    parts: by name as for a message ("config", "code"), the values or digests of what it is made of. Only a digest of each part
    is exchanged where all are alike.
    """
    if group.size() == 1:
        return
    mine = {"host": socket.gethostname(), "parts": {name: _digest(json.dumps(values)) for name, values in parts.items()}}
    everyone = gather_json(mine, group)
    names = list(dict.fromkeys(name for each in everyone for name in each["parts"]))
    differing = [name for name in names if len({each["parts"].get(name) for each in everyone}) > 1]
    if not differing:
        return
    details = gather_json({name: parts.get(name, {}) for name in differing}, group)
    findings = []
    for name in differing:
        digests = [each["parts"].get(name) for each in everyone]
        usual = digests.index(max(digests, key=digests.count))  # of as many on both sides, the first rank is believed
        alike: dict[str | None, list[int]] = defaultdict(list)
        for rank, digest in enumerate(digests):
            if digest != digests[usual]:
                alike[digest].append(rank)
        for ranks in alike.values():
            where = f"{_names(ranks)} on {everyone[ranks[0]]['host']}"
            what = f"other {name} than rank {usual}: {_differences(details[ranks[0]][name], details[usual][name])}"
            findings.append(Finding(where, what))
    raise UserError("The ranks were not started with the same.", [*findings, Finding("", "Start all of them alike")])


def source_digests(files: Mapping[str, Path]) -> dict[str, str]:
    """A digest of each file, by the given name; "absent" for one that cannot be read."""
    return {name: _file_digest(path) for name, path in files.items()}


def _file_digest(path: Path) -> str:
    try:
        return _digest(path.read_bytes())
    except OSError:
        return "absent"


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[:16]


def _differences(theirs: Mapping[str, str], usual: Mapping[str, str]) -> str:
    keys = [key for key in {**usual, **theirs} if theirs.get(key) != usual.get(key)]
    shown = [f"{key} ({theirs.get(key, 'absent')}, not {usual.get(key, 'absent')})" for key in keys[:SHOWN]]
    return ", ".join(shown) + (f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else "")


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
