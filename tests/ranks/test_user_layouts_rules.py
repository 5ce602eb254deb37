"""What else holds where a user's transformer is split: losses, dropout, saving, `run.check`, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.errors import ConfigError, MeshwrightError
from meshwright.models.adopt import adopt
from meshwright.runtime.adopted import AdoptedModule
from meshwright.runtime.run import Run
from tests.ranks.foreign_models import GPT2, KINDS, hugging_face, made
from tests.ranks.pool import joined
from tests.ranks.test_user_layouts import LAYOUTS, data, module, optimizer, oracle, summed

TOLERANCE = 1e-11

# ---- losses


def two(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Means over the targets, and over the rows."""
    tokens, _, labels = batch
    logits = model(tokens)
    return {
        "tokens": F.cross_entropy(logits.flatten(0, -2), labels.flatten()),
        "rows": logits.square().mean((1, 2)).mean(),
    }


def weights_of(batch: Any) -> dict[str, float]:
    return {"tokens": float((batch[2] != -100).sum()), "rows": float(len(batch[0]))}


def of_two(layout: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    run, model = Run(joined()), module("simple")
    model, _, batches = run.parallelize(model, optimizer(model), data(), plan=LAYOUTS[layout], micro_batch=2)
    losses = []
    for batch in batches:
        run.step(batch, two, weight_fn=weights_of)
        assert run.result is not None
        losses.append({name: float(value) for name, value in run.result.losses.items()})
    return losses, run.state_dict()


@pytest.mark.parametrize("layout", ["zero1-pp"])
def test_two_losses_with_weights_of_their_own(ranks, layout: str):
    """Mutation tried: a rank without the loss keeps the names of no losses (it has no loss to report, and stops)."""
    model = module("simple")
    opt, expected = optimizer(model), []
    for batch in data():
        found = two(model, batch)
        opt.zero_grad()
        torch.stack(list(found.values())).sum().backward()
        opt.step()
        expected.append({name: float(value.detach()) for name, value in found.items()})
    for losses, weights in ranks(4).run(of_two, layout):
        assert all(mine == pytest.approx(other, rel=1e-12) for mine, other in zip(losses, expected, strict=True))
        assert max(float((weights[name] - value).abs().max()) for name, value in model.state_dict().items()) < TOLERANCE


# ---- dropout and precision


def with_dropout(layout: str, attention: float) -> list[float]:
    run = Run(joined())
    kind = hugging_face(
        "GPT2LMHeadModel", "GPT2Config", **{**GPT2, "resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": attention}
    )
    theirs = made(kind)
    theirs.train()
    model, _, _ = run.parallelize(theirs, torch.optim.SGD(theirs.parameters(), lr=0.0), plan=LAYOUTS[layout], accumulate=2)
    assert any("dropout 0.3 is drawn by step" in note for note in run.notes)
    batch, before = next(iter(data())), torch.get_rng_state()
    losses = [float(run.step(batch, summed)) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)  # of attention dropout too
    model.eval()
    return [*losses, float(run.step(batch, summed))]


def test_dropout_is_that_of_any_other_layout_and_another_in_each_step(ranks):
    """Mutation tried: the key without the number of the step (the first two losses are then one)."""
    (first, second, without), *rest = [*ranks(2).run(with_dropout, "tp", 0.0), *ranks(2).run(with_dropout, "pp", 0.0)]
    assert len({round(each, 6) for each in (first, second, without)}) == 3
    for other in rest:
        assert other == pytest.approx([first, second, without], rel=1e-12)
    noisy = ranks(2).run(with_dropout, "pp", 0.5)
    assert noisy[0] == noisy[1] and noisy[0][0] != first and noisy[0][2] == pytest.approx(without, rel=1e-12)


def in_bf16(layout: str) -> tuple[list[float], set[torch.dtype]]:
    run, theirs = Run(joined()), module("simple").float()
    model, _, batches = run.parallelize(theirs, optimizer(theirs), data(), plan=LAYOUTS[layout], precision="bf16", clip=0.5)
    return [float(run.step(batch, summed)) for batch in batches], {p.dtype for p in model.parameters()}


def test_bf16_stays_near_fp64(ranks):
    for losses, kinds in ranks(2).run(in_bf16, "pp"):
        assert kinds == {torch.bfloat16}
        assert max(abs(a - b) for a, b in zip(losses, oracle("simple").losses, strict=True)) < 4e-2


def test_their_loss_is_ours_as_is_what_an_output_holds():
    """Theirs is in fp32."""
    for name, labels in (("gpt2", (3, 6)), ("bert", (3, 6)), ("classifier", (3,))):
        theirs = made(KINDS[name]).float()
        model = AdoptedModule(adopt(theirs))
        draw = torch.Generator().manual_seed(3)
        batch = {"input_ids": torch.randint(2, 17, (3, 6), generator=draw), "attention_mask": torch.ones(3, 6).long()}
        batch["labels"] = torch.randint(0, 3, labels, generator=draw)
        if len(labels) == 2:
            batch["labels"][0, :3] = -100
        expected, found = theirs(**batch), model(**batch, return_dict=True)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
        assert len(found[:]) == 2 and model(batch["input_ids"])[0].shape == found.logits.shape
        with pytest.raises(ConfigError, match="was called with inputs_embeds"):
            model(**batch, inputs_embeds=torch.ones(1))
        with pytest.raises(ConfigError, match="of type 0"):
            model(batch["input_ids"], token_type_ids=batch["input_ids"])


# ---- saving


def saved(folder: str) -> None:
    run, model = Run(joined()), module("simple")
    opt = optimizer(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    _, opt, batches = run.parallelize(model, opt, data(), plan=LAYOUTS["tp-pp"], clip=0.5)
    for batch in batches:
        run.step(batch, summed)
        schedule.step()
        break
    run.save(folder, {"schedule": schedule.state_dict()})
    run.close()


def loaded(folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    run, model = Run(joined()), module("simple")
    opt = optimizer(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    _, opt, batches = run.parallelize(model, opt, data(), plan=LAYOUTS["pp"], clip=0.5)
    schedule.load_state_dict(run.load(folder)["schedule"])
    losses = []
    for batch in batches:
        losses.append(float(run.step(batch, summed)))
        schedule.step()
    run.close()
    return losses, run.state_dict()


def test_a_checkpoint_goes_on_under_another_split(ranks, tmp_path: Path):
    """Mutation tried: one label for all parameters (7e-2 in the loss)."""
    ranks(4).run(saved, str(tmp_path))
    reference = oracle("simple")
    for losses, weights in ranks(2).run(loaded, str(tmp_path)):
        assert losses == pytest.approx(reference.losses[1:], rel=1e-12)
        assert max(float((weights[name] - value).abs().max()) for name, value in reference.weights.items()) < TOLERANCE


# ---- check, BatchNorm


def mixed(positions_first: bool) -> nn.Module:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=not positions_first)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(17, 8), encoder, nn.Linear(8, 17)).double()


def checked(plan: Any, kind: str) -> list[str]:
    run = Run(joined())
    theirs = module("simple") if kind in ("simple", "infinite") else mixed(kind == "mixed")
    model, _, batches = run.parallelize(theirs, optimizer(theirs), data(), plan=plan)
    if kind == "infinite":  # which only the last stage sees
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name == "inner.head.bias":
                    parameter[3] = torch.inf
    return [str(finding) for finding in run.check(next(iter(batches)), summed, model=model)]


@pytest.mark.parametrize(
    ("plan", "kind", "says"),
    [
        (LAYOUTS["pp"], "simple", None),
        (LAYOUTS["pp"], "infinite", "head.bias"),
        ("zero3", "mixed", "batch_first=False"),
        ("zero3", "rows", None),
    ],
)
def test_check_names_what_depends_on_the_layout_on_every_rank(ranks, plan: Any, kind: str, says: str | None):
    for found in ranks(2).run(checked, plan, kind):
        assert found == [] if says is None else len(found) == 1 and says in found[0], found


def normed(batch_norm: Any) -> torch.Tensor:
    run = Run(joined())
    theirs = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model, _, _ = run.parallelize(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), plan="ddp", batch_norm=batch_norm)
    rows = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(run.rank))
    run.step(rows, lambda called, x: (called(x).square().sum(), len(x)))
    return model[1].running_mean.clone()


