"""How a model is spread over the devices of this machine to be served: tp x pp ranks hold it together, dp times. No torch here.

The fewest ranks with which it fits hold it together, all other devices are copies: a copy answers as many requests as the one
before, while ranks that share a model wait for each other in every layer. What was asked for is kept as it is: devices that it
leaves over get copies, or where those were asked for share its matrices; never more stages, which make no answer faster.
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

__all__ = ["Serving", "cache_findings", "choose_serving", "held_bytes"]

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

    On accelerators it is the first layout that holds the model with a sequence of its full length (`held_bytes`; not asked
    where both tp and pp are given), by devices that are idle, ranks of a copy and pp; where dp is given by pp first. The reason
    says what was added to what was asked for, and what is idle.
    Raises LayoutError with everything that is wrong.
    """
    findings = [*_unsplittable(model, task, given)]
    if findings:
        raise LayoutError(findings=findings)
    if device_bytes is None:
        why = "as asked" if given else "a CPU has one rank where no more are asked for"
        return Serving(**given, reason=why)
    shapes = _shapes(model, task, given, devices)
    if not shapes:
        asked = " x ".join(f"{key} {given[key]}" for key in ("tp", "pp", "dp") if key in given)
        what = f"{asked} {'are' if len(given) > 1 else 'is'} {counted(math.prod(given.values()), 'rank')}"
        what += f", and there {'is' if devices == 1 else 'are'} {counted(devices, 'device')} to use"
        fix = f"Sizes with a product of {devices} or less can be; leave some out to have them chosen"
        raise LayoutError(findings=[Finding(", ".join(f"--{key}" for key in given), what, fix)])
    if task != "lm":
        return Serving(**shapes[0], reason=f"a copy of the encoder on each of {_used(shapes[0], devices)}")
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


def cache_findings(
    model: ModelConfig,
    serving: Serving,
    blocks: int,
    block_size: int,
    memory: int,
    items: tuple[int, int | None, int | None] = (2, None, None),
) -> list[Finding]:
    """What speaks against so many blocks of the cache and one more, which belongs to nobody, on the fullest rank: that they do
    not fit beside the weights. memory: bytes there. items: item, matrix_item and cache_item of `held_bytes`."""
    weights, sequence = held_bytes(model, serving.tp, serving.pp, *items)
    each, room = sequence // model.max_len * block_size, max(0, memory - weights)
    if (blocks + 1) * each <= room:
        return []
    what = f"{blocks:,} of {each:,} bytes are {blocks * each / GIB:,.1f} GiB"
    what += f", and {room / GIB:,.1f} of {memory / GIB:,.1f} are left beside the weights"
    fix = f"Use {room // each - 1:,} or less, or leave it out" if room >= 2 * each else "Use more or larger devices"
    return [Finding("--blocks", what, fix)]


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


def _shapes(model: ModelConfig, task: str, given: Mapping[str, int], devices: int) -> list[dict[str, int]]:
    """Every layout of what is given that this model can have on so many devices, the most wanted first."""
    sizes = range(1, devices + 1 if task == "lm" else 2)
    pairs = [(tp, pp) for tp in sizes for pp in sizes if tp * pp * given.get("dp", 1) <= devices]
    legal = [(tp, pp) for tp, pp in pairs if not [*_unsplittable(model, task, {"tp": tp, "pp": pp})]]
    shapes = [{"tp": tp, "pp": pp, "dp": given.get("dp", devices // (tp * pp))} for tp, pp in legal]

    def order(shape: dict[str, int]) -> tuple[int, int, int, int]:
        together = shape["tp"] * shape["pp"]
        return shape["pp"] if "dp" in given else 0, devices - together * shape["dp"], together, shape["pp"]

    return sorted((shape for shape in shapes if shape.items() >= given.items()), key=order)


def _first_that_fits(
    model: ModelConfig,
    shapes: list[dict[str, int]],
    given: Mapping[str, int],
    devices: int,
    device_bytes: int,
    items: tuple[int, int | None, int | None],
) -> Serving:
    asked, tried = "tp" in given and "pp" in given, list[tuple[int, str]]()
    for shape in shapes:
        weights, cache = held_bytes(model, shape["tp"], shape["pp"], *items)
        need = f"{weights / GIB:.1f} GiB of weights and {cache / GIB:.2f} for a sequence of {model.max_len}"
        if asked or (weights <= WEIGHT_SHARE * device_bytes and weights + cache <= SHARE * device_bytes):
            before = f"; {min(tried)[1]} would not fit" if tried else ""
            reason = f"{need} of {device_bytes / GIB:.1f} GiB a device, on {_used(shape, devices)}{before}"
            return Serving(**shape, reason=f"{_asked(shape, given)}, {reason}" if given else reason)
        tried.append((weights + cache, f"tp {shape['tp']} x pp {shape['pp']} with {need}"))
    limit = f"{device_bytes / GIB:.1f} GiB a device: weights may take {WEIGHT_SHARE:.0%}, both {SHARE:.0%}"
    what = f"{min(tried)[1]} does not fit {limit}"
    fix = "Use more or larger devices, or give --tp and --pp to try all the same"
    raise LayoutError(findings=[Finding("devices", what, fix)])


def _asked(shape: Mapping[str, int], given: Mapping[str, int]) -> str:
    """ "as asked", and what was added to it."""
    added = [f"{axis} {size}" for axis, size in shape.items() if axis not in given and size > 1]
    return f"as asked, with {' and '.join(added)} added" if added else "as asked"


def _used(shape: Mapping[str, int], devices: int) -> str:
    """ "8 devices", or "6 of 8 devices, 2 are idle"."""
    used = math.prod(shape.values())
    idle = devices - used
    return (
        counted(devices, "device") if not idle else f"{used} of {devices} devices, {idle} {'is' if idle == 1 else 'are'} idle"
    )
