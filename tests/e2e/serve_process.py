"""A server process with an engine that says what it is told to: `python -m tests.e2e.serve_process '{"fail": 5}'`.

Keys of the object: fail (number of the step that raises), step_s, drain_s, child (the engine has a process of its own), key.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from meshwright.serve.gate import Keys
from meshwright.serve.server import ServerOptions, reserve, run_server
from tests.unit.serve_fakes import FakeEngine


class WithChild(FakeEngine):
    """Its worker must not outlive it."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.child = subprocess.Popen(["sleep", "60"])
        print(f"child {self.child.pid}", flush=True)

    def close(self) -> None:
        super().close()
        self.child.kill()
        self.child.wait()


def main() -> int:
    given = json.loads(sys.argv[1])
    kind = WithChild if given.get("child") else FakeEngine
    fail = (given["fail"], RuntimeError("worker 1 died")) if "fail" in given else None
    engine = kind(ends=False, max_len=10**7, step_s=given.get("step_s", 0.005), fail=fail)
    keys = Keys([given["key"]]) if "key" in given else None
    options = ServerOptions(port=0, keys=keys, drain_s=given.get("drain_s", 5.0))
    return run_server(engine, options, reserve(options.host, options.port), say=lambda text: print(text, flush=True))


if __name__ == "__main__":
    sys.exit(main())
