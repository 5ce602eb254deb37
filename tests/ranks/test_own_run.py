"""`Run` on ranks: several losses, optimizers and models, optimizers of torch, precision, saving and loading, and bad input."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from meshwright.config.schema import LossScaleConfig
from meshwright.errors import MeshwrightError
from meshwright.runtime.run import Run
from tests.ranks.own_loop import Outcome, by_step, loader, loss_sum, module, optimizer, oracle, rows
from tests.ranks.pool import joined

TOLERANCE = 1e-11

# ---- optimizers


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("sgd", {"momentum": 0.9}),
        ("sgd", {"momentum": 0.9, "nesterov": True}),
        ("adagrad", {}),
        ("rmsprop", {"momentum": 0.5, "centered": True}),
    ],
)
@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_optimizers_of_torch_do_to_pieces_what_they_do_to_the_whole(ranks, kind: str, more: dict[str, Any], plan: str):
    """Mutation tried: a shadow's gradient without the clip factor (0.8)."""
    reference = oracle(kind=kind, **more)
    for outcome in ranks(2).run(own_optimizer, plan, kind, more):
        assert outcome.difference(reference) < TOLERANCE


def own_optimizer(plan: str, kind: str, more: dict[str, Any]) -> Outcome:
    return by_step(plan, {}, kind, **more)


def refused_optimizers() -> list[str]:
    run, said = Run(joined()), []

    class Theirs(torch.optim.SGD):
        """Somebody else's."""

    for kind in (torch.optim.LBFGS, torch.optim.Adafactor, Theirs):
        model = nn.Linear(2, 2)
        try:
            run.parallelize(model, kind(model.parameters(), lr=0.1))
        except MeshwrightError as error:
            said.append(str(error))
    model = nn.Linear(2, 2)
    run.parallelize(model, Theirs(model.parameters(), lr=0.1), elementwise=True)
    model = nn.Linear(2, 2)
    used = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    used.step()
    for opt in (used, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))])):
        try:
            run.parallelize(nn.Linear(2, 2) if opt is not used else model, opt)
        except MeshwrightError as error:
            said.append(str(error))
    return said


def test_optimizers_that_need_whole_matrices_or_have_run_are_refused_by_name(ranks):
    (said,) = ranks(1).run(refused_optimizers)
    assert len(said) == 5
    assert "LBFGS" in said[0] and "Adafactor" in said[1] and "Theirs" in said[2] and "elementwise=True" in said[2]
    assert "has made steps already" in said[3] and "no parameters of the model" in said[4]


# ---- several losses, optimizers, models


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x).tanh()
        return self.first(hidden), self.second(hidden)


def data() -> DataLoader:
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(1)).double()
    return DataLoader(TensorDataset(x), batch_size=4)


def heads() -> TwoHeads:
    torch.manual_seed(2)
    return TwoHeads().double()


def both(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
    """The second counts only rows whose first number is positive."""
    (x,) = batch
    first, second = model(x)
    kept = (x[:, :1] > 0).double()
    return {"all": ((first**2).sum(), len(x)), "some": ((second * kept).square().sum(), kept.sum())}


def weights(batch: list[torch.Tensor]) -> dict[str, float]:
    return {"all": len(batch[0]), "some": float((batch[0][:, 0] > 0).sum())}


def two_losses(how: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """`how`: each with its weight, or means with weights that are known ahead, over two micro-batches."""
    run, model = Run(joined()), heads()
    opt = {"body": torch.optim.SGD(model.trunk.parameters(), lr=0.1), "heads": torch.optim.AdamW(
        [*model.first.parameters(), *model.second.parameters()], lr=0.01)}  # fmt: skip
    micro = 1 if how == "ahead" else None
    model, opt, batches = run.parallelize(model, opt, data(), plan="zero2", micro_batch=micro)
    assert sorted(opt) == ["body", "heads"]
    losses = []
    for batch in batches:
        if how == "ahead":
            losses.append(float(run.step(batch, means_of, weight_fn=weights)))
        else:
            losses.append(float(run.step(batch, both)))
        assert run.result is not None and set(run.result.losses) == {"all", "some"}
    return losses, run.state_dict()


def means_of(model: nn.Module, batch: list[torch.Tensor]) -> dict[str, Any]:
    found = both(model, batch)
    return {name: total / max(1.0, float(weight)) for name, (total, weight) in found.items()}


def plain_losses() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = heads()
    opts = [torch.optim.SGD(model.trunk.parameters(), lr=0.1), torch.optim.AdamW(
        [*model.first.parameters(), *model.second.parameters()], lr=0.01)]  # fmt: skip
    losses = []
    for batch in data():
        loss = sum(total / weight for total, weight in both(model, batch).values())
        for opt in opts:
            opt.zero_grad()
        loss.backward()
        for opt in opts:
            opt.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


@pytest.mark.parametrize("how", ["each", "ahead"])
def test_two_losses_with_weights_of_their_own_and_two_optimizers(ranks, how: str):
    """Mutation tried: one weight for both losses (1e-2)."""
    losses, state = plain_losses()
    for found, weights_found in ranks(2).run(two_losses, how):
        assert max(abs(a - b) for a, b in zip(found, losses, strict=True)) < TOLERANCE
        assert max(float((weights_found[name] - value).abs().max()) for name, value in state.items()) < TOLERANCE


class Nets(nn.ModuleDict):
    """Generator and discriminator of a toy GAN."""


def nets() -> Nets:
    torch.manual_seed(6)
    return Nets({"g": nn.Linear(2, 3), "d": nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))}).double()


