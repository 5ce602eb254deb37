"""The engine: prompts in, tokens and text out, many at a time.

    step = schedule -> run -> postprocess

While the device computes a step, the next one is launched where nothing of it depends on the host seeing what the first one
gives: its tokens never leave the device. An answer that turns out to have ended is then computed once more for nothing.

Single-threaded: `add`, `abort`, `step` and `stats` are called from one thread. With temperature 0 an answer is a function of
model, prompt and settings; what a row is computed beside changes its logits by rounding at most, on a CPU as elsewhere.
"""

from __future__ import annotations

import json
import secrets
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.distributed import device as devices
from meshwright.errors import CheckpointError, Finding, UserError
from meshwright.models.trunk import Trunk
from meshwright.serve.cache import BLOCK_SIZE, BlockPool
from meshwright.serve.packed import Packer
from meshwright.serve.quantize import cache_dtype, quantize_matrices
from meshwright.serve.ranks import ServingGroup, SharedRunner
from meshwright.serve.request import Finish, Logprob, Output, Request
from meshwright.serve.runner import Runner
from meshwright.serve.sampler import Drawing, Drawn, Row, Scores, begin, begin_greedy
from meshwright.serve.scheduler import Scheduler, Sequence, Work
from meshwright.serve.step_sizes import step_sizes
from meshwright.serve.text import Decodes, Detokenizer, StopFilter

__all__ = ["LLMEngine"]


@dataclass(eq=False)
class _Answer:
    """What the engine knows of a request beside what is to be computed. plain: its tokens are the largest logits."""

    sequence: Sequence
    seed: int
    ends: frozenset[int]
    text: Detokenizer | None
    stops: StopFilter
    plain: bool


@dataclass
class _Step:
    """Work that was started. drawing: of the tokens of `drawn`; None: of a pipeline, whose logits are not here yet."""

    work: list[Work]
    drawn: list[Sequence]
    drawing: Drawing | None = None


