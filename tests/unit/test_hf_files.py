"""Folders of weights: damaged ones are refused by name before anything is loaded, ours read back bit for bit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.config.schema import ModelConfig
from meshwright.errors import CheckpointError, DeviceError
from meshwright.models import build, initialize, shards
from meshwright.models.files import load_model, save_model
from meshwright.models.hf import HfFolder, export_hf, load_hf
from meshwright.models.shards import INDEX, Shards, new_folder, write_shards

CONFIG = ModelConfig(layers=3, width=32, heads=4, kv_heads=2, ffn=40, vocab=50, max_len=64)


def _model(config: ModelConfig = CONFIG, task: str = "lm") -> torch.nn.Module:
    model = build(config, task)
    initialize(model, 0, "cpu")
    return model


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """An export in three files."""
    size = sum(p.numel() * 4 for p in _model().parameters())
    export_hf(_model(), CONFIG, "lm", tmp_path / "three", shard_bytes=size * 2 // 5)
    assert len(list((tmp_path / "three").glob("model-*-of-00003.safetensors"))) == 3
    return tmp_path / "three"


def _edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


DAMAGE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing shard": (
        lambda f: (f / "model-00002-of-00003.safetensors").unlink(),
        ("model-00002-of-00003.safetensors", "is missing"),
    ),
    "cut shard": (lambda f: _cut(f / "model-00003-of-00003.safetensors"), ("model-00003-of-00003.safetensors", "cut short")),
    "empty shard": (
        lambda f: (f / "model-00001-of-00003.safetensors").write_bytes(b""),
        ("model-00001-of-00003.safetensors", "cut short"),
    ),
    "empty index": (lambda f: (f / INDEX).write_text(""), (INDEX, "is not JSON")),
    "index of nothing": (lambda f: _edit_index(f, dict.clear), (INDEX, "names no tensor")),
    "tensor in no shard": (
        lambda f: _edit_index(f, lambda m: m.update({"model.extra.weight": "model-00001-of-00003.safetensors"})),
        ("model-00001-of-00003.safetensors", "does not hold model.extra.weight"),
    ),
    "shard outside": (lambda f: _edit_index(f, lambda m: m.update(x="../secret.safetensors")), (INDEX, "../secret")),
    "tensor not listed": (lambda f: _edit_index(f, lambda m: m.pop("model.norm.weight")), ("holds model.norm.weight, which",)),
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], ("has neither",)),
    "config cut": (lambda f: _cut(f / "config.json"), ("config.json", "is not JSON")),
    "no config": (lambda f: (f / "config.json").unlink(), ("config.json", "No such file")),
}


# Mutation: `Shards` without its look at the headers finds a cut file only while loading: red.
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_before_loading(kind: str, three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage, words = DAMAGE[kind]
    damage(three)
    monkeypatch.setattr(Shards, "get", lambda *_: pytest.fail("a weight was read"))
    started = time.monotonic()
    with pytest.raises(CheckpointError) as error:
        load_hf(three)
    assert time.monotonic() - started < 2
    for word in words:
        assert word in str(error.value)


def test_a_description_that_is_nested_too_deeply_is_refused(three: Path) -> None:
    # red before, by a RecursionError
    (three / "model.safetensors.index.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: is not JSON"):
        Shards(three)


def test_all_damage_at_once(three: Path) -> None:
    (three / "model-00001-of-00003.safetensors").unlink()
    _cut(three / "model-00002-of-00003.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_hf(three)
    assert len(error.value.findings) == 2


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        Shards(tmp_path)


def _edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


WRONG: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], tuple[str, ...]]] = {
    "shape": (
        lambda t: t.update({"model.layers.1.self_attn.k_proj.weight": torch.zeros(8, 32)}),
        ("model.layers.1.self_attn.k_proj.weight is [8, 32], config.json asks for [16, 32]",),
    ),
    "vocabulary": (lambda t: t.update({"model.embed_tokens.weight": torch.zeros(51, 32)}), ("[51, 32]", "[50, 32]")),
    "unknown": (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}), ("q_proj.bias is no tensor",)),
    "a layer too many": (lambda t: t.update({"model.layers.3.input_layernorm.weight": torch.zeros(32)}), ("layers.3",)),
    "untied without a head": (lambda t: t.pop("lm_head.weight"), ("lm_head.weight", "Set tie_word_embeddings if")),
    "integers": (lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}), ("model.norm.weight", "I8")),
}


@pytest.mark.parametrize("kind", WRONG)
def test_weights_that_do_not_fit_are_named(kind: str, tmp_path: Path) -> None:
    edit, words = WRONG[kind]
    export_hf(_model(), CONFIG, "lm", tmp_path / "theirs")
    _edit_tensors(tmp_path / "theirs", edit)
    with pytest.raises(CheckpointError) as error:
        load_hf(tmp_path / "theirs")
    for word in words:
        assert word in str(error.value)


# Mutation: doubles are not compared, and the trained output matrix is lost without a word: red.
@pytest.mark.parametrize("task", ["lm", "mlm"])
def test_tied_flag_with_two_unequal_tensors_is_refused(task: str, tmp_path: Path) -> None:
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    config = CONFIG.model_copy(update={"tied": True})
    if task == "mlm":
        head, embedding = "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"
        more = {"arch": "encoder", "kv_heads": None, "positions": "learned", "norm": "layer", "norm_order": "post"}
        more |= {"final_norm": False, "embed_norm": True, "token_types": 2, "activation": "gelu", "head_transform": True}
        more |= {"qkv_bias": True, "attention_bias": True, "mlp_bias": True, "head_bias": True}
        config = config.model_copy(update=more)
    export_hf(_model(config, task), config, task, tmp_path / "theirs")
    _edit_tensors(tmp_path / "theirs", lambda t: t.update({head: t[embedding].clone()}))
    model, _ = load_hf(tmp_path / "theirs")  # twice the same is one
    assert model.head.weight is model.embedding.weight
    _edit_tensors(tmp_path / "theirs", lambda t: t[head].add_(1e-3))
    with pytest.raises(CheckpointError, match=f"{embedding} and {head} differ"):
        load_hf(tmp_path / "theirs")
    if task == "mlm":
        _edit_tensors(tmp_path / "theirs", lambda t: (t.pop(head), t.update({"cls.predictions.decoder.bias": torch.ones(50)})))
        with pytest.raises(CheckpointError, match=r"decoder\.bias"):
            load_hf(tmp_path / "theirs")


def test_older_spellings(tmp_path: Path) -> None:
    """Headless prefix left out (GPT-2's first files), gamma and beta (BERT's), buffers that are no weights."""
    gpt = {"positions": "learned", "norm": "layer", "activation": "gelu_tanh", "kv_heads": None, "tied": True}
    config = CONFIG.model_copy(update={**gpt, "qkv_bias": True, "attention_bias": True, "mlp_bias": True})
    model = _model(config)
    export_hf(model, config, "lm", tmp_path / "gpt2")

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)

    _edit_tensors(tmp_path / "gpt2", strip)
    again, _ = load_hf(tmp_path / "gpt2")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_what_the_task_does_not_use_is_told(tmp_path: Path) -> None:
    from tests.unit import hf_models

    hf_models.saved("bert", tmp_path / "bert")
    extra = {"bert.pooler.dense.weight": torch.zeros(32, 32), "cls.seq_relationship.bias": torch.zeros(2)}
    _edit_tensors(tmp_path / "bert", lambda t: t.update(extra))
    with HfFolder.open(tmp_path / "bert") as opened:
        assert opened.unused == sorted(extra)


@pytest.mark.parametrize("shard_bytes", [2**30, 20_000, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_our_folder_reads_back(shard_bytes: int, tied: bool, tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"tied": tied})
    model = _model(config)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    save_model(tmp_path / "ours", model, config, "lm", tmp_path / "tokenizer", shard_bytes=shard_bytes)
    again, read, task = load_model(tmp_path / "ours")
    assert (read, task) == (config, "lm")
    assert (again.head.weight is again.embedding.weight) is tied
    for (name, a), (other, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b)
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == "{}"
    assert not list((tmp_path / "ours").glob("*.partial"))
    half, _, _ = load_model(tmp_path / "ours", dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "edit, word",
    [
        ({"format": "other"}, "format is 'other'"),
        ({"version": 2}, "version is 2"),
        ({"config": {"layers": 0}}, "config.layers"),
        ({"config": {"colour": 1}}, "config.colour"),
        ({"config": {**CONFIG.model_dump(), "layers": 4}}, "no file has tensor layers.3."),
        ({"config": {**CONFIG.model_dump(), "ffn": 48}}, "model.json asks for"),
    ],
)
def test_our_folder_is_checked(edit: dict, word: str, tmp_path: Path) -> None:
    save_model(tmp_path / "ours", _model(), CONFIG, "lm")
    path = tmp_path / "ours" / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}))
    with pytest.raises(CheckpointError, match=word):
        load_model(tmp_path / "ours")


def test_memory_is_one_shard_and_one_tensor(tmp_path: Path) -> None:
    """Tensors are asked for one by one, and let go with their shard."""
    import weakref

    alive: list[weakref.ref] = []
    most = 0

    def stream():
        nonlocal most
        for index in range(20):
            tensor = torch.zeros(250)  # 1,000 bytes, three of them a shard
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in alive))
            yield f"t{index}", tensor
            del tensor

    assert write_shards(tmp_path, stream(), 3000) == 20_000
    assert most <= 5
    assert len(list(tmp_path.glob("model-*-of-00007.safetensors"))) == 7


# Mutations, each red: no clean-up after an error; writing into the folder itself.
def test_nothing_is_left_of_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        assert not (tmp_path / "ours").exists()  # it has its name when it is whole
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "save_tensors", full)
    with pytest.raises(DeviceError, match="No space left on device"):
        save_model(tmp_path / "ours", _model(), CONFIG, "lm")
    assert list(tmp_path.iterdir()) == []


def test_space_and_names_are_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(DeviceError, match=r"1,024\.0 PiB are needed, .* free\. Free space"),
        new_folder(tmp_path / "big", 2**60),
    ):
        pytest.fail("there is no room")
    monkeypatch.setattr(shards.shutil, "disk_usage", lambda path: SimpleNamespace(free=1500))
    with pytest.raises(DeviceError, match=r"3\.0 MiB are needed, 1\.5 KiB are free"), new_folder(tmp_path / "big", 3 << 20):
        pytest.fail("there is no room")
    monkeypatch.undo()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    with pytest.raises(DeviceError, match="is not empty"):
        save_model(tmp_path / "taken", _model(), CONFIG, "lm")
    with pytest.raises(DeviceError, match="cannot be written"):
        save_model(tmp_path / "taken" / "file" / "below", _model(), CONFIG, "lm")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
