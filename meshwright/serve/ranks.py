"""Several ranks that hold one model together, by the tables and the stages of training. The first one schedules, draws and
answers; each step it sends what to compute, as numbers over the CPU, and all compute it with their part of model and cache.

    tp ranks share every matrix, heads and their part of the cache: their exchanges are those of `parallel.tensor`
    dp replicas hold the same: they have nothing to do with each other but one size of the cache, and a new request goes to one
    pp stages have layers behind each other: a message is the hidden states [T, D] of the new tokens to the next stage, and of
    the last one the logits to the first rank. As many steps as stages are under way, each with its share of the sequences

Every rank carries out the steps in the order in which they were sent, so a block that changes hands in between is first written
by its old sequence and then by its new one, on every stage.

Shapes: T new tokens of a step, D width, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.distributed import device as devices
from meshwright.errors import DeviceError, Finding
from meshwright.models.trunk import Trunk
from meshwright.parallel.links import Links, pairs_of
from meshwright.parallel.pipeline import cut
from meshwright.parallel.tensor import split_tensors
from meshwright.serve.packed import Packed
from meshwright.serve.runner import Runner
from meshwright.serve.sampler import Scores, scores_of
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan

__all__ = ["ServingGroup", "SharedRunner", "replica_rows"]

PATIENCE = timedelta(days=365)
END = [0] * 5
"""In the place of how many numbers a step has, and its sizes."""


@dataclass
class ServingGroup:
    """Ranks of a mesh with the axes "pp", "dp_replicate" and "tp", outermost first: stages send the least, so they are the
    farthest from each other. What `split` finds is in the fields after the first three.

    control   those of this replica over the CPU (gloo), for what is no tensor of the model
    everyone  those of all replicas, over the CPU; None: there is one
    span     layers [first, stop) that are here
    links    to the neighbouring stages, for hidden states; None where there is one stage
    back     the first and the last stage, for logits
    """

    mesh: DeviceMesh
    control: dist.ProcessGroup
    everyone: dist.ProcessGroup | None = None
    span: tuple[int, int] | None = None
    links: Links | None = None
    back: dist.ProcessGroup | None = None

    @classmethod
    def join(cls, tp: int, pp: int = 1, dp: int = 1) -> ServingGroup:
        """All ranks of torch.distributed, which must be as many. Collective. Raises DeviceError."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != tp * pp * dp:
            what = f"tp {tp}, pp {pp} and dp {dp} are {tp * pp * dp} ranks, and there {'is' if world == 1 else 'are'} {world}"
            raise DeviceError(findings=[Finding("tp, pp, dp", what, "Start as many processes, or use another layout")])
        layout = Layout(tp=tp, pp=pp, dp_replicate=dp)
        shape, names = tuple(size for _, size in layout.axes), tuple(name for name, _ in layout.axes)
        kind = "cpu" if dist.get_backend() == "gloo" else devices.pick()
        mesh = DeviceMesh(kind, torch.arange(world).view(shape), mesh_dim_names=names)
        return cls.of(mesh)

    @classmethod
    def of(cls, mesh: DeviceMesh) -> ServingGroup:
        """Of a mesh over all ranks. Collective."""
        # ranks that follow wait in it for as long as nobody asks; one that dies closes its connections, which all notice
        everyone = dist.new_group(backend="gloo", timeout=PATIENCE)
        rows = replica_rows(mesh)
        if len(rows) == 1:
            return cls(mesh, everyone)
        control, _ = dist.new_subgroups_by_enumeration(rows, timeout=PATIENCE, backend="gloo")
        return cls(mesh, control, everyone)

    @property
    def alone(self) -> bool:
        """Whether this rank holds a whole model."""
        return self.control.size() == 1

    @property
    def stages(self) -> int:
        return self.mesh["pp"].size()

    @property
    def stage(self) -> int:
        return self.mesh.get_local_rank("pp")

    @property
    def leads(self) -> bool:
        return self.stage == 0 and self.mesh.get_local_rank("tp") == 0

    def least(self, number: int) -> int:
        """The smallest that any rank has. Collective."""
        least = torch.tensor(number)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self.everyone or self.control)
        return int(least)

    def split(self, model: Trunk) -> Trunk:
        """Leaves this rank's part in it. Collective. Raises LayoutError where it does not divide."""
        plan = Plan(layout=Layout(tp=self.mesh["tp"].size(), pp=self.stages), sequence_parallel=False, schedule="gpipe")
        stages = cut(model, plan, self.mesh)
        split_tensors(model, plan, self.mesh)
        if self.stages > 1:
            self.span, self.links = stages.spans[self.stage], stages.links
            self.back = pairs_of(self.mesh, "logits", 0, self.stages - 1)
        return model


