"""metrics.jsonl: one JSON object a step, each step exactly once, whatever happened to the process.

Every line has at least `step, loss, grad_norm, lr, tokens, tokens_per_s`; docs/metrics.md gives the formula of each figure.
JSON has no NaN or infinity: such a value stands as null, and `nonfinite` lists its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.disk import replacing
from meshwright.errors import Finding, UserError

__all__ = ["REQUIRED", "MetricsWriter", "perplexity", "read_metrics"]

REQUIRED = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s")


def perplexity(loss: float) -> float:
    """exp of the mean cross-entropy in nats a target token (without label smoothing and z-loss); inf where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class MetricsWriter:
    """Appends steps to a metrics file; each line is handed to the operating system at once, so a killed process loses none.

    resume_step: the last step that stands (0: a new run). Lines of later steps, and a last line cut short, are dropped by
    writing a new file beside the old and renaming it, so that a kill in between changes nothing. To lose no step, write the
    line of step k before a checkpoint of step k is published.

    Each line carries `process`: 1 for the process that began the run, one more after each resume.
    """

    def __init__(self, path: str | Path, resume_step: int = 0):
        self.path = Path(path)
        kept = [record for record in read_metrics(self.path) if record["step"] <= resume_step] if self.path.exists() else []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as file:
            file.writelines(_line(record) for record in kept)
        self.last_step = kept[-1]["step"] if kept else 0
        """Step of the newest line; after opening, smaller than `resume_step` if lines of the run are missing."""
        self.process = 1 + max((record.get("process", 1) for record in kept), default=0)
        self._file = self.path.open("a", encoding="utf-8")

    def write(
        self,
        *,
        step: int,
        loss: float | None,
        grad_norm: float | None,
        lr: float,
        tokens: int,
        tokens_per_s: float,
        **more: Any,
    ) -> None:
        """Append the line of `step`; `more` holds numbers, strings, null, or dicts of those.

        loss, grad_norm: None where the step had none (no target in the whole batch). tokens: since the start of the run.
        Raises ValueError when the step is not beyond the last one: our own mistake.
        """
        if step <= self.last_step:
            raise ValueError(f"step {step} after step {self.last_step}: a step is written once, in order")
        given = {"step": step, "loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens": tokens, "tokens_per_s": tokens_per_s}
        line, nonfinite = _clean({**given, **more, "process": self.process})
        if nonfinite:
            line["nonfinite"] = nonfinite
        self._file.write(_line(line))
        self._file.flush()
        self.last_step = step

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"


def _clean(values: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """Values as JSON can hold them, and the dotted names of those that were NaN or infinite."""
    record: dict[str, Any] = {}
    nonfinite: list[str] = []
    for key, value in values.items():
        name = prefix + key
        if hasattr(value, "item"):  # a numpy or torch scalar
            value = value.item()
        if isinstance(value, Mapping):
            record[key], inner = _clean(value, name + ".")
            nonfinite += inner
        elif isinstance(value, float) and not math.isfinite(value):
            record[key] = None
            nonfinite.append(name)
        elif value is None or isinstance(value, (bool, int, float, str)):
            record[key] = value
        else:
            raise TypeError(f"metric {name!r} is a {type(value).__name__}; numbers, strings, null and dicts are written")
    return record, nonfinite


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The steps of a run, in order. A last line that was cut by a kill is left out.

    Raises UserError that names file and line when the file cannot be read, or any other line is not the object of a step.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(findings=[Finding(str(path), f"cannot be read: {error.strerror}", "Is this a run folder?")]) from None
    tail = lines.pop()  # what follows the last newline: nothing, or the beginning of a line
    records: list[dict[str, Any]] = []
    findings: list[Finding] = []
    for number, line in enumerate(lines, start=1):
        reason = ""
        try:
            record = json.loads(line)
        except ValueError as error:
            reason = f"is not JSON ({error})"
        else:
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                reason = "is no object with a whole number `step`"
            elif records and record["step"] <= records[-1]["step"]:
                reason = f"has step {record['step']} after step {records[-1]['step']}"
        if reason:
            findings.append(Finding(f"{path}:{number}", reason, "Delete this line; the file is written by one run at a time"))
        else:
            records.append(record)
    if tail:
        records += _last(tail, records)
    if findings:
        raise UserError(findings=findings[:10])
    return records


def _last(tail: bytes, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The line without a newline, if it is a whole step all the same (an editor may have taken the newline away)."""
    try:
        record = json.loads(tail)
    except ValueError:
        return []
    whole = isinstance(record, dict) and type(record.get("step")) is int and all(key in record for key in REQUIRED)
    return [record] if whole and (not records or record["step"] > records[-1]["step"]) else []