def test_batch_norm_takes_the_rows_of_all_ranks_or_of_its_own(ranks):
    """Mutation tried: the argument not passed on."""
    one, other = ranks(2).run(normed, "synchronised")
    assert torch.equal(one, other)
    one, other = ranks(2).run(normed, "local")
    assert not torch.allclose(one, other)


# ---- refused


def refused() -> list[str]:
    run, said = Run(joined()), []

    def attempt(what: Any) -> None:
        try:
            what()
        except MeshwrightError as error:
            said.append(str(error))
        else:
            said.append("")

    def parallelize(theirs: nn.Module, layout: str, opt: Any = None, **more: Any) -> Any:
        return run.parallelize(theirs, opt or optimizer(theirs), plan=LAYOUTS[layout], **more)

    llama = made(KINDS["llama"])
    names = dict(llama.named_parameters())
    apart = [p for name, p in names.items() if "k_proj" in name]
    groups = [{"params": [p for name, p in names.items() if "k_proj" not in name]}, {"params": apart, "lr": 1.0}]
    attempt(lambda: parallelize(nn.Linear(2, 2), "tp"))
    attempt(lambda: parallelize(llama, "tp", torch.optim.AdamW(groups)))
    attempt(lambda: parallelize(module("simple"), "tp", precision="bf16", low_weights=False))
    attempt(lambda: parallelize(module("simple"), "tp", batch_norm="both"))
    model, opt, _ = parallelize(module("simple"), "pp")
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    attempt(lambda: model(tokens))
    attempt(lambda: model(tokens, tokens))
    attempt(model.state_dict)
    attempt(lambda: run.micro_batch().__enter__())
    attempt(lambda: opt.load_state_dict({"state": {}, "param_groups": opt.param_groups}))
    attempt(lambda: parallelize(model.adopted.origin, "pp"))
    return said


SAYS = ["has 0 nn.TransformerEncoder", "in two groups", "low_weights: false", "batch_norm: 'both'", "is a stage of a pipeline",
        "takes 1 arguments", "run.state_dict()", "runs the micro-batches of a step itself", "has moments of parameters",
        "was made parallel before"]  # fmt: skip


def test_what_cannot_be_is_refused_by_name(ranks):
    for said in ranks(2).run(refused):
        assert len(said) == len(SAYS)
        for words, expected in zip(said, SAYS, strict=True):
            assert expected in words


def test_a_pipeline_runs_the_model_once_on_micro_batches_of_one_shape():
    model = AdoptedModule(adopt(module("simple")))
    model.lay_out(SimpleNamespace(axes=SimpleNamespace(model={"pp": None})), (0, 1), 0)  # type: ignore[arg-type]
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    model.begin(0)
    with model.through(model.inner, 0, 0):
        model(tokens)
        with pytest.raises(ConfigError, match="calls the model twice"):
            model(tokens)
    with model.through(model.inner, 0, 1), pytest.raises(ConfigError, match="one shape"):
        model(tokens[:1])
    model.begin(1)
    with model.through(model.inner, 1, 0):
        model(tokens[:1])
