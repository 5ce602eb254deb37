"""Other tools on our workloads: which there are, what each needs. One file a peer, started by torchrun with -m. No torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

__all__ = ["BEST", "PEERS", "Peer", "missing"]


@dataclass(frozen=True)
class Peer:
    """module: what is started. needs: packages, by import name. workloads: what it can run. arguments: its own flags."""

    name: str
    module: str
    workloads: tuple[str, ...]
    needs: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


_HF = "meshwright.bench.peers.hf_trainer"
_DEEPSPEED = "meshwright.bench.peers.deepspeed"
_TRANSFORMERS = ("transformers", "accelerate")

PEERS = {
    peer.name: peer
    for peer in (
        Peer("ddp", "meshwright.bench.peers.ddp", ("encoder-24x1024", "smoke-encoder")),
        *(
            Peer(f"deepspeed-{stage}", _DEEPSPEED, ("encoder-24x1024", "smoke-encoder"), ("deepspeed",), (f"--stage{stage}",))
            for stage in (1, 2, 3)
        ),
        Peer("hf", _HF, ("llama-1b", "bert-large", "smoke"), _TRANSFORMERS, ("--compile",)),
        Peer("hf-liger", _HF, ("llama-1b", "smoke"), (*_TRANSFORMERS, "liger_kernel"), ("--liger",)),
        Peer(
            "torchtitan",
            "meshwright.bench.peers.torchtitan",
            ("llama-1b", "smoke"),
            ("torchtitan", "torchdata", "datasets", "tyro", "tokenizers"),
        ),
    )
}

BEST = {
    "llama-1b": ("torchtitan", "hf-liger"),
    "bert-large": ("hf",),
    "encoder-24x1024": ("ddp",),
    "smoke-encoder": ("ddp",),
}
"""The peers that `--peers auto` runs: the fastest known ones of each workload."""


def missing(peer: Peer) -> list[str]:
    """Packages that the peer needs and this Python does not have."""
    return [name for name in peer.needs if importlib.util.find_spec(name) is None]
