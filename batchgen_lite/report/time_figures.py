"""Plots over time: where the engine's time went, link and cores, batch, bytes, memory."""

from __future__ import annotations

import plotly.graph_objects as go

from batchgen_lite.offload.budget import format_size
from batchgen_lite.report.axis import TimeAxis
from batchgen_lite.trace.run_recorder import RunRecorder

COLOURS = {
    "experts": "#1b7f5c",
    "attention": "#57b894",
    "projections": "#a9dcc6",
    "head": "#d7efe5",
    "sampling": "#8e7cc3",
    "other": "#b9b9b9",
    "waiting": "#d1495b",
    "between sweeps": "#edae49",
}
_SAID = {
    "experts": "computing: experts and dense FFNs",
    "attention": "computing: attention slices",
    "projections": "computing: projections and routers",
    "head": "computing: head",
    "sampling": "sampling",
    "other": "rest of a sweep: embedding, Python",
    "waiting": "waiting for weights (the disk or the link bounds)",
    "between sweeps": "between sweeps: scheduling, text, journal",
}

_BLUE, _DARK = "#2e6f95", "#333333"


def engine_time(recorder: RunRecorder, axis: TimeAxis) -> go.Figure:
    """What bounded each moment: shares of the engine's time."""
    line = recorder.timeline
    amounts = {name: axis.rates(line.flow(name)) for name in COLOURS if name != "other"}
    named = [sum(values) for values in zip(*(amounts[n] for n in amounts if n != "between sweeps"), strict=True)]
    sweeps = axis.rates(line.flow("sweeps"))
    amounts["other"] = [max(0.0, whole - part) for whole, part in zip(sweeps, named, strict=True)]
    figure = go.Figure()
    for name, colour in COLOURS.items():
        figure.add_bar(
            x=axis.starts,
            y=amounts[name],
            width=axis.width,
            offset=0,
            name=_SAID[name],
            marker={"color": colour, "line": {"width": 0}},
        )
    figure.update_layout(barmode="stack", bargap=0, xaxis_title=axis.title, yaxis_title="share of the engine's time")
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return figure


def overlap(recorder: RunRecorder, axis: TimeAxis) -> go.Figure:
    """How busy link and cores were: both near 1 at once is full overlap."""
    line = recorder.timeline
    parts = [line.flow(name) for name in ("experts", "attention", "projections", "head")]
    computing = axis.rates([sum(values) for values in zip(*parts, strict=True)])
    figure = go.Figure()
    _steps(figure, axis, computing, "cores computing", COLOURS["experts"])
    _steps(figure, axis, axis.rates(line.flow("link busy")), "link reading", _BLUE)
    figure.update_layout(xaxis_title=axis.title, yaxis_title="share of the time")
    figure.update_yaxes(range=[0, 1.05], tickformat=".0%")
    return figure


def batch(recorder: RunRecorder, axis: TimeAxis) -> go.Figure:
    """Rows by state, and tokens per sweep."""
    line = recorder.timeline
    figure = go.Figure()
    for name, colour in (("running", "#1b7f5c"), ("held", "#edae49"), ("evicted", "#d1495b")):
        _steps(figure, axis, axis.means(line.level(name)), f"rows {name}", colour, width=1, stackgroup="rows")
    _steps(figure, axis, axis.means(line.level("tokens")), "tokens per sweep", _DARK, width=1, yaxis="y2")
    figure.update_layout(
        xaxis_title=axis.title,
        yaxis_title="rows",
        yaxis2={"title": "tokens per sweep", "overlaying": "y", "side": "right", "rangemode": "tozero"},
    )
    return figure


def bytes_by_tier(recorder: RunRecorder, axis: TimeAxis) -> go.Figure:
    """Where weights and KV came from and went to."""
    line = recorder.timeline
    tiers = {
        "read": ("weights read from disk", _BLUE),
        "resident": ("weights used from memory", "#57b894"),
        "copied in": ("host to device", "#7a5195"),
        "copied out": ("device to host", "#bc5090"),
        "spilled": ("KV spilled to disk", "#edae49"),
        "restored": ("KV restored from disk", "#d1495b"),
    }
    figure = go.Figure()
    for name, (title, colour) in tiers.items():
        total = line.total(name)
        if total:
            rates = [amount / (1 << 20) for amount in axis.rates(line.flow(name))]
            _steps(figure, axis, rates, f"{title}: {format_size(int(total))}", colour)
    figure.update_layout(xaxis_title=axis.title, yaxis_title="MiB/s")
    return figure


def memory(recorder: RunRecorder, axis: TimeAxis) -> go.Figure:
    """The process's memory against its budget, and the KV pages in use."""
    line, mib = recorder.timeline, 1 << 20
    figure = go.Figure()
    held = [value / mib for value in axis.peaks(line.peaks("memory"))]
    _steps(figure, axis, held, "process, MiB", _BLUE)
    if "--ram" in recorder.budgets:
        limit = recorder.budgets["--ram"][0] / mib
        figure.add_hline(y=limit, line={"dash": "dash", "color": "#d1495b"}, annotation_text=f"--ram {limit:,.0f} MiB")
    _steps(figure, axis, axis.means(line.level("kv pages")), "KV pages in use", _DARK, width=1, yaxis="y2")
    figure.update_layout(
        xaxis_title=axis.title,
        yaxis={"title": "MiB", "rangemode": "tozero"},
        yaxis2={"title": "KV pages", "overlaying": "y", "side": "right", "rangemode": "tozero"},
    )
    return figure


def _steps(
    figure: go.Figure, axis: TimeAxis, values: list[float], name: str, colour: str, *, width: int = 2, **more: str
) -> None:
    """A line that keeps its level within a bar's time. ``more``: as plotly's scatter has it."""
    figure.add_scatter(
        x=axis.starts, y=values, name=name, line={"color": colour, "width": width, "shape": "hv"}, **more
    )
