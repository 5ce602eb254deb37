"""ZeRO-3 for modules that are not ours: the first forward is a lesson (`lesson`), later ones keep to what it showed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.errors import MeshwrightError
from meshwright.parallel.blocks import Blocks
from meshwright.parallel.lesson import Lesson
from meshwright.parallel.zero import Part
from meshwright.parallel.zero3 import GatheredParameters, GatheredPart, Walk

__all__ = ["StudiedParameters"]

FIX = "Use zero: 2, which keeps whole weights, or set `gather_whole = True` on the model, which gathers all of it at once"


class StudiedParameters(GatheredParameters):
    """Gathered parameters of any module. The first training forward and the first one without gradients are lessons.

    data: all ranks that see different samples; they learn together. compiled: whether blocks are, so that nobody can look into
    them. Raises MeshwrightError, instead of a wrong result, where a later forward visits other blocks than the first one did,
    and where a part of the model is called outside of the model's own forward.
    """

    def __init__(self, *args: Any, data: dist.ProcessGroup, compiled: bool, **options: Any):
        self._data, self._compiled = data, compiled
        self._lesson: Lesson | None = None
        self._late: Lesson | None = None
        """Of which backward is still to come."""
        self._walks: list[Walk] = []
        """Forwards that the next backward is for."""
        self._route: dict[bool, list[nn.Module]] = {}
        """Blocks that the lesson visited, with gradients and without."""
        super().__init__(*args, **options)
        self._numbers: dict[Part, int] = {part: number for number, part in enumerate(self.parts)}

    def _visited(self, blocks: Blocks) -> Blocks:
        return blocks

    # ---- forward

    def _hook_forward(self) -> None:
        super()._hook_forward()
        self.model.register_forward_hook(lambda *_: self._stop(), always_call=True)
        home = {id(slot.parameter): part for part in self.parts for slot in part.group.slots if id(slot) in part.views}
        for module in self.model.modules():
            parts = {home[id(p)]: None for p in module.parameters(recurse=False) if id(p) in home}
            if parts:
                module.register_forward_pre_hook(lambda module, _, parts=tuple(parts): self._check_there(module, parts))

    def _check_there(self, module: nn.Module, parts: tuple[GatheredPart, ...]) -> None:
        if self._lesson is None and not self._whole and not all(part.there for part in parts):
            name = next(name for name, other in self.model.named_modules() if other is module)
            raise MeshwrightError(f"{name} runs where the model has not gathered its weights: call the model itself. {FIX}")

    def _enter(self) -> None:
        grad = torch.is_grad_enabled()
        learns = not self._whole and grad not in self._route and any(self._blocks.values())
        if learns:
            self._routes = {}
        super()._enter()
        if learns:
            self._lesson = self._begin_lesson()
        if grad:
            self._walks.append(self._walk)

    def _needed_beside(self, walk: Walk) -> set[Part]:
        """A weight that several forwards used gets its one gradient when backward is through with all of them."""
        left = [other.visits if other.reached is None else other.visits[: other.reached + 1] for other in self._walks]
        return {
            part
            for other, visits in zip(self._walks, left, strict=True)
            if other is not walk
            for block in visits
            for part in self._blocks[block]
        }

    def end(self, chunk: int, last: bool) -> None:
        super().end(chunk, last)
        self._walks.clear()

    def _begin_lesson(self) -> Lesson:
        blocks: dict[int, list[nn.Module]] = {}
        for block in self._blocks:
            for parameter in block.parameters():
                blocks.setdefault(id(parameter), []).append(block)
        parts = self.parts
        home = {id(slot.parameter): part for part in parts for slot in part.group.slots if id(slot) in part.views}
        rest = set(self._shared)
        return Lesson(
            {key: value for key, value in blocks.items() if key in home and home[key] not in rest},
            {key: self._numbers[part] for key, part in home.items()},
            parts=len(parts),
            fetch=lambda numbers: self._have([parts[number] for number in numbers]),
            drop=lambda numbers: self._release([parts[number] for number in numbers]),
            there=lambda number: parts[number].ready,
            storages=lambda: {part.whole_weights.untyped_storage().data_ptr(): n for n, part in enumerate(parts) if part.there},
            data=self._data,
            device=self.groups[0].device,
            watched=not self._compiled,
        )

    def _before(self, block: nn.Module) -> None:
        lesson = self._lesson
        if lesson is None or self.backward():
            if not self.backward():
                self._check_route(block)
            super()._before(block)
            return
        lesson.inside.append(block)
        lesson.want(self._numbers[part] for part in self._blocks[block])
        self._walk.visits.append(block)

    def _after(self, block: nn.Module, output: Any) -> None:
        lesson = self._lesson
        super()._after(block, output)
        if lesson is not None and not self.backward():
            lesson.inside.pop()

    def _leave(self) -> None:
        lesson, grad = self._lesson, torch.is_grad_enabled()
        if lesson is None:
            self._check_route(None)
            super()._leave()
            return
        places = {block: place for place, block in enumerate(self._blocks)}
        lesson.end_forward([places[block] for block in self._walk.visits])
        self._lesson = None
        self._route[grad] = list(self._walk.visits)
        self._keep_apart(lesson)
        super()._leave()
        if grad:
            self._late = lesson

    def _stop(self) -> None:
        """After a forward that failed, too."""
        if self._lesson is not None:
            self._lesson.stop()
            self._lesson = None

    def _check_route(self, block: nn.Module | None) -> None:
        """Every rank gathers for itself: where one goes another way than it did when they went together, it would take the
        weights of one block for those of another."""
        route, number = self._route.get(torch.is_grad_enabled()), len(self._walk.visits)
        if route is None or self._whole or not any(self._blocks.values()):
            return
        expected = route[number] if number < len(route) else None
        if block is not expected:
            names = {module: name for name, module in self.model.named_modules()}
            came, there = (names[module] if module is not None else "the end" for module in (block, expected))
            raise MeshwrightError(f"forward came to {came} where it came to {there} the first time. {FIX}")

    # ---- what was learnt

    def _keep_apart(self, lesson: Lesson) -> None:
        parts = self.parts
        moved = [parts[number] for number in sorted(lesson.apart) if parts[number] not in self._shared]
        self._shared = [*self._shared, *moved]
        self._blocks = {block: [part for part in own if part not in moved] for block, own in self._blocks.items()}

    def release(self) -> None:
        super().release()
        if self._late is not None:
            lesson, self._late = self._late, None
            lesson.agree()
            self._keep_apart(lesson)