class LLMEngine:
    """A decoder that answers many prompts at once; `load` makes one from files.

    tokenizer   None: no text, tokens only
    ends        tokens that end an answer, beside those of a request
    max_len     longest prompt and answer together
    model_name  of the folder it came from
    """

    def __init__(
        self,
        model: Trunk,
        tokenizer: Decodes | None = None,
        *,
        ends: tuple[int, ...] = (),
        blocks: int | None = None,
        block_size: int = BLOCK_SIZE,
        max_running: int | None = None,
        token_budget: int | None = None,
        offline: bool = False,
        group: ServingGroup | None = None,
        prefix: bool = True,
        graphs: bool | None = None,
        ahead: bool | None = None,
        cache_dtype: torch.dtype | None = None,
        name: str = "model",
    ):
        """max_running: sequences at a time; token_budget: tokens of a step; None: `step_sizes`. offline: as of `load`.
        blocks: of the cache; None: what the device has room for. prefix: keep what was computed, for prompts that begin
        alike. group: ranks that hold the model together, and those of its replicas, whose caches then have one size; all make
        an engine, and all but the first of a replica then `follow`. graphs, cache_dtype: as of `Runner`.
        ahead: launch the next step before the results of the last one are here; None: on an accelerator."""
        self.tokenizer, self.ends, self.config, self.model_name = tokenizer, frozenset(ends), model.config, name
        span = None if group is None else group.span
        default = step_sizes(next(model.parameters()).device.type, offline)
        max_running = default.running if max_running is None else max_running
        token_budget = default.tokens if token_budget is None else token_budget
        sizes: dict[str, Any] = {"blocks": blocks, "block_size": block_size, "token_budget": token_budget}
        sizes["key_span"] = default.key_span
        runner = Runner(model, **sizes, sequences=max_running, span=span, graphs=graphs, cache_dtype=cache_dtype)
        self._alone = group is None or group.alone
        self.runner: Runner | SharedRunner = runner if group is None or self._alone else SharedRunner(runner, group)
        self.max_len = runner.max_len
        self._ahead = self.runner.lanes == 1 and (runner.device.type != "cpu" if ahead is None else ahead)
        self.pool = BlockPool(runner.blocks if group is None else group.least(runner.blocks), block_size, prefix=prefix)
        self.scheduler = Scheduler(self.pool, max_running=max_running, token_budget=token_budget, lanes=self.runner.lanes)
        self._packer = Packer(max_running, block_size, self.pool.needed(self.max_len))
        self._answers: dict[str, _Answer] = {}
        self._aborted: list[str] = []
        self._out: deque[_Step] = deque()
        self._counts = dict.fromkeys(("requests", "prompt_tokens", "answer_tokens", "computed_tokens", "steps"), 0)
        self._finished: dict[str, int] = dict.fromkeys(("stop", "length", "abort", "error"), 0)

    @classmethod
    def load(
        cls,
        source: str | Path,
        *,
        device: str | None = None,
        dtype: torch.dtype | None = None,
        blocks: int | None = None,
        block_size: int = BLOCK_SIZE,
        max_running: int | None = None,
        token_budget: int | None = None,
        offline: bool = False,
        graphs: bool | None = None,
        quantization: str | None = None,
        kv_cache_dtype: str | None = None,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
    ) -> LLMEngine:
        """From a run folder, one of its checkpoints, a model folder or a Hugging Face folder.

        device  default: the accelerator that torch finds, else the CPU. dtype: of the weights; default: as stored, on an
                accelerator bf16
        max_running, token_budget  sequences at a time, and tokens of a step; None: `step_sizes`. offline: those of many prompts
                for which nobody waits
        quantization  "fp8": matrices in 8 bits (`serve.quantize`). kv_cache_dtype: "fp8": keys and values too
        tp, pp  ranks that hold each matrix together, and stages of layers behind each other
        dp      such engines side by side (`ServingGroup` says where): this is the one of this rank
        Of more than one rank torch.distributed must be up with tp * pp * dp ranks, and every one of them calls this.
        Raises CheckpointError for what is no decoder that predicts tokens, DeviceError where it does not fit.
        """
        from meshwright.runtime.trained import load_trained

        group = ServingGroup.join(tp, pp, dp) if tp * pp * dp > 1 else None
        parts = group if group is not None and not group.alone else None
        kind = devices.pick(device)
        place = devices.rank_device(kind, 0 if group is None else group.mesh.get_rank() % devices.count(kind))
        dtype = dtype or (None if kind == "cpu" else torch.bfloat16)
        trained = load_trained(source, device="cpu" if parts or quantization else place, dtype=dtype)
        model = trained.model
        if not isinstance(model, Trunk) or not model.causal or trained.task != "lm":
            what = f"has task {trained.task!r} and architecture {trained.model_config.arch!r}, which predict no next token"
            raise CheckpointError(findings=[Finding(str(source), what, "Use a language model")])
        if parts is not None:
            model = parts.split(model)
        model = model.to(place) if quantization is None else quantize_matrices(model, torch.device(place))
        ends = (*_file_ends(trained.source), *([] if trained.tokenizer.eos is None else [trained.tokenizer.eos]))
        return cls(
            model,
            trained.tokenizer,
            ends=ends,
            blocks=blocks,
            block_size=block_size,
            max_running=max_running,
            token_budget=token_budget,
            offline=offline,
            graphs=graphs,
            cache_dtype=cache_dtype(kv_cache_dtype),
            group=group,
            name=Path(source).absolute().name,
        )

    # ---- what is asked

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to say."""
        return self.scheduler.has_work or bool(self._aborted or self._out)

    def refusals(self, request: Request) -> list[Finding]:
        """Every reason why this engine cannot answer it."""
        found = []
        length, vocab = len(request.tokens), self.config.vocab or 0
        if request.id in self._answers:
            found.append(Finding("id", f"{request.id!r} is under way", "Give every request an id of its own"))
        if not request.tokens:
            found.append(Finding("prompt", "is empty", "Give at least one token, for instance the start token"))
        wrong = [token for token in request.tokens if not 0 <= token < vocab]
        if wrong:
            found.append(Finding("prompt", f"token {wrong[0]} is none of the model's {vocab}", "Use its own tokenizer"))
        for name in ("logit_bias", "stop_ids"):
            wrong = [token for token in getattr(request.params, name) if token >= vocab]
            if wrong:
                found.append(Finding(name, f"token {wrong[0]} is none of the model's {vocab}", "Use its own tokenizer"))
        if request.params.stop and self.tokenizer is None:
            found.append(Finding("stop", "needs a tokenizer, and this engine has none", "Use stop_ids"))
        asked, room = length + request.params.max_tokens, self.pool.blocks * self.pool.block_size
        what = f"{length} tokens of prompt and max_tokens {request.params.max_tokens} are {asked}"
        if asked > self.max_len:
            fix = "Shorten the prompt, or ask for less"
            found.append(Finding("max_tokens", f"{what}; the model takes {self.max_len}", fix))
        elif asked - 1 > room:  # the last token of an answer needs no keys
            found.append(Finding("max_tokens", f"{what}; the cache holds {room}", "Ask for less, or give it more blocks"))
        return found

    def check(self, request: Request) -> None:
        """Raises UserError with everything that is wrong with a request."""
        findings = self.refusals(request)
        if findings:
            raise UserError(findings=findings)

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError with everything that is wrong with it; then nothing has changed."""
        self.check(request)
        params = request.params
        ends = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else self.ends)
        text = None if self.tokenizer is None else Detokenizer(self.tokenizer, request.tokens)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        plain = params.plain and not params.min_tokens
        self._answers[request.id] = _Answer(self.scheduler.add(request), seed, ends, text, StopFilter(params.stop), plain)
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += len(request.tokens)

    def abort(self, id: str) -> bool:
        """End a request: its blocks are free at once, and the next step says so. False where it is not under way."""
        if id not in self._answers:
            return False
        self._close(self._answers[id], "abort")
        self._aborted.append(id)
        return True

    # ---- what is done

    def step(self) -> list[Output]:
        """Compute some tokens of what is under way, and say what is new of each answer."""
        outputs = [Output(id, [], "", "abort") for id in self._aborted]
        self._aborted.clear()
        while len(self._out) < self.runner.lanes and (work := self.scheduler.schedule()):
            self._start(work)
        if not self._out:
            return outputs
        if self._ahead and len(self._out) == 1 and self._certain(self._out[0]):
            work = self.scheduler.ahead(self._out[0].work)
            if work:
                self._start(work)
        step = self._out.popleft()
        drawing = step.drawing or self._draw(step)
        return outputs + self._postprocess(step, drawing.wait())

    def _start(self, work: list[Work]) -> None:
        step = _Step(work, [item.sequence for item in work if item.last])
        self.runner.start(self._packer.pack(work))
        if self.runner.lanes == 1:
            step.drawing = self._draw(step)
        self._out.append(step)

    def _certain(self, step: _Step) -> bool:
        """Whether the device has the tokens of a step, on every rank, and needs no more to choose those after them."""
        if self._alone:
            return not any(sequence.request.params.penalised for sequence in step.drawn)
        return all(self._answers[s.request.id].plain for s in step.drawn if self._wanted(s))

    def _draw(self, step: _Step) -> Drawing:
        """A token for every sequence whose newest one was computed, and that nobody has aborted since."""
        scores = self.runner.finish()
        kept = [r for r, sequence in enumerate(step.drawn) if self._wanted(sequence)]
        if len(kept) < len(step.drawn):
            step.drawn = [step.drawn[r] for r in kept]
            scores = Scores(scores.logits[kept], scores.best[:, kept])
        if all(self._answers[sequence.request.id].plain for sequence in step.drawn):
            return begin_greedy(scores)
        drawing = begin(scores, [self._row(sequence) for sequence in step.drawn])
        if self._ahead:
            self.runner.feed(drawing.tokens)
        return drawing

    def _wanted(self, sequence: Sequence) -> bool:
        answer = self._answers.get(sequence.request.id)
        return answer is not None and answer.sequence is sequence

    def _row(self, sequence: Sequence) -> Row:
        """What the next token depends on, be it after one that is only known to the device."""
        answer, params = self._answers[sequence.request.id], sequence.request.params
        unknown = max(0, sequence.out - 1)
        banned = answer.ends if sequence.answered + unknown < params.min_tokens else frozenset()
        prompt, past = (sequence.request.tokens, sequence.answer) if params.penalised else ((), [])
        return Row(params, answer.seed, prompt, past, tuple(banned), len(sequence.tokens) + unknown)

    def _postprocess(self, step: _Step, drawn: Drawn) -> list[Output]:
        outputs = []
        self._counts["steps"] += 1
        self._counts["computed_tokens"] += sum(item.count for item in step.work)
        for item in step.work:
            if self._wanted(item.sequence):
                self.scheduler.done(item)
        for sequence, token, logprob, broken in zip(step.drawn, drawn.tokens, drawn.logprobs, drawn.broken, strict=True):
            if self._wanted(sequence):
                answer = self._answers[sequence.request.id]
                outputs.append(self._failed(answer) if broken else self._grown(answer, token, logprob))
        return outputs

    def _failed(self, answer: _Answer) -> Output:
        self._close(answer, "error")
        return Output(answer.sequence.request.id, [], "", "error")

    def _grown(self, answer: _Answer, token: int, logprob: Logprob | None) -> Output:
        """The answer has one token more: its text, and whether that ends it."""
        sequence, params = answer.sequence, answer.sequence.request.params
        sequence.tokens.append(token)
        self._counts["answer_tokens"] += 1
        finish: Finish | None = None
        if token in answer.ends:
            finish = "stop"
        elif sequence.answered >= params.max_tokens or len(sequence.tokens) >= self.max_len:
            finish = "length"
        text = self._text(answer, token, finish)
        if answer.stops.stopped:
            finish = "stop"
        if finish is not None:
            self._close(answer, finish)
        return Output(sequence.request.id, [token], text, finish, None if logprob is None else [logprob])

    def _text(self, answer: _Answer, token: int, finish: Finish | None) -> str:
        """New text; at the end with all that was held back, unless a stop string ends it."""
        if answer.text is None:
            return ""
        text = "" if token in answer.ends else answer.text.push(token)
        if finish is not None:
            text += answer.text.end()
        if answer.sequence.answered < answer.sequence.request.params.min_tokens:
            return text  # a stop string may begin after them only
        text = answer.stops.push(text)
        return text if finish is None else text + answer.stops.end()

    def _close(self, answer: _Answer, finish: Finish) -> None:
        self.scheduler.remove(answer.sequence)
        del self._answers[answer.sequence.request.id]
        self._finished[finish] += 1

    # ---- what there is to know

    def stats(self) -> dict[str, float]:
        """Numbers for a dashboard. queue, running: requests. queued_tokens: of those that wait. kv_blocks: of the cache;
        kv_held of them are held by requests, a share of kv_used. prefix_hits: tokens that were found in the cache, of
        prefix_asked. Totals: requests, prompt_tokens, answer_tokens, computed_tokens (through the model), steps, preemptions,
        and of requests that ended finished_stop, _length, _abort, _error."""
        return {
            "queue": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "queued_tokens": sum(len(sequence.tokens) for sequence in self.scheduler.waiting),
            "kv_blocks": self.pool.blocks,
            "kv_held": self.pool.held,
            "kv_used": self.pool.held / self.pool.blocks,
            "prefix_hits": self.pool.hits,
            "prefix_asked": self.pool.asked,
            "preemptions": self.scheduler.preemptions,
            **self._counts,
            **{f"finished_{reason}": count for reason, count in self._finished.items()},
        }

    def follow(self) -> None:
        """On a rank that is not the first: compute what the first one says, until it closes."""
        assert isinstance(self.runner, SharedRunner), "an engine of one rank has nobody to follow"
        self.runner.follow()

    def close(self) -> None:
        """Let the other ranks go. An engine of one rank has none."""
        if isinstance(self.runner, SharedRunner):
            self.runner.close()


def _file_ends(source: Path) -> tuple[int, ...]:
    """End tokens of a generation_config.json: chat models have several."""
    try:
        value = json.loads((source / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return ()
    values = value if isinstance(value, list) else [value]
    return tuple(token for token in values if isinstance(token, int) and not isinstance(token, bool))
