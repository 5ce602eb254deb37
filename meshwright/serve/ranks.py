"""Several ranks that hold one model together, by the tables of training. The first one schedules, draws and answers; each step
it sends what to compute, as JSON over the CPU, and all compute it with their part of every matrix and of the cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import DeviceError, Finding
from meshwright.models.trunk import Trunk
from meshwright.parallel.tensor import split_tensors
from meshwright.serve.runner import Packed, Runner
from meshwright.spec.layout import Layout
from meshwright.spec.plan import Plan

__all__ = ["Leader", "ServingGroup"]

PATIENCE = timedelta(days=365)
END = "null"


@dataclass(frozen=True)
class ServingGroup:
    """Ranks of a mesh with the axis "tp". control: the same ranks over the CPU (gloo), for what is no tensor of the model."""

    mesh: DeviceMesh
    control: dist.ProcessGroup
    local_rank: int = 0

    @classmethod
    def join(cls, tp: int, local_rank: int | None = None) -> ServingGroup:
        """All ranks of torch.distributed, which must be as many. Collective. Raises DeviceError."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != tp:
            what = f"{tp} ranks are to hold the model together, and there {'is' if world == 1 else 'are'} {world}"
            raise DeviceError(findings=[Finding("tp", what, "Start as many processes, or use another tp")])
        kind = "cpu" if dist.get_backend() == "gloo" else str(torch.accelerator.current_accelerator())
        layout = Layout(tp=tp)
        shape, names = tuple(size for _, size in layout.axes), tuple(name for name, _ in layout.axes)
        mesh = DeviceMesh(kind, torch.arange(tp).view(shape), mesh_dim_names=names)
        # ranks that follow wait in it for as long as nobody asks; one that dies closes its connections, which all notice
        control = dist.new_group(backend="gloo", timeout=PATIENCE)
        return cls(mesh, control, dist.get_rank() if local_rank is None else local_rank)

    @property
    def size(self) -> int:
        return self.mesh["tp"].size()

    @property
    def leads(self) -> bool:
        return self.mesh.get_local_rank("tp") == 0

    def split(self, model: Trunk) -> Trunk:
        """Leaves this rank's part in it. Raises LayoutError where it does not divide."""
        split_tensors(model, Plan(layout=Layout(tp=self.size), sequence_parallel=False), self.mesh)
        return model

    def send(self, text: str) -> str:
        """The first rank's text, not an empty one, on every rank."""
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if self.leads else None
        size = torch.tensor([0 if data is None else data.numel()])
        dist.broadcast(size, group=self.control, group_src=0)
        if data is None:
            data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, group=self.control, group_src=0)
        return bytes(data.numpy()).decode()


class Leader:
    """In the place of a runner on every rank of a group: `run` on the first, `follow` on the others.

    blocks: what the rank with the least room has.
    """

    def __init__(self, runner: Runner, group: ServingGroup):
        self.runner, self.group = runner, group
        least = torch.tensor(runner.blocks)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=group.control)
        self.blocks = int(least)

    def run(self, packed: Packed) -> torch.Tensor:
        """As `Runner.run`."""
        self.group.send(json.dumps(packed.to_json()))
        return self.runner.run(packed)

    def follow(self) -> None:
        """Until `close` on the first rank."""
        while True:
            text = self.group.send("")
            if text == END:
                return
            self.runner.run(Packed(**json.loads(text)))

    def close(self) -> None:
        self.group.send(END)
