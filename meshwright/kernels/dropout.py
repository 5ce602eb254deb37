"""Dropout as a pure function of (seed, global sample number, position, site, feature).

Nothing is drawn from a generator state, so the mask of an element is the same on any number of ranks, in any
micro-batch split, under recompute and on any device. Integer arithmetic is int32 that wraps modulo 2^32, which CPU,
CUDA and compiled code agree on bit for bit.

Shapes: B rows, S positions, D features.
"""

from __future__ import annotations

import torch

__all__ = ["dropout", "keep_mask", "position_keys"]

_WORD = 2**32
_SEED, _SAMPLE, _HIGH, _POSITION = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F
_SITE, _FEATURE = 0x632BE5AB, 0x9E3779B1
_M1, _M2 = 0x7FEB352D, 0x846CA68B
"""Odd multipliers; 16/15 shifts with these two are the low-bias 32-bit finaliser found by C. Wellons' search
(https://nullprogram.com/blog/2018/07/31/)."""


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of `value`."""
    return (value + 2**31) % _WORD - 2**31


def _mix_number(x: int) -> int:
    """The finaliser on a Python integer: for what is known on the host."""
    x %= _WORD
    x = (x ^ (x >> 16)) * _M1 % _WORD
    x = (x ^ (x >> 15)) * _M2 % _WORD
    return x ^ (x >> 16)


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """The finaliser in place on an int32 tensor, without its last shift: every caller goes on from the high bits."""
    x ^= (x >> 16) & 0xFFFF
    x *= _signed(_M1)
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed(_M2)
    return x


def _low_word(x: torch.Tensor) -> torch.Tensor:
    """Low 32 bits of an integer tensor as int32, by arithmetic that never overflows."""
    return (((x.long() & (_WORD - 1)) ^ 2**31) - 2**31).to(torch.int32)


def position_keys(seed: int, samples_B: torch.Tensor, positions_BS: torch.Tensor) -> torch.Tensor:
    """One key a token: int32 [B, S].

    seed          of the run, any integer
    samples_B     int64 [B], global sample numbers; they never repeat within a run, so they stand for the step too
    positions_BS  integer [B, S] or [S]: the offset in the *row* (not in its document, which would repeat keys in a
                  packed row); under context parallelism the global offsets of the local tokens
    """
    start = _mix_number(seed + _SEED) ^ _mix_number((seed >> 32) + _HIGH)
    key_B1 = _low_word(samples_B).mul(_signed(_SAMPLE)).add_(_signed(start))
    key_B1 = _mix_(key_B1).add_(_low_word(samples_B.long() >> 32).mul_(_signed(_HIGH)))[:, None]
    key_BS = key_B1 + _low_word(positions_BS).mul_(_signed(_POSITION))
    key_BS = _mix_(key_BS)
    return key_BS ^ ((key_BS >> 16) & 0xFFFF)


def keep_mask(key_BS: torch.Tensor, features: int, site: int, p: float) -> torch.Tensor:
    """Which elements stay: bool [B, S, features], each true with probability 1 - p (to 2^-32).

    site is any integer that names the place in the model; every place needs its own.
    """
    token_BS1 = (key_BS + _signed(site * _SITE))[..., None]
    feature_D = torch.arange(features, dtype=torch.int32, device=key_BS.device) * _signed(_FEATURE)
    bits_BSD = _mix_(token_BS1 + feature_D)
    return bits_BSD >= min(round(p * _WORD), _WORD - 1) - 2**31


def _scaled(x_BSD: torch.Tensor, key_BS: torch.Tensor, site: int, p: float) -> torch.Tensor:
    keep_BSD = keep_mask(key_BS, x_BSD.shape[-1], site, p)
    return torch.where(keep_BSD, x_BSD * (1.0 / (1.0 - p)), 0.0)


class _Dropout(torch.autograd.Function):
    """Saves the keys, 1/D of the mask, and draws the mask again in backward."""

    @staticmethod
    def forward(ctx, x_BSD, key_BS, site, p):
        ctx.save_for_backward(key_BS)
        ctx.site, ctx.p = site, p
        return _scaled(x_BSD, key_BS, site, p)

    @staticmethod
    def backward(ctx, grad_BSD):
        (key_BS,) = ctx.saved_tensors
        return _scaled(grad_BSD, key_BS, ctx.site, ctx.p), None, None, None


def dropout(x_BSD: torch.Tensor, key_BS: torch.Tensor | None, site: int, p: float) -> torch.Tensor:
    """`x` with elements zeroed with probability p and the others divided by 1 - p; `x` itself when p is 0 or key None.

    x_BSD   any floating dtype, [B, S, D] (or [B, D] beside a key [B])
    key_BS  int32 from `position_keys`
    """
    if key_BS is None or p == 0.0:
        return x_BSD
    if torch.compiler.is_compiling():  # the partitioner finds by itself that the mask follows from the keys
        return _scaled(x_BSD, key_BS, site, p)
    return _Dropout.apply(x_BSD, key_BS, site, p)
