"""The report: a page that stands alone, from a run that had everything to one that had nothing."""

from __future__ import annotations

import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import Browser

from batchgen_lite.report.page import write_report
from batchgen_lite.trace.event_log import EventLog
from batchgen_lite.trace.recorder import States
from batchgen_lite.trace.run_recorder import RunRecorder

PLOTS = ("bound", "overlap", "sweep", "batch", "tiers", "memory", "accounts", "lengths", "experts")
LINES = {"model": "tiny <script>alert(1)</script> & Co", "rows": "12 ok"}


class Hand:
    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def recorded(sweeps: int) -> RunRecorder:
    """A run of ``sweeps`` sweeps of 2 layers with 4 experts, every kind of event among them."""
    hand = Hand()
    recorder = RunRecorder(EventLog(limit_bytes=64 << 10), clock=hand)
    recorder.accounts("--ram", 3 << 28, {"interpreter": 2 << 28, "KV cache": 1 << 27})
    for sweep in range(sweeps):
        recorder.sweep_begins(40 + sweep % 5, States(running=40, held=2, evicted=1, waiting=max(0, 90 - sweep)))
        start = recorder.now()
        for layer in range(2):
            begun = recorder.now()
            hand.at += 0.02
            recorder.waited(begun)
            recorder.read(begun, 9 << 20, layer)
            recorder.routed(layer, [10, 20, layer, 5])
            for expert in range(4):
                recorder.submitted(layer, expert, 1 << 20)
                since = recorder.now()
                hand.at += 0.01
                recorder.tile("experts", layer, expert, 1 << 20, since, resident=expert == 3)
            recorder.module("experts", layer, 40, begun)
            since = recorder.now()
            hand.at += 0.01
            recorder.slice_step("qkv", layer, 40, since)
        recorder.sweep_ends(start, 3, 37, 40)
        recorder.memory((2 << 28) + sweep * 1000, 30 + sweep % 7)
        recorder.kv_moved("spilled", recorder.now() - 0.005, 1 << 20, sweep)
        recorder.finished(20 + sweep % 90, 5 + sweep % 40, "stop")
        hand.at += 0.005
    return recorder


class Strict(HTMLParser):
    """Tags that do not close in order, and everything that would leave the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.mistakes: list[str] = []
        self.sections: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "action") and not (value or "").startswith("data:"):
                self.mistakes.append(f"{tag} {name}={value}")
            if tag == "section" and name == "id":
                self.sections.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.mistakes.append(f"</{tag}> out of place")


def parsed(path: Path) -> Strict:
    parser = Strict()
    parser.feed(path.read_text())
    parser.close()
    assert parser.open == []
    return parser


@pytest.mark.parametrize("sweeps", [0, 1, 300])
def test_the_page_is_sound_html_and_asks_for_nothing(tmp_path: Path, sweeps: int) -> None:
    path = tmp_path / "report.html"
    write_report(path, recorded(sweeps), "done", LINES)
    page = parsed(path)
    assert page.mistakes == []
    assert tuple(page.sections) == PLOTS
    text = path.read_text()
    assert "tiny &lt;script&gt;alert(1)&lt;/script&gt; &amp; Co" in text
    assert "alert(1)</script>" not in text
    assert len(text) < 6 << 20  # the library's 4.8 MB and little else, however long the run


def pixels(png: bytes) -> bytes:
    """The decompressed rows of a PNG, as filtered."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    at, data = 8, b""
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += 12 + length
    return zlib.decompress(data)


@pytest.mark.browser
@pytest.mark.parametrize("sweeps", [0, 300])
def test_a_browser_draws_it_without_complaint(tmp_path: Path, sweeps: int) -> None:
    path = tmp_path / "report.html"
    write_report(path, recorded(sweeps), "done", LINES)
    with Browser(tmp_path / "profile") as browser:
        browser.open(path, 1200, 4600)
        drawn = browser.evaluate("[...document.querySelectorAll('.js-plotly-plot')].map(plot => plot.id)")
        height = browser.evaluate("document.documentElement.scrollHeight")
        marks = browser.evaluate("document.querySelectorAll('.point path, .js-line, .hm image').length")
        shot = browser.screenshot()
        assert browser.problems == []
        assert browser.requests == [path.as_uri()]
    missing = set() if sweeps else {"sweep", "lengths", "experts"}
    assert drawn == [f"plot-{name}" for name in PLOTS if name not in missing]
    assert height > 1500
    assert marks > (100 if sweeps else 0)
    assert len(set(pixels(shot))) > (100 if sweeps else 10)  # an empty page has hardly any values


@pytest.mark.browser
def test_the_browser_test_would_notice(tmp_path: Path) -> None:
    """A page that throws and asks for something else is found out."""
    path = tmp_path / "bad.html"
    path.write_text('<img src="nowhere.png"><script>console.error("no"); throw new Error("bad")</script>')
    with Browser(tmp_path / "profile") as browser:
        browser.open(path, 400, 300)
        browser.evaluate("1")
        problems = "".join(browser.problems)
        assert "bad" in problems
        assert "no" in problems
        assert len(browser.requests) == 2
