from __future__ import annotations

from batchgen_lite.cli.reports import summary_figures, summary_lines
from batchgen_lite.jobs.job import Counts
from batchgen_lite.runtime.interface import RunSummary
from batchgen_lite.runtime.measure import Shares
from batchgen_lite.runtime.summary import shares_line


def test_what_a_run_measured_is_in_both_summaries() -> None:
    shares = Shares()
    shares.observe(period=10.0, sweep=9.0, waited=6.0, busy=9.5, nbytes=950 << 20)
    run = RunSummary(sweeps=1, measured=shares.figures(), extra={"time went": shares_line(shares)})
    figures = summary_figures(Counts(1, 1, 0, 0), run, seconds=11.0)
    assert figures["link_idle_share"] == 0.05
    assert figures["roofline_share"] == 0.95
    assert figures["waiting_seconds"] == 6.0
    assert figures["streaming_bytes_per_second"] == 100 << 20
    assert summary_lines(Counts(1, 1, 0, 0), run, seconds=11.0)["time went"] == (
        "computing 30%, waiting for weights 60%, between sweeps 10.0%; 100 MiB/s while reading; "
        "link idle 5.0% of 1 IO-bound sweeps; 0.95 of the roofline"
    )


def test_a_run_that_read_nothing_says_nothing_of_the_link() -> None:
    shares = Shares()
    shares.observe(period=10.0, sweep=9.9, waited=0.0, busy=0.0, nbytes=0)
    line = shares_line(shares)
    assert "link" not in line
    assert "reading" not in line
    assert shares_line(Shares()) == "no sweep was completed"
