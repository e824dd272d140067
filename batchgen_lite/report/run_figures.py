"""Plots of the run as a whole: one sweep's events, lengths, memory accounts, experts."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from batchgen_lite.offload.budget import format_size
from batchgen_lite.trace.chrome import LANES
from batchgen_lite.trace.event_log import Event, What
from batchgen_lite.trace.run_recorder import RunRecorder, bin_end

MOST_EVENTS = 3000  # of one sweep, drawn; the longest
_COLOURS = {
    What.READ: "#2e6f95",
    What.COPY_IN: "#7a5195",
    What.COPY_OUT: "#bc5090",
    What.WAIT: "#d1495b",
    What.MODULE: "#a9dcc6",
    What.ATTENTION: "#57b894",
    What.TILE: "#1b7f5c",
    What.KV: "#edae49",
    What.BETWEEN: "#edae49",
}


def typical_sweep(recorder: RunRecorder) -> go.Figure | None:
    """All lanes of the kept sweep of median length; None if no sweep was completed."""
    sweeps = [event for event in recorder.log.events() if event.what is What.SWEEP]
    if not sweeps:
        return None
    sweep = sorted(sweeps, key=lambda event: event.seconds)[len(sweeps) // 2]
    begin, end = sweep.start, sweep.start + sweep.seconds
    # Once more from the start: all events at once would take several times the log's memory.
    shown = [event for event in recorder.log.events() if event.what in _COLOURS and _overlaps(event, begin, end)]
    shown = sorted(shown, key=lambda event: -event.seconds)[:MOST_EVENTS]
    figure = go.Figure()
    for what, lane in LANES.items():
        own = [event for event in shown if event.what is what]
        if own:
            figure.add_bar(
                orientation="h",
                y=[lane] * len(own),
                base=[(max(begin, event.start) - begin) * 1e3 for event in own],
                x=[(min(end, event.start + event.seconds) - max(begin, event.start)) * 1e3 for event in own],
                hovertext=[_said(event) for event in own],
                hoverinfo="text",
                marker={"color": _COLOURS[what], "line": {"width": 0}},
                showlegend=False,
            )
    figure.update_layout(barmode="overlay", xaxis_title="ms within the sweep")
    figure.update_yaxes(autorange="reversed")
    return figure


def _overlaps(event: Event, begin: float, end: float) -> bool:
    return event.start < end and event.start + event.seconds > begin


def _said(event: Event) -> str:
    parts = [event.name]
    if event.what in (What.MODULE, What.ATTENTION, What.TILE) and event.layer >= 0:
        parts.append(f"layer {event.layer}")
    if event.what is What.TILE and event.index >= 0:
        parts.append(f"expert {event.index}")
    if event.tokens:
        parts.append(f"{event.tokens:,} tokens")
    if event.nbytes:
        parts.append(format_size(event.nbytes))
    return ", ".join([*parts, f"{event.seconds * 1e3:,.2f} ms"])


def lengths(recorder: RunRecorder) -> go.Figure | None:
    """How long prompts and answers were, in tokens; None if no row has ended."""
    if not recorder.prompt_lengths:
        return None
    figure = go.Figure()
    for name, counts, colour in (
        ("prompts", recorder.prompt_lengths, "#2e6f95"),
        ("answers", recorder.generated_lengths, "#1b7f5c"),
    ):
        bins = range(min(counts), max(counts) + 1)
        figure.add_bar(
            x=[_bin_name(number) for number in bins],
            y=[counts[number] for number in bins],
            name=name,
            marker={"color": colour},
        )
    every = range(max(recorder.prompt_lengths | recorder.generated_lengths) + 1)
    figure.update_xaxes(categoryorder="array", categoryarray=[_bin_name(number) for number in every])
    figure.update_layout(barmode="group", xaxis_title="tokens", yaxis_title="rows", xaxis_type="category")
    return figure


def _bin_name(number: int) -> str:
    first, last = bin_end(number - 1) + 1, bin_end(number)
    return f"{last}" if number <= 8 or first >= last else f"{first}-{last}"


def accounts(recorder: RunRecorder) -> go.Figure | None:
    """What each memory budget is divided into; None if the engine keeps no accounts."""
    if not recorder.budgets:
        return None
    mib = 1 << 20
    figure = go.Figure()
    for name in dict.fromkeys(name for _, held in recorder.budgets.values() for name in held):
        sizes = {budget: held.get(name, 0) for budget, (_, held) in recorder.budgets.items()}
        figure.add_bar(
            orientation="h",
            y=list(sizes),
            x=[size / mib for size in sizes.values()],
            name=f"{name}: {format_size(max(sizes.values()))}",
        )
    figure.add_scatter(
        x=[limit / mib for limit, _ in recorder.budgets.values()],
        y=list(recorder.budgets),
        mode="markers",
        marker={"symbol": "line-ns-open", "size": 40, "color": "#d1495b", "line": {"width": 3}},
        name="budget: " + ", ".join(format_size(limit) for limit, _ in recorder.budgets.values()),
    )
    figure.update_layout(barmode="stack", xaxis_title="MiB")
    return figure


def expert_map(recorder: RunRecorder) -> go.Figure | None:
    """Tokens and reads of every expert of every layer; None for a model without routed experts."""
    layers = sorted(layer for layer, row in recorder.experts.items() if row.tokens)
    if not layers:
        return None
    figure = make_subplots(rows=1, cols=2, subplot_titles=("tokens", "reads from disk"), shared_yaxes=True)
    width = max(len(recorder.experts[layer].tokens) for layer in layers)
    for column, kind in enumerate(("tokens", "reads"), start=1):
        rows = [list(getattr(recorder.experts[layer], kind)) for layer in layers]
        figure.add_heatmap(
            x=list(range(width)),
            y=layers,
            z=[row + [0] * (width - len(row)) for row in rows],
            colorscale="Viridis",
            colorbar={"x": 0.45 if column == 1 else 1.0, "thickness": 12},
            hovertemplate="layer %{y}, expert %{x}: %{z:,} " + kind + "<extra></extra>",
            row=1,
            col=column,
        )
        figure.update_xaxes(title_text="expert", row=1, col=column)
    figure.update_yaxes(title_text="layer", row=1, col=1)
    figure.update_layout(xaxis={"domain": [0, 0.44]}, xaxis2={"domain": [0.55, 0.99]})
    return figure
