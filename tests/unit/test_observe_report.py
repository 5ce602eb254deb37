"""report.html: whole, readable without a network, right for short, broken and resumed runs."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cli import main
from meshwright.errors import UserError
from meshwright.observe.metrics import MetricsWriter
from meshwright.observe.plots import figures, thin
from meshwright.observe.report import write_report
from meshwright.observe.summary import save_facts, summarise


def line(step: int, **more: object) -> dict:
    split = {"compute": 0.2, "communication": 0.05, "data": 0.02, "checkpoint": 0.0, "evaluate": 0.0, "idle": 0.03, "wall": 0.3}
    base = {"step": step, "loss": 5.0 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens": 64 * step, "tokens_per_s": 213.0}
    return {**base, "split": split, "memory": {"rss": 2**30}, **more}


def make_run(folder: Path, lines: list[dict], resume_step: int = 0) -> Path:
    with MetricsWriter(folder / "metrics.jsonl", resume_step) as writer:
        for one in lines:
            writer.write(**one)
    return folder


class Page(HTMLParser):
    """What the page is made of: tags that load something, balance of the tags, text outside scripts."""

    VOID = ("meta", "br", "link", "img", "input", "hr")

    def __init__(self, text: str):
        super().__init__()
        self.loads: list[tuple[str, str]] = []
        self.stack: list[str] = []
        self.text = ""
        self.plots = 0
        self.policy = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        for name in ("src", "href", "srcset", "data", "action"):
            if values.get(name):
                self.loads.append((tag, str(values[name])))
        if tag == "meta" and values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""
        self.plots += "plotly-graph-div" in (values.get("class") or "")
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack[-1] == tag, (tag, self.stack[-5:])
        self.stack.pop()

    def handle_data(self, data: str) -> None:
        if "script" not in self.stack and "style" not in self.stack:
            self.text += data


def page_of(run: Path) -> Page:
    text = write_report(run).read_text(encoding="utf-8")
    page = Page(text)
    assert page.stack == []
    assert page.loads == []  # not one address to load from
    assert page.policy.startswith("default-src 'none'") and "http" not in page.policy and "*" not in page.policy
    assert "Plotly" in text and len(text) > 1_000_000  # the library is inside
    return page


def test_a_whole_run(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "我的<run>",
        [
            line(
                s,
                mfu=0.3,
                loss_scale=1024.0,
                noise_scale=40.0,
                samples_per_s=3.3,
                **({"val_loss": 2.0, "val_perplexity": 7.389} if s == 5 else {}),
            )
            for s in range(1, 11)
        ],
    )
    (run / "config.yaml").write_text("run: {seed: 3}\nmodel: {recipe: '<b>debug</b>', width: 64}\ntrain: {lr: 0.0003}\n")
    (run / "plan.json").write_text(json.dumps({"layout": {"dp_shard": 2}, "reason": "it fits"}))
    save_facts(run, machine={"devices": "2 x H200", "versions": {"torch": "2.13.0"}})
    save_facts(run, summary=summarise([], devices=2, peak_rate=989.4e12, peak_source="H200 data sheet, bf16 dense"))
    page = page_of(run)
    assert page.plots == 9
    for expected in (
        "Run 我的<run>", "<b>debug</b>", "train.lr0.0003", "layout.dp_shard2", "2 x H200", "versions.torch2.13.0",
        "MFU30.0% of 2 x 989.4 TFLOP/s: H200 data sheet, bf16 dense", "held-out loss2.0000 (perplexity 7.389)",
        "time: compute2.00 s, 66.7%", "4 values of config.yaml",
    ):  # fmt: skip
        assert expected in page.text, expected


def test_a_run_of_one_step_with_nothing_beside_it(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, [line(1)]))
    assert "not recorded" in page.text and page.plots == 6


def test_only_a_loss_that_is_scaled_has_a_curve_of_its_scale() -> None:
    from meshwright.observe.plots import figures

    def titles(*scales: float) -> list[str]:
        records = [line(step, loss_scale=scale) for step, scale in enumerate(scales, start=1)]
        return [figure.layout.title.text for _, figure in figures(records)]

    assert "loss scale" not in titles(1.0, 1.0) and "loss scale" in titles(2.0, 1.0)


def test_steps_that_are_not_finite_are_named(tmp_path: Path) -> None:
    lines = [line(s) for s in range(1, 31)]
    for step in (7, 8):
        lines[step - 1] |= {"loss": math.nan, "grad_norm": math.inf}
    page = page_of(make_run(tmp_path, lines))
    assert "2 step(s) with values that are not finite (grad_norm, loss): step 7, 8." in page.text


def test_a_run_whose_every_loss_is_nan(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path, [line(s, loss=math.nan) for s in (1, 2)]))
    assert page.plots == 5  # no loss curve, the others stand


def test_a_resumed_run_and_missing_steps(tmp_path: Path) -> None:
    make_run(tmp_path, [line(s) for s in range(1, 8)])
    make_run(tmp_path, [line(s) for s in range(6, 10)], resume_step=4)
    text = write_report(tmp_path).read_text()
    assert "1 step(s) between 1 and 9 have no line" in text
    assert '"x0":5.5' in text.replace(" ", "")


def test_damaged_side_files_do_not_matter(tmp_path: Path) -> None:
    run = make_run(tmp_path, [line(1)])
    (run / "config.yaml").write_text("a: [1, 2")
    (run / "plan.json").write_bytes(b"\xff\xfe{")
    (run / "summary.json").write_text("[1]")
    assert "not recorded" in page_of(run).text


def test_no_run_no_step_no_page(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no run folder: it has no metrics"):
        write_report(tmp_path)
    make_run(tmp_path, [])
    with pytest.raises(UserError, match="holds no step yet"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_script_in_a_value_stays_text(tmp_path: Path) -> None:
    run = make_run(tmp_path, [line(1)])
    (run / "config.yaml").write_text("model: {recipe: '</td><script>alert(1)</script>'}\n")
    assert "<script>alert" not in write_report(run).read_text()


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    records = [line(s, process=1) for s in range(1, 30_001)]
    made = {figure.layout.title.text: figure for _, figure in figures(records)}
    assert len(made["loss"].data[0].x) <= 2100
    split = made["time split, mean of 150 steps a bar"]
    assert len(split.data[0].x) == 200
    heights = [sum(bar.y[0] for bar in split.data)]
    assert heights == [pytest.approx(0.3)]


@given(st.lists(st.one_of(st.none(), st.integers(0, 5).map(float)), min_size=1, max_size=300), st.integers(5, 50))
def test_thinning_keeps_ends_extremes_and_gaps(values: list[float | None], limit: int) -> None:
    # mutation tried: every n-th point only -> red
    steps, kept = thin(list(range(len(values))), values, limit)
    assert steps == sorted(set(steps)) and all(values[s] == k for s, k in zip(steps, kept, strict=True))
    assert steps[0] == 0 and steps[-1] == len(values) - 1
    finite = [v for v in values if v is not None]
    if finite:
        assert {max(finite), min(finite)} <= set(kept)
    assert (None in kept) == (None in values)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, [line(s) for s in range(1, 4)])
    assert main(["report", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"report: {run / 'report.html'}" in out and re.search(r"tokens/s +213", out)
    assert main(["report", str(run), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["steps"] == 3 and shown["report"] == str(run / "report.html")
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "no run folder" in capsys.readouterr().err
    assert main(["report", "--help"]) == 0
    assert "Example: meshwright report" in capsys.readouterr().out
