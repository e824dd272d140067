"""The report: one page that needs no network. The plotting library is inside it, which makes it about 5 MB."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from batchgen_lite import __version__
from batchgen_lite.report import run_figures, time_figures
from batchgen_lite.report.axis import TimeAxis
from batchgen_lite.trace.atomic_file import replaced
from batchgen_lite.trace.run_recorder import RunRecorder

# Nothing may be fetched, whatever the library would like to.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0; } h2 { font-size: 1.15em; margin: 2em 0 0; }
p { margin: .2em 0; color: #555; max-width: 75em; }
table { border-collapse: collapse; margin: 1em 0; }
th { text-align: left; font-weight: 600; padding: .1em 1.5em .1em 0; vertical-align: top; white-space: nowrap; }
"""

_CONFIG = {"displaylogo": False, "responsive": True}

_HEIGHTS = {"sweep": 430, "accounts": 280}


def write_report(path: Path, recorder: RunRecorder, title: str, lines: Mapping[str, str]) -> None:
    """Write ``path``; it is there complete or not at all. ``lines``: label -> text for the head. Raises OSError."""
    with replaced(path) as file:
        for piece in page(recorder, title, lines):
            file.write(piece.encode())


def page(recorder: RunRecorder, title: str, lines: Mapping[str, str]) -> Iterator[str]:
    """The page in pieces."""
    head = f"batchgen-lite: {title}"
    yield f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(head)}</title>\n'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
    yield f"<style>{_STYLE}</style>\n<script>{get_plotlyjs()}</script>\n</head>\n<body>\n"
    yield f"<h1>{escape(head)}</h1>\n<p>batchgen-lite {__version__}; {escape(_detail(recorder))}</p>\n<table>\n"
    for label, text in lines.items():
        yield f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>\n"
    yield "</table>\n"
    for name, heading, caption, figure in _sections(recorder):
        yield f'<section id="{name}">\n<h2>{escape(heading)}</h2>\n<p>{escape(caption)}</p>\n'
        yield _plot(name, figure) if figure is not None else "<p>Nothing to show: the run had none.</p>\n"
        yield "</section>\n"
    yield "</body>\n</html>\n"


def _detail(recorder: RunRecorder) -> str:
    stride, sweeps = recorder.log.stride, recorder.sweeps
    which = "every one" if stride == 1 else f"every {stride}th"
    return f"{sweeps:,} sweeps, of which {which} is kept in detail; sums are exact for the whole run"


def _plot(name: str, figure: go.Figure) -> str:
    figure.update_layout(
        template="plotly_white",
        height=_HEIGHTS.get(name, 360),
        margin={"l": 60, "r": 60, "t": 30, "b": 50},
        legend={"orientation": "h", "y": -0.22, "yanchor": "top"},
    )
    html: str = figure.to_html(full_html=False, include_plotlyjs=False, div_id=f"plot-{name}", config=_CONFIG)
    return html + "\n"


def _sections(recorder: RunRecorder) -> Iterator[tuple[str, str, str, go.Figure | None]]:
    """(name, heading, caption, plot or None)."""
    axis = TimeAxis.of(recorder.timeline)
    bar = f"{axis.bar_seconds:.3g} s"
    yield (
        "bound",
        "What bounded the run",
        f"Where the engine's time went, in steps of {bar}. Red: disk or link; green: the cores; yellow: Python.",
        time_figures.engine_time(recorder, axis),
    )
    yield (
        "overlap",
        "Link and cores",
        "How much of each moment the link was reading and the cores were computing. Both high at once: full overlap.",
        time_figures.overlap(recorder, axis),
    )
    yield (
        "sweep",
        "One sweep in detail",
        "The kept sweep of median length, lane by lane; point at a bar to see what it was, drag to look closer.",
        run_figures.typical_sweep(recorder),
    )
    yield (
        "batch",
        "Batch",
        "Rows that take part in sweeps, rows set aside, and the tokens that each sweep carried.",
        time_figures.batch(recorder, axis),
    )
    yield (
        "tiers",
        "Bytes by tier",
        "Weights and KV between disk, memory and device; the legend has the totals.",
        time_figures.bytes_by_tier(recorder, axis),
    )
    yield (
        "memory",
        "Memory",
        "What the process held, against its budget, and how full the KV cache was.",
        time_figures.memory(recorder, axis),
    )
    yield ("accounts", "Memory accounts", "What the budget was divided into.", run_figures.accounts(recorder))
    yield ("lengths", "Lengths", "Rows by the length of prompt and answer.", run_figures.lengths(recorder))
    yield (
        "experts",
        "Experts",
        "How many tokens each expert of each layer computed, and how often its weights came from the disk.",
        run_figures.expert_map(recorder),
    )
