"""The curves of a run as plotly figures. Steps whose value is missing or not finite are gaps, never bridged."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go

__all__ = ["figures", "thin"]

_POINTS = 2000
_PARTS = {
    "compute": "#2a6f97",
    "communication": "#e07a1f",
    "data": "#6a994e",
    "checkpoint": "#8e5aa8",
    "evaluate": "#c9a227",
    "idle": "#9a9a9a",
}
_LAYOUT = {
    "template": "plotly_white",
    "height": 320,
    "margin": {"l": 64, "r": 16, "t": 40, "b": 70},
    "legend": {"orientation": "h", "y": -0.25, "yanchor": "top", "x": 0},
    "hovermode": "x unified",
}

Values = list[float | None]
Records = list[dict[str, Any]]


def figures(records: Records) -> list[tuple[str, go.Figure]]:
    """(one line on how to read it, figure) for every quantity that the metrics lines have."""
    made = [
        (
            "Mean cross-entropy a target token, in nats; it should fall. Held-out loss that rises while the training loss "
            "falls is overfitting.",
            _curves(records, "loss", "loss (nats a token)", {"training": _at("loss"), "held-out": _at("val_loss")}),
        ),
        (
            "What the optimizer was told at each step.",
            _curves(records, "learning rate", "learning rate", {"lr": _at("lr")}),
        ),
        (
            "Global gradient norm before clipping. Spikes above the clipping threshold are cut to it; a steady climb often "
            "comes before a diverging loss.",
            _curves(records, "gradient norm", "norm", {"grad_norm": _at("grad_norm")}, log=True),
        ),
        (
            "Tokens of all devices over the seconds of the step without evaluation. The first step of a process is slow: it "
            "compiles.",
            _curves(records, "speed", "tokens/s", {"tokens/s": _at("tokens_per_s")}),
        ),
        (
            "Share of the peak rate that the model's own operations reach; recomputation does not count.",
            _curves(records, "MFU", "share of peak", {"MFU": _at("mfu")}, percent=True),
        ),
        (
            "Where each step's time went. The parts sum to the wall time; communication is only what compute had to wait for.",
            _split(records),
        ),
        (
            "Bytes of rank 0: in live tensors (allocated), held by the caching allocator (reserved), resident in the process.",
            _curves(
                records,
                "memory",
                "GiB",
                {
                    name: _at("memory", name, scale=2**-30)
                    for name in ("allocated", "reserved", "allocated_peak", "reserved_peak", "rss")
                },
            ),
        ),
        (
            "fp16 only. It halves when a gradient overflows (that step is skipped) and grows again later.",
            _curves(records, "loss scale", "scale", {"loss scale": _scaled}, log=True) if any(map(_scaled, records)) else None,
        ),
        (
            "Rows a step beyond which a larger batch hardly helps (S / |G|^2). A global batch several times above it "
            "wastes tokens.",
            _curves(records, "gradient noise scale", "rows", {"noise scale": _at("noise_scale")}, log=True),
        ),
    ]
    return [(note, figure) for note, figure in made if figure is not None]


def _at(*path: str, scale: float = 1.0) -> Callable[[dict[str, Any]], float | None]:
    def look(record: dict[str, Any]) -> float | None:
        value: Any = record
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value * scale if isinstance(value, (int, float)) else None

    return look


def _scaled(record: dict[str, Any]) -> float | None:
    """The loss scale; None where the loss is not scaled, which other precisions than fp16 note as 1."""
    return value if (value := _at("loss_scale")(record)) != 1.0 else None


def thin(steps: list[int], values: Values, limit: int = _POINTS) -> tuple[list[int], Values]:
    """At most about `limit` points: of each run of neighbours the first, last, lowest and highest, and the first gap, so that
    no spike and no missing step disappears."""
    if len(steps) <= limit:
        return steps, values
    width = -(-len(steps) * 5 // limit)
    kept: list[int] = []
    for start in range(0, len(steps), width):
        here = range(start, min(start + width, len(steps)))
        finite = [(value, i) for i in here if (value := values[i]) is not None]
        gap = next((i for i in here if values[i] is None), None)
        chosen = {here[0], here[-1], *([] if gap is None else [gap])}
        if finite:
            chosen |= {min(finite)[1], max(finite)[1]}
        kept += sorted(chosen)
    return [steps[i] for i in kept], [values[i] for i in kept]


def _curves(
    records: Records,
    title: str,
    unit: str,
    curves: dict[str, Callable[[dict[str, Any]], float | None]],
    *,
    log: bool = False,
    percent: bool = False,
) -> go.Figure | None:
    figure = go.Figure()
    for name, look in curves.items():
        values = [look(record) for record in records]
        if all(value is None for value in values):
            continue
        pairs = list(zip((record["step"] for record in records), values, strict=True))
        if name == "held-out":  # measured now and then: its points are joined
            pairs = [pair for pair in pairs if pair[1] is not None]
        steps, points = thin([step for step, _ in pairs], [value for _, value in pairs])
        alone = any(  # a point between two gaps has no line and needs a mark to be seen
            value is not None and (i == 0 or points[i - 1] is None) and (i + 1 == len(points) or points[i + 1] is None)
            for i, value in enumerate(points)
        )
        mode = "lines+markers" if len(points) <= 60 or alone else "lines"
        figure.add_trace(go.Scatter(x=steps, y=points, name=name, mode=mode, connectgaps=False))
    if not figure.data:
        return None
    figure.update_layout(title=title, xaxis_title="step", yaxis_title=unit, showlegend=len(figure.data) > 1, **_LAYOUT)
    if log:
        figure.update_yaxes(type="log")
    if percent:
        figure.update_yaxes(tickformat=".1%", rangemode="tozero")
    _mark_resumes(figure, records)
    return figure


def _split(records: Records, bins: int = 200) -> go.Figure | None:
    """Stacked bars: the mean of every part over each bin of neighbouring steps, so that the bars' heights are mean walls."""
    timed = [record for record in records if isinstance(record.get("split"), dict)]
    if not timed:
        return None
    width = -(-len(timed) // bins)
    groups = [timed[i : i + width] for i in range(0, len(timed), width)]
    figure = go.Figure()
    for part, color in _PARTS.items():
        means = [sum(r["split"].get(part, 0.0) for r in group) / len(group) for group in groups]
        figure.add_trace(
            go.Bar(
                x=[(group[0]["step"] + group[-1]["step"]) / 2 for group in groups],
                y=means,
                name=part,
                marker_color=color,
                marker_line_width=0,
            )
        )
    title = "time split" if width == 1 else f"time split, mean of {width} steps a bar"
    figure.update_layout(title=title, xaxis_title="step", yaxis_title="seconds a step", barmode="stack", bargap=0, **_LAYOUT)
    _mark_resumes(figure, records)
    return figure


def _mark_resumes(figure: go.Figure, records: Records, most: int = 40) -> None:
    starts = [b["step"] for a, b in itertools.pairwise(records) if a.get("process") != b.get("process")]
    for step in starts[-most:]:
        figure.add_vline(x=step - 0.5, line_dash="dot", line_width=1, line_color="#888")
