"""Recorded decode steps on an accelerator: the same tokens as without, alone and under load. `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from meshwright.config.schema import ModelConfig
from meshwright.distributed import device as devices
from meshwright.kernels.paged_attention import Pages, Singles, gathered_attention, paged_attention
from meshwright.models import build, generate, initialize
from meshwright.models.trunk import Trunk
from meshwright.serve.engine import LLMEngine
from meshwright.serve.request import Request
from meshwright.serve.sampling import SamplingParams
from tests.unit import fused_cases, one_row_cases

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.accelerator.is_available() or not devices.records(torch.device(devices.pick())):
    pytest.skip("no accelerator that records", allow_module_level=True)

SHAPES = list(itertools.product((64, 128), (1, 4, 8)))


def made(head_dim: int, group: int, **values: object) -> Trunk:
    shape = {"layers": 3, "width": 256, "heads": 8, "kv_heads": 8 // group, "head_dim": head_dim, "ffn": 512, "vocab": 997}
    model = build(ModelConfig(**{**shape, "max_len": 3072, "init_std": 0.1, **values}), "lm", torch.bfloat16)  # type: ignore[arg-type]
    initialize(model, 0, torch.accelerator.current_accelerator())
    assert isinstance(model, Trunk)
    return model


def answers(model: Trunk, length: int = 40, **options: object) -> dict[str, list[int]]:
    """Greedy and drawn answers to prompts of many lengths, some of which come later than others."""
    engine = LLMEngine(copy.deepcopy(model), **{"blocks": 1200, "max_running": 24, "token_budget": 1024, **options})  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(3)
    requests = []
    for n in range(20):
        tokens = tuple(torch.randint(0, 997, (1 + 113 * n,), generator=draw).tolist())
        params = SamplingParams(temperature=float(n % 4 == 3), seed=n, max_tokens=length - n % 7)
        requests.append(Request(str(n), tokens, params))
    found: dict[str, list[int]] = {request.id: [] for request in requests}
    while requests or engine.has_work:
        if requests:
            engine.add(requests.pop())
        for output in engine.step():
            assert output.finish in (None, "length")
            found[output.id] += output.tokens
    assert engine.pool.held == 0
    return found


class Called(devices.Recorder):
    """Records nothing: what would be replayed is called."""

    def record(self, call):
        return call


def called(model: Trunk, **options: object) -> dict[str, list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "Recorder", Called)
        return answers(model, **options)


@pytest.mark.parametrize(("head_dim", "group"), SHAPES)
def test_recorded_steps_give_the_tokens_of_steps_that_are_called(head_dim: int, group: int):
    """The same launches, hence the same bits."""
    model = made(head_dim, group)
    assert answers(model) == called(model)


@pytest.mark.parametrize(("head_dim", "group"), SHAPES)
def test_the_kernel_is_the_plain_attention(head_dim: int, group: int):
    """In bf16 both, values of about 1: an output has 8 bits. With sizes on the host, and with sizes on the device alone."""
    device = torch.device(devices.pick())
    torch.manual_seed(0)
    lengths = (1, 16, 255, 256, 257, 700, 1024, 9000)
    keys, values = (torch.randn(1200, 16, 8 // group, head_dim, dtype=torch.bfloat16, device=device) for _ in "kv")
    q = torch.randn(len(lengths), 8, head_dim, dtype=torch.bfloat16, device=device)
    tables = torch.randint(0, 1200, (len(lengths), 1024), dtype=torch.int32, device=device)
    slots = torch.zeros(len(lengths), dtype=torch.int64, device=device)
    host = Pages(slots, tables, (1,) * len(lengths), lengths)
    expected = gathered_attention(q.double(), keys.double(), values.double(), host)
    found = paged_attention(q, keys, values, host)
    assert (found.double() - expected).abs().max() < 2**-8 * float(expected.abs().max())
    alone = Singles(slots, tables, torch.tensor(lengths, dtype=torch.int32, device=device))
    assert torch.equal(paged_attention(q, keys, values, alone), found)
    for row in range(len(lengths)):
        one = Singles(slots[row : row + 1], tables[row : row + 1], alone.lengths[row : row + 1])
        assert torch.equal(paged_attention(q[row : row + 1], keys, values, one)[0], found[row])


@pytest.mark.parametrize(
    "values", [{"experts": 4, "experts_per_token": 2, "moe_ffn": 128}, {"sliding_window": 100}], ids=["experts", "window"]
)
def test_other_layers_can_be_recorded(values: dict[str, object]):
    model = made(64, 4, **values)
    assert answers(model) == called(model)


def test_recorded_steps_ahead_give_the_tokens_of_plain_steps():
    """In fp32, where what is computed beside a row changes a logit by 1e-6: no padding, no recording, nothing ahead."""
    model = made(64, 4).float()
    assert answers(model, 20) == answers(model, 20, graphs=False, ahead=False)


LIMIT = {"fp32": 4e-6, "bf16": 2.0**-6}
"""Relative to numbers above 1: up to four roundings of 2**-9 one after the other. torch's and Triton's functions differ by some
last bits of fp32."""


@pytest.mark.parametrize("many", [32, 8192])
def test_what_lies_between_matrices_is_the_plain_version(many: int, monkeypatch: pytest.MonkeyPatch):
    """With the sizes for many rows of a matrix, and for few."""
    from meshwright.kernels import fused_triton, one_row_triton

    monkeypatch.setattr(one_row_triton, "MANY", many)
    device = torch.device(devices.pick())
    found = fused_cases.cases(fused_triton, device, tuple(LIMIT)) | one_row_cases.cases(device, tuple(LIMIT))
    wrong = {name: value for name, value in found.items() if value is not True and not value < LIMIT[name.rsplit(" ", 1)[1]]}
    assert len(found) > 60 and not wrong


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("values", [{}, {"qk_norm": True}, {"qkv_bias": True, "sliding_window": 100}], ids=["", "norm", "bias"])
def test_the_forward_of_serving_is_the_models(group: int, values: dict[str, object]):
    """Greedy tokens of a sequence alone, in fp32, whose rounding is far below the distance of two logits."""
    model = made(64, group, **values).float()
    prompt = list(range(5, 42))
    expected = generate(model, prompt, max_tokens=12)
    engine = LLMEngine(copy.deepcopy(model), blocks=40)
    engine.add(Request("a", tuple(prompt), SamplingParams(temperature=0.0, max_tokens=12)))
    found: list[int] = []
    while engine.has_work:
        found += [token for output in engine.step() for token in output.tokens]
    assert found == expected


def test_marks_are_left_as_they_were_found():
    """The programs of a sequence count themselves: replayed over the same memory, a hundred times."""
    device = torch.device(devices.pick())
    torch.manual_seed(0)
    keys, values = (torch.randn(700, 16, 2, 128, dtype=torch.bfloat16, device=device) for _ in "kv")
    q = torch.randn(64, 8, 128, dtype=torch.bfloat16, device=device)
    tables = torch.randint(0, 700, (64, 160), dtype=torch.int32, device=device)
    lengths = torch.randint(1, 2560, (64,), dtype=torch.int32, device=device)
    pages = Singles(torch.zeros(64, dtype=torch.int64, device=device), tables, lengths)
    first = paged_attention(q, keys, values, pages)
    assert all(torch.equal(paged_attention(q, keys, values, pages), first) for _ in range(100))
    assert not pages.marks.of(64, 2, device).any()
