"""How a model is spread over the devices of this machine to be served: tp x pp ranks hold it together, dp times. No torch here.

The fewest ranks with which it fits hold it together, all other devices are copies: a copy answers as many requests as the one
before, while ranks that share a model wait for each other in every layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from meshwright.config.schema import ModelConfig
from meshwright.errors import Finding, LayoutError, counted
from meshwright.spec.counts import rank_parameters
from meshwright.spec.layout import Layout
from meshwright.spec.sharding import tensor_findings
from meshwright.spec.stages import check_split

__all__ = ["Serving", "choose_serving", "held_bytes"]

GIB = 2**30
WEIGHT_SHARE = 0.7
"""Of a device's memory that weights may take: the rest is for the cache, without which they answer few at a time."""
SHARE = 0.9
"""Of it that weights and cache may take together, as `runner.blocks_for` has it."""


@dataclass(frozen=True)
class Serving:
    """tp ranks share every matrix, pp stages of layers are behind each other, dp replicas hold the same. reason: why so."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    reason: str = ""

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def leads(self) -> tuple[int, ...]:
        """The first rank of each replica: of two neighbours the place along tp differs, else along dp, else along pp."""
        return tuple(replica * self.tp for replica in range(self.dp))

    def __str__(self) -> str:
        return f"tp {self.tp} x pp {self.pp} x dp {self.dp}: {self.reason}"


def choose_serving(
    model: ModelConfig,
    task: str,
    given: Mapping[str, int],
    *,
    devices: int,
    device_bytes: int | None = None,
    item: int = 2,
    matrix_item: int | None = None,
    cache_item: int | None = None,
) -> Serving:
    """given: those of tp, pp and dp that were asked for. device_bytes: memory of a device; None: a CPU, which has as many ranks
    as are asked for. item: bytes of a weight. matrix_item, cache_item: as of `held_bytes`.

    On accelerators every device is used: the first of the layouts by (ranks of a copy, pp) that holds the model with a sequence
    of its full length (`held_bytes`; not asked where both tp and pp are given).
    Raises LayoutError with everything that is wrong.
    """
    findings = [*_unsplittable(model, task, given)]
    if findings:
        raise LayoutError(findings=findings)
    if device_bytes is None:
        why = "as asked" if given else "a CPU has one rank where no more are asked for"
        return Serving(**given, reason=why)
    shapes = [shape for shape in _shapes(model, task, devices) if shape.items() >= given.items()]
    if not shapes:
        asked = " x ".join(f"{key} {given[key]}" for key in ("tp", "pp", "dp") if key in given)
        what = f"{asked} {'are' if len(given) > 1 else 'is'} {counted(math.prod(given.values()), 'rank')}"
        what += f", and there {'is' if devices == 1 else 'are'} {counted(devices, 'device')} to use"
        fix = f"Sizes with a product of {devices} use all; leave some out to have them chosen, or name fewer --devices"
        raise LayoutError(findings=[Finding(", ".join(f"--{key}" for key in given), what, fix)])
    if task != "lm":
        return Serving(**shapes[0], reason=f"a copy of the encoder on each of {counted(devices, 'device')}")
    return _first_that_fits(model, shapes, given, devices, device_bytes, (item, matrix_item, cache_item))


def held_bytes(
    model: ModelConfig, tp: int, pp: int, item: int, matrix_item: int | None = None, cache_item: int | None = None
) -> tuple[int, int]:
    """(weights, cache of one sequence of the full length) on the fullest rank, in bytes: `rank_parameters`, and 2 tensors of
    ceil(kv_heads / tp) head_dim max_len numbers for each of ceil(layers / pp) layers.

    item: bytes of a number. matrix_item: of those of a layer, experts apart; cache_item: of the cache's. None: as of the others
    """
    counts = rank_parameters(model, "lm", Layout(tp=tp, pp=pp))
    matrices = counts.total - counts.outside - counts.experts
    weights = counts.total * item + matrices * ((matrix_item or item) - item)
    features = -(-(model.kv_heads or model.heads) // tp) * (model.head_dim or model.width // model.heads)
    return weights, 2 * -(-model.layers // pp) * features * model.max_len * (cache_item or item)


def _unsplittable(model: ModelConfig, task: str, given: Mapping[str, int]) -> Iterator[Finding]:
    tp, pp = given.get("tp", 1), given.get("pp", 1)
    if task != "lm":
        for key in ("tp", "pp"):
            if given.get(key, 1) > 1:
                yield Finding(f"--{key}", "is for decoders, and this model is an encoder", "Use --dp for copies of it")
        return
    for found in tensor_findings(model, tp):
        yield Finding("--tp", found.what, found.fix.replace("tp:", "--tp"))
    for found in check_split((), model.layers, pp):
        yield Finding("--pp", found.what, f"Use --pp {model.layers} or less")


def _shapes(model: ModelConfig, task: str, devices: int) -> list[dict[str, int]]:
    """Every layout that uses all devices and can have this model, those with the fewest ranks a copy first."""
    sizes = [size for size in range(1, devices + 1) if devices % size == 0 and (task == "lm" or size == 1)]
    pairs = [(size // pp, pp) for size in sizes for pp in range(1, size + 1) if size % pp == 0]
    legal = [(tp, pp) for tp, pp in pairs if not [*_unsplittable(model, task, {"tp": tp, "pp": pp})]]
    return [{"tp": tp, "pp": pp, "dp": devices // (tp * pp)} for tp, pp in legal]


def _first_that_fits(
    model: ModelConfig,
    shapes: list[dict[str, int]],
    given: Mapping[str, int],
    devices: int,
    device_bytes: int,
    items: tuple[int, int | None, int | None],
) -> Serving:
    asked, told = "tp" in given and "pp" in given, list[str]()
    for shape in shapes:
        weights, cache = held_bytes(model, shape["tp"], shape["pp"], *items)
        need = f"{weights / GIB:.1f} GiB of weights and {cache / GIB:.2f} for a sequence of {model.max_len}"
        if asked or (weights <= WEIGHT_SHARE * device_bytes and weights + cache <= SHARE * device_bytes):
            before = f"; {told[-1]} would not fit" if told else ""
            reason = f"{need} of {device_bytes / GIB:.1f} GiB a device, on {counted(devices, 'device')}{before}"
            return Serving(**shape, reason=f"as asked, {reason}" if given else reason)
        told.append(f"tp {shape['tp']} x pp {shape['pp']} with {need}")
    what = (
        f"{told[-1]} does not fit {device_bytes / GIB:.1f} GiB a device: weights may take {WEIGHT_SHARE:.0%}, both {SHARE:.0%}"
    )
    fix = "Use more or larger devices, or give --tp and --pp to try all the same"
    raise LayoutError(findings=[Finding("devices", what, fix)])
