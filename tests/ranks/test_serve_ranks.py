"""An engine over two ranks answers as one does, from the tables by which training splits the model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import DeviceError, LayoutError
from meshwright.models import generate
from meshwright.models.files import save_model
from meshwright.models.trunk import Trunk
from meshwright.serve.engine import LLMEngine
from meshwright.serve.quantize import quantize_matrices
from meshwright.serve.ranks import ServingGroup
from meshwright.serve.request import Request
from meshwright.spec.layout import Layout
from tests.ranks.pool import layout_mesh
from tests.unit.test_serve_engine import answers, expected, greedy, made, prompts, tokens_of


def group_of(pp: int = 1) -> ServingGroup:
    """Of the whole pool; the pool's own group is over the CPU already."""
    assert dist.group.WORLD is not None
    return ServingGroup(layout_mesh(Layout(tp=dist.get_world_size() // pp, pp=pp)), dist.group.WORLD)


def lead_or_follow(engine: LLMEngine, requests: list[Request]) -> tuple[dict[str, list[int]], dict[str, float]] | None:
    if dist.get_rank():
        engine.follow()
        return None
    try:
        found = {id: tokens_of(outputs) for id, outputs in answers(engine, requests).items()}
    finally:
        engine.close()
    return found, engine.stats()


def answered(family: str, options: dict[str, Any], length: int, pp: int = 1) -> Any:
    group = group_of(pp)
    blocks = options.pop("blocks") + (dist.get_rank() == 0)  # the rank with the least room decides
    model = group.split(copy.deepcopy(made(family)))
    engine = LLMEngine(model, blocks=blocks, block_size=4, group=group, **options)
    return lead_or_follow(engine, [Request(str(n), tuple(prompt), greedy(length)) for n, prompt in enumerate(prompts(4))])


@pytest.mark.parametrize("family", ["llama", "llama-3", "gpt-2", "qwen-3", "mixtral"])
def test_two_ranks_answer_as_one(ranks, family: str):
    """`llama-3` has one key/value head, which both ranks then hold. Mutations tried, each red: a follower skips the steps that
    draw nothing; the features of a rank's queries counted as keys; every rank its own number of blocks."""
    (found, stats), other = ranks(2).run(answered, family, {"blocks": 9, "token_budget": 6}, 12)
    assert other is None and stats["kv_blocks"] == 9 and stats["preemptions"] > 0
    for n, prompt in enumerate(prompts(4)):
        assert found[str(n)] == expected(family, tuple(prompt), 12)


def test_four_ranks_share_two_key_heads(ranks):
    (found, _), *_ = ranks(4).run(answered, "qwen-2", {"blocks": 20}, 5)
    assert found == {str(n): expected("qwen-2", tuple(prompt), 5) for n, prompt in enumerate(prompts(4))}


@pytest.mark.parametrize("family", ["llama", "gpt-2", "mixtral"])
def test_two_stages_answer_as_one(ranks, family: str):
    """`gpt-2` has one matrix for the embedding and the head, which are on two ranks. Mutations tried, each red: the next stage
    gets zeros; `finish` gives the step that was started last."""
    (found, stats), other = ranks(2).run(answered, family, {"blocks": 10, "token_budget": 6}, 12, 2)
    assert other is None and stats["preemptions"] > 0
    for n, prompt in enumerate(prompts(4)):
        assert found[str(n)] == expected(family, tuple(prompt), 12)


def test_two_stages_of_two_ranks(ranks):
    (found, _), *_ = ranks(4).run(answered, "qwen-2", {"blocks": 20}, 5, 2)
    assert found == {str(n): expected("qwen-2", tuple(prompt), 5) for n, prompt in enumerate(prompts(4))}


def signs(family: str) -> Trunk:
    """Every row of a matrix is one number with signs, which 8 bits hold in any part of it."""
    model = copy.deepcopy(made(family))
    for layer in model.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.data.sign_().mul_(torch.linspace(0.2, 0.4, module.weight.shape[0])[:, None])
    return model


def answered_narrow(family: str, pp: int) -> Any:
    group = group_of(pp)
    model = quantize_matrices(group.split(signs(family)), torch.device("cpu"))
    engine = LLMEngine(model, blocks=20, block_size=4, group=group)
    return lead_or_follow(engine, [Request(str(n), tuple(prompt), greedy(6)) for n, prompt in enumerate(prompts(4))])


@pytest.mark.parametrize(("family", "pp"), [("llama", 1), ("llama-3", 1), ("gpt-2", 1), ("llama", 2)])
def test_two_ranks_with_matrices_of_8_bits(ranks, family: str, pp: int):
    """`llama-3` has the rows of one matrix in two parts, `gpt-2` biases. Mutations tried, each red: no sum over ranks; the bias
    added on each."""
    (found, _), _ = ranks(2).run(answered_narrow, family, pp)
    model = signs(family)
    assert found == {str(n): generate(model, prompt, max_tokens=6) for n, prompt in enumerate(prompts(4))}


def aborts() -> tuple[list[int], list[int]] | None:
    """A request is aborted while steps with its tokens are under way, and its blocks go to another one."""
    group = group_of(pp=2)
    engine = LLMEngine(group.split(copy.deepcopy(made("llama"))), blocks=4, block_size=4, group=group, prefix=False)
    if dist.get_rank():
        engine.follow()
        return None
    gone, stays, late = (Request(id, tuple(range(n, n + 5)), greedy(4)) for n, id in enumerate(("gone", "stays", "late")))
    found: dict[str, list[int]] = {"gone": [], "stays": [], "late": []}
    for request in (gone, stays):
        engine.add(request)
    while engine.has_work or late.id not in found:
        outputs = engine.step()
        for output in outputs:
            found[output.id] += output.tokens
        if engine.abort("gone"):
            engine.add(late)
        engine.scheduler.check()
    engine.close()
    return found["stays"], found["late"]


def test_an_aborted_request_leaves_its_blocks_to_others(ranks):
    assert ranks(2).run(aborts)[0] == (expected("llama", tuple(range(1, 6)), 4), expected("llama", tuple(range(2, 7)), 4))


def loaded(folder: str, tp: int, pp: int) -> Any:
    engine = LLMEngine.load(folder, device="cpu", tp=tp, pp=pp, blocks=20, block_size=4)
    return lead_or_follow(engine, [Request("a", (3, 4, 5), greedy(6, ignore_eos=True))])


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_load_on_two_ranks(ranks, tmp_path: Path, tp: int, pp: int):
    model = made("llama")
    save_model(tmp_path / "model", model, model.config, "lm")
    Tokenizer.train([], 262).save(tmp_path / "model")
    (found, _), _ = ranks(2).run(loaded, str(tmp_path / "model"), tp, pp)
    assert found == {"a": expected("llama", (3, 4, 5), 6)}


def refused(folder: str) -> tuple[str, str]:
    with pytest.raises(DeviceError) as few:
        LLMEngine.load(folder, device="cpu", tp=3)
    model = copy.deepcopy(made("llama"))
    model.config = model.config.model_copy(update={"heads": 1, "kv_heads": 1})
    with pytest.raises(LayoutError) as heads:
        group_of().split(model)
    return str(few.value), str(heads.value)


def test_what_does_not_fit_is_refused(ranks, tmp_path: Path):
    for few, heads in ranks(2).run(refused, str(tmp_path)):
        assert few.startswith("tp, pp, dp: tp 3, pp 1 and dp 1 are 3 ranks, and there are 2")
        assert "heads" in heads
    with pytest.raises(DeviceError, match="and there is 1"):
        LLMEngine.load(tmp_path, tp=2)


def dies(length: int) -> None:
    """The second rank ends in the middle; the first one must not wait for it."""
    group = group_of()
    engine = LLMEngine(group.split(copy.deepcopy(made("llama"))), blocks=20, block_size=4, group=group)
    if dist.get_rank():
        raise RuntimeError("the follower is gone")
    engine.add(Request("a", (1, 2), greedy(length)))
    for _ in range(length):
        engine.step()


def test_a_rank_that_dies_ends_the_others(ranks):
    from tests.ranks.pool import RankError

    with pytest.raises(RankError, match="the follower is gone"):
        ranks(2).run(dies, 20, timeout=20)
