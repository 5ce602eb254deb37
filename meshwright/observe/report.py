"""report.html of a run: one file that opens without a network, from what the run folder holds."""

from __future__ import annotations

import html
import json
import math
from pathlib import Path
from typing import Any

import yaml

from meshwright.disk import write_whole
from meshwright.errors import Finding, UserError
from meshwright.observe.metrics import read_metrics
from meshwright.observe.summary import Summary, load_facts, rows_of, summarise

__all__ = ["summary_of", "write_report"]

_EXCERPT = (
    "model.recipe", "model.arch", "model.layers", "model.width", "model.heads", "model.kv_heads", "model.ffn", "model.vocab",
    "data.seq_len", "data.packing", "objective.kind", "train.batch", "train.lr", "train.optimizer.kind", "train.schedule.kind",
    "train.schedule.warmup", "train.clip", "precision", "run.seed",
)  # fmt: skip

_STYLE = """
body { font: 15px/1.5 system-ui, "Noto Sans CJK SC", sans-serif; color: #222; max-width: 1080px;
  margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ddd }
table { border-collapse: collapse; font-size: 14px } td, th { padding: 2px 14px 2px 0; text-align: left; vertical-align: top }
td + td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere } .columns { display: flex; flex-wrap: wrap; gap: 0 4em }
.note { color: #555; margin: .2em 0 2em } .warn { background: #fdecea; border-left: 4px solid #c0392b; padding: .5em 1em }
summary { cursor: pointer } code { background: #f4f4f4; padding: 0 .3em }
"""

_HOW_TO_READ = """
<p>Every figure's formula is in <code>docs/metrics.md</code>. Hover over a curve for its values, drag to zoom, double-click
to come back. Dotted vertical lines are places where the run was stopped and resumed. A gap in a curve is a step whose value
was not finite or was not measured.</p>
<p>Start with the loss: it should fall steeply at first and slowly later. Then the time split: a large <b>data</b> share asks
for more loader prefetch or prepared shards; a large <b>communication</b> share for larger micro-batches or another layout;
a large <b>checkpoint</b> share for rarer checkpoints or background writing; <b>idle</b> is time outside all of these.</p>
"""


def summary_of(run_dir: str | Path) -> Summary:
    """The run's figures: recomputed from metrics.jsonl, with the peak, devices and usage that the run itself noted."""
    _, noted = load_facts(run_dir)
    usage = noted.get("usage")
    return summarise(
        read_metrics(_metrics_path(run_dir)),
        devices=noted.get("devices", 1),
        peak_rate=noted.get("peak_rate"),
        peak_source=noted.get("peak_source", ""),
        usage=usage if isinstance(usage, dict) else None,
    )


def write_report(run_dir: str | Path) -> Path:
    """Write `report.html` into the run folder and return its path.

    Needs metrics.jsonl; uses config.yaml, plan.json, machine.json and summary.json where they are. Raises UserError when the
    folder is no run, or its metrics are damaged or empty.
    """
    run_dir = Path(run_dir)
    records = read_metrics(_metrics_path(run_dir))
    if not records:
        raise UserError(findings=[Finding(str(_metrics_path(run_dir)), "holds no step yet", "Train at least one step first")])
    page = _page(run_dir, records)
    path = run_dir / "report.html"
    write_whole(path, page)
    return path


def _metrics_path(run_dir: str | Path) -> Path:
    path = Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        raise UserError(
            findings=[Finding(str(run_dir), "is no run folder: it has no metrics.jsonl", "Give the run.dir of a training run")]
        )
    return path


def _page(run_dir: Path, records: list[dict[str, Any]]) -> str:
    from plotly.offline import get_plotlyjs

    from meshwright.observe.plots import figures

    machine, _ = load_facts(run_dir)
    config = _flatten(_load(run_dir / "config.yaml", yaml.safe_load))
    plan = _flatten(_load(run_dir / "plan.json", json.loads))
    excerpt = {key: config[key] for key in _EXCERPT if config.get(key) is not None}
    plots = [
        figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True})
        + f'<p class="note">{html.escape(note)}</p>'
        for note, figure in figures(records)
    ]
    name = html.escape(run_dir.resolve().name)
    # The policy lets the page run what it carries and fetch nothing at all.
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{name} - Meshwright</title>
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>
<h1>Run {name}</h1>
{_warnings(records)}
<div class="columns"><div><h2>Result</h2>{_table(rows_of(summary_of(run_dir)))}</div>
<div><h2>Settings</h2>{_table(excerpt.items())}</div>
<div><h2>Plan</h2>{_table(plan.items())}</div>
<div><h2>Machine</h2>{_table(_flatten(machine).items())}</div></div>
<h2>Curves</h2>
{"".join(plots)}
<h2>How to read this</h2>{_HOW_TO_READ}
<h2>All settings</h2><details><summary>{len(config)} values of config.yaml</summary>{_table(config.items())}</details>
</body></html>
"""


def _warnings(records: list[dict[str, Any]]) -> str:
    nonfinite = [record for record in records if record.get("nonfinite")]
    steps = [record["step"] for record in records]
    missing = steps[-1] - steps[0] + 1 - len(steps)
    sentences = []
    if nonfinite:
        names = sorted({name for record in nonfinite for name in record["nonfinite"]})
        first = ", ".join(str(record["step"]) for record in nonfinite[:10]) + (", ..." if len(nonfinite) > 10 else "")
        sentences.append(f"{len(nonfinite)} step(s) with values that are not finite ({', '.join(names)}): step {first}.")
    if missing:
        sentences.append(f"{missing} step(s) between {steps[0]} and {steps[-1]} have no line in metrics.jsonl.")
    return "".join(f'<p class="warn">{html.escape(sentence)}</p>' for sentence in sentences)


def _load(path: Path, parse) -> dict[str, Any]:
    """A file of the run folder as a dict; {} when it is absent or damaged, since the report then does without."""
    try:
        value = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def _flatten(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, dict):
            flat |= _flatten(inner, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = inner
    return flat


def _table(rows) -> str:
    cells = "".join(f"<tr><td>{html.escape(str(label))}</td><td>{html.escape(_show(value))}</td></tr>" for label, value in rows)
    return f"<table>{cells}</table>" if cells else '<p class="note">not recorded</p>'


def _show(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
