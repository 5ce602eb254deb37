"""The layout in which a model is served, by hand-computed bytes, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from meshwright.config.schema import ModelConfig
from meshwright.errors import LayoutError
from meshwright.serve.layout import Serving, cache_findings, choose_serving, held_bytes

GIB = 2**30
LARGE: dict[str, Any] = {
    "layers": 32,
    "width": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
    "max_len": 8192,
}


def choose(
    given: dict[str, int] | None = None, devices: int = 8, gib: float | None = 80, task: str = "lm", **shape: Any
) -> Serving:
    device_bytes = None if gib is None else int(gib * GIB)
    arch = "decoder" if task == "lm" else "encoder"
    model = ModelConfig(**{"arch": arch, **LARGE, **shape})
    return choose_serving(model, task, given or {}, devices=devices, device_bytes=device_bytes)


def sizes(serving: Serving) -> tuple[int, int, int]:
    return serving.tp, serving.pp, serving.dp


def test_bytes_of_an_8b_model_by_hand():
    """Llama 3 8B has 8,030,261,248 parameters of 2 bytes, and 2 * 32 layers * 8 heads * 128 * 2 bytes a token of the cache."""
    weights, cache = held_bytes(ModelConfig(**LARGE), 1, 1, 2)
    assert weights == 2 * 8_030_261_248 and cache == 131072 * 8192
    assert held_bytes(ModelConfig(**LARGE), 4, 1, 2)[1] == cache // 4 == held_bytes(ModelConfig(**LARGE), 1, 4, 2)[1]
    assert held_bytes(ModelConfig(**LARGE), 16, 1, 2)[1] == cache // 8  # two ranks hold one key/value head


def test_blocks_that_fit_beside_the_weights():
    """A block of 16 tokens of an 8B model is 2 MiB, a half of it with tp 2 or in 8 bits; one block more belongs to nobody.
    Mutations tried, each red: the weights not counted; no block for nobody; the block of a whole model on each rank."""
    model, weights = ModelConfig(**LARGE), 2 * 8_030_261_248
    room = weights + 1001 * 2 * 2**20
    assert not cache_findings(model, Serving(), 1000, 16, room)
    (found,) = cache_findings(model, Serving(), 1001, 16, room)
    assert found.where == "--blocks" and "1,001 of 2,097,152 bytes are 2.0 GiB, and 2.0 of 16.9 are left" in found.what
    assert found.fix == "Use 1,000 or less, or leave it out"
    shared = held_bytes(model, 2, 1, 2)[0] + 1001 * 2**20
    assert not cache_findings(model, Serving(tp=2), 1000, 16, shared) and cache_findings(model, Serving(tp=2), 1001, 16, shared)
    assert not cache_findings(model, Serving(), 2001, 16, room, (2, None, 1))
    assert cache_findings(model, Serving(), 1, 16, weights)[0].fix == "Use more or larger devices"


@pytest.mark.parametrize(
    ("gib", "devices", "wanted"),
    [
        (80, 8, (1, 1, 8)),
        (22, 8, (1, 1, 8)),  # 14.96 GiB of weights are 68% of it
        (21, 8, (2, 1, 4)),  # and 71% of this
        (10, 8, (4, 1, 2)),
        (6, 8, (4, 1, 2)),
        (22, 3, (1, 1, 3)),
        (16, 3, (3, 1, 1)),
    ],
)
def test_the_fewest_ranks_that_hold_it_and_the_rest_are_copies(gib: float, devices: int, wanted: tuple[int, int, int]):
    """Mutations tried, each red: weights may take 90%; the cache not counted; the most ranks first."""
    serving = choose(devices=devices, gib=gib)
    assert sizes(serving) == wanted
    assert f"of {gib:.1f} GiB a device, on {devices} devices" in serving.reason
    assert ("would not fit" in serving.reason) == (serving.tp > 1)


def test_a_long_sequence_wants_more_ranks():
    assert sizes(choose(gib=24)) == (1, 1, 8) and sizes(choose(gib=24, max_len=131072)) == (2, 1, 4)


def test_stages_where_tensors_do_not_divide():
    """Two query heads: four ranks can share it as two stages of two."""
    few = {"heads": 2, "kv_heads": 2, "head_dim": 128}
    assert sizes(choose(gib=5.6, **few)) == (2, 2, 2)
    assert sizes(choose(gib=10, devices=2, **few)) == (2, 1, 1)


def test_what_is_asked_is_done_and_the_rest_is_chosen():
    assert sizes(choose({"tp": 2}, gib=80)) == (2, 1, 4) and "as asked" in choose({"tp": 2}).reason
    assert sizes(choose({"dp": 4}, gib=80)) == (2, 1, 4)
    assert sizes(choose({"pp": 2}, gib=80)) == (1, 2, 4)
    assert sizes(choose({"tp": 1, "pp": 1}, gib=1)) == (1, 1, 8)  # by hand: no estimate is in the way
    assert choose({"tp": 4, "pp": 2}).leads == (0,) and Serving(tp=2, pp=2, dp=3).leads == (0, 2, 4)
    assert str(choose({"tp": 4, "pp": 2})).startswith("tp 4 x pp 2 x dp 1: as asked, ")


@pytest.mark.parametrize(
    ("given", "devices", "wanted", "said"),
    [
        ({"tp": 2, "dp": 1}, 4, (2, 1, 1), "as asked, 7.5 "),
        ({"tp": 2, "pp": 1, "dp": 2}, 8, (2, 1, 2), "as asked, 7.5 "),
        ({"tp": 3}, 8, (3, 1, 2), "as asked, with dp 2 added, "),
        ({"tp": 2}, 4, (2, 1, 2), "as asked, with dp 2 added, "),
        ({"dp": 2}, 7, (3, 1, 2), "as asked, with tp 3 added, "),
        ({"pp": 3, "dp": 1}, 8, (2, 3, 1), "as asked, with tp 2 added, "),
        ({"dp": 1}, 1, (1, 1, 1), "as asked, 15.0 "),
    ],
)
def test_what_is_asked_leaves_devices_idle_and_gets_no_stages(
    given: dict[str, int], devices: int, wanted: tuple[int, int, int], said: str
):
    """Mutation tried: idle devices before stages also where dp is given, which makes the first (2, 2, 1)."""
    serving = choose(given, devices)
    idle = devices - serving.ranks
    assert sizes(serving) == wanted and serving.reason.startswith(said), serving
    rest = f"on {serving.ranks} of {devices} devices, {idle} {'is' if idle == 1 else 'are'} idle"
    assert serving.reason.endswith(rest if idle else f"on {devices} device{'' if devices == 1 else 's'}"), serving


def test_stages_are_added_to_what_is_asked_where_it_would_not_fit():
    """And that is said, with what would not."""
    serving = choose({"tp": 2, "dp": 1}, 4, gib=8)
    assert sizes(serving) == (2, 2, 1) and serving.reason.startswith("as asked, with pp 2 added, ")
    assert re.search(r"on 4 devices; tp 2 x pp 1 with 7\.5 GiB of weights and .* would not fit$", serving.reason)
    few = {"heads": 2, "kv_heads": 2, "head_dim": 128, "layers": 3}
    left = choose(gib=4, devices=5, **few)  # five ranks cannot hold it together, one has no room for it
    assert sizes(left) == (2, 1, 2) and "on 4 of 5 devices, 1 is idle; tp 1 x pp 1 with " in left.reason


def test_a_cpu_has_as_many_ranks_as_are_asked_for():
    assert sizes(choose(devices=1, gib=None)) == (1, 1, 1) and sizes(choose({"tp": 2, "dp": 3}, 1, None)) == (2, 1, 3)


def test_an_encoder_is_copied():
    assert sizes(choose(task="mlm", devices=3)) == (1, 1, 3) and sizes(choose({"dp": 2}, 1, None, task="mlm")) == (1, 1, 2)
    two = choose({"dp": 2}, 4, task="mlm")
    assert sizes(two) == (1, 1, 2) and two.reason == "a copy of the encoder on each of 2 of 4 devices, 2 are idle"
    with pytest.raises(LayoutError) as told:
        choose({"tp": 2, "pp": 2, "dp": 2}, task="mlm")
    assert [finding.where for finding in told.value.findings] == ["--tp", "--pp"]


def test_what_cannot_be_is_refused_with_all_reasons():
    with pytest.raises(LayoutError) as told:
        choose({"tp": 64, "pp": 33})
    assert [str(finding) for finding in told.value.findings] == [
        "--tp: 64 ranks, but only 32 query heads (model.heads): a rank would have none. Use --tp 32 or less",
        "--pp: 33 stages for 32 layers; each stage needs one. Use --pp 32 or less",
    ]
    for given, what in (
        (
            {"tp": 2, "pp": 5, "dp": 1},
            "--tp, --pp, --dp: tp 2 x pp 5 x dp 1 are 10 ranks, and there are 8 devices to use. Sizes",
        ),
        ({"dp": 16}, "--dp: dp 16 is 16 ranks, and there are 8 devices to use. Sizes with a product of 8 or less can be"),
    ):
        with pytest.raises(LayoutError) as told:
            choose(given)
        assert str(told.value).startswith(what)
    with pytest.raises(LayoutError, match=r"devices: tp 4 x pp 2 with 1\.9 GiB of weights and 0\.12 .* does not fit 2\.0 GiB"):
        choose(gib=2)