def judge(d: nn.Module, g: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of the discriminator: real rows up, made ones down."""
    return nn.functional.softplus(-d(x)).sum() + nn.functional.softplus(d(g(x[:, :2]).detach())).sum()


def deceive(d: nn.Module, g: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.softplus(-d(g(x[:, :2]))).sum()


def gan(plan: str, together: bool) -> dict[str, torch.Tensor]:
    run, net = Run(joined()), nets()
    opts = {"g": torch.optim.AdamW(net["g"].parameters(), lr=0.02), "d": torch.optim.AdamW(net["d"].parameters(), lr=0.05)}
    batches: Any
    if together:
        _, opts, batches = run.parallelize(net, opts, data(), plan=plan)
    else:
        _, opts["g"], batches = run.parallelize(net["g"], opts["g"], data(), plan=plan)
        _, opts["d"], _ = run.parallelize(net["d"], opts["d"], plan=plan)
    for batch in batches:
        run.step(batch, lambda _, b: (judge(net["d"], net["g"], b[0]), len(b[0])), optimizer=opts["d"])
        run.step(batch, lambda _, b: (deceive(net["d"], net["g"], b[0]), len(b[0])), optimizer=opts["g"])
    if together:
        return run.state_dict(net)
    return {f"{name}.{key}": value for name in ("g", "d") for key, value in run.state_dict(net[name]).items()}


@pytest.mark.parametrize(
    ("plan", "together", "world"), [("zero2", True, 2), ("zero1", False, 2), ("zero3", False, 2), ("zero1", False, 4)]
)
def test_a_gan_with_two_optimizers_in_turn(ranks, plan: str, together: bool, world: int):
    """Mutations tried: backward of the generator's loss into the discriminator too (an error where they are two models); a row
    that stands in for none counts for the module that was given no loader (four ranks: 1e-2)."""
    net = nets()
    opts = {"g": torch.optim.AdamW(net["g"].parameters(), lr=0.02), "d": torch.optim.AdamW(net["d"].parameters(), lr=0.05)}
    for (x,) in data():
        for name, loss_fn in (("d", judge), ("g", deceive)):
            net.zero_grad()
            (loss_fn(net["d"], net["g"], x) / len(x)).backward()
            opts[name].step()
    for found in ranks(world).run(gan, plan, together):
        assert max(float((found[name] - value).abs().max()) for name, value in net.state_dict().items()) < TOLERANCE


# ---- precision


def half(precision: str, low: bool | None, plan: str) -> tuple[list[float], set[str]]:
    run, model = Run(joined()), module().float()
    scale = LossScaleConfig(initial=1024.0)  # at 65536 the first steps of the smallest weights overflow and are skipped
    options: dict[str, Any] = {"plan": plan, "precision": precision, "low_weights": low, "loss_scale": scale}
    model, opt, batches = run.parallelize(model, optimizer(model), loader(), **options)
    schedule, losses = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8), []
    for _ in range(3):
        losses += [float(run.step(batch, loss_sum)) for batch in batches]
        schedule.step()
    model.eval()
    with torch.no_grad():
        assert model(rows().tensors[0]).isfinite().all()
    return losses, {str(parameter.dtype) for parameter in model.parameters()}


@pytest.mark.parametrize(
    ("precision", "low", "plan", "dtype"),
    [("bf16", None, "ddp", "float32"), ("bf16", True, "zero1", "bfloat16"), ("fp16", None, "zero2", "float32"),
     ("fp16", None, "zero3", "float16"), ("fp32", None, "zero2", "float32")],
)  # fmt: skip
def test_mixed_precision_stays_near_fp64(ranks, precision: str, low: bool | None, plan: str, dtype: str):
    """bf16 rounds to 2^-9, fp16 to 2^-12; losses of about 3 over 9 steps. Mutation tried: no loss scale taken off, which AdamW
    hardly sees (7e-3)."""
    reference = oracle(epochs=3, clip=1e9)
    near = {"bf16": 4e-2, "fp16": 6e-3, "fp32": 1e-5}[precision]
    for losses, kinds in ranks(2).run(half, precision, low, plan):
        assert kinds == {f"torch.{dtype}"}
        assert max(abs(a - b) for a, b in zip(losses, reference.losses, strict=True)) < near
        assert losses[-1] < losses[0]


# ---- saving and loading


def first_half(folder: str, plan: str, kind: str) -> None:
    run, model = Run(joined()), module()
    opt = optimizer(model, kind, **(NESTEROV if kind == "sgd" else {}))
    model, opt, batches = run.parallelize(model, opt, loader(), plan=plan, clip=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    for epoch in range(2):
        for number, batch in enumerate(batches):
            run.step(batch, loss_sum)
            if (epoch, number) == (1, 1):  # in the middle of the second epoch
                run.save(folder, {"schedule": schedule.state_dict()})
                run.close()
                return
        schedule.step()


def second_half(folder: str, plan: str, kind: str) -> Outcome:
    run, model, made = Run(joined()), module(), Outcome()
    for parameter in model.parameters():
        parameter.data.zero_()  # nothing but the checkpoint knows the weights
    opt = optimizer(model, kind, **(NESTEROV if kind == "sgd" else {}))
    model, opt, batches = run.parallelize(model, opt, loader(), plan=plan, clip=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.8)
    schedule.load_state_dict(run.load(folder)["schedule"])
    for batch in batches:
        made.losses.append(float(run.step(batch, loss_sum)))
        assert run.result is not None
        made.norms.append(float(run.result.grad_norm))
    made.weights = run.state_dict()
    run.close()
    return made


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ((2, "zero2"), (4, "zero3"), "adamw"),
        ((4, "zero3"), (1, "ddp"), "adagrad"),
        ((1, "ddp"), (2, "zero1"), "rmsprop"),
        ((2, "zero1"), (2, "zero3"), "sgd"),
    ],
)
def test_a_run_goes_on_in_the_middle_of_an_epoch_on_another_layout(ranks, tmp_path: Path, before: Any, after: Any, kind: str):
    """Mutations tried: moments not loaded (1e-2); the loader from its start; steps not taken (7e-3); state made only for
    optimizers that count ("sgd", which has a momentum and nesterov: the checkpoint is refused)."""
    reference = oracle(kind=kind, skip=5, **(NESTEROV if kind == "sgd" else {}))
    ranks(before[0]).run(first_half, str(tmp_path), before[1], kind)
    for outcome in ranks(after[0]).run(second_half, str(tmp_path), after[1], kind):
        assert outcome.difference(reference) < TOLERANCE


NESTEROV = {"momentum": 0.9, "nesterov": True}


def from_torch(kind: str, more: dict[str, Any]) -> float:
    """A torch optimizer's state of one device is taken by the parallel one."""
    run, reference = Run(joined()), module()
    opt = optimizer(reference, kind, **more)
    batches = list(loader())
    for batch in batches[:2]:
        opt.zero_grad()
        total, count = loss_sum(reference, batch)
        (total / count).backward()
        opt.step()
    model = module()
    model.load_state_dict(reference.state_dict())
    model, parallel, _ = run.parallelize(model, optimizer(model, kind, **more), plan="zero3")
    parallel.load_state_dict(opt.state_dict())
    assert kind == "sgd" or parallel.state_dict()["step"] == 2
    opt.zero_grad()
    total, count = loss_sum(reference, batches[0])
    (total / count).backward()
    opt.step()
    half = slice(2 * run.rank, 2 * run.rank + 2)
    run.step([tensor[half] for tensor in batches[0]], loss_sum)
    found = run.state_dict()
    return max(float((found[name] - value).abs().max()) for name, value in reference.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "more"),
    [("adamw", {}), ("adagrad", {}), ("rmsprop", {"momentum": 0.5}), ("sgd", {"momentum": 0.9}), ("sgd", NESTEROV)],
)
def test_the_state_of_a_torch_optimizer_is_taken(ranks, kind: str, more: dict[str, Any]):
    """Mutation tried: what torch's own optimizers have not made yet is not made (rmsprop and nesterov: 1e-3)."""
    assert max(ranks(2).run(from_torch, kind, more)) < TOLERANCE


