"""Known accelerators by the names that drivers give; data-sheet numbers without sparsity."""

from __future__ import annotations

import re

import pytest

from meshwright.plan.hardware import ACCELERATORS, lookup


@pytest.mark.parametrize(
    ("driver", "name", "bf16", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.4, 3352),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756.5, 2039),
        ("NVIDIA H100 NVL", "H100 NVL", 835.5, 3938),
        ("NVIDIA H200", "H200", 989.4, 4800),
        ("NVIDIA H200 NVL", "H200 NVL", 835.5, 4800),
        ("NVIDIA GH200 480GB", "GH200", 989.4, 4000),
        ("NVIDIA H800", "H800 SXM", 989.4, 3352),
        ("NVIDIA H20", "H20", 148, 4000),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB", 312, 2039),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB", 312, 1555),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB", 312, 1935),
        ("A100-PCIE-40GB", "A100 PCIe 40GB", 312, 1555),
        ("NVIDIA A800-SXM4-80GB", "A800 SXM 80GB", 312, 2039),
        ("NVIDIA A800 80GB PCIe", "A800 PCIe 80GB", 312, 1935),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 165.2, 1008),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D", 147.1, 1008),
        ("NVIDIA GeForce RTX 3090", "RTX 3090", 71, 936),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti", 80, 1008),
        ("NVIDIA L40S", "L40S", 362, 864),
        ("NVIDIA L40", "L40", 181, 864),
        ("NVIDIA L4", "L4", 121, 300),
        ("NVIDIA A10", "A10", 125, 600),
        ("NVIDIA B200", "B200", 2250, 7700),
        ("AMD Instinct MI300X", "MI300X", 1307.4, 5300),
        ("Tesla V100-SXM2-32GB", "V100 SXM 32GB", None, 900),
        ("Tesla V100-SXM2-16GB", "V100 SXM 16GB", None, 900),
        ("Tesla V100-PCIE-16GB", "V100 PCIe 16GB", None, 900),
        ("Tesla T4", "T4", None, 320),
    ],
)
def test_driver_names_are_found(driver: str, name: str, bf16: float | None, bandwidth: float) -> None:
    found = lookup(driver)
    assert found is not None and found.name == name
    assert found.peak.get("bf16") == (None if bf16 is None else bf16 * 1e12)
    assert found.bandwidth == bandwidth * 1e9


@pytest.mark.parametrize(
    "driver",
    [
        "Intel(R) Xeon(R) Platinum 8480+",
        "NVIDIA A10G",
        "NVIDIA H20-3e",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "Tesla V100S-PCIE-32GB",
        "NVIDIA T4G",
        "",
    ],
)
def test_what_is_not_in_the_table_is_unknown(driver: str) -> None:
    assert lookup(driver) is None


def test_the_table_is_consistent() -> None:
    names = [known.name for known in ACCELERATORS]
    assert len(set(names)) == len(names)
    for known in ACCELERATORS:
        re.compile(known.pattern)
        assert known.peak["fp32"] <= known.peak.get("tf32", known.peak["fp16"]) <= known.peak["fp16"]
        assert known.peak.get("bf16", known.peak["fp16"]) == known.peak["fp16"]
        assert 15 * 2**30 < known.memory < 300 * 2**30 and 3e11 <= known.bandwidth < 1e13
