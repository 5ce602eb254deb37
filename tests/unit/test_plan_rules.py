"""Refused layouts: each with its reason, and each in docs/parallelism.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright.spec.layout import Layout
from meshwright.spec.layout_rules import REFUSALS, refused

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"


def documented() -> list[str]:
    section = PAGE.read_text(encoding="utf-8").split("## Refused")[1]
    return re.findall(r"^\| `.*? \| (.*) \|$", section, flags=re.MULTILINE)


def test_the_page_lists_exactly_what_is_refused():
    # Red when a refusal is added, dropped or reworded on one side only.
    assert documented() == [refusal.why for refusal in REFUSALS]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(dp_replicate=8),
        Layout(dp_shard=2, zero=1),
        Layout(dp_shard=8, zero=2),
        Layout(dp_replicate=2, dp_shard=4, zero=2),
    ],
)
def test_layouts_that_run_are_not_refused(layout):
    assert refused(layout) == []


def test_every_reason_at_once_with_its_number_and_what_to_do():
    found = refused(Layout(pp=2, tp=4, zero=3))
    assert [finding.where for finding in found] == ["layout.pp", "layout.tp", "layout.zero"]
    assert found[1].what == "4, but tensor parallelism is not available" and all(finding.fix for finding in found)
    assert {refusal.key for refusal in REFUSALS} <= set(Layout().to_dict())
