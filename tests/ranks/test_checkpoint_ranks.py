"""Checkpoints over gloo ranks: shared writing, resharding, errors that every rank hears of."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.checkpoint import CheckpointStore, Piece, flat_pieces, read_manifest
from meshwright.checkpoint import ticket as ticket_module
from meshwright.checkpoint.manifest import Box
from meshwright.errors import MeshwrightError
from tests.ranks.pool import Pools, _context
from tests.unit.checkpoint_cases import bits, flip, piece_of

SHAPES = {
    "embedding": (120, 16),
    "qkv": (96, 16),
    "down": (16, 64),
    "norm": (16,),
    "moment": (5, 7),
    "scale": (),
    "none": (0, 2),
}


def full_state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {**state, "norm": state["norm"].bfloat16(), "qkv": state["qkv"].double()}


def held(state: dict[str, torch.Tensor], rank: int, world: int) -> list[Piece]:
    """Rows of the embedding by rank; qkv by rows and down by columns over pairs; the moment flat; the rest on every rank."""
    tp, part = min(2, world), rank % min(2, world)
    rows, columns, heads = 120 // world, 64 // tp, 96 // tp
    boxes = {
        "embedding": Box((rows * rank, 0), (rows, 16)),
        "qkv": Box((heads * part, 0), (heads, 16)),
        "down": Box((0, columns * part), (16, columns)),
    }
    pieces = [piece_of(name, full, boxes.get(name, Box.whole(full.shape))) for name, full in state.items() if name != "moment"]
    start, stop = 35 * rank // world, 35 * (rank + 1) // world
    return pieces + flat_pieces("moment", state["moment"].reshape(-1)[start:stop].clone(), (5, 7), start)


def opened(root: str, lines: list[str] | None = None, **options: Any) -> CheckpointStore:
    report: Callable[[str], None] = (lambda text: None) if lines is None else lines.append
    world = dist.get_world_size()
    group = dist.new_group(list(range(world)), backend="gloo")
    return CheckpointStore(root, group=group, rank=dist.get_rank(), world=world, report=report, **options)


def exact(pieces: list[Piece], state: dict[str, torch.Tensor]) -> bool:
    return all(bits(p.tensor) == bits(state[p.name][p.box.inside(Box.whole(p.shape))]) for p in pieces)


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in full_state(0).items()}


# ---- on the ranks


def save_and_train(root: str) -> tuple[float, int]:
    """Save in the background while the default group is in use and the tensors change; twice, so that one waits."""
    rank, world = dist.get_rank(), dist.get_world_size()
    total = torch.zeros(())
    with opened(root) as store:
        size = store.check_space(held(full_state(1), rank, world))
        for step in (1, 2):
            pieces = held(full_state(step), rank, world)
            ticket = store.save(step, pieces, {"step": step})
            for _ in range(20):
                for piece in pieces:
                    piece.tensor.fill_(7)
                total = torch.ones(())
                dist.all_reduce(total)
        ticket.wait()
    return float(total), size


def load_newest(root: str) -> tuple[str, bool, Any, int, int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    store = opened(root, write=False)
    newest = store.newest()
    assert newest is not None
    hashed = store.last_load.bytes_hashed
    pieces = held(zeros(), rank, world)
    meta = store.load(newest, pieces)
    return newest.name, exact(pieces, full_state(meta["step"])), meta, hashed, store.last_load.bytes_read


def outcome(work: Callable[[], object]) -> tuple[str, str]:
    try:
        work()
    except MeshwrightError as error:
        return type(error).__name__, str(error)
    return "", ""


def one_rank_cannot_write(root: str) -> tuple[Any, ...]:
    rank, world = dist.get_rank(), dist.get_world_size()
    real = ticket_module.write_shard

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    try:
        with opened(root, keep=1) as store:
            store.save(1, held(full_state(1), rank, world), {"step": 1}).wait()
            if rank == 1:
                ticket_module.write_shard = full  # type: ignore[assignment]
            first = outcome(store.save(2, held(full_state(2), rank, world), {"step": 2}).wait)
            store.save(3, held(full_state(3), rank, world), {"step": 3})
            second = outcome(lambda: store.save(4, held(full_state(4), rank, world), {"step": 4}))
            newest = store.newest()
            ticket_module.write_shard = real
            last = outcome(store.save(5, held(full_state(5), rank, world), {"step": 5}).wait)
    finally:
        ticket_module.write_shard = real
    return first, second, newest.name if newest else None, last


def open_only(root: str) -> tuple[str, str]:
    return outcome(lambda: opened(root, lock_patience_s=0.1).close())


def load_damaged(root: str, name: str) -> tuple[tuple[str, str], bool, str | None, int]:
    lines: list[str] = []
    store = opened(root, lines, write=False)
    pieces = held(zeros(), dist.get_rank(), dist.get_world_size())
    text = outcome(lambda: store.load(Path(root) / name, pieces))
    touched = any(bool(piece.tensor.any()) for piece in pieces)
    newest = store.newest()
    return text, touched, newest.name if newest else None, len(lines)


def disagree(root: str) -> list[tuple[str, str]]:
    rank = dist.get_rank()
    with opened(root) as store:
        shape = (4, 2 + rank // 1 % 2)
        shapes = outcome(lambda: store.save(1, [Piece("w", torch.zeros(shape), shape, (0, 0))], {}))
        own = [Piece("w", torch.zeros(2, 2), (6, 2), (2 * rank, 0))]
        hole = outcome(lambda: store.save(1, own, {}))
        one = outcome(lambda: store.save(1, [], {"bad": {1, 2}} if rank == 1 else {}))
    return [shapes, hole, one]


def change_on_one_rank(root: str) -> None:
    """Same pieces on rank 0, other pieces on rank 1: the cached plan must not be used."""
    rank = dist.get_rank()
    with opened(root) as store:
        for step, world in ((1, 2), (2, 1)):
            tensor = torch.full((4 // world, 2), float(step))
            offset = (2 * rank, 0) if world == 2 else (0, 0)
            pieces = [Piece("w", tensor, (4, 2), offset, owner=rank == 0 or world == 2)]
            store.save(step, pieces, {}).wait()


def a_rank_dies_in_its_save(root: str, rank: int) -> None:
    """Rank 1 of 2 is killed when it should write; rank 0 must hear of it at `wait`, not hang."""
    dist.init_process_group("gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2)
    if rank == 1:
        ticket_module.write_shard = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    ticket = opened(root).save(1, held(full_state(1), rank, 2), {})
    kind, text = outcome(ticket.wait)
    Path(root, "heard").write_text(f"{kind}: {text}", encoding="utf-8")
    os._exit(0)


# ---- in the test process


@pytest.mark.parametrize("world", [1, 2, 4])
def test_save_on_some_ranks_load_on_others(ranks: Pools, tmp_path: Path, world: int) -> None:
    # Mutation tried: the background writer on the default group (`group=dist.group.WORLD`); the all-reduce of the trainer
    # then met the writer's messages and the ranks stopped.
    root = str(tmp_path / "checkpoints")
    total, size = ranks(world).run(save_and_train, root)[0]
    assert total == world and size == sum(len(bits(t)) for t in full_state(0).values())
    manifest = read_manifest(tmp_path / "checkpoints" / "step-00000002")
    written = [sum(s.box.numel for t in manifest.tensors.values() for s in t.slices if s.file == f) for f in manifest.files]
    assert len(written) == world and sum(written) == sum(t.numel() for t in full_state(0).values())
    size_on_disk = [entry.bytes for entry in manifest.files.values()]
    for other in (1, 2, 4):
        answers = ranks(other).run(load_newest, root)
        assert [answer[:3] for answer in answers] == [("step-00000002", True, {"step": 2})] * other
        assert sum(answer[3] for answer in answers) == sum(size_on_disk), "each file is hashed by one rank"
        assert all(answer[4] == sum(len(bits(p.tensor)) for p in held(zeros(), r, other)) for r, answer in enumerate(answers))
    pieces = held(zeros(), 0, 1)
    CheckpointStore(root, write=False).load(tmp_path / "checkpoints" / "step-00000001", pieces)
    assert exact(pieces, full_state(1)), "what training did after the save is not in it"


def replicas_only(root: str, step: int) -> None:
    with opened(root) as store:
        state = {"a": torch.randn(1000, 33), "b": torch.randn(257), "c": torch.tensor(1.0)}
        store.save(step, [Piece(n, t, tuple(t.shape), (0,) * t.dim()) for n, t in state.items()], {}).wait()


def test_replicas_share_the_writing(ranks: Pools, tmp_path: Path) -> None:
    # Mutation tried: only rank 0 offered as a writer; one file instead of four.
    ranks(4).run(replicas_only, str(tmp_path), 1)
    manifest = read_manifest(tmp_path / "step-00000001")
    sizes = [(tmp_path / "step-00000001" / name).stat().st_size for name in manifest.files]
    assert len(sizes) == 4 and max(sizes) <= 1.1 * min(sizes)
    assert sum(s.box.numel for t in manifest.tensors.values() for s in t.slices) == 33000 + 257 + 1


def test_a_rank_that_cannot_write_stops_all(ranks: Pools, tmp_path: Path) -> None:
    for answer in ranks(2).run(one_rank_cannot_write, str(tmp_path)):
        first, second, newest, last = answer
        for step, (kind, text) in ((2, first), (3, second)):
            assert kind == "CheckpointError"
            assert f"checkpoint of step {step}: not saved: rank 1: OSError: [Errno 28] No space left on device" in text
            assert f"free in {tmp_path}, the checkpoint takes" in text
        assert newest == "step-00000001" and last == ("", "")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-00000005"]


def test_a_folder_in_use_is_refused_on_every_rank(ranks: Pools, tmp_path: Path) -> None:
    with CheckpointStore(tmp_path):
        for kind, text in ranks(2).run(open_only, str(tmp_path)):
            assert kind == "CheckpointError" and "is writing checkpoints here" in text
    assert ranks(2).run(open_only, str(tmp_path)) == [("", "")] * 2
    (tmp_path / "file").write_text("")
    for kind, text in ranks(2).run(open_only, str(tmp_path / "file" / "x")):
        assert kind == "DeviceError" and "Not a directory" in text


def test_damage_is_told_on_every_rank(ranks: Pools, tmp_path: Path) -> None:
    ranks(4).run(save_and_train, str(tmp_path))
    shard = tmp_path / "step-00000002" / "shard-00003-of-00004.safetensors"
    flip(shard, 8 * shard.stat().st_size - 1)
    answers = ranks(2).run(load_damaged, str(tmp_path), "step-00000002")
    for rank, ((kind, text), touched, newest, lines) in enumerate(answers):
        assert kind == "CheckpointError" and str(shard) in text and "the damage is in tensor" in text
        assert not touched and newest == "step-00000001"
        assert lines == (1 if rank == 0 else 0), "reports come from rank 0 alone"
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    for (kind, text), touched, newest, _ in ranks(2).run(load_damaged, str(tmp_path), "step-00000002"):
        assert kind == "CheckpointError" and "manifest.json: cannot be read" in text
        assert not touched and newest == "step-00000001"


def test_pieces_that_disagree_are_refused_on_every_rank(ranks: Pools, tmp_path: Path) -> None:
    for shapes, hole, one in ranks(2).run(disagree, str(tmp_path)):
        assert shapes == ("CheckpointError", "w: rank 1 has F32 [4, 3], another rank F32 [4, 2]")
        assert "w: 4 of 12 elements are held by no rank" in hole[1]
        assert one == ("CheckpointError", "meta.bad: is a set; only numbers, text, lists and objects of these can be stored")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("step-")] == []


def test_a_splitting_that_changes_between_saves(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(change_on_one_rank, str(tmp_path))
    assert [len(read_manifest(tmp_path / f"step-0000000{step}").files) for step in (1, 2)] == [2, 1]


def test_a_rank_that_dies_while_saving_is_heard_of(tmp_path: Path) -> None:
    pair = [_context().Process(target=a_rank_dies_in_its_save, args=(str(tmp_path), rank)) for rank in range(2)]
    for process in pair:
        process.start()
    try:
        for process in pair:
            process.join(30)
        assert [process.exitcode for process in pair] == [0, -9]
    finally:
        for process in pair:
            process.kill()
    assert (tmp_path / "heard").read_text(encoding="utf-8").startswith("MeshwrightError: checkpoint of step 1 was not saved: ")
    assert CheckpointStore(tmp_path, write=False).newest() is None
