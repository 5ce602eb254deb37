"""The store in a world of one: save, find, load, keep, refuse."""

from __future__ import annotations

import json
import multiprocessing.synchronize
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from meshwright.checkpoint import CheckpointStore, Piece, inspect
from meshwright.checkpoint import ticket as ticket_module
from meshwright.errors import CheckpointError, DeviceError, MeshwrightError
from tests.ranks.pool import _context
from tests.unit.checkpoint_cases import bits, whole


def state(seed: int, rows: int = 64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.w": torch.randn(rows, 32, generator=generator),
        "model.b": torch.randn(7, generator=generator).bfloat16(),
        "optimizer.step": torch.tensor(seed),
        "none": torch.zeros(0, 3),
    }


def pieces(tensors: dict[str, torch.Tensor]) -> list[Piece]:
    return [whole(name, tensor) for name, tensor in tensors.items()]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(bits(a[name]) == bits(b[name]) for name in a)


def loaded(store: CheckpointStore, path: Path) -> dict[str, torch.Tensor]:
    target = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
    store.load(path, pieces(target))
    return target


def steps(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if "step" in path.name)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, lines: list[str]):
    with CheckpointStore(tmp_path / "checkpoints", keep=2, report=lines.append) as opened:
        yield opened


# ---- saving


@pytest.mark.parametrize("background", [True, False])
def test_tensors_may_change_as_soon_as_save_returns(store: CheckpointStore, background: bool) -> None:
    # Mutation tried: staging by reference instead of a copy; the checkpoint then held the changed values.
    tensors = state(1, rows=20000)
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    ticket = store.save(3, pieces(tensors), {"a": 1}, background=background)
    for tensor in tensors.values():
        tensor.fill_(5)
    path = ticket.wait()
    assert path.name == "step-00000003" and ticket.done and ticket.bytes == sum(len(bits(t)) for t in expected.values())
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    assert store.load(path, pieces(target)) == {"a": 1}
    assert same(target, expected)


def test_saving_goes_on_beside_training(store: CheckpointStore) -> None:
    release = threading.Event()

    def hold_up(partial: Path) -> None:
        release.wait(10)

    store._before_publish = hold_up
    ticket = store.save(1, pieces(state(1)), {})
    assert not ticket.done, "save returned while the writer was still held up"
    release.set()
    assert ticket.wait().is_dir()


def test_never_two_saves_at_once(store: CheckpointStore) -> None:
    seen: list[list[str]] = []
    store._before_publish = lambda partial: seen.append(steps(partial.parent))
    for step in range(1, 5):
        store.save(step, pieces(state(step)), {})
    store.wait()
    assert seen[0] == [".step-00000001.partial"]
    assert all(sum("partial" in name for name in names) == 1 for names in seen)


def test_the_staging_memory_is_used_again(store: CheckpointStore) -> None:
    store.save(1, pieces(state(1)), {}).wait()
    before = store._staging._buffer.data_ptr(), store._staging.bytes
    store.save(2, pieces(state(2)), {}).wait()
    assert (store._staging._buffer.data_ptr(), store._staging.bytes) == before


def test_random_states_come_back_through_plain_readers(store: CheckpointStore) -> None:
    python, numpy_rng = random.Random(3), np.random.default_rng(4)
    torch_rng = torch.Generator().manual_seed(5)
    meta = {"python": python.getstate(), "numpy": numpy_rng.bit_generator.state, "torch": torch_rng.get_state().tolist()}
    path = store.save(1, pieces(state(1)), {"rng": meta}).wait()
    for file in path.iterdir():
        if file.suffix == ".json":
            assert json.loads(file.read_text(encoding="utf-8"))["step"] == 1
        else:
            with safe_open(str(file), "np") as opened:
                assert "model.w" in opened.keys()  # noqa: SIM118
    rng = store.load(path, pieces(state(0)))["rng"]
    version, internal, gauss = rng["python"]
    again = random.Random()
    again.setstate((version, tuple(internal), gauss))
    assert [again.random() for _ in range(5)] == [python.random() for _ in range(5)]
    fresh = np.random.default_rng()
    fresh.bit_generator.state = rng["numpy"]
    assert fresh.random(5).tolist() == numpy_rng.random(5).tolist()
    generator = torch.Generator()
    generator.set_state(torch.tensor(rng["torch"], dtype=torch.uint8))
    assert torch.equal(torch.rand(5, generator=generator), torch.rand(5, generator=torch_rng))


def test_values_that_are_no_json_are_refused_before_anything_is_written(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError) as refusal:
        store.save(1, pieces(state(1)), {"rng": np.random.get_state(), "best": float("inf")})
    assert [f.where for f in refusal.value.findings] == ["meta.rng[1]", "meta.best"]
    assert steps(store.root) == []
    store.save(1, pieces(state(1)), {}).wait()


