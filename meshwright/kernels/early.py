"""Kernels that begin while the one before them ends (programmatic dependent launch of CUDA, from compute capability 9.0 on).

A kernel that takes part says at its beginning that the next one may be brought to the device, loads what no kernel of a step
writes (weights, scales, norms), and then waits until everything before it is done. It neither reads what a kernel wrote nor
writes anything before that; and since each waits for its predecessor to end, which itself waited, whatever lies farther back is
done too. A kernel that takes no part begins when all before it has ended, as ever: between two of them it breaks the chain, no
more. So parameters must not be written by the kernel right before one that takes part; no step does that.
"""

from __future__ import annotations

import functools

__all__ = ["ALLOWED", "launch_options"]

ALLOWED = True
"""Whether kernels may do it where they can; `bench` times both."""


@functools.cache
def _known() -> bool:
    """Whether Triton at hand and the device can; Triton's interpreter cannot."""
    import triton
    import triton.language as tl

    if triton.knobs.runtime.interpret or not hasattr(getattr(tl.extra, "cuda", None), "gdc_wait"):
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


def launch_options() -> dict[str, bool]:
    """Of the launch of a kernel with the constant `early`."""
    return {"early": True, "launch_pdl": True} if ALLOWED and _known() else {"early": False}