# ---- schedulers, bad input


def scheduled() -> list[str]:
    """Schedulers made before and after, by `run.update` and by `optimizer.step`: no warning of torch's, and the rate moves."""
    rates = []
    for before in (True, False):
        run, model = Run(joined()), nn.Linear(2, 1)
        opt: Any = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5) if before else None
        model, opt, _ = run.parallelize(model, opt)
        schedule = schedule or torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(3):
                opt.zero_grad()
                with run.micro_batch():
                    run.backward(model(torch.ones(1, 2)).sum(), 1)
                assert run.ready
                if number % 2:
                    run.update()
                else:
                    opt.step()
                schedule.step()
        assert run.result is not None
        rates.append((run.result.lr, opt.param_groups[0]["lr"]))
    assert rates == [((0.25,), 0.125)] * 2
    return []


def test_schedulers_of_torch_work(ranks):
    ranks(1).run(scheduled)


def mistakes() -> dict[str, str]:
    run, said = Run(joined()), {}

    def attempt(name: str, work: Any) -> None:
        try:
            work()
        except MeshwrightError as error:
            said[name] = f"{type(error).__name__}: {error}"
        else:
            said[name] = "nothing"

    attempt("early", lambda: run.step([], loss_sum))
    frozen = nn.Linear(2, 1)
    opt = torch.optim.SGD(frozen.parameters(), lr=1.0)
    frozen.requires_grad_(False)
    attempt("frozen", lambda: run.parallelize(frozen, opt))
    attempt("arguments", lambda: run.parallelize(frozen, None, batch="all", accumulate=0, clip=-1, precision="int8"))
    attempt("meta", lambda: run.parallelize(nn.Linear(2, 1, device="meta"), opt))
    other = nn.Linear(2, 1)
    attempt("plan", lambda: run.parallelize(other, torch.optim.SGD(other.parameters()), plan="zero4"))

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model, opt, _ = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=1.0), accumulate=2)
    x = torch.ones(2, 2)
    attempt("vector", lambda: run.step(torch.ones(4, 2), lambda m, b: m(b)))
    run = Run(joined())
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model, opt, _ = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=1.0), accumulate=2)
    with run.micro_batch():
        run.backward(model(x).sum(), 2)
    attempt("middle", run.update)
    attempt("inside", lambda: model(x).sum().backward())
    attempt("step", lambda: run.step(x, loss_sum))
    run = Run(joined())
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model, opt, _ = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def empty() -> None:
        with run.micro_batch():
            pass

    attempt("without", empty)
    run = Run(joined())
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model, opt, _ = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = model[0].weight.detach().clone()
    attempt("nan", lambda: run.step(x * math.nan, lambda m, b: (m(b).sum(), 2)))
    assert torch.equal(model[0].weight, before)
    loss = run.step(x, lambda m, b: (m(b).sum() * 0, 0))
    assert float(loss) == 0.0 and torch.equal(model[0].weight, before) and run.result is not None and run.result.skipped is True
    attempt("group", lambda: opt.add_param_group({"params": [nn.Parameter(x)]}))
    attempt("closure", lambda: opt.step(lambda: None))
    return said