def test_pieces_that_do_not_fit_are_refused_all_at_once(store: CheckpointStore) -> None:
    bad = [Piece("a", torch.zeros(2), (3,), (0,)), Piece("b", torch.zeros(2), (2,), (0,), owner=False)]
    with pytest.raises(CheckpointError) as refusal:
        store.save(1, bad, {})
    assert [f.where for f in refusal.value.findings] == ["a", "b"]
    assert store.newest() is None


def test_saving_a_step_again_replaces_it(store: CheckpointStore) -> None:
    store.save(1, pieces(state(1)), {}).wait()
    path = store.save(1, pieces(state(9)), {}, tag="again").wait()
    assert same(loaded(store, path), state(9))
    assert sorted(p.name for p in store.root.iterdir()) == [".lock", "step-00000001"]
    assert inspect(path, digests=True)["tag"] == "again"


# ---- keeping


def test_the_newest_and_the_best_are_kept(store: CheckpointStore) -> None:
    for step in range(1, 7):
        store.save(step, pieces(state(step)), {})
        if step in (1, 2):
            store.mark_best(step, 1 / step)
    store.wait()
    assert steps(store.root) == ["step-00000002", "step-00000005", "step-00000006"]
    assert store.best() == store.root / "step-00000002"
    assert store.newest() == store.root / "step-00000006"
    assert same(loaded(store, store.root / "step-00000002"), state(2))


def test_a_best_one_whose_save_fails_does_not_displace_the_last(store: CheckpointStore) -> None:
    store.save(1, pieces(state(1)), {}).wait()
    store.mark_best(1, 2.0)
    release = threading.Event()

    def fail(partial: Path) -> None:
        release.wait(10)
        raise OSError(28, "No space left on device")

    store._before_publish = fail
    ticket = store.save(2, pieces(state(2)), {})
    store.mark_best(2, 1.0)
    release.set()
    with pytest.raises(CheckpointError, match="No space left"):
        ticket.wait()
    store._before_publish = None
    store.save(3, pieces(state(3)), {}).wait()
    assert json.loads((store.root / "best.json").read_text()) == {"step": 1, "value": 2.0}
    with pytest.raises(CheckpointError, match="no checkpoint of step 2"):
        store.mark_best(2, 1.0)
    with pytest.raises(ValueError, match="nan"):
        store.mark_best(3, float("nan"))


def test_a_damaged_best_record_stops_the_tidying_not_the_run(store: CheckpointStore, lines: list[str]) -> None:
    for step in (1, 2, 3):
        store.save(step, pieces(state(step)), {}).wait()
    (store.root / "best.json").write_text("{")
    store.save(4, pieces(state(4)), {}).wait()
    assert steps(store.root) == ["step-00000002", "step-00000003", "step-00000004"]
    assert store.best() is None
    assert "best.json: is damaged" in lines[0]


def test_going_back_to_an_earlier_step_continues_from_what_was_written_last(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep=2) as first:
        for step in (10, 20):
            first.save(step, pieces(state(step)), {})
    with CheckpointStore(tmp_path, keep=2) as second:
        second.save(15, pieces(state(15)), {}).wait()
        assert second.newest() == tmp_path / "step-00000015"
    assert steps(tmp_path) == ["step-00000015", "step-00000020"]


