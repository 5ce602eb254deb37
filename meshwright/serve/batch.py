"""`meshwright generate --prompts`: a file of prompts through one engine, or through as many as there are devices for."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshwright.errors import Finding, UserError, counted
from meshwright.serve.contract import Engine
from meshwright.serve.fleet import Fleet
from meshwright.serve.layout import Serving
from meshwright.serve.loading import phase, say
from meshwright.serve.offline import AHEAD, answer_file, check_prompts
from meshwright.serve.sampling import SamplingParams

__all__ = ["BatchCommand"]

GRACE_S = 10.0
"""After a signal, for ranks to end their last step."""


@dataclass(frozen=True)
class BatchCommand:
    """model: a folder. prompts, output: files. drawn: settings of every answer. engine, devices: as of `ServeCommand`."""

    model: str
    prompts: str
    output: str
    drawn: Mapping[str, Any]
    engine: Mapping[str, Any] = field(default_factory=dict)
    devices: str | None = None

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.model, {**self.engine, "offline": True}, None, self.devices)

    def run(self) -> int:
        """Answer every prompt; the exit code. Raises UserError with all findings before anything is loaded."""
        findings = self._findings()
        serving, more = self.fleet.plan(task="lm")
        if findings or serving is None:
            raise UserError(findings=[*findings, *more])
        say(f"plan: {serving}")
        if serving.ranks > 1 or self.devices is not None:
            rank = json.dumps({"command": dataclasses.asdict(self), "serving": dataclasses.asdict(serving)})
            return self.fleet.launch(serving, ["-m", "meshwright.serve.batch", rank], GRACE_S)
        with phase(f"load {self.model}"):
            engine = self.fleet.load(serving)
        return self._answer(engine, serving)

    def _findings(self) -> list[Finding]:
        """What is wrong with the settings of the answers and with the files."""
        findings: list[Finding] = []
        try:
            SamplingParams(**self.drawn)
        except UserError as error:
            findings += error.findings
        if Path(self.output).exists():
            findings.append(Finding(self.output, "is there already", "Name another file"))
        elif not Path(self.output).absolute().parent.is_dir():
            findings.append(Finding(self.output, "cannot be written: there is no such folder", "Make it first"))
        if not Path(self.prompts).is_file():
            there = Path(self.prompts).exists()
            what = "is no regular file, which can be read twice" if there else "there is no such file"
            return [*findings, Finding(self.prompts, what)]
        return [*findings, *check_prompts(self.prompts)]

    def as_rank(self, serving: Serving) -> int:
        """One rank of several."""
        return self.fleet.as_rank(serving, lambda engine: self._answer(engine, serving))

    def _answer(self, engine: Engine, serving: Serving) -> int:
        began = time.perf_counter()
        try:
            params = SamplingParams(**self.drawn)
            made, tokens = answer_file(engine, self.prompts, self.output, params, ahead=AHEAD * serving.dp)
        finally:
            engine.close()
        seconds = time.perf_counter() - began
        rate = f"{tokens / seconds:,.1f} tokens/s"
        say(f"{counted(made, 'prompt')}, {counted(tokens, 'token')} in {seconds:.1f} s: {rate}; see {self.output}")
        return 0


def _main() -> int:
    given = json.loads(sys.argv[1])
    return BatchCommand(**given["command"]).as_rank(Serving(**given["serving"]))


if __name__ == "__main__":
    sys.exit(_main())
