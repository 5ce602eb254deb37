"""The jobs that are measured, each as the settings of one of our runs; peers are given the same shapes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.config.schema import Config

__all__ = ["WORKLOADS", "Workload"]


@dataclass(frozen=True)
class Workload:
    """rows: a device and step. targets: what is predicted: next tokens ("causal"), a masked share ("masked") or a label for
    every position ("all"), which is what a language model over a plain encoder is in tutorials."""

    name: str
    model: dict[str, Any]
    rows: int
    seq_len: int
    targets: str
    unit: str

    def config(self, *, devices: int, steps: int, folder: str, **more: Any) -> Config:
        """Settings of our run; `more` are further sections or scalars (precision, compile)."""
        return Config.model_validate(
            {
                "run": {"dir": folder},
                "model": self.model,
                "data": {"seq_len": self.seq_len, "document_mask": False, "valid_fraction": 0.0, "prefetch": 8},
                "objective": {"kind": "causal_lm" if self.targets == "causal" else "masked_lm"},
                "train": {
                    "batch": self.rows * devices,
                    "micro_batch": self.rows,
                    "steps": steps,
                    "lr": 1e-4,
                    "schedule": {"kind": "constant"},
                    "optimizer": {"betas": [0.9, 0.999], "weight_decay": 0.01},
                },
                "checkpoint": {"final": False},
                "log": {"every": max(1, steps // 4), "report": False},
                **more,
            }
        )


def _recipe(name: str, **more: Any) -> dict[str, Any]:
    from meshwright.config.recipes import recipe

    return {**recipe(name), **more}


def _all() -> list[Workload]:
    tiny = {"layers": 2, "width": 64, "heads": 4, "ffn": 128, "vocab": 512}
    return [
        Workload("llama-1b", _recipe("llama-1b"), 4, 4096, "causal", "tokens"),
        Workload("bert-large", _recipe("bert-large"), 64, 512, "masked", "samples"),
        Workload("encoder-24x1024", _recipe("encoder-24x1024"), 32, 512, "all", "samples"),
        Workload("smoke", tiny, 4, 64, "causal", "tokens"),
        Workload("smoke-encoder", {**_recipe("encoder-24x1024"), **tiny}, 4, 64, "all", "samples"),
    ]


WORKLOADS = {workload.name: workload for workload in _all()}
