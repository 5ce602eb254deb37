"""The story of a run, top to bottom."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.train.context import Context
from meshwright.train.evaluate import evaluate
from meshwright.train.saving import save
from meshwright.train.schedule import batch_at, learning_rate
from meshwright.train.step import Agreed, StepResult, agree, train_step

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
    run.store.check_space(run.engine.parameters_state())
    reason = run.budget.spent(state.step)
    finished = True
    steps = run.train_loader.steps(state.consumed, lambda consumed: batch_at(config.train, consumed))
    clock.restart()
    with run.watchdog, run.recorder:
        while reason is None:
            with clock.span("data"):
                data = next(steps)
                agreed = agree(run, data)
            if agreed.stop:
                reason, finished = run.why_stopped()
                break
            lr = learning_rate(config.train, state.updates, run.budget.steps or 0)
            with run.profile.step(state.step + 1):
                result = train_step(run, data, agreed, lr)
            advance(run, data.rows + data.dropped, data.dropped, agreed, result)
            reason = run.budget.spent(state.step)

            held_out, improved = {}, False
            if run.valid_loader is not None and (reason or due(config.evaluate.every, state.step)):
                with clock.span("evaluate"):
                    figures = held_out = evaluate(run)
                improved = remember_best(run, figures["val_loss"])
                if 0 < config.evaluate.patience <= state.bad_evaluations:
                    reason = f"no better held-out loss in {state.bad_evaluations} evaluations"

            # the line of a step is written before its checkpoint can be published, so that a resume finds every line
            run.recorder.record(run, agreed, result, lr, held_out, clock.finish_step())
            if reason is None and (due(config.checkpoint.every, state.step) or (improved and config.evaluate.best)):
                with clock.span("checkpoint"):
                    save(run)
            run.watchdog.beat()
        save(run)
        run.store.wait()
    steps.close()
    return Outcome(reason, finished, figures)


def advance(run: Context, consumed: int, dropped: int, agreed: Agreed, result: StepResult) -> None:
    """Move the counters past this step. A step that updated nothing still moves the data position."""
    state = run.state
    state.step += 1
    state.consumed += consumed
    state.dropped += dropped
    state.tokens += agreed.tokens
    if run.recorder.must_know_skips and bool(result.skipped):
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


def due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0
