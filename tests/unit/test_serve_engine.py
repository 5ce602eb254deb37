"""The engine answers as `generate` does, which has no cache: alone and under load, whatever is chunked, preempted or known."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

from meshwright.config.schema import ModelConfig
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import UserError
from meshwright.models import build, generate, initialize
from meshwright.models.trunk import Trunk
from meshwright.serve.engine import LLMEngine
from meshwright.serve.request import Output, Request
from meshwright.serve.runner import Runner
from meshwright.serve.sampler import Scores, scores_of
from meshwright.serve.sampling import SamplingParams
from meshwright.serve.step_sizes import step_sizes

BASE: dict[str, Any] = {"layers": 2, "width": 24, "heads": 4, "ffn": 64, "vocab": 61, "max_len": 48, "init_std": 0.4}
GPT2 = {"positions": "learned", "norm": "layer", "activation": "gelu_tanh", "tied": True, "qkv_bias": True}
GPT2 |= {"attention_bias": True, "mlp_bias": True, "position_offset": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 2},
    "llama-3": {"kv_heads": 1, "rope_scaling": LLAMA3},
    "gpt-2": GPT2,
    "qwen-2": {"kv_heads": 2, "qkv_bias": True, "tied": True},
    "qwen-3": {"kv_heads": 2, "qk_norm": True, "head_dim": 10},
    "mistral": {"kv_heads": 2, "sliding_window": 5},
    "mixtral": {"experts": 4, "experts_per_token": 2, "moe_ffn": 20, "kv_heads": 2},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 40}},
    "post-norm": {"norm_order": "post", "norm": "layer", "positions": "none", "activation": "relu"},
}


@functools.cache
def made(family: str, dtype: torch.dtype = torch.float64) -> Trunk:
    model = build(ModelConfig(**{**BASE, **FAMILIES[family]}), "lm")
    initialize(model, 0, "cpu")
    assert isinstance(model, Trunk)
    with torch.no_grad():  # away from biases of 0 and norms of 1
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.to(dtype)


def engine_of(family: str = "llama", dtype: torch.dtype = torch.float64, **options: Any) -> LLMEngine:
    options = {"blocks": 40, "block_size": 4, **options}
    return LLMEngine(copy.deepcopy(made(family, dtype)), **options)


def prompts(count: int, vocab: int = 61) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab, (1 + 5 * n % 17,), generator=generator).tolist() for n in range(count)]


@functools.cache
def expected(family: str, prompt: tuple[int, ...], length: int, dtype: torch.dtype = torch.float64) -> list[int]:
    return generate(made(family, dtype), list(prompt), max_tokens=length)


def greedy(length: int = 8, **values: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=length, **values)


def answers(engine: LLMEngine, requests: list[Request]) -> dict[str, list[Output]]:
    """All outputs of each request; the books of the engine are looked at after every step."""
    found: dict[str, list[Output]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            found[output.id].append(output)
        engine.scheduler.check()
    assert engine.pool.held == 0
    return found


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def check(engine: LLMEngine, family: str, count: int = 5, length: int = 8, dtype: torch.dtype = torch.float64) -> None:
    requests = [Request(str(n), tuple(prompt), greedy(length)) for n, prompt in enumerate(prompts(count))]
    for request, outputs in zip(requests, answers(engine, requests).values(), strict=True):
        assert tokens_of(outputs) == expected(family, request.tokens, length, dtype), request.id
        assert [output.finish for output in outputs] == [None] * (length - 1) + ["length"]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_every_family(family: str):
    """Mutations tried, each red: the window one key wider; positions counted from the chunk's start; the mask of a chunk
    without the tokens before it; one cache for all layers; one key more is seen than there should be."""
    check(engine_of(family, token_budget=6), family)


def test_fp32():
    check(engine_of("llama", torch.float32), "llama", dtype=torch.float32)


@pytest.mark.parametrize("budget", range(1, 19))
def test_any_chunk_size(budget: int):
    check(engine_of(token_budget=budget, block_size=3), "llama", count=4, length=4)


@pytest.mark.parametrize("family", ["mistral", "gpt-2"])
def test_preemption(family: str):
    # Mutation tried: a preempted sequence keeps `computed`: red.
    engine = engine_of(family, blocks=8, token_budget=7)
    check(engine, family, count=6, length=14)
    assert engine.stats()["preemptions"] > 3


def test_one_after_the_other_and_together_give_the_same():
    alone = engine_of(max_running=1, prefix=False)
    check(alone, "llama")
    assert alone.stats()["steps"] > 30
    check(engine_of(max_running=64), "llama")


def test_what_is_known_is_not_computed_again():
    # Mutation tried: the digest of a block is of its own tokens alone: red.
    engine, prefix = engine_of(), list(range(20, 37))
    first = Request("first", tuple(prefix), greedy())
    again = [Request(f"{n}", (*prefix[:cut], *range(n)), greedy()) for n, cut in enumerate((17, 13, 8, 4, 17), 1)]
    assert tokens_of(answers(engine, [first])["first"]) == expected("llama", first.tokens, 8)
    before = engine.stats()
    for request, outputs in zip(again, answers(engine, again).values(), strict=True):
        assert tokens_of(outputs) == expected("llama", request.tokens, 8)
    after = engine.stats()
    assert after["prefix_hits"] - before["prefix_hits"] == 16 + 12 + 8 + 4 + 16
    computed = after["computed_tokens"] - before["computed_tokens"]
    assert computed == sum(len(r.tokens) for r in again) - 56 + 5 * 7  # the last token of an answer is never computed


def test_seeds_make_draws_whatever_is_beside_them():
    # Mutation tried: the seed of the engine instead of the request's: red.
    def drawn(ids: list[int], **options: Any) -> dict[str, list[int]]:
        params = {n: SamplingParams(seed=n % 3, max_tokens=8, top_k=20 * (n % 2)) for n in ids}
        requests = [Request(str(n), tuple(prompts(4)[n % 2]), params[n]) for n in ids]
        return {id: tokens_of(outputs) for id, outputs in answers(engine_of(**options), requests).items()}

    together = drawn([0, 1, 2, 3, 4, 6], blocks=12, token_budget=9)
    for n in (0, 1, 4):
        assert drawn([n])[str(n)] == together[str(n)]
    assert together["0"] == together["6"] and together["0"] != together["2"] != together["4"]
    unseeded = [Request(str(n), (1, 2), SamplingParams(max_tokens=12)) for n in range(2)]
    first, second = (tokens_of(outputs) for outputs in answers(engine_of(), unseeded).values())
    assert first != second


def test_ends():
    answer = expected("llama", (5, 6), 8)
    end = answer[3]
    cut = answer[: answer.index(end) + 1]

    def finished(engine: LLMEngine, params: SamplingParams) -> tuple[list[int], str | None]:
        outputs = answers(engine, [Request("a", (5, 6), params)])["a"]
        return tokens_of(outputs), outputs[-1].finish

    assert finished(engine_of(ends=(end,)), greedy()) == (cut, "stop")
    assert finished(engine_of(ends=(end,)), greedy(ignore_eos=True)) == (answer, "length")
    assert finished(engine_of(), greedy(stop_ids=(end,))) == (cut, "stop")
    assert finished(engine_of(), greedy(stop_ids=(end,), ignore_eos=True)) == (cut, "stop")
    assert finished(engine_of(), greedy(1)) == (answer[:1], "length")
    late, why = finished(engine_of(ends=(end,)), greedy(stop_ids=(answer[0],), min_tokens=5))
    assert end not in late[:5] and answer[0] not in late[:5] and (len(late) >= 5 or why == "length")


def test_the_whole_context_can_be_used():
    engine = engine_of(blocks=12)
    for length in (47, 10):
        request = Request("a", tuple(range(length)), greedy(48 - length))
        assert tokens_of(answers(engine, [request])["a"]) == expected("llama", request.tokens, 48 - length)


def test_what_cannot_be_answered_is_refused_and_changes_nothing():
    engine = engine_of(blocks=5)
    engine.add(Request("twice", (1,), greedy()))

    def wrong(request: Request) -> list[str]:
        with pytest.raises(UserError) as raised:
            engine.add(request)
        return [f"{finding.where}: {finding.what}" for finding in raised.value.findings]

    assert wrong(Request("twice", (), greedy(stop=("a",)))) == [
        "id: 'twice' is under way",
        "prompt: is empty",
        "stop: needs a tokenizer, and this engine has none",
    ]
    assert wrong(Request("a", (1, 61), greedy(logit_bias={70: 1.0}, stop_ids=(61,)))) == [
        "prompt: token 61 is none of the model's 61",
        "logit_bias: token 70 is none of the model's 61",
        "stop_ids: token 61 is none of the model's 61",
    ]
    assert "40 tokens of prompt and max_tokens 9 are 49; the model takes 48" in wrong(Request("a", (1,) * 40, greedy(9)))[0]
    assert "are 22; the cache holds 20" in wrong(Request("a", (1,) * 14, greedy(8)))[0]
    engine.add(Request("fits", (1,) * 13, greedy(8)))
    while engine.has_work:
        engine.step()
    assert engine.stats()["finished_length"] == 2 and engine.pool.held == 0


def test_abort_frees_at_once_and_is_said():
    engine = engine_of()
    for id in ("runs", "waits"):
        engine.add(Request(id, (1, 2, 3), greedy(20)))
        engine.scheduler.max_running = 1
    engine.step()
    assert engine.pool.held == 1
    assert engine.abort("runs") and engine.pool.held == 0 and not engine.abort("runs") and not engine.abort("nobody")
    assert engine.abort("waits") and engine.has_work
    assert [(output.id, output.finish) for output in engine.step()] == [("runs", "abort"), ("waits", "abort")]
    assert not engine.has_work and engine.step() == [] and engine.stats()["finished_abort"] == 2
    check(engine, "llama")


def test_logits_that_are_no_numbers_end_a_request_with_an_error():
    engine = engine_of("gpt-2")
    with torch.no_grad():
        engine.runner.model.position_embedding.weight[2 + 9] = torch.nan  # type: ignore[union-attr]
    requests = [Request("short", (1, 2, 3), greedy(6)), Request("long", (1, 2, 3), greedy(9))]
    found = answers(engine, requests)
    assert found["short"][-1].finish == "length" and found["long"][-1].finish == "error"
    assert tokens_of(found["long"]) == expected("gpt-2", (1, 2, 3), 7)
    assert engine.stats()["finished_error"] == 1


def test_what_is_no_number_stays_with_its_request():
    """Its blocks go to others, who must not see what is left in them. Mutation tried: nothing is cleared in the gathered keys
    and values: red."""
    engine = engine_of("gpt-2", blocks=4, prefix=False)
    with torch.no_grad():
        engine.runner.model.position_embedding.weight[2 + 9 :] = torch.nan  # type: ignore[union-attr]
    found = answers(engine, [Request("long", (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14), greedy(2))])
    assert [output.finish for output in found["long"]] == ["error"]
    requests = [Request("one", (1,), greedy(3)), Request("six", (1, 2, 3, 4, 5, 6), greedy(3))]
    for request, outputs in zip(requests, answers(engine, requests).values(), strict=True):
        assert tokens_of(outputs) == expected("gpt-2", request.tokens, 3)


def test_a_preferred_request_goes_first():
    engine = engine_of(max_running=1)
    order = []
    for id, priority in (("a", 1), ("b", 1), ("c", 0)):
        engine.add(Request(id, (1, 2), greedy(2), priority))
    while engine.has_work:
        order += [output.id for output in engine.step() if output.finish]
    assert order == ["c", "a", "b"]


def test_logprobs_are_those_of_the_whole_forward():
    # Mutation tried: the logits of the position before: red.
    request = Request("a", (7, 8, 9), greedy(4, logprobs=3))
    outputs = answers(engine_of(token_budget=2), [request])["a"]
    tokens = [7, 8, 9]
    for output in outputs:
        (found,) = output.logprobs or []
        whole = made("llama")(torch.tensor([tokens]))[0, -1].detach().log_softmax(0)
        assert found.token == output.tokens[0] and abs(found.logprob - float(whole[found.token])) < 1e-12
        values, ids = whole.topk(3)
        assert [token for token, _ in found.top] == ids.tolist()
        assert [value for _, value in found.top] == pytest.approx(values.tolist(), abs=1e-12)
        tokens += output.tokens


def test_experts_do_not_drop_what_others_bring():
    """A capacity is a limit by row; an answer would depend on its batch mates."""
    config = ModelConfig(**{**BASE, **FAMILIES["mixtral"], "capacity": 0.5})
    model = build(config, "lm")
    initialize(model, 0, "cpu")
    free = copy.deepcopy(model.double())
    for layer in free.layers:
        layer.mlp.router.capacity = None  # type: ignore[union-attr]
    engine = LLMEngine(model, blocks=20, block_size=4)  # type: ignore[arg-type]
    found = answers(engine, [Request(str(n), tuple(prompt), greedy(5)) for n, prompt in enumerate(prompts(3))])
    for outputs, prompt in zip(found.values(), prompts(3), strict=True):
        assert tokens_of(outputs) == generate(free, prompt, max_tokens=5)


# ---- text


class Says:
    """In the place of a runner: logits that make the next of `tokens` certain, by the position in the answer."""

    def __init__(self, runner: Runner, prompt: int, tokens: list[int], vocab: int):
        self.blocks, self.prompt, self.tokens, self.vocab = runner.blocks, prompt, tokens, vocab

    lanes = 1

    def start(self, packed: Any) -> None:
        self.scores = torch.zeros(len(packed.select), self.vocab)
        for row, index in enumerate(packed.select):
            place = packed.positions[index] + 1 - self.prompt
            self.scores[row, self.tokens[min(place, len(self.tokens) - 1)]] = 9.0  # a step ahead may be one too many

    def finish(self) -> Scores:
        return scores_of(self.scores)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.train(["alpha betagamma 😀 你好 "] * 4, 300)


def said(words: Tokenizer, ids: list[int], **values: Any) -> tuple[list[str], int, str | None]:
    """Pieces of text, number of tokens, and why it ended."""
    config = ModelConfig(**{**BASE, "vocab": words.vocab_size})
    model = build(config, "lm")
    initialize(model, 0, "cpu")
    engine = LLMEngine(model, words, blocks=20, block_size=4, ends=(words.eos or 0,))  # type: ignore[arg-type]
    engine.runner = Says(engine.runner, 2, [*ids, words.eos or 0], words.vocab_size)  # type: ignore[assignment,arg-type]
    outputs = answers(engine, [Request("a", (words.bos or 0, 9), greedy(**{"length": 30, **values}))])["a"]
    return [output.text for output in outputs], len(tokens_of(outputs)), outputs[-1].finish


def test_text_is_what_the_tokens_say(words: Tokenizer):
    ids = words.encode("alpha 😀 你好")
    pieces, count, finish = said(words, ids)
    assert "".join(pieces) == "alpha 😀 你好" and count == len(ids) + 1 and finish == "stop"
    assert all("�" not in piece for piece in pieces)


def test_stop_strings_end_the_answer_before_themselves(words: Tokenizer):
    ids = [token for word in ("alpha", " bet", "agam", "ma") for token in words.encode(word)]
    pieces, count, finish = said(words, ids, stop=("tagam",))
    assert "".join(pieces) == "alpha be" and finish == "stop" and count < len(ids)
    pieces, count, finish = said(words, ids, stop=("max",))
    assert "".join(pieces) == "alpha betagamma" and finish == "stop" and count == len(ids) + 1
    pieces, count, finish = said(words, ids, stop=("lph", "lpha"))
    assert "".join(pieces) == "a" and finish == "stop"
    pieces, count, finish = said(words, ids, stop=("alpha",), min_tokens=len(words.encode("alpha")) + 1)
    assert "".join(pieces) == "alpha betagamma" and finish == "stop"


def test_an_answer_that_ends_inside_of_a_character(words: Tokenizer):
    ids = list(words.encode("\U0001f984"))  # four bytes that the tokenizer has not seen together
    assert len(ids) > 2
    pieces, _, finish = said(words, ids, length=2)
    assert pieces == ["", "�"] and finish == "length"


# ---- memory


def test_blocks_from_what_is_free():
    from meshwright.errors import DeviceError
    from meshwright.serve.runner import block_bytes, blocks_for

    each = block_bytes([(2, 64)] * 3, 16, torch.bfloat16)
    assert each == 3 * 2 * 16 * 2 * 64 * 2  # layers, keys and values, tokens, heads, features, bytes
    assert blocks_for(50 * each, 100 * each, each, 16, 16 * 40, share=0.9) == 40
    with pytest.raises(DeviceError, match=r"hold 640 tokens .* may have 641.* Use at most max_len 640"):
        blocks_for(50 * each, 100 * each, each, 16, 641, share=0.9)


def test_memory_that_is_not_there_is_said_before_it_is_taken(monkeypatch: pytest.MonkeyPatch):
    """Mutations tried: no look at what is free (the allocator's own error, or a process that is killed later); `_warm` without
    its `except`."""
    from meshwright.errors import DeviceError
    from meshwright.serve.runner import block_bytes

    with pytest.raises(DeviceError, match=r"blocks: 99,999,999,999 of .* GiB, and .* are free"):
        engine_of(blocks=99_999_999_999)
    runner = engine_of(max_running=3).runner
    each = block_bytes(runner._shapes, runner.block_size, runner.cache_dtype)
    monkeypatch.setattr("meshwright.distributed.device.memory_total", lambda device: (41 * each, 100 * each))
    assert engine_of(blocks=40).pool.blocks == 40
    with pytest.raises(DeviceError, match="Use 40 or less"):
        engine_of(blocks=41)

    def run(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(runner, "run", run)
    with pytest.raises(DeviceError, match="token_budget, max_running: a step of 103 tokens with logits of 4 needs more"):
        runner._warm(103, 4)


@pytest.mark.parametrize("tokens", [5, 48, 103])
def test_the_first_step_is_as_large_as_any(tokens: int, monkeypatch: pytest.MonkeyPatch):
    """More tokens than one sequence may have are several sequences, each in blocks of its own."""
    runner, seen = engine_of(max_running=3).runner, []
    run = runner.run
    monkeypatch.setattr(runner, "run", lambda packed, hidden=None: seen.append(packed) or run(packed, hidden))
    runner._warm(tokens, 4)
    (packed,) = seen
    assert packed.sizes[0] == packed.counts.sum() == tokens and packed.counts.max() <= runner.max_len == 48
    assert len(set(packed.slots.tolist())) == tokens and len(packed.select) == min(tokens, 4)
    assert packed.positions.max() == packed.counts.max() - 1


def test_sizes_of_a_step_are_those_of_the_device_unless_given():
    scheduler = engine_of(max_running=None).scheduler
    assert (scheduler.max_running, scheduler.token_budget) == step_sizes("cpu", offline=False)[:2]
    scheduler = engine_of(max_running=7, token_budget=11).scheduler
    assert (scheduler.max_running, scheduler.token_budget) == (7, 11)
    assert step_sizes("cuda", offline=True) > step_sizes("cuda", offline=False) > step_sizes("cpu", offline=True)


def test_blocks_of_a_cpu_are_enough_for_all_that_run():
    engine = engine_of(blocks=None, max_running=3)
    assert engine.pool.blocks == 3 * 12
    check(engine, "llama")
