"""Dropout as a pure function of (seed, global sample number, position, site, feature).

Nothing is drawn from a generator state, so the mask of an element is the same on any number of ranks, in any
micro-batch split, under recompute and on any device. The arithmetic is that of 32-bit words modulo 2^32, on which CPU,
CUDA and compiled code agree bit for bit.

Shapes: B rows, S positions, D features.
"""

from __future__ import annotations

import torch

from meshwright.kernels.accelerated import pointwise_kernels

__all__ = ["FEATURE", "FIRST", "SECOND", "dropout", "in_words", "keep_mask", "plain_dropout", "position_keys"]

_WORD = 2**32
_SEED, _HIGH, _SITE = 0x9E3779B9, 0x42B2AE35, 0x632BE5AB
_SAMPLE, _POSITION = 0x5BD1E995, 0x27D4EB2F
FEATURE = 0x9E3779B1
"""Odd, so that multiples differ modulo 2^32. _HIGH, _SAMPLE and _POSITION are under 2^31: times a word they fit int64."""
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
"""Odd multipliers; 16/15/16 shifts with these two are the low-bias 32-bit finaliser found by C. Wellons' search
(https://nullprogram.com/blog/2018/07/31/)."""


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of `value`."""
    return (value + 2**31) % _WORD - 2**31


def _mix_number(x: int) -> int:
    """The finaliser on a Python integer: for what is known on the host."""
    x %= _WORD
    x = (x ^ (x >> 16)) * FIRST % _WORD
    x = (x ^ (x >> 15)) * SECOND % _WORD
    return x ^ (x >> 16)


def _wrapped(x: torch.Tensor) -> torch.Tensor:
    """An int64 tensor reduced to the int32 range, modulo 2^32, by arithmetic that never overflows."""
    return ((x & (_WORD - 1)) ^ 2**31) - 2**31


def _times(x: torch.Tensor, factor: int) -> torch.Tensor:
    """x * factor modulo 2^32: an int32 x in place, an int64 one (of int32 values) without ever overflowing."""
    return x.mul_(factor) if x.dtype == torch.int32 else _wrapped(x * factor)


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """The finaliser, in place where x is int32, without its last shift: what follows goes by the high bits."""
    x ^= (x >> 16) & 0xFFFF
    x = _times(x, _signed(FIRST))
    x ^= (x >> 15) & 0x1FFFF
    return _times(x, _signed(SECOND))


def _word(x: torch.Tensor) -> torch.Tensor:
    """The type to go on in. Compiled for a CPU, an int32 that overflows is undefined behaviour in C++, which compilers do
    use (a loop over features that never ends); int64 never overflows here. Elsewhere int32 wraps and is faster."""
    wide = torch.compiler.is_compiling() and x.device.type == "cpu"
    return x.long() if wide else x.to(torch.int32)


def _multiple(x: torch.Tensor, factor: int) -> torch.Tensor:
    """Low word of x * factor, for int64 x of which the low word counts, and factors under 2^31 (or x under 2^31)."""
    return _wrapped((x & (_WORD - 1)) * factor)


def position_keys(seed: int, samples_B: torch.Tensor, positions_BS: torch.Tensor) -> torch.Tensor:
    """One key a token: int32 [B, S].

    seed          of the run, any integer
    samples_B     int64 [B], global sample numbers; they never repeat within a run, so they stand for the step too
    positions_BS  integer [B, S] or [S]: the offset in the *row* (not in its document, which would repeat keys in a
                  packed row); under context parallelism the global offsets of the local tokens
    """
    start = _signed(_mix_number(seed + _SEED) ^ _mix_number((seed >> 32) + _HIGH))
    samples_B = samples_B.long()
    key_B = _mix_(_word(_wrapped(_multiple(samples_B, _SAMPLE) + start)))
    key_B = _word(_wrapped(key_B.long() + _multiple(samples_B >> 32, _HIGH)))
    key_BS = _wrapped(key_B.long()[:, None] + _multiple(positions_BS.long(), _POSITION))
    key_BS = _mix_(_word(key_BS)).to(torch.int32)
    return key_BS ^ ((key_BS >> 16) & 0xFFFF)


def keep_mask(key_BS: torch.Tensor, features: int, site: int, p: float) -> torch.Tensor:
    """Which elements stay: bool [B, S, features], each true with probability 1 - p (to 2^-32).

    site is any integer that names the place in the model; every place needs its own.
    """
    features_D = _word(_multiple(torch.arange(features, device=key_BS.device), FEATURE))
    token_BS1 = _word(_wrapped(key_BS.long() + in_words(site, p)[0]))[..., None]
    bits_BSD = token_BS1 + features_D
    bits_BSD = _mix_(bits_BSD if bits_BSD.dtype == torch.int32 else _wrapped(bits_BSD))
    return bits_BSD >= in_words(site, p)[1]


def in_words(site: int, p: float) -> tuple[int, int, float]:
    """What is added to a key, an int32; the smallest int32 of a hash that keeps its element; and the factor of what is kept."""
    return _signed(site * _SITE), min(round(p * _WORD), _WORD - 1) - 2**31, 1.0 / (1.0 - p)


def plain_dropout(x_BSD: torch.Tensor, key_BS: torch.Tensor, site: int, p: float) -> torch.Tensor:
    """As `dropout`, for 0 < p < 1."""
    keep_BSD = keep_mask(key_BS, x_BSD.shape[-1], site, p)
    return torch.where(keep_BSD, x_BSD * in_words(site, p)[2], 0.0)


def _dropped(x_BSD: torch.Tensor, key_BS: torch.Tensor, site: int, p: float) -> torch.Tensor:
    """`plain_dropout` in one kernel where there is one: without a compiler it is some thirty, each a pass over memory."""
    kernels = pointwise_kernels(x_BSD.device)
    if kernels is None:
        return plain_dropout(x_BSD, key_BS, site, p)
    return kernels.dropped(x_BSD, key_BS, *in_words(site, p))


class _Dropout(torch.autograd.Function):
    """Saves the keys, 1/D of the mask, and draws the mask again in backward."""

    @staticmethod
    def forward(ctx, x_BSD, key_BS, site, p):
        ctx.save_for_backward(key_BS)
        ctx.site, ctx.p = site, p
        return _dropped(x_BSD, key_BS, site, p)

    @staticmethod
    def backward(ctx, grad_BSD):
        (key_BS,) = ctx.saved_tensors
        return _dropped(grad_BSD, key_BS, ctx.site, ctx.p), None, None, None


def dropout(x_BSD: torch.Tensor, key_BS: torch.Tensor | None, site: int, p: float) -> torch.Tensor:
    """`x` with elements zeroed with probability p and the others divided by 1 - p; `x` itself when p is 0 or key None.

    x_BSD   any floating dtype, [B, S, D] (or [B, D] beside a key [B])
    key_BS  int32 from `position_keys`
    """
    if key_BS is None or p == 0.0:
        return x_BSD
    if torch.compiler.is_compiling():  # the partitioner finds by itself that the mask follows from the keys
        return plain_dropout(x_BSD, key_BS, site, p)
    return _Dropout.apply(x_BSD, key_BS, site, p)
