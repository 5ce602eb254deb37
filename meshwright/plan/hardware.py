"""What is known about accelerators: dense peak rates, memory bandwidth, memory. Data only, no torch.

Peaks are the makers' data-sheet numbers *without* sparsity, for matmuls that accumulate in fp32 (what training uses; the
GeForce cards list twice that for fp16 accumulation). `fp32` is plain fp32 arithmetic, `tf32` the tensor-core mode that fp32
tensors may use. A precision that a device has no fast path for is absent. No card sustains its data-sheet peak: an H200
reaches 80% of it on large bf16 matmuls.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["ACCELERATORS", "Accelerator", "lookup"]

TERA = 1e12
GB = 1e9
GIB = 2**30


@dataclass(frozen=True)
class Accelerator:
    """name: as the field calls it. pattern: regular expression over the name that the driver gives, spaces and case free.
    peak: precision -> FLOP/s, dense. bandwidth: bytes/s of device memory. memory: bytes, nominal (ask the driver for what is
    really there)."""

    name: str
    pattern: str
    peak: MappingProxyType[str, float]
    bandwidth: float
    memory: int


def _known(name: str, pattern: str, *, half: float, tf32: float | None, fp32: float, bandwidth: float, memory: int,
           bf16: bool = True) -> Accelerator:  # fmt: skip
    """Rates in TFLOP/s, bandwidth in GB/s, memory in GiB, as data sheets write them. `half`: fp16, and bf16 where it is."""
    peak = {"fp16": half, "fp32": fp32} | ({"bf16": half} if bf16 else {}) | ({"tf32": tf32} if tf32 else {})
    rates = MappingProxyType({precision: rate * TERA for precision, rate in peak.items()})
    return Accelerator(name, pattern, rates, bandwidth * GB, memory * GIB)


# The first pattern that is found in the driver's name wins, so the narrower name stands before the wider one.
ACCELERATORS: tuple[Accelerator, ...] = (
    _known("B200", r"\bB200\b", half=2250, tf32=1125, fp32=75, bandwidth=7700, memory=180),
    _known("GH200", r"\bGH200\b", half=989.4, tf32=494.7, fp32=66.9, bandwidth=4000, memory=96),
    _known("H200 NVL", r"\bH200 NVL\b", half=835.5, tf32=417.5, fp32=60, bandwidth=4800, memory=141),
    _known("H200", r"\bH200\b", half=989.4, tf32=494.7, fp32=66.9, bandwidth=4800, memory=141),
    _known("H100 NVL", r"\bH100 NVL\b", half=835.5, tf32=417.5, fp32=60, bandwidth=3938, memory=94),
    _known("H100 PCIe", r"\bH100 PCIE\b", half=756.5, tf32=378, fp32=51.2, bandwidth=2039, memory=80),
    _known("H100 SXM", r"\bH100 (80GB HBM\d|SXM)", half=989.4, tf32=494.7, fp32=66.9, bandwidth=3352, memory=80),
    _known("H800 PCIe", r"\bH800 PCIE\b", half=756.5, tf32=378, fp32=51.2, bandwidth=2039, memory=80),
    _known("H800 SXM", r"\bH800\b", half=989.4, tf32=494.7, fp32=66.9, bandwidth=3352, memory=80),
    _known("H20", r"\bH20\b(?! 3E)", half=148, tf32=74, fp32=44, bandwidth=4000, memory=96),
    _known("A100 SXM 40GB", r"\bA100 SXM4 40GB\b", half=312, tf32=156, fp32=19.5, bandwidth=1555, memory=40),
    _known("A100 PCIe 40GB", r"\bA100 PCIE 40GB\b", half=312, tf32=156, fp32=19.5, bandwidth=1555, memory=40),
    _known("A100 PCIe 80GB", r"\bA100 (80GB PCIE|PCIE 80GB)\b", half=312, tf32=156, fp32=19.5, bandwidth=1935, memory=80),
    _known("A100 SXM 80GB", r"\bA100 SXM4 80GB\b", half=312, tf32=156, fp32=19.5, bandwidth=2039, memory=80),
    _known("A800 PCIe 80GB", r"\bA800 (80GB PCIE|PCIE 80GB)\b", half=312, tf32=156, fp32=19.5, bandwidth=1935, memory=80),
    _known("A800 SXM 80GB", r"\bA800 SXM4 80GB\b", half=312, tf32=156, fp32=19.5, bandwidth=2039, memory=80),
    _known("A40", r"\bA40\b", half=149.7, tf32=74.8, fp32=37.4, bandwidth=696, memory=48),
    _known("A30", r"\bA30\b", half=165, tf32=82, fp32=10.3, bandwidth=933, memory=24),
    _known("A10", r"\bA10\b", half=125, tf32=62.5, fp32=31.2, bandwidth=600, memory=24),
    _known("RTX A6000", r"\bRTX A6000\b", half=154.8, tf32=77.4, fp32=38.7, bandwidth=768, memory=48),
    _known("L40S", r"\bL40S\b", half=362, tf32=183, fp32=91.6, bandwidth=864, memory=48),
    _known("L40", r"\bL40\b", half=181, tf32=90.5, fp32=90.5, bandwidth=864, memory=48),
    _known("L4", r"\bL4\b", half=121, tf32=60, fp32=30.3, bandwidth=300, memory=24),
    _known("RTX 5090", r"\bRTX 5090\b(?! D| LAPTOP)", half=209.5, tf32=104.8, fp32=104.8, bandwidth=1792, memory=32),
    _known("RTX 4090 D", r"\bRTX 4090 D\b", half=147.1, tf32=73.5, fp32=73.5, bandwidth=1008, memory=24),
    _known("RTX 4090", r"\bRTX 4090\b(?! LAPTOP)", half=165.2, tf32=82.6, fp32=82.6, bandwidth=1008, memory=24),
    _known("RTX 3090 Ti", r"\bRTX 3090 TI\b", half=80, tf32=40, fp32=40, bandwidth=1008, memory=24),
    _known("RTX 3090", r"\bRTX 3090\b", half=71, tf32=35.6, fp32=35.6, bandwidth=936, memory=24),
    _known("V100 SXM 32GB", r"\bV100 SXM\d 32GB\b", half=125, tf32=None, fp32=15.7, bandwidth=900, memory=32, bf16=False),
    _known("V100 PCIe 32GB", r"\bV100 PCIE 32GB\b", half=112, tf32=None, fp32=14, bandwidth=900, memory=32, bf16=False),
    _known("V100 PCIe 16GB", r"\bV100 PCIE\b", half=112, tf32=None, fp32=14, bandwidth=900, memory=16, bf16=False),
    _known("V100 SXM 16GB", r"\bV100 SXM\d\b", half=125, tf32=None, fp32=15.7, bandwidth=900, memory=16, bf16=False),
    _known("T4", r"\bT4\b", half=65, tf32=None, fp32=8.1, bandwidth=320, memory=16, bf16=False),
    _known("MI300X", r"\bMI300X\b", half=1307.4, tf32=653.7, fp32=163.4, bandwidth=5300, memory=192),
)


def lookup(device_name: str) -> Accelerator | None:
    """The known accelerator behind a driver's device name ("NVIDIA A100-SXM4-80GB"), or None.

    A part of a card (MIG) has only a part of the rates, so it is unknown here.
    """
    name = " ".join(re.split(r"[\s\-_/]+", device_name.upper()))
    if re.search(r"\bMIG\b", name):
        return None
    return next((known for known in ACCELERATORS if re.search(known.pattern, name)), None)