def test_damaged_ones_do_not_count_among_the_kept(tmp_path: Path, lines: list[str]) -> None:
    # Mutation tried: `prune` counting every folder; it then deleted step 1, the only whole one beside the newest.
    with CheckpointStore(tmp_path, keep=2) as first:
        for step in (1, 2):
            first.save(step, pieces(state(step)), {}).wait()
    shard = next((tmp_path / "step-00000002").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with CheckpointStore(tmp_path, keep=2, report=lines.append) as second:
        assert second.newest() == tmp_path / "step-00000001"
        second.save(3, pieces(state(3)), {}).wait()
        assert steps(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]
        second.save(4, pieces(state(4)), {}).wait()
    assert steps(tmp_path) == ["step-00000003", "step-00000004"]
    assert len(lines) == 1 and "step-00000002" in lines[0] and "tensor model.b" in lines[0]


# ---- opening


def test_leftovers_of_a_dead_run_are_named_and_removed(tmp_path: Path, lines: list[str]) -> None:
    with CheckpointStore(tmp_path) as first:
        first.save(1, pieces(state(1)), {})
    (tmp_path / ".step-00000002.partial").mkdir()
    (tmp_path / ".step-00000002.partial" / "shard-00000-of-00001.safetensors").write_bytes(b"half")
    (tmp_path / ".trash-step-00000000-1-0").mkdir()
    reader = CheckpointStore(tmp_path, write=False, report=lines.append)
    assert reader.newest() == tmp_path / "step-00000001"
    assert len(lines) == 2
    assert ".step-00000002.partial: skipped, it is not complete" in lines[0]
    assert (tmp_path / ".step-00000002.partial").exists(), "a reader changes nothing"
    lines.clear()
    with CheckpointStore(tmp_path, report=lines.append) as second:
        assert second.newest() == tmp_path / "step-00000001"
    assert len(lines) == 1 and ".step-00000002.partial: skipped and removed" in lines[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "step-00000001"]


def test_a_complete_checkpoint_without_its_name_is_published(tmp_path: Path, lines: list[str]) -> None:
    with CheckpointStore(tmp_path) as first:
        path = first.save(1, pieces(state(1)), {}).wait()
    path.rename(tmp_path / ".step-00000001.partial")
    with CheckpointStore(tmp_path, report=lines.append) as second:
        assert same(loaded(second, tmp_path / "step-00000001"), state(1))
    assert "was complete when the run that wrote it ended; published" in lines[0]


def hold(root: Path, opened: multiprocessing.synchronize.Event, end: multiprocessing.synchronize.Event) -> None:
    with CheckpointStore(root):
        opened.set()
        end.wait(20)


def test_one_writer_at_a_time_and_its_leftovers_are_safe(tmp_path: Path) -> None:
    context = _context()  # the server that has torch loaded already
    opened, end = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, opened, end))
    other.start()
    try:
        assert opened.wait(20)
        (tmp_path / ".step-00000002.partial").mkdir()
        with pytest.raises(CheckpointError, match=f"process {other.pid} is writing checkpoints here"):
            CheckpointStore(tmp_path, lock_patience_s=0.1)
        assert (tmp_path / ".step-00000002.partial").exists()
        CheckpointStore(tmp_path, write=False).newest()
    finally:
        other.kill()
        other.join()
    CheckpointStore(tmp_path).close()  # a killed holder holds nothing


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    # Mutation tried: the fork handler left out; the second store then failed after its patience.
    store = CheckpointStore(tmp_path)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reads, 1)
        os._exit(0)
    try:
        store.close()
        CheckpointStore(tmp_path, lock_patience_s=0.5).close()
    finally:
        os.write(writes, b"x")
        os.waitpid(child, 0)
        os.close(reads)
        os.close(writes)


def test_closed_and_reading_stores_do_not_save(tmp_path: Path, store: CheckpointStore) -> None:
    store.close()
    for closed in (store, CheckpointStore(tmp_path, write=False)):
        with pytest.raises(CheckpointError, match="opened for reading only, or closed"):
            closed.save(1, pieces(state(1)), {})
    assert CheckpointStore(tmp_path / "nowhere", write=False).newest() is None
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_cannot_be_made_is_a_clear_refusal(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match=r"file/checkpoints: cannot be written \(Not a directory\)"):
        CheckpointStore(tmp_path / "file" / "checkpoints")
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointStore(tmp_path, keep=0)
    with pytest.raises(ValueError, match="world is 2"):
        CheckpointStore(tmp_path, world=2)


# ---- loading


def test_names_shapes_and_dtypes_that_differ_are_listed_and_nothing_is_filled(store: CheckpointStore) -> None:
    path = store.save(1, pieces(state(1)), {}).wait()
    target = {
        "model.w": torch.zeros(64, 32, dtype=torch.float64),
        "model.b": torch.zeros(8, dtype=torch.bfloat16),
        "model.new": torch.zeros(2),
        "none": torch.zeros(0, 3),
    }
    with pytest.raises(CheckpointError) as refusal:
        store.load(path, pieces(target))
    assert {f.where: f.what for f in refusal.value.findings} == {
        "model.w": "is F32 in the checkpoint, F64 here",
        "model.b": "has shape [7] in the checkpoint, [8] here",
        "model.new": "is not in the checkpoint",
        "optimizer.step": "is in the checkpoint, but nothing here takes it",
    }
    assert not any(tensor.any() for tensor in target.values())


def test_cast_and_ignore(store: CheckpointStore) -> None:
    path = store.save(1, pieces(state(1)), {}).wait()
    target = {"model.w": torch.zeros(64, 32, dtype=torch.float64), "model.b": torch.zeros(7)}
    store.load(path, pieces(target), cast=True, ignore=["optimizer.*", "none"])
    assert torch.equal(target["model.w"], state(1)["model.w"].double())
    assert torch.equal(target["model.b"], state(1)["model.b"].float())
    with pytest.raises(CheckpointError, match=r"^none: is in the checkpoint"):
        store.load(path, pieces(target), cast=True, ignore=["optimizer.*"])


