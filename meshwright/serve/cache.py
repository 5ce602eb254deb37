"""Blocks of the key/value cache: who holds which, and which prefixes are known already. No torch here; `serve.pages` has the
memory.

A block holds the keys and values of `block_size` consecutive tokens of one sequence. A full block is known by the digest of all
tokens up to its end, so another sequence that begins alike takes it over instead of computing it. A block is

    free     nobody holds it, and nothing in it is of use
    idle     nobody holds it, but its prefix may come again: the least recently used is taken where none is free
    held     by one sequence, or by several that begin alike
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from meshwright.errors import Finding, UserError

__all__ = ["BLOCK_SIZE", "BlockPool", "block_digest"]

BLOCK_SIZE = 16
"""Tokens of a block where nothing else is said."""


def block_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """Of a block's tokens and, by the digest of the block before it, of all tokens before. A cryptographic one: whoever makes
    two prefixes with one digest would read another one's answer."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class BlockPool:
    """`blocks` blocks of `block_size` tokens.

    prefix: whether full blocks are kept for others. hits, asked: tokens found, and looked for, in blocks of other sequences.
    """

    def __init__(self, blocks: int, block_size: int, *, prefix: bool = True):
        findings = [
            Finding(name, f"{value!r} is not a whole number >= 1")
            for name, value in (("blocks", blocks), ("block_size", block_size))
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
        ]
        if findings:
            raise UserError(findings=findings)
        self.blocks, self.block_size, self.prefix = blocks, block_size, prefix
        self.hits = self.asked = 0
        self._free = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * blocks
        self._digests: dict[int, bytes] = {}
        self._known: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Blocks that `take` can give."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        return self.blocks - self.available

    def needed(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def find(self, tokens: Sequence[int]) -> list[tuple[int, bytes]]:
        """The longest known prefix in whole blocks, (block, digest) each, never all of `tokens`: the last one is to be
        computed, for its logits. Nobody holds them by that: `hold` them before anything else is taken."""
        found: list[tuple[int, bytes]] = []
        digest = b""
        if self.prefix:
            for start in range(0, len(tokens) - self.block_size, self.block_size):
                digest = block_digest(digest, tokens[start : start + self.block_size])
                block = self._known.get(digest)
                if block is None:
                    break
                found.append((block, digest))
        return found

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of these `available` would lose if they were held."""
        return sum(block in self._idle for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder of each."""
        for block in blocks:
            assert self._holders[block] or block in self._idle, f"block {block} is free"
            self._idle.pop(block, None)
            self._holders[block] += 1

    def take(self, count: int) -> list[int] | None:
        """Blocks with one holder and nothing in them; None, and nothing changes, where there are not so many."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                del self._known[self._digests.pop(block)]
            self._holders[block] = 1
            taken.append(block)
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """One holder less of each, in the order of a sequence: of its idle blocks the last is forgotten first, for the others
        are of no use without those before them."""
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"nobody holds block {block}"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._digests:
                self._idle[block] = None
            else:
                self._free.append(block)

    def learn(self, block: int, digest: bytes) -> None:
        """`block`, held, is full, and its keys and values are computed. Where the prefix is known already the old block stays
        the one that is found."""
        assert self._holders[block] > 0, f"nobody holds block {block}"
        if self.prefix and digest not in self._known and block not in self._digests:
            self._known[digest] = block
            self._digests[block] = digest

    def check(self, held: Iterable[Sequence[int]] | None = None) -> None:
        """Raises AssertionError where the books are wrong. held: the blocks of every sequence, all holders that there are."""
        free, idle = set(self._free), set(self._idle)
        used = {block for block, count in enumerate(self._holders) if count}
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & idle and not free & used and not idle & used, "a block is in two places"
        assert free | idle | used == set(range(self.blocks)), "a block is lost"
        assert all(count >= 0 for count in self._holders)
        assert idle <= self._digests.keys(), "an idle block has no digest"
        assert not free & self._digests.keys(), "a free block is known"
        assert {digest: block for block, digest in self._digests.items()} == self._known, "digests and blocks differ"
        if held is not None:
            counts = [0] * self.blocks
            for blocks in held:
                assert len(set(blocks)) == len(blocks), "a sequence has a block twice"
                for block in blocks:
                    counts[block] += 1
            assert counts == self._holders, "holders are not those of the sequences"
