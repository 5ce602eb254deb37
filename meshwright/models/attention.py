"""The one attention that every model calls.

Whole rows go to `scaled_dot_product_attention`. Packed documents go to variable-length flash attention on an
accelerator that has it, and to the same function under a block mask elsewhere, which is also the oracle.

Shapes: B rows, S positions, H query heads, K key/value heads, E features of a head, T = B*S tokens, N documents.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["attention", "block_mask"]

_PRIORITY = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""cuDNN first: measured on an H200, it is 1.4 to 1.9 times as fast as the flash backend that torch would pick."""
_FLASH_DEVICES = ("cuda",)
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_HEAD_DIM = 256


@functools.cache
def _varlen() -> tuple[Callable[..., Any], bool] | None:
    """torch's variable-length attention and whether it takes grouped heads (2.11 does not); None where it is missing."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return (varlen_attn, "enable_gqa" in known) if "window_size" in known else None


_VARLEN = _varlen() if torch.accelerator.is_available() else None  # importing it costs a second and loads the compiler


def block_mask(
    documents_BS: torch.Tensor | None, length: int, *, causal: bool, window: int | None, device: torch.device
) -> torch.Tensor:
    """Which keys a query sees: bool [B or 1, 1, S, S]. Padding (document -1) sees padding, so that no row is empty."""
    query_S1, key_1S = torch.arange(length, device=device)[:, None], torch.arange(length, device=device)[None]
    mask = torch.ones(length, length, dtype=torch.bool, device=device)
    if causal:
        mask = key_1S <= query_S1
    if window is not None:
        mask = mask & (query_S1 - key_1S < window)
        if not causal:
            mask = mask & (key_1S - query_S1 < window)
    if documents_BS is None:
        return mask[None, None]
    return (mask & (documents_BS[:, :, None] == documents_BS[:, None, :]))[:, None]


def _flash_documents(
    q_BSHE: torch.Tensor,
    k_BSKE: torch.Tensor,
    v_BSKE: torch.Tensor,
    cu_seqlens: torch.Tensor,
    window_size: tuple[int, int],
    scale: float | None,
) -> torch.Tensor:
    assert _VARLEN is not None
    varlen_attn, grouped = _VARLEN
    batch, length, heads, _ = q_BSHE.shape
    q_THE, k_TKE, v_TKE = (t.reshape(batch * length, t.shape[2], t.shape[3]) for t in (q_BSHE, k_BSKE, v_BSKE))
    options: dict[str, Any] = {}
    if k_TKE.shape[1] != heads:
        if grouped:
            options["enable_gqa"] = True
        else:
            k_TKE, v_TKE = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k_TKE, v_TKE))
    out_THE = varlen_attn(
        q_THE, k_TKE, v_TKE, cu_seqlens, cu_seqlens, length, length, scale=scale, window_size=window_size, **options
    )
    return out_THE.view(batch, length, heads, -1)


def attention(
    q_BSHE: torch.Tensor,
    k_BSKE: torch.Tensor,
    v_BSKE: torch.Tensor,
    *,
    causal: bool,
    documents: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(q k^T * scale) v for every head, [B, S, H, E]; query head h reads key/value head h // (H/K).

    documents   int [B, S], tokens see their own document only; -1 is padding. None: a row is one document
    cu_seqlens  int32 [N+1], the same boundaries over the T flattened tokens; needed by the accelerator's path only
    window      keys a query sees, itself included
    dropout_p   of the attention weights, drawn from the device's generator
    scale       default 1/sqrt(E)
    """
    length, device = q_BSHE.shape[1], q_BSHE.device
    masked = documents is not None or (window is not None and window < length)
    flash = (
        device.type in _FLASH_DEVICES
        and _VARLEN is not None
        and q_BSHE.dtype in _FLASH_DTYPES
        and q_BSHE.shape[-1] % 8 == 0
        and q_BSHE.shape[-1] <= _FLASH_HEAD_DIM
        and dropout_p == 0.0
    )
    if masked and flash and (documents is None or cu_seqlens is not None):
        if documents is None:
            cu_seqlens = torch.arange(0, q_BSHE.shape[0] * length + 1, length, dtype=torch.int32, device=device)
        reach = -1 if window is None else window - 1
        assert cu_seqlens is not None
        return _flash_documents(q_BSHE, k_BSKE, v_BSKE, cu_seqlens, (reach, 0 if causal else reach), scale)
    mask = block_mask(documents, length, causal=causal, window=window, device=device) if masked else None
    with contextlib.nullcontext() if device.type == "cpu" else sdpa_kernel(_PRIORITY, set_priority=True):
        out_BHSE = F.scaled_dot_product_attention(
            q_BSHE.transpose(1, 2),
            k_BSKE.transpose(1, 2),
            v_BSKE.transpose(1, 2),
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=causal and mask is None,
            scale=scale,
            enable_gqa=q_BSHE.shape[2] != k_BSKE.shape[2],
        )
    return out_BHSE.transpose(1, 2)