def test_what_newest_verified_is_not_read_again_unless_it_was_touched(store: CheckpointStore) -> None:
    path = store.save(1, pieces(state(1)), {}).wait()
    assert store.newest() == path
    loaded(store, path)
    assert store.last_load.bytes_hashed == 0
    shard = next(path.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        loaded(store, path)


def test_inspect(store: CheckpointStore) -> None:
    path = store.save(4, pieces(state(1)), {"config": {"lr": 1}}, tag="final").wait()
    facts = inspect(path, digests=True)
    assert (facts["step"], facts["tag"], facts["world"], facts["findings"]) == (4, "final", 1, [])
    assert facts["tensors"]["model.w"] == {"dtype": "F32", "shape": [64, 32], "slices": 1}
    assert facts["bytes"] == sum(p.stat().st_size for p in path.glob("*.safetensors"))
    json.dumps(facts)


# ---- space


def test_space_is_checked_before_the_first_step(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(len(bits(t)) for t in state(1).values())
    usage = shutil.disk_usage(store.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3 * size))
    assert store.check_space(pieces(state(1))) == size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3 * size - 1))
    with pytest.raises(DeviceError, match=r"3 checkpoints of 8\.0 KiB need 24\.1 KiB more, 24\.1 KiB are free"):
        store.check_space(pieces(state(1)))
    assert store.check_space(pieces(state(1)), copies=1) == size
    store.save(1, pieces(state(1)), {}).wait()
    assert store.check_space(pieces(state(1))) == size, "what is there already counts"


def test_a_limit_on_file_size_is_seen_before_the_first_step(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4096, -1))
    with pytest.raises(DeviceError, match=r"rank 0 writes a file of 8\.0 KiB, the limit on file size is 4\.0 KiB"):
        store.check_space(pieces(state(1)))


def fill_up(root: str) -> None:
    """Two saves of 12 MB, keep 1, as a run would: the second one does not fit."""
    store = CheckpointStore(root, keep=1)
    tensors = {"w": torch.full((3_000_000,), 1.0)}
    code = 0
    try:
        store.save(1, pieces(tensors), {}).wait()
        if os.environ.get("FILE_LIMIT"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["FILE_LIMIT"]), resource.RLIM_INFINITY))
        tensors["w"].fill_(2)
        store.save(2, pieces(tensors), {})
        store.save(3, pieces(tensors), {})
    except MeshwrightError as error:
        print(error, flush=True)  # nothing else does before `_exit`
        code = error.exit_code
    os._exit(code)


@pytest.mark.parametrize("how", ["small disk", "file limit"])
def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path, how: str) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    env = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))
    if how == "small disk":
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(root)], capture_output=True, text=True)
        if mounted.returncode:
            pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    else:
        env["FILE_LIMIT"] = str(5 << 20)
    try:
        command = [sys.executable, "-c", f"from {__name__} import fill_up; fill_up({str(root)!r})"]
        run = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
        assert run.returncode == 2, run.stderr
        reason = "No space left on device" if how == "small disk" else "File too large"
        assert "checkpoint of step 2: not saved" in run.stdout and reason in run.stdout
        assert f"free in {root}, the checkpoint takes 11.4 MiB" in run.stdout
        assert "Traceback" not in run.stdout + run.stderr
        store = CheckpointStore(root, write=False)
        path = store.newest()
        assert path is not None and sorted(p.name for p in root.iterdir()) == [".lock", "step-00000001"]
        target = {"w": torch.zeros(3_000_000)}
        store.load(path, pieces(target))
        assert bool((target["w"] == 1).all())
    finally:
        if how == "small disk":
            subprocess.run(["umount", str(root)], check=True)


def test_an_error_of_the_background_is_raised_at_the_next_save_and_then_forgotten(store: CheckpointStore) -> None:
    def fail(partial: Path) -> None:
        raise RuntimeError("boom")

    store.save(1, pieces(state(1)), {}).wait()
    store._before_publish = fail
    store.save(2, pieces(state(2)), {})
    store._before_publish = None
    with pytest.raises(CheckpointError, match=r"checkpoint of step 2: not saved: RuntimeError: boom \(.* free in"):
        store.save(3, pieces(state(3)), {})
    assert steps(store.root) == ["step-00000001"]
    assert store.save(3, pieces(state(3)), {}).wait().is_dir()


def test_memory_that_is_not_there_is_an_error_of_the_save(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store._staging, "fill", lambda shares, pieces: (_ for _ in ()).throw(MemoryError("no host memory")))
    with pytest.raises(CheckpointError, match="MemoryError: no host memory"):
        store.save(1, pieces(state(1)), {}, background=False)


def test_readable_sizes() -> None:
    sizes = {0: "0 bytes", 1023: "1023 bytes", 1536: "1.5 KiB", 5 << 20: "5.0 MiB", 3 << 30: "3.0 GiB", 7 << 50: "7168.0 TiB"}
    assert {size: ticket_module.readable(size) for size in sizes} == sizes
