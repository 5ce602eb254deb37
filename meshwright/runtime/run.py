"""`Run`: what a user's own script holds. It makes a module parallel, runs its steps, and saves and loads them.

run = meshwright.init()
model, optimizer, loader = run.parallelize(model, optimizer, loader)
for batch in loader:
    loss = run.step(batch, loss_fn)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from meshwright.checkpoint import CheckpointStore, inspect
from meshwright.config.schema import LossScaleConfig, OptimizerConfig
from meshwright.distributed.mesh import build_mesh, data_rank
from meshwright.distributed.world import Ranks
from meshwright.errors import CheckpointError, ConfigError, Finding, MeshwrightError
from meshwright.parallel.apply import parallelize
from meshwright.parallel.flat import FlatParameters
from meshwright.parallel.own_optimizer import Labels, OwnOptimizer
from meshwright.parallel.whole import whole_weights
from meshwright.runtime.adopted import AdoptedModule
from meshwright.runtime.batches import Split, counted_split, split_rows
from meshwright.runtime.checking import findings_of
from meshwright.runtime.given_optimizer import ParallelOptimizer
from meshwright.runtime.kept import check_alike, pieces_of, take_state, training_state
from meshwright.runtime.preparing import (
    are_loaders,
    as_given,
    check_arguments,
    dtype_of,
    keys_of,
    listed,
    loaders_of,
    owners,
    plan_for,
    share_values,
)
from meshwright.runtime.splitting import give_back, original_state, subject_of, training_of
from meshwright.runtime.training import StepResult, Training
from meshwright.runtime.user_loader import UserLoader
from meshwright.runtime.user_plan import Given, precision_of
from meshwright.spec.parameters import Table
from meshwright.spec.plan import Plan

__all__ = ["Run"]


class Run:
    """The ranks of a script, and what they train. `meshwright.init` makes it, and closes it when the script ends.

    ranks: their process groups. seed: orders random samplers that have no generator of their own.
    """

    def __init__(self, ranks: Ranks, seed: int = 0):
        self.ranks = ranks
        self.seed = seed
        self.plan: Plan | None = None
        """Of the last `parallelize`."""
        self.notes: list[str] = []
        """What was decided without being asked."""
        self._trainings: list[Training] = []
        self._loaders: list[UserLoader] = []
        self._stores: dict[Path, CheckpointStore] = {}

    # ---- who and where

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, which prints and writes for all."""
        return self.rank == 0

    def print(self, *values: Any) -> None:
        """On rank 0 only."""
        if self.is_lead:
            print(*values, flush=True)

    # ---- making parallel

    def parallelize(
        self,
        model: nn.Module,
        optimizer: Any,
        loader: Any = None,
        *,
        plan: Given = "auto",
        precision: str | None = None,
        low_weights: bool | None = None,
        loss_scale: LossScaleConfig | None = None,
        batch: str = "global",
        micro_batch: int | None = None,
        accumulate: int = 1,
        clip: float = 0.0,
        on_nonfinite: str = "stop",
        split: Split = split_rows,
        elementwise: bool = False,
        table: Table | None = None,
        batch_norm: Literal["synchronised", "local"] = "synchronised",
    ) -> tuple[nn.Module, Any, Any]:
        """(model, optimizer, loader) to go on with, in place of the old ones. The model is the same object, but where the plan
        has tp, pp or cp: there it is another one that is called alike (`runtime.adopted`), made from a transformer that
        `models.adopt` knows. Your module then keeps its old weights, on the CPU, until `give_back`.

        optimizer: a torch optimizer over parameters of the model, or several (a list, tuple or dict comes back as one).
        loader: a DataLoader or any iterable of batches, or several, or None.
        plan: "auto", "ddp", "zero1", "zero2", "zero3", a Plan, or parts of one (mapping, JSON text, file).
        precision: "fp32", "fp64", "bf16" or "fp16" (the last two by torch.autocast, fp16 with a loss scale); None: that of the
        parameters. low_weights: bf16 and fp16 keep the weights in that type too, with fp32 masters; None: under ZeRO-3 only.
        batch: a batch of the loader is that of all ranks together ("global"), or of each ("rank").
        micro_batch: rows that `step` puts through the model at once. accumulate: micro-batches a step, where that is not given.
        clip: largest global gradient norm of `step`; 0: off. on_nonfinite: "stop" raises NumericsError, "skip" goes on.
        split: cuts batches that are no tensors of rows. elementwise: optimizers unknown to us treat each element by itself.
        table: how parameters are split over tensor and pipeline ranks. batch_norm: BatchNorm takes its statistics from the rows
        of all data ranks ("synchronised"), or of its own ("local").
        Parameters start as they are on rank 0. Raises UserError subclasses with everything that is wrong.
        """
        optimizers = listed(optimizer)
        known = [module for each in self._trainings for module in each.known_as]
        loaders = loaders_of(loader)
        check_arguments(
            model, optimizers, loaders, batch, on_nonfinite, micro_batch, accumulate, clip, precision, known, batch_norm
        )
        split = counted_split(split)
        labels = Labels(tuple(optimizers))
        label = owners(model, labels, self.notes)
        kept = precision or precision_of(model)
        self.plan = made = plan_for(model, plan, kept, precision is not None, micro_batch, optimizers, self.ranks)
        dtype = dtype_of(model, made, precision, low_weights)
        subject = subject_of(model, made, table, label, low_weights, self.seed)
        mesh = build_mesh(made.layout, self.device.type)
        share_values(subject.model, self.ranks)

        def make(parameters: FlatParameters) -> OwnOptimizer:
            return OwnOptimizer(labels, parameters, elementwise)

        engine = parallelize(
            subject.model,
            plan=made,
            mesh=mesh,
            table=subject.table,
            optimizer=OptimizerConfig(no_decay=[]),
            device=self.device,
            loss_scale=loss_scale,
            batch_norm=batch_norm,
            dtype=dtype,
            label=subject.label,
            make_optimizer=make,
        )
        own_rows = made.micro_batch if isinstance(plan, Plan) or "micro_batch" in keys_of(plan) else micro_batch
        training = training_of(subject, engine, made, self.ranks, split, own_rows, accumulate)
        training.clip, training.stop = clip, on_nonfinite == "stop"
        training.optimizers = tuple(ParallelOptimizer(each, training, number) for number, each in enumerate(optimizers))
        self.notes += [*subject.notes, *engine.notes]
        dealt = self._deal(loaders, data_rank(mesh), batch, split)
        training.loaders = self._loaders
        self._add(training)
        if isinstance(subject.given, AdoptedModule):
            subject.given.lay_out(engine, data_rank(mesh), self.rank)
        return subject.given, as_given(optimizer, training.optimizers), as_given(loader, dealt, several=are_loaders(loader))

    def _deal(self, loaders: Sequence[Any], place: tuple[int, int], mode: str, split: Split) -> list[UserLoader]:
        """Each of the given loaders as this rank iterates it. place: this rank among those with rows of their own."""
        rank, ways = place
        dealt = [
            UserLoader(each, ranks=self.ranks, place=rank, ways=ways, mode=mode, seed=self.seed, split=split)
            for each in loaders
        ]
        self._loaders += dealt
        return dealt

    def _add(self, training: Training) -> None:
        self._trainings.append(training)
        for each in self._trainings:
            each.alone = len(self._trainings) == 1

    def check(self, batch: Any, call: Callable[[Any, Any], Any], *, model: nn.Module | None = None) -> list[Finding]:
        """What is wrong with how the model treats a batch: whether the result for a row depends on other rows, so that it would
        depend on the layout, and where numbers stop being finite; each with the module. Empty where nothing is.

        call(model, batch): a `loss_fn`, or anything that gives logits. Nothing is trained, and buffers are put back. It takes
        five forwards, and four more where rows mix. Every rank must call it; the findings are those of all ranks.
        """
        return findings_of(self._trained(model), batch, call)

    # ---- training

    def step(
        self,
        batch: Any,
        loss_fn: Callable[[Any, Any], Any],
        *,
        weight_fn: Callable[[Any], Any] | None = None,
        optimizer: Any = None,
    ) -> torch.Tensor:
        """One update from a batch of the loader: micro-batches, loss scale, reduction, clipping, update. The loss over the
        whole global batch, fp64 [], detached; the total where there are several (`run.result.losses` has each).

        loss_fn(model, batch): (sum, weight), or a mean whose weight `weight_fn(batch)` tells, or a bare mean, which is taken
        only where all micro-batches have the same number of rows; or a list or dict of several. weight_fn: a number, or a dict.
        optimizer: the one, or those, that the step is for, where there are several; backward then reaches only what is theirs.
        """
        training, active = self._of(optimizer)
        result: StepResult = training.step(batch, loss_fn, weight_fn, active)
        return result.loss

    @contextmanager
    def micro_batch(self, *, last: bool | None = None, optimizer: Any = None) -> Iterator[None]:
        """Around forward and backward of one micro-batch in a loop of your own. last: of its step; None: by `accumulate`, and
        at the end of an epoch. optimizer: as in `step`."""
        training, active = self._of(optimizer)
        self._current = training
        with training.micro_batch(last, active):
            yield

    def backward(self, loss: Any, weight: Any = None) -> None:
        """Backward inside `micro_batch`. loss: what a `loss_fn` of `step` returns. weight: of a mean, e.g. its rows."""
        self._now.backward(loss, weight)

    @property
    def ready(self) -> bool:
        """Whether the last micro-batch of the step is done: time for `clip` and `update`."""
        return self._current is not None and self._current.ready

    def clip(self, norm: float) -> torch.Tensor:
        """Clips the global gradient norm of the coming update. The norm before clipping, []."""
        return self._now.clip_to(norm)

    def update(self) -> StepResult:
        """Ends the step: optimizer and gradients. What it did; `loss` is over the whole global batch."""
        return self._now.update()

    @property
    def result(self) -> StepResult | None:
        """Of the last step."""
        return None if self._current is None else self._current.result

    _current: Training | None = None

    @property
    def _now(self) -> Training:
        if self._current is None:
            raise MeshwrightError("no micro-batch was begun: use `with run.micro_batch(): run.backward(loss)`")
        return self._current

    def _of(self, optimizer: Any) -> tuple[Training, tuple[int, ...]]:
        """Whose step it is, and the numbers of its optimizers."""
        if not self._trainings:
            raise MeshwrightError("there is nothing to train: call run.parallelize(model, optimizer, loader) first")
        if optimizer is None:
            if len(self._trainings) > 1:
                what = f"is for one of {len(self._trainings)} models"
                raise ConfigError(findings=[Finding("step", what, "Say optimizer=, one that run.parallelize returned")])
            found = self._trainings[0]
            self._current = found
            return found, tuple(range(len(found.optimizers)))
        wanted = listed(optimizer)
        for training in self._trainings:
            numbers = [number for number, each in enumerate(training.optimizers) if any(each is one for one in wanted)]
            if wanted and len(numbers) == len(wanted):
                self._current = training
                return training, tuple(numbers)
        what = "is none that run.parallelize returned, or they are of several models"
        raise ConfigError(findings=[Finding("optimizer", what, "Use the returned ones; one model a step")])

    # ---- weights, saving, loading

    def state_dict(self, model: nn.Module | None = None) -> dict[str, torch.Tensor]:
        """The whole weights as one device would have them, by the names of your module, in full precision on the CPU: a copy.
        Every rank must call it."""
        training = self._trained(model)
        if isinstance(training.model, AdoptedModule):
            return original_state(training.model.adopted, training.engine)
        if training.members is not None:
            return {name: value.cpu() for name, value in whole_weights(training.engine)}
        with training.engine.masters() as whole:
            return {name: value.detach().cpu().clone() for name, value in whole.state_dict().items()}

    def give_back(self, model: nn.Module | None = None) -> nn.Module:
        """Your module with the trained weights, where tp, pp or cp put another one in its place. Every rank must call it."""
        training = self._trained(model)
        if not isinstance(training.model, AdoptedModule):
            what = "is what was trained, under the layout that it has now"
            raise ConfigError(findings=[Finding("model", what, "Its whole weights are run.state_dict()")])
        give_back(training.model.adopted, training.engine)
        return training.model.adopted.origin

    def _trained(self, model: nn.Module | None) -> Training:
        found = [each for each in self._trainings if model is None or any(model is one for one in each.known_as)]
        if len(found) != 1:
            what = "there is none" if not self._trainings else "say which: it is none, or one of several"
            raise ConfigError(findings=[Finding("model", what, "Call run.parallelize first, and name its model")])
        return found[0]

    def save(self, path: str | Path, extra: Mapping[str, Any] | None = None, *, keep: int = 2, tag: str | None = None) -> Path:
        """A checkpoint of everything that this run trains, in the folder `path`: weights, moments, steps, scales, places in
        the loaders. extra: JSON values of your own, such as `{"scheduler": scheduler.state_dict()}`. keep: newest that stay.

        Every rank must call it. Raises CheckpointError, on every rank.
        """
        meta = {
            "run": {
                "plan": self.plan.to_dict() if self.plan else None,
                "trainings": [training_state(each) for each in self._trainings],
                "loaders": [loader.state() for loader in self._loaders],
            },
            "extra": dict(extra or {}),
        }
        store = self._store(path, keep)
        return store.save(
            max(each.steps for each in self._trainings), pieces_of(self._trainings), meta, background=False, tag=tag
        ).wait()

    def load(self, path: str | Path, *, tag: str | None = None) -> dict[str, Any]:
        """Goes on from the newest whole checkpoint in the folder `path` (or the one with `tag`), or from a checkpoint itself,
        on this or any other layout. Returns what was saved as `extra`. Every rank must call it, after `parallelize`.

        Raises CheckpointError: there is none, it is damaged, or of another model, optimizer or precision.
        """
        folder = Path(path)
        single = (folder / "manifest.json").is_file()
        store = self._store(folder.parent if single else folder, None)
        found = folder if single else store.newest() if tag is None else self._tagged(store, tag)
        if found is None:
            what = "there is no whole checkpoint" + (f" with tag {tag!r}" if tag is not None else "")
            raise CheckpointError(findings=[Finding(str(folder), what, "Save one with run.save")])
        meta = inspect(found)["meta"]
        state = meta.get("run")
        check_alike(self._trainings, state, found)
        for training, saved in zip(self._trainings, state["trainings"], strict=True):
            training.own.prepare_load(saved["optimizers"])
        store.load(found, pieces_of(self._trainings))
        for training, saved in zip(self._trainings, state["trainings"], strict=True):
            take_state(training, saved)
        for loader, saved in zip(self._loaders, state["loaders"], strict=False):
            loader.load(saved)
        return dict(meta["extra"])

    def _store(self, path: str | Path, keep: int | None) -> CheckpointStore:
        root = Path(path).absolute()
        if root not in self._stores:
            group = self.ranks.checkpoint if self.size > 1 else None
            self._stores[root] = CheckpointStore(
                root,
                group=group,
                rank=self.rank,
                world=self.size,
                keep=keep or 2,
                report=lambda line: print(f"meshwright: warning: {line}", file=sys.stderr, flush=True),
            )
        if keep is not None:
            self._stores[root].keep = keep
        return self._stores[root]

    def _tagged(self, store: CheckpointStore, tag: str) -> Path | None:
        from meshwright.checkpoint import retain
        from meshwright.distributed.reduce import broadcast_json

        found = [each.path.name for each in retain.find(store.root) if each.manifest is not None and each.manifest.tag == tag]
        name = broadcast_json(found[0] if found else None, self.ranks.control)
        return None if name is None else store.root / name

    def close(self) -> None:
        """Ends loaders and the right to write checkpoints. The process groups are those of whoever made them."""
        for store in self._stores.values():
            store.close()
        for loader in self._loaders:
            loader.close()
        self._stores = {}