def replica_rows(mesh: DeviceMesh) -> list[list[int]]:
    """The ranks of each replica, the one that leads it first."""
    axis = (mesh.mesh_dim_names or ()).index("dp_replicate")
    return mesh.mesh.movedim(axis, 0).reshape(mesh.mesh.shape[axis], -1).tolist()


class SharedRunner:
    """In the place of a runner on every rank of a group: `start` and `finish` on the first, `follow` on the others.

    lanes: steps that are under way at the same time.
    """

    def __init__(self, runner: Runner, group: ServingGroup):
        self.runner, self.group, self.lanes = runner, group, group.stages
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._results: deque[Scores | Packed] = deque()

    # ---- on the first rank

    def start(self, packed: Packed) -> None:
        """As `Runner.start`: of several stages it computes the first, and does not wait for the others."""
        self._tell([packed.numbers.size, *packed.sizes], packed.numbers)
        output = self._compute(packed)
        self._results.append(packed if output is None else output)

    def finish(self) -> Scores:
        """As `Runner.finish`."""
        result = self._results.popleft()
        if isinstance(result, Scores):
            return result
        runner = self.runner
        logits = torch.empty(len(result.select), runner.model.config.vocab or 0, dtype=runner.dtype, device=runner.device)
        if len(result.select):
            dist.recv(logits, group=self.group.back, group_src=1)
        return scores_of(logits)

    def feed(self, tokens: torch.Tensor) -> None:
        """As `Runner.feed`, on this rank only."""
        self.runner.feed(tokens)

    def close(self) -> None:
        """The others' `follow` returns."""
        self._tell(END)
        self._settle(0)

    def _tell(self, sizes: list[int], numbers: np.ndarray | None = None) -> None:
        tensors = [torch.tensor(sizes)] + ([] if numbers is None else [torch.from_numpy(numbers)])
        for tensor in tensors:
            self._keep(dist.broadcast(tensor, group=self.group.control, group_src=0, async_op=True), tensor)

    # ---- on the others

    def follow(self) -> None:
        """Until `close` on the first rank."""
        back = self.group.back if self.group.mesh.get_local_rank("tp") == 0 else None
        while (packed := self._hear()) is not None:
            output = self._compute(packed)
            if back is not None and output is not None and len(packed.select):
                logits = output.logits.contiguous()
                self._keep(dist.isend(logits, group=back, group_dst=0), logits)
        self._settle(0)

    def _hear(self) -> Packed | None:
        sizes = torch.empty(len(END), dtype=torch.int64)
        dist.broadcast(sizes, group=self.group.control, group_src=0)
        count, tokens, rows, selected, width = sizes.tolist()
        if not count:
            return None
        numbers = torch.empty(count, dtype=torch.int32)
        dist.broadcast(numbers, group=self.group.control, group_src=0)
        return Packed(numbers.numpy(), (tokens, rows, selected, width))

    # ---- on all

    def _compute(self, packed: Packed) -> Scores | None:
        """This rank's part of a step: the scores where the last layer is here, else None and the next stage has the states."""
        runner, links, stage = self.runner, self.group.links, self.group.stage
        hidden = None
        if links is not None and stage:
            hidden = torch.empty(packed.sizes[0], runner.model.config.width, dtype=runner.dtype, device=runner.device)
            links.receive(hidden, stage - 1).wait()
        output = runner.run(packed, hidden)
        if isinstance(output, Scores):
            return output
        assert links is not None
        output = output.contiguous()
        self._keep(links.send(output, stage + 1), output)
        return None

    def _keep(self, sent: dist.Work | None, tensor: torch.Tensor) -> None:
        """What is being sent stays alive. Few messages are at a time: the oldest one of more has long arrived."""
        assert sent is not None
        self._sent.append((sent, tensor))
        self._settle(4 * self.lanes)

    def _settle(self, most: int) -> None:
        while len(self._sent) > most:
            self._sent.popleft()[0].wait()
