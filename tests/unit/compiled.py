"""Compiles what a module of cases would launch, for an H100 or H200 that need not be there; nothing is computed.

python -O -m tests.unit.compiled MODULE   prints a JSON object: kernels by name, and how many variants of each were compiled.
-O, since what the cases assert of results does not hold of none.

Triton's interpreter runs a kernel as Python does, and accepts what its compiler refuses: a variable that changes its type in a
branch, for one.
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import runpy
import sys
from typing import Any

import torch

HOPPER = ("cuda", 90, 32)
SHARED = 227 * 2**10
"""Bytes of shared memory that a program can have there; one that needs more fails only when it is launched."""


class Absent:
    """A driver of a device that is not there."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*HOPPER)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    import triton

    triton.runtime.driver.set_active(Absent())
    launch, found = triton.JITFunction.run, collections.Counter[str]()

    def compiled(self: Any, *args: Any, **options: Any) -> Any:
        dtypes = {each.dtype for each in args if isinstance(each, torch.Tensor)}
        if torch.float64 in dtypes and torch.float8_e4m3fn in dtypes:
            return None  # the interpreter's alone: a device has no product of them
        options["warmup"] = True
        before = len(self.device_caches[0][0])
        kernel = launch(self, *args, **options)
        if kernel.metadata.shared > SHARED:
            raise MemoryError(f"{self.fn.__name__} needs {kernel.metadata.shared} bytes of shared memory")
        found[self.fn.__name__] += len(self.device_caches[0][0]) - before
        return kernel

    triton.JITFunction.run = compiled
    with contextlib.redirect_stdout(io.StringIO()):
        runpy.run_module(f"tests.unit.{sys.argv[1]}", run_name="__main__", alter_sys=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
