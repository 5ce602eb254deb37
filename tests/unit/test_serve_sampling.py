"""Settings of an answer are refused all at once; draws follow the probabilities and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.errors import UserError
from meshwright.models.generate import pick
from meshwright.serve.sampler import Row, draw, uniform
from meshwright.serve.sampling import SamplingParams


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(UserError) as raised:
        SamplingParams(
            temperature=-1.0,
            top_k=-1,
            top_p=0.0,
            min_p=1.5,
            repetition_penalty=0.0,
            presence_penalty=math.nan,
            frequency_penalty=math.inf,
            seed=2**63,
            logit_bias={-1: 0.0, 3: 101.0},
            stop=("",),
            stop_ids=(-5,),
            max_tokens=0,
            min_tokens=-1,
            logprobs=21,
            ignore_eos=1,  # type: ignore[arg-type]
        )
    names = [finding.where for finding in raised.value.findings]
    assert sorted(set(names)) == sorted(SamplingParams.__dataclass_fields__) and names.count("logit_bias") == 2
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    "values",
    [
        {"max_tokens": True},
        {"max_tokens": 10**18},
        {"max_tokens": "5"},
        {"temperature": 1e400},
        {"temperature": True},
        {"seed": -1},
        {"stop": "text"},
        {"stop": ("a",) * 65},
        {"logit_bias": [1]},
        {"min_tokens": 17},
        {"logprobs": 1.0},
    ],
)
def test_one_that_is_wrong(values):
    with pytest.raises(UserError) as raised:
        SamplingParams(**values)
    assert [finding.where for finding in raised.value.findings] == list(values)


def test_lists_are_taken():
    params = SamplingParams(stop=["a"], stop_ids=[1])  # type: ignore[arg-type]
    assert params.stop == ("a",) and params.stop_ids == (1,)


def shares(logits: list[float], draws: int = 3000, **settings) -> torch.Tensor:
    params = SamplingParams(**settings)
    rows = [Row(params, 7, position=position) for position in range(draws)]
    return torch.bincount(torch.tensor(draw(torch.tensor([logits] * draws), rows).tokens), minlength=len(logits)) / draws


LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().tolist()


def test_draws_follow_the_probabilities():
    # Mutations tried: logits times the temperature; top_p compared with the sum after a token; top_k one more; min_p a share of
    # 1 instead of the largest: each is red. Four standard errors: 0.037.
    def near(found: torch.Tensor, weights: list[float]) -> bool:
        wanted = torch.tensor(weights) / sum(weights)
        return bool(((found - wanted).abs() < 0.037).all()) and bool((found[wanted == 0] == 0).all())

    assert near(shares(LOGITS), [0.1, 0.4, 0.2, 0.3])
    assert near(shares(LOGITS, temperature=0.5), [0.01, 0.16, 0.04, 0.09])
    assert near(shares(LOGITS, top_k=2), [0, 0.4, 0, 0.3])
    assert near(shares(LOGITS, top_p=0.71), [0, 0.4, 0.2, 0.3])
    assert near(shares(LOGITS, top_p=0.69), [0, 0.4, 0, 0.3])
    assert near(shares(LOGITS, top_p=1e-9), [0, 1, 0, 0])
    assert near(shares(LOGITS, min_p=0.51), [0, 0.4, 0, 0.3])
    assert near(shares(LOGITS, min_p=0.49), [0, 0.4, 0.2, 0.3])
    assert near(shares(LOGITS, top_k=3, top_p=0.7), [0, 0.4, 0, 0.3])  # 0.4 + 0.3 of 0.9
    assert near(shares(LOGITS, temperature=1e-3), [0, 1, 0, 0])


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 5, "top_p": 0.7}, {"temperature": 0.3}])
def test_the_same_tokens_can_come_as_from_the_oracle(settings):
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(3)
    oracle = {pick(logits[0], generator, **settings) for _ in range(1500)}
    rows = [Row(SamplingParams(**settings), 1, position=position) for position in range(1500)]
    assert set(draw(logits.expand(1500, -1), rows).tokens) == oracle


def test_a_draw_does_not_depend_on_the_rows_beside_it():
    # Mutation tried: one random number for the whole batch by the first row's seed: red.
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = [
        Row(SamplingParams(), 1, position=4),
        Row(SamplingParams(top_k=9), 2, position=4),
        Row(SamplingParams(temperature=0.0), 3, position=9),
        Row(SamplingParams(top_p=0.5, presence_penalty=1.0), 4, (1,), (2, 3), (4,), 9),
        Row(SamplingParams(logit_bias={3: 5.0}), 1, position=4),
        Row(SamplingParams(min_p=0.1, repetition_penalty=2.0), 5, (1, 2), (3,), position=5),
    ]
    together = draw(logits, rows).tokens
    assert together == [draw(logits[r : r + 1], [row]).tokens[0] for r, row in enumerate(rows)]
    order = [3, 0, 5, 1, 4, 2]
    assert [together[r] for r in order] == draw(logits[order], [rows[r] for r in order]).tokens


def test_seed_and_position_make_the_number():
    numbers = {uniform(seed, position) for seed in range(30) for position in range(30)}
    assert len(numbers) == 900 and all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 900 - 0.5) < 0.04  # four standard errors of a uniform number
    assert uniform(2**63 - 1, 2**40) == uniform(2**63 - 1, 2**40)


def drawn(logits: list[float], row: Row) -> int:
    return draw(torch.tensor([logits]), [row]).tokens[0]


def test_penalties_and_biases():
    # By hand. Mutations tried: the repetition penalty divides negative logits too; presence counted once a token of the answer;
    # frequency and presence of the prompt: each is red.
    def greedy(**values) -> SamplingParams:
        return SamplingParams(temperature=0.0, **values)

    assert drawn([1.0, 0.9, -2.0], Row(greedy(repetition_penalty=1.2), 0, (0,), ())) == 1  # 1 / 1.2 < 0.9
    assert drawn([-1.0, -1.1, -9.0], Row(greedy(repetition_penalty=1.2), 0, (), (0,))) == 1  # -1 * 1.2 < -1.1
    assert drawn([1.0, 0.9, -2.0], Row(greedy(presence_penalty=0.2), 0, (0,), ())) == 0
    assert drawn([1.0, 0.9, -2.0], Row(greedy(presence_penalty=0.2), 0, (0,), (2,))) == 0
    assert drawn([1.0, 0.9, -2.0], Row(greedy(presence_penalty=0.2), 0, (), (0,))) == 1
    assert drawn([1.0, 0.7, -2.0], Row(greedy(presence_penalty=0.2), 0, (), (0, 0))) == 0
    assert drawn([1.0, 0.7, -2.0], Row(greedy(frequency_penalty=0.2), 0, (), (0, 0))) == 1
    assert drawn([1.0, 0.7, -2.0], Row(greedy(frequency_penalty=0.1), 0, (), (0, 0))) == 0
    assert drawn([1.0, 0.7, -2.0], Row(greedy(logit_bias={2: 3.5}), 0)) == 2
    assert drawn([1.0, 0.7, -2.0], Row(greedy(), 0, banned=(0, 99))) == 1


def test_logprobs_are_the_model_s_own():
    row = Row(SamplingParams(temperature=0.0, logprobs=2, logit_bias={2: 9.0}), 0)
    (found,) = draw(torch.tensor([LOGITS]), [row]).logprobs
    assert found is not None and found.token == 2 and math.isclose(found.logprob, math.log(0.2), rel_tol=1e-5)
    assert [token for token, _ in found.top] == [1, 3]
    assert [value for _, value in found.top] == pytest.approx([math.log(0.4), math.log(0.3)], rel=1e-5)
    none, own = draw(torch.tensor([LOGITS] * 2), [Row(SamplingParams(), 0), Row(SamplingParams(logprobs=0), 0)]).logprobs
    assert none is None and own is not None and own.top == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_said(bad):
    logits = torch.tensor([LOGITS, [0.0, bad, 0.0, 0.0], LOGITS])
    found = draw(logits, [Row(SamplingParams(top_k=2), 3, position=1)] * 3)
    assert found.broken == [False, True, False] and found.tokens[0] == found.tokens[2]
    assert draw(torch.full((1, 4), -math.inf), [Row(SamplingParams(), 0)]).broken == [True]
    assert draw(torch.empty(0, 4), []).tokens == []
