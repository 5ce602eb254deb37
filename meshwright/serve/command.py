"""`meshwright serve`: from a folder to a server, in one process or one a rank."""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import Finding, UserError
from meshwright.serve.contract import Engine
from meshwright.serve.fleet import Fleet
from meshwright.serve.gate import VARIABLE, Keys, read_keys
from meshwright.serve.http import Limits
from meshwright.serve.layout import Serving
from meshwright.serve.loading import phase, say
from meshwright.serve.server import LAST_S, ServerOptions, reserve, run_server

__all__ = ["ServeCommand"]


@dataclass(frozen=True)
class ServeCommand:
    """model: a folder. options: without keys, which are read from `key_file` or the environment. engine: options of
    `load_engine` that were given, a dtype by its name. no_key: serve an address that others reach without one. devices: numbers
    of those to use ("0,2"). dry_run: say the plan and start nothing."""

    model: str
    options: ServerOptions
    engine: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None
    key_file: str | None = None
    no_key: bool = False
    devices: str | None = None
    dry_run: bool = False

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.model, self.engine, self.name, self.devices)

    def run(self) -> int:
        """Load and serve; the exit code. Raises UserError with all findings before anything is loaded or started."""
        findings, keys = self._check()
        with contextlib.ExitStack() as held:
            try:
                listener = held.enter_context(reserve(self.options.host, self.options.port))
            except UserError as error:
                findings += error.findings
            serving, more = self.fleet.plan()
            if findings or serving is None:
                raise UserError(findings=[*findings, *more])
            return self._start(serving, listener, keys)

    def _start(self, serving: Serving, listener: socket.socket, keys: Keys | None) -> int:
        say(f"plan: {serving}")
        if self.dry_run:
            return 0
        if serving.ranks > 1 or self.devices is not None:
            listener.close()  # the first rank takes it, before it loads
            rank = json.dumps({"command": dataclasses.asdict(self), "serving": dataclasses.asdict(serving)})
            return self.fleet.launch(serving, ["-m", "meshwright.serve.command", rank], self.options.drain_s + 2 * LAST_S)
        with phase(f"load {self.model}"):
            engine = self.fleet.load(serving)
        return self._serve(engine, keys, listener)

    def as_rank(self, serving: Serving) -> int:
        """One rank of several."""
        with contextlib.ExitStack() as held:
            listener: list[socket.socket] = []

            def before() -> None:
                listener.append(held.enter_context(reserve(self.options.host, self.options.port)))

            return self.fleet.as_rank(serving, lambda engine: self._serve(engine, self._check()[1], *listener), before)

    def _serve(self, engine: Engine, keys: Keys | None, listener: socket.socket) -> int:
        return run_server(engine, dataclasses.replace(self.options, keys=keys), listener, say=say)

    def _check(self) -> tuple[list[Finding], Keys | None]:
        findings: list[Finding] = []
        keys: Keys | None = None
        try:
            keys = None if self.no_key else read_keys(self.key_file)
        except UserError as error:
            findings += error.findings
        else:
            if self.no_key and self.key_file is not None:
                findings.append(Finding("--no-key", "and --api-key-file contradict each other", "Leave one of them out"))
            elif keys is None and not self.no_key and not _loopback(self.options.host):
                what = f"{self.options.host} is reached from other machines, and there is no key"
                findings.append(Finding("--host", what, f"Give --api-key-file or set {VARIABLE}; --no-key serves everybody"))
        return findings, keys


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _main() -> int:
    given = json.loads(sys.argv[1])
    command, serving = given["command"], Serving(**given["serving"])
    options = command.pop("options")
    options["limits"] = Limits(**options["limits"])
    return ServeCommand(options=ServerOptions(**options), **command).as_rank(serving)


if __name__ == "__main__":
    sys.exit(_main())
