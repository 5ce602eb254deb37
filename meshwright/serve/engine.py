"""The engine: prompts in, tokens and text out, many at a time.

    step = schedule -> run -> postprocess

Single-threaded: `add`, `abort`, `step` and `stats` are called from one thread. With temperature 0 an answer is a function of
model, prompt and settings; what a row is computed beside changes its logits by rounding at most, on a CPU as elsewhere.
"""

from __future__ import annotations

import json
import secrets
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

from meshwright.distributed import device as devices
from meshwright.errors import CheckpointError, Finding, UserError
from meshwright.models.trunk import Trunk
from meshwright.serve.cache import BlockPool
from meshwright.serve.ranks import ServingGroup, SharedRunner
from meshwright.serve.request import Finish, Logprob, Output, Request
from meshwright.serve.runner import Runner, pack
from meshwright.serve.sampler import Drawn, Row, draw
from meshwright.serve.scheduler import Scheduler, Sequence, Work
from meshwright.serve.text import Decodes, Detokenizer, StopFilter

__all__ = ["LLMEngine"]


@dataclass(eq=False)
class _Answer:
    """What the engine knows of a request beside what is to be computed."""

    sequence: Sequence
    seed: int
    ends: frozenset[int]
    text: Detokenizer | None
    stops: StopFilter


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
        block_size: int = 16,
        max_running: int = 64,
        token_budget: int = 512,
        group: ServingGroup | None = None,
        prefix: bool = True,
        name: str = "model",
    ):
        """blocks: of the cache; None: what the device has room for. prefix: keep what was computed, for prompts that begin
        alike. group: ranks that hold the model together; all make an engine, and all but the first then `follow`."""
        self.tokenizer, self.ends, self.config, self.model_name = tokenizer, frozenset(ends), model.config, name
        span = None if group is None else group.span
        runner = Runner(
            model, blocks=blocks, block_size=block_size, token_budget=token_budget, sequences=max_running, span=span
        )
        self.runner: Runner | SharedRunner = runner if group is None else SharedRunner(runner, group)
        self.max_len = runner.max_len
        self.pool = BlockPool(self.runner.blocks, block_size, prefix=prefix)
        self.scheduler = Scheduler(self.pool, max_running=max_running, token_budget=token_budget, lanes=self.runner.lanes)
        self._answers: dict[str, _Answer] = {}
        self._aborted: list[str] = []
        self._out: deque[list[Work]] = deque()
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
        block_size: int = 16,
        max_running: int = 64,
        token_budget: int = 512,
        tp: int = 1,
        pp: int = 1,
    ) -> LLMEngine:
        """From a run folder, one of its checkpoints, a model folder or a Hugging Face folder.

        device  default: the accelerator that torch finds, else the CPU. dtype: of the weights; default: as stored, on an
                accelerator bf16
        tp, pp  ranks that hold each matrix together, and stages of layers behind each other: torch.distributed must be up with
                tp * pp ranks, and every one of them calls this
        Raises CheckpointError for what is no decoder that predicts tokens, DeviceError where it does not fit.
        """
        from meshwright.runtime.trained import load_trained

        group = ServingGroup.join(tp, pp) if tp * pp > 1 else None
        kind = devices.pick(device)
        place = devices.rank_device(kind, 0 if group is None else group.mesh.get_rank() % devices.count(kind))
        dtype = dtype or (None if kind == "cpu" else torch.bfloat16)
        trained = load_trained(source, device="cpu" if group else place, dtype=dtype)
        model = trained.model
        if not isinstance(model, Trunk) or not model.causal or trained.task != "lm":
            what = f"has task {trained.task!r} and architecture {trained.model_config.arch!r}, which predict no next token"
            raise CheckpointError(findings=[Finding(str(source), what, "Use a language model")])
        if group is not None:
            model = group.split(model).to(place)
        ends = (*_file_ends(trained.source), *([] if trained.tokenizer.eos is None else [trained.tokenizer.eos]))
        return cls(
            model,
            trained.tokenizer,
            ends=ends,
            blocks=blocks,
            block_size=block_size,
            max_running=max_running,
            token_budget=token_budget,
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

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError with everything that is wrong with it; then nothing has changed."""
        findings = self.refusals(request)
        if findings:
            raise UserError(findings=findings)
        params = request.params
        ends = frozenset(params.stop_ids) | (frozenset() if params.ignore_eos else self.ends)
        text = None if self.tokenizer is None else Detokenizer(self.tokenizer, request.tokens)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self._answers[request.id] = _Answer(self.scheduler.add(request), seed, ends, text, StopFilter(params.stop))
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
            self.runner.start(pack(work, self.pool.block_size))
            self._out.append(work)
        if not self._out:
            return outputs
        work, logits = self._out.popleft(), self.runner.finish()
        return outputs + self._postprocess(work, self._draw(work, logits))

    def _draw(self, work: list[Work], logits: torch.Tensor) -> Drawn:
        """A token for every sequence whose newest one was computed, and that nobody has aborted since."""
        rows = [item for item in work if item.last]
        kept = [r for r, item in enumerate(rows) if self._wanted(item.sequence)]
        return draw(logits if len(kept) == len(rows) else logits[kept], [self._row(rows[r].sequence) for r in kept])

    def _wanted(self, sequence: Sequence) -> bool:
        answer = self._answers.get(sequence.request.id)
        return answer is not None and answer.sequence is sequence

    def _row(self, sequence: Sequence) -> Row:
        answer, params = self._answers[sequence.request.id], sequence.request.params
        banned = answer.ends if sequence.answered < params.min_tokens else frozenset()
        prompt, past = (sequence.request.tokens, sequence.answer) if params.penalised else ((), [])
        return Row(params, answer.seed, prompt, past, tuple(banned), len(sequence.tokens))

    def _postprocess(self, work: list[Work], drawn: Drawn) -> list[Output]:
        outputs = []
        self._counts["steps"] += 1
        self._counts["computed_tokens"] += sum(item.count for item in work)
        work = [item for item in work if self._wanted(item.sequence)]
        for item in work:
            self.scheduler.done(item)
        chosen = [item.sequence for item in work if item.last]
        for sequence, token, logprob, broken in zip(chosen, drawn.tokens, drawn.logprobs, drawn.broken, strict=True):
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
