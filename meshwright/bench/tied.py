"""Becomes a command that ends with the benchmark that started it, even where that one was killed.

python -m meshwright.bench.tied PARENT COMMAND...     PARENT: the benchmark's process id

The kernel sends SIGTERM when the parent dies (Linux; elsewhere nothing), on which torchrun ends its ranks.
"""

from __future__ import annotations

import os
import signal
import sys

from meshwright.distributed.worker import tie_to_parent


def main() -> None:
    parent, *command = sys.argv[1:]
    tie_to_parent(int(parent), signal.SIGTERM)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
