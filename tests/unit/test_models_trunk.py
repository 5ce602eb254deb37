"""Decoder and encoder as wholes: against torch's encoder, packed against alone, heads, dropout, compiled blocks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.config.recipes import recipe
from meshwright.config.schema import ModelConfig
from meshwright.data.batch import IGNORE
from meshwright.kernels.cross_entropy import linear_cross_entropy
from meshwright.kernels.dropout import keep_mask, position_keys
from meshwright.models import LossParts, build, heads, initialize, layers, trunk

F64 = torch.float64
VOCAB = 50
DECODERS = {
    "llama": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48},
    "qwen3": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 40, "qk_norm": True, "tied": True},
    "mistral": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 1, "ffn": 48, "sliding_window": 3},
    "gpt2": {**recipe("gpt2"), "layers": 2, "width": 32, "heads": 4, "ffn": 64, "max_len": 40},
}
ENCODERS = {
    "bert": {**recipe("bert-base"), "layers": 2, "width": 32, "heads": 4, "ffn": 64, "max_len": 40},
    "roberta": {**recipe("roberta-base"), "layers": 2, "width": 32, "heads": 4, "ffn": 64, "max_len": 40},
    "plain": {**recipe("encoder-24x1024"), "layers": 2, "width": 32, "heads": 4, "ffn": 64, "max_len": 40},
}
MODELS = {**DECODERS, **ENCODERS}


def make(name: str, task: str | None = None, dtype: torch.dtype = F64, **changes) -> nn.Module:
    # A large std, so that attention is far from uniform and every position matters.
    config = ModelConfig(
        **{**MODELS[name], "vocab": VOCAB, "init_std": 0.3, "init_depth_scaled": False, "classes": 3, **changes}
    )
    model = build(config, task or ("lm" if config.arch == "decoder" else "mlm"), dtype)
    initialize(model, 0, "cpu")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.1)
    return model


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def pack(documents: list[torch.Tensor], row: int, pad: int = 0) -> dict[str, torch.Tensor]:
    """One packed row: tokens, documents, positions."""
    lengths = [len(d) for d in documents]
    rest = row - sum(lengths)
    ids = [i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * rest
    positions = [p for n in [*lengths, rest] for p in range(n)]
    return {
        "tokens": torch.cat([*documents, torch.full((rest,), pad)])[None],
        "documents": torch.tensor([ids], dtype=torch.int32),
        "positions": torch.tensor([positions]),
    }


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_equal_each_alone(name):
    # Red with: documents not passed to attention, positions not passed to the learned table (gpt2).
    model = make(name)
    documents = [tokens(1, n, seed=n)[0] for n in (5, 1, 9)]
    for pad in (0, 7):  # what stands on the padding has no influence
        row = pack(documents, 20, pad)
        logits = model(row.pop("tokens"), **row)
        assert logits.isfinite().all()
        start = 0
        for document in documents:
            alone = model(document[None])[0]
            torch.testing.assert_close(logits[0, start : start + len(document)], alone, rtol=0, atol=1e-12)
            start += len(document)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_positions_are_used(name):
    # Red with: positions not passed to the rope table (a shift of a whole document leaves its logits as they are).
    model, ids = make(name), tokens(1, 6)
    plain = torch.arange(6)[None]
    assert torch.equal(model(ids, positions=plain), model(ids))
    assert (model(ids, positions=2 * plain) - model(ids)).abs().max() > 1e-3


def test_decoder_sees_no_future_and_encoder_does():
    for name in ("llama", "bert"):
        model, first = make(name), tokens(1, 8)
        second = first.clone()
        second[0, 6] = (second[0, 6] + 1) % VOCAB
        change = (model(first) - model(second)).abs().amax(-1)[0]
        assert (change[6:] > 0).all() and (change[:6] > 0).all() == (name == "bert")


def test_sliding_window_reaches_as_far_as_it_says():
    model, first = make("mistral", layers=1), tokens(1, 10)
    second = first.clone()
    second[0, 2] = (second[0, 2] + 1) % VOCAB
    change = (model(first) - model(second)).abs().amax(-1)[0]
    assert (change > 0).tolist() == [False, False, True, True, True, False, False, False, False, False]


@pytest.mark.parametrize("order,final", [("post", False), ("pre", True)])
def test_encoder_equals_torch_s(order, final):
    # Red with: the two norms swapped, gelu for relu, q and k rows of the fused weight exchanged.
    model = make("plain", norm_order=order, final_norm=final)
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=order == "pre", dtype=F64)
    with torch.no_grad():
        x = model.embedding(tokens(2, 7))
        expected = x
        for ours in model.layers:
            for suffix in ("weight", "bias"):
                fused = getattr(ours.attention.qkv, suffix)
                parts = model.table.rule(f"layers.0.attention.qkv.{suffix}").fused
                rows = [fused[where] for part in "qkv" for _, where in parts.slices(part)]
                getattr(layer.self_attn, f"in_proj_{suffix}").copy_(torch.cat(rows))
                for theirs, own in (
                    (layer.self_attn.out_proj, ours.attention.out),
                    (layer.linear1, ours.mlp.up),
                    (layer.linear2, ours.mlp.down),
                    (layer.norm1, ours.attention_norm),
                    (layer.norm2, ours.mlp_norm),
                ):
                    getattr(theirs, suffix).copy_(getattr(own, suffix))
            expected = layer(expected)
        if final:
            expected = model.norm(expected)
        torch.testing.assert_close(model(tokens(2, 7)), model.head(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "swiglu"])
def test_feed_forward_written_out(activation):
    # Red with: gate and value exchanged, groups of 8 rows for 16.
    mlp = make("llama", activation=activation, ffn=48, mlp_bias=True).layers[0].mlp
    x = torch.randn(3, 5, 32, dtype=F64)
    up = x @ mlp.up.weight.T + mlp.up.bias
    if activation == "swiglu":
        gate = torch.cat([up[..., i : i + 16] for i in (0, 32, 64)], -1)
        value = torch.cat([up[..., i + 16 : i + 32] for i in (0, 32, 64)], -1)
        inner = gate / (1 + (-gate).exp()) * value
    elif activation == "gelu":
        inner = up * 0.5 * (1 + torch.erf(up / 2**0.5))
    elif activation == "gelu_tanh":
        inner = 0.5 * up * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (up + 0.044715 * up**3)))
    else:
        inner = up.clamp(min=0)
    torch.testing.assert_close(mlp(x), inner @ mlp.down.weight.T + mlp.down.bias, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_loss_is_that_of_the_logits(name):
    # Red with: select applied after the transform's norm was left out, labels shifted by one, z term dropped.
    model, ids = make(name), tokens(3, 8)
    labels = tokens(3, 8, seed=1)
    labels[0, :5] = IGNORE
    logits = model(ids)
    assert logits.shape == (3, 8, VOCAB)
    parts = model(ids, labels=labels, smoothing=0.1, z_loss=1e-2)
    assert isinstance(parts, LossParts)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1)
    z = 1e-2 * logits.logsumexp(-1)[labels != IGNORE].square().sum()
    torch.testing.assert_close(parts.loss_sum, expected + z, rtol=1e-12, atol=0)
    torch.testing.assert_close(parts.z_sum, z, rtol=1e-12, atol=0)
    assert parts.correct == (logits.argmax(-1) == labels).sum()

    select = torch.tensor([[1, 4], [0, 7], [3, 3]])
    rows = torch.arange(3)[:, None]
    torch.testing.assert_close(model(ids, select=select), logits[rows, select], rtol=0, atol=1e-12)
    chosen = model(ids, select=select, labels=labels[rows, select]).loss_sum
    expected = F.cross_entropy(logits[rows, select].flatten(0, 1), labels[rows, select].flatten(), reduction="sum")
    torch.testing.assert_close(chosen, expected, rtol=1e-12, atol=0)


def test_the_head_sees_selected_positions_and_keeps_no_logits(monkeypatch):
    # Red with: logits from F.linear, select applied to the loss of all positions.
    seen, saved = [], []

    def record(hidden, weight, *args, **settings):
        seen.append(hidden.shape)
        return linear_cross_entropy(hidden, weight, *args, **settings)

    monkeypatch.setattr(heads, "linear_cross_entropy", record)
    model = build(ModelConfig(layers=1, width=8, heads=1, ffn=8, vocab=20_000, head_bias=True), "lm")
    initialize(model, 0, "cpu")
    ids = torch.zeros(4, 200, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        model(ids, labels=ids).loss_sum.backward()
        model(ids, select=torch.arange(8)[None].expand(4, 8), labels=ids[:, :8]).loss_sum.backward()
    assert seen == [(800, 8), (32, 8)]
    assert max(saved) <= 20_000 * 8


@pytest.mark.parametrize("pooler", [True, False])
def test_classification(pooler):
    # Red with: the last position taken for the encoder, padding counted as the decoder's last position.
    encoder, ids = make("bert", "classify", pooler=pooler), tokens(2, 6)
    hidden = encoder.run_layers(encoder.embed(ids, None, None), (0, 2), ids, None, None, None, None)
    first = hidden[:, 0]
    if pooler:
        first = (first @ encoder.pooler.weight.T + encoder.pooler.bias).tanh()
    expected = first @ encoder.classifier.weight.T + encoder.classifier.bias
    torch.testing.assert_close(encoder(ids), expected, rtol=0, atol=1e-12)
    labels = torch.tensor([2, IGNORE])
    parts = encoder(ids, labels=labels)
    torch.testing.assert_close(parts.loss_sum, F.cross_entropy(expected, labels, reduction="sum"), rtol=1e-12, atol=0)

    decoder = make("llama", "classify", pooler=pooler)
    padded = pack([ids[0, :4]], 9)
    torch.testing.assert_close(decoder(padded.pop("tokens"), **padded), decoder(ids[:1, :4]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name,task", [("gpt2", "lm"), ("bert", "mlm"), ("bert", "classify"), ("plain", "mlm")])
def test_dropout_does_not_depend_on_the_split(name, task):
    # Red with: the row's index for its sample number in position_keys, one key for all layers (second part).
    model, ids = make(name, task, attention_dropout=0.0), tokens(4, 6)
    keys = position_keys(3, torch.arange(4), torch.arange(6)[None].expand(4, 6))
    whole = model(ids, dropout_key=keys)
    assert not torch.equal(whole, model(ids))
    split = torch.cat([model(ids[rows], dropout_key=keys[rows]) for rows in (slice(0, 1), slice(1, 4))])
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-12)


def test_every_dropout_site_has_a_mask_of_its_own(monkeypatch):
    # Red with: layer_keys returning its argument, MLP_SITE equal to ATTENTION_SITE.
    masks = []

    def record(x, key, site, p):
        masks.append(keep_mask(key, 32, site, p).flatten()[: 2 * 32])
        return x

    monkeypatch.setattr(layers, "dropout", record)
    monkeypatch.setattr(trunk, "dropout", record)
    model, ids = make("bert", "classify", layers=3), tokens(2, 6)
    model(ids, dropout_key=position_keys(3, torch.arange(2), torch.arange(6)[None].expand(2, 6)))
    assert len(masks) == 1 + 3 * 2 + 1
    assert len({tuple(m.tolist()) for m in masks}) == len(masks)


def test_no_key_means_no_dropout_whatever_the_mode():
    model, ids = make("gpt2", dropout=0.5, attention_dropout=0.5), tokens(2, 6)
    assert torch.equal(model.train()(ids), model.eval()(ids))


def test_attention_dropout_is_on_with_a_key():
    model, ids = make("gpt2", dropout=0.0, attention_dropout=0.5), tokens(2, 6)
    keys = position_keys(0, torch.arange(2), torch.arange(6)[None].expand(2, 6))
    assert not torch.equal(model(ids, dropout_key=keys), model(ids))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # read by the compiler itself
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_compiled_blocks_equal_eager_bitwise(name):
    # Red with: a dropout site that differs from layer to layer (recompiles), attention dropout drawn in another order.
    model = make(name, dtype=torch.float32, layers=4, dropout=0.2, attention_dropout=0.1 if name == "bert" else 0.0)
    compiled = copy.deepcopy(model)
    for layer in compiled.layers:
        layer.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    row = pack([tokens(1, n, seed=n)[0] for n in (5, 6)], 16)
    ids = row.pop("tokens")
    keys = position_keys(5, torch.arange(1), torch.arange(16)[None])

    def run(m: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(0)
        m.zero_grad()
        loss = m(ids, labels=ids, dropout_key=keys, **row).loss_sum
        loss.backward()
        return [loss.detach(), *(p.grad for p in m.parameters())]

    torch.compiler.reset()
    all_layers, compiled.layers = compiled.layers, compiled.layers[:1]
    run(compiled)
    compiled.layers = all_layers
    with torch.compiler.set_stance("fail_on_recompile"):  # what was built for one layer serves all
        results = run(compiled)
    assert all(torch.equal(a, b) for a, b in zip(results, run(model), strict=True))
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_compiled_blocks_on_an_accelerator(name, packed):
    if not torch.accelerator.is_available():
        pytest.skip("no accelerator")
    torch.compiler.reset()  # the variants of other models count against the limit of the one code that all layers share
    device = torch.accelerator.current_accelerator()
    oracle = make(name, dtype=torch.bfloat16, init_std=0.1, attention_dropout=0.0)
    model = copy.deepcopy(oracle).to(device)
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=False)
    row = pack([tokens(1, n, seed=n)[0] for n in (5, 9, 17)], 32)
    ids = row.pop("tokens").repeat(2, 1)
    row = {key: value.repeat(2, 1) for key, value in row.items()} if packed else {}
    keys = position_keys(5, torch.arange(2), torch.arange(32)[None].expand(2, 32))
    exact = copy.deepcopy(oracle).double()
    expected = exact(ids, labels=ids, dropout_key=keys, **row).loss_sum
    expected.backward()
    if packed:
        row["cu_seqlens"] = torch.tensor([0, 5, 14, 31, 32, 37, 46, 63, 64], dtype=torch.int32)
    on_device = {key: value.to(device) for key, value in row.items()}
    got = model(ids.to(device), labels=ids.to(device), dropout_key=keys.to(device), **on_device).loss_sum
    got.backward()
    assert got.item() == pytest.approx(expected.item(), rel=5e-3)
    for (parameter_name, parameter), reference in zip(model.named_parameters(), exact.parameters(), strict=True):
        error = (parameter.grad.cpu().double() - reference.grad).norm() / reference.grad.norm().clamp(min=1e-3)
        assert error < 0.08, parameter_name


def test_tied_head_is_one_parameter_with_both_gradients():
    tied, ids = make("qwen3"), tokens(2, 6)
    assert tied.head.weight is tied.embedding.weight and "head.weight" not in dict(tied.named_parameters())
    assert tied.table.ties == (("embedding.weight", "head.weight"),)
    untied = make("qwen3", tied=False)
    untied.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight})
    for model in (tied, untied):
        model(ids, labels=ids).loss_sum.backward()
    both = untied.embedding.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, both, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_precision_follows_the_weights(name):
    # Red with: rope tables in the model's dtype, logits upcast.
    ids, tables = tokens(2, 36), []
    exact = make(name, init_std=0.05)
    assert exact(ids).dtype == F64 and exact(ids, labels=ids).loss_sum.dtype == F64
    low = copy.deepcopy(exact).to(torch.bfloat16)
    low.layers[0].register_forward_pre_hook(lambda _, args: tables.append(args[1]))
    logits = low(ids)
    assert [cos is None or cos.dtype == torch.float32 for cos in tables] == [True]
    assert logits.dtype == torch.bfloat16 and low(ids, labels=ids).loss_sum.dtype == torch.float32
    error = (logits.double() - copy.deepcopy(low).double()(ids)).abs().max() / exact(ids).abs().max()
    assert error < 0.03


def test_norms_are_computed_in_at_least_fp32():
    # Red with: x * rsqrt(mean(x^2)) in bf16, which misses by many units in the last place.
    for norm in ("rms", "layer"):
        model = make("llama", norm=norm, dtype=torch.bfloat16)
        x = torch.randn(64, 32, dtype=torch.bfloat16) * 30 + 20
        expected = copy.deepcopy(model.norm).double()(x.double()).bfloat16()
        assert (model.norm(x) != expected).double().mean() < 5e-3  # ties of double rounding


def test_a_slice_of_whole_groups_is_a_smaller_layer():
    # What tensor parallelism will rest on: halves of the rows of qkv and up, of the columns of out and down, add up.
    layer = make("llama", layers=1, ffn=64).layers[0]
    x = torch.randn(2, 5, 32, dtype=F64)
    for module, rows, columns in ((layer.attention, "qkv", "out"), (layer.mlp, "up", "down")):
        context = (None, None, None, None, None) if module is layer.attention else ()
        total = torch.zeros_like(x)
        for half in range(2):
            part = copy.deepcopy(module)
            a, b = getattr(part, rows), getattr(part, columns)
            a.weight = nn.Parameter(a.weight.chunk(2, 0)[half])
            b.weight = nn.Parameter(b.weight.chunk(2, 1)[half])
            total += part(x, *context)
        torch.testing.assert_close(total, module(x, *context), rtol=0, atol=1e-12)
