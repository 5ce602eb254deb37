"""The story of a run, top to bottom."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.data.loader import StepData
from meshwright.distributed.reduce import max_scalars
from meshwright.errors import MeshwrightError
from meshwright.train.context import Context
from meshwright.train.evaluate import evaluate
from meshwright.train.result import Agreed, StepResult
from meshwright.train.saving import check_room, save
from meshwright.train.schedule import batch_at, learning_rate
from meshwright.train.step import agree, train_step

__all__ = ["Outcome", "train"]


@dataclass(frozen=True)
class Outcome:
    """Why the run ended, and its last held-out figures. `finished` is False where it was stopped and can be resumed."""

    reason: str
    finished: bool = True
    figures: dict[str, float] = field(default_factory=dict)


def train(run: Context) -> Outcome:
    """Train until the budget is spent, a signal asks to stop, or the held-out loss no longer improves. All ranks call it."""
    config, state, clock = run.config, run.state, run.clock
    figures: dict[str, float] = {}
    check_room(run)
    reason, finished = run.budget.spent(state.step), True
    run.engine.model.train()
    steps = run.train_loader.steps(state.consumed, lambda consumed: batch_at(config.train, consumed))
    clock.restart()
    with run.watchdog, run.recorder:
        while reason is None:
            with clock.span("data"):
                data = next(steps)
            with clock.waiting():
                agreed = agree(run, data)
            if agreed.stop:
                reason, finished = why_stopped(run)
                break
            lr = learning_rate(config.train, state.updates, run.budget.steps or 0)
            with run.profile.step(state.step + 1):
                result = train_step(run, data, agreed, lr)
            advance(run, data, agreed, result)
            reason = run.budget.spent(state.step)

            held_out, improved = {}, False
            if run.valid_loader is not None and (reason or due(config.evaluate.every, state.step)):
                with clock.span("evaluate"):
                    held_out = evaluate(
                        run.engine, run.objective, run.valid_loader, rows=config.evaluate.rows, device=run.device
                    )
                figures, improved = held_out, remember_best(run, held_out["val_loss"])
                if reason is None and 0 < config.evaluate.patience <= state.bad_evaluations:
                    reason = f"no better held-out loss in {state.bad_evaluations} evaluations"

            if due(config.train.sync_check, state.step):
                check_replicas(run)
            # the line of a step is written before its checkpoint can be published, so that a resume finds every line
            run.recorder.record({**counters(run, agreed, lr), **held_out}, agreed, result, clock.finish_step())
            if reason is None and (due(config.checkpoint.every, state.step) or (improved and config.evaluate.best)):
                with clock.span("checkpoint"):
                    save(run)
            run.watchdog.beat()
        run.watchdog.beat("the last save")
        if config.checkpoint.final:
            save(run)
        run.store.wait()
    run.train_loader.close()
    return Outcome(reason, finished, figures)


def advance(run: Context, data: StepData, agreed: Agreed, result: StepResult) -> None:
    """Move the counters past this step. A step that updated nothing still moves the data position."""
    state = run.state
    state.step += 1
    state.consumed = data.consumed_after
    state.dropped += data.dropped
    state.tokens += agreed.tokens
    if agreed.targets == 0 or (run.recorder.must_know_skips and bool(result.skipped)):
        state.skipped += 1
    else:
        state.updates += 1


def remember_best(run: Context, loss: float) -> bool:
    """Whether `loss` is the best held-out loss so far (NaN never is)."""
    state = run.state
    if loss < (state.best_loss if state.best_loss is not None else float("inf")):
        state.best_loss, state.best_step, state.bad_evaluations = loss, state.step, 0
        return True
    state.bad_evaluations += 1
    return False


def counters(run: Context, agreed: Agreed, lr: float) -> dict[str, float]:
    state = run.state
    samples = state.consumed - state.dropped
    done = {"step": state.step, "lr": lr, "tokens": state.tokens, "samples": samples, "batch": agreed.rows}
    return {**done, "targets": agreed.targets, "updates": state.updates, "skipped": state.skipped}


def why_stopped(run: Context) -> tuple[str, bool]:
    """Reason, and whether the run is finished, after all ranks agreed to stop at a step boundary."""
    if max_scalars([float(run.out_of_time())], run.ranks.control)[0]:
        return f"{run.budget.hours} hours spent", True
    return "stopped by a signal", False


def check_replicas(run: Context) -> None:
    """Opt-in: all replicas hold the same bits."""
    differs = run.engine.sync_check()
    if differs is not None:
        raise MeshwrightError(f"step {run.state.step}: {differs} differs between replicas")


def due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
