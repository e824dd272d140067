"""Stop strings: the first to be complete, wherever the text is cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_lite.text.stop_strings import StopMatch, StopStrings

LETTERS = st.text(alphabet="ab", min_size=1, max_size=5)
STOPS = st.lists(LETTERS, min_size=1, max_size=4)


def first_by_character(stops: list[str], text: str, exempt: int = 0) -> StopMatch | None:
    """The definition: take characters one by one until some stop string ends; the longest of those that do."""
    for end in range(exempt + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return StopMatch(stop, end - len(stop), end)
    return None


@settings(max_examples=300)
@given(stops=STOPS, text=st.text(alphabet="ab", max_size=30), exempt=st.integers(0, 8))
def test_the_first_complete_stop_is_found(stops: list[str], text: str, exempt: int) -> None:
    exempt = min(exempt, len(text))
    assert StopStrings(stops).find(text, exempt) == first_by_character(stops, text, exempt)


@settings(max_examples=500)
@given(stops=STOPS, parts=st.lists(st.text(alphabet="ab", max_size=4), max_size=12))
def test_cuts_do_not_matter_and_shown_text_is_never_taken_back(stops: list[str], parts: list[str]) -> None:
    finder, text, shown, match = StopStrings(stops), "", 0, None
    for part in parts:
        seen, text = len(text), text + part
        match = finder.find(text, seen)
        if match is not None:
            break
        safe = finder.safe_length(text)
        assert safe >= shown
        shown = safe
    whole = "".join(parts)
    assert match == first_by_character(stops, whole)
    assert shown <= (len(whole) if match is None else match.start)


@given(stops=STOPS, text=st.text(alphabet="ab", max_size=20))
def test_no_more_is_held_back_than_needed(stops: list[str], text: str) -> None:
    held = text[StopStrings(stops).safe_length(text) :]
    assert held == "" or any(stop.startswith(held) and stop != held for stop in stops) or held in stops


def test_no_stops() -> None:
    assert not StopStrings([])
    assert StopStrings([]).find("abc", 0) is None
    assert StopStrings([]).safe_length("abc") == 3
