"""Canaries: what `meshwright.compat` hides still is as it believes. One that fails says what to look at after an upgrade."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from meshwright import compat
from meshwright.distributed.environment import World
from meshwright.distributed.world import init_world


def test_the_collectives_are_the_newest_names_and_do_not_warn():
    for name, old in (("all_gather_single", "all_gather_into_tensor"), ("reduce_scatter_single", "reduce_scatter_tensor")):
        assert hasattr(dist, name) or hasattr(dist, old), f"neither {name} nor {old}: torch renamed it again"
    with init_world(World()), warnings.catch_warnings():
        warnings.simplefilter("error")
        out, source = torch.empty(3), torch.arange(3.0)
        compat.all_gather_single(out, source)
        assert torch.equal(out, source)
        compat.reduce_scatter_single(out, 2 * source)
        assert torch.equal(out, 2 * source)


def test_the_flash_operators_take_what_they_are_given():
    # Run on a GPU by tests/gpu/test_context.py; here their order of arguments, which is what releases change.
    forward, backward = torch.ops.aten._flash_attention_forward.default, torch.ops.aten._flash_attention_backward.default
    named = [[each.name for each in operator._schema.arguments] for operator in (forward, backward)]
    given = ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    assert named[0][:10] == ["query", "key", "value", *given, "return_debug_mask"] and "scale" in named[0]
    assert named[1][:14] == ["grad_out", "query", "key", "value", "out", "logsumexp", *given, "rng_state", "unused"]
    assert "scale" in named[1] and len(forward._schema.returns) == 5 and len(backward._schema.returns) == 3
    q, k = (
        torch.empty(24, 4, 16, dtype=torch.bfloat16, device="meta"),
        torch.empty(16, 2, 16, dtype=torch.bfloat16, device="meta"),
    )
    cu = torch.empty(4, dtype=torch.int32, device="meta")
    out, lse = compat.flash_forward(q, k, k, cu, cu, (12, 8), False, 1.0)
    assert out.shape == q.shape and lse.shape == (4, 24) and lse.dtype == torch.float32
    gradients = compat.flash_backward(out, q, k, k, out, lse, cu, cu, (12, 8), False, 1.0)
    assert [each.shape for each in gradients] == [q.shape, k.shape, k.shape]


def test_a_scheduler_sees_a_step_by_the_name_that_we_set():
    """Red when torch calls it otherwise: a scheduler's first step then warns."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    compat.count_step(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()


def test_what_normalises_over_rows_has_one_base_class():
    """Red when torch makes one of them otherwise: it would then be left to each rank, without a word."""
    norms = [torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm]
    assert all(issubclass(norm, compat.BatchNorm) for norm in norms)
    assert all(issubclass(norm, compat.NormBase) for norm in [*norms, torch.nn.InstanceNorm1d])
    assert not issubclass(torch.nn.LayerNorm, compat.NormBase)


def test_a_file_of_tensors_is_for_whom_any_new_file_is(tmp_path):
    # Red with safetensors alone: 0600, which nobody else, such as a container's user, can read.
    plain, path = tmp_path / "plain", tmp_path / "model.safetensors"
    plain.touch()
    for _ in range(2):
        compat.save_tensors({"a": torch.arange(3.0)}, path, {"format": "pt"})
    assert path.stat().st_mode == plain.stat().st_mode
    assert load_file(path)["a"].tolist() == [0.0, 1.0, 2.0]