def test_what_is_wrong_is_said_in_one_message(ranks):
    (said,) = ranks(1).run(mistakes)
    expected = {
        "early": "call run.parallelize",
        "frozen": "no trainable parameter",
        "arguments": "accumulate: 0 is no whole number",
        "meta": "meta device",
        "plan": "'zero4' is no strategy",
        "vector": "LossError: loss: is no scalar: its shape is (2, 1)",
        "middle": "1 of 2 micro-batches",
        "inside": "outside of a micro-batch (engine.backward_scope). In a loop of your own: `with run.micro_batch(): run",
        "step": "in the middle of a step of your own loop",
        "without": "without run.backward",
        "nan": "NumericsError: step 1: loss or gradients are not finite (loss nan); the first parameter",
        "group": "laid out",
        "closure": "takes no closure",
    }
    assert said.keys() == expected.keys()
    assert {name: text for name, text in said.items() if expected[name] not in text} == {}
    assert said["arguments"].count("\n") >= 4 and "0.weight is not finite" in said["nan"].replace(
        "is 0.weight", "0.weight is not finite"
    )


def uneven() -> str:
    """11 rows in batches of 4: the last one leaves ranks of two with 2 and 1."""
    run, model = Run(joined()), module()
    model, _, batches = run.parallelize(model, optimizer(model), loader())
    try:
        for batch in batches:
            run.step(batch, lambda m, b: m(b[0]).mean())
    except MeshwrightError as error:
        return f"{run.result.loss.isfinite() if run.result else ''} {error}"
    return ""


def test_bare_means_of_unequal_rows_are_refused_on_every_rank(ranks):
    for said in ranks(2).run(uneven):
        assert "1 to 2 rows" in said and "weight_fn" in said and said.startswith("True")
