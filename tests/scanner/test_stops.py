from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.scanner.stops import Stops


def _run(stops: list[str], chunks: list[str]) -> tuple[str, str | None]:
    watch, shown = Stops(stops), ""
    for chunk in chunks:
        text, hit = watch.feed(chunk)
        shown += text
        if hit is not None:
            return shown, hit
    return shown + watch.flush(), None


def test_the_stop_string_itself_is_not_shown() -> None:
    assert _run(["\n\n"], ["a\n", "\nb"]) == ("a", "\n\n")


def test_what_only_looked_like_a_stop_string_is_shown() -> None:
    assert _run(["END"], ["E", "N", "d"]) == ("ENd", None)


def test_the_first_to_be_complete_wins() -> None:
    assert _run(["abcd", "bc"], ["abcd"]) == ("a", "bc")


def test_of_two_that_end_together_the_longer_wins() -> None:
    assert _run(["c", "bc"], ["abc"]) == ("a", "bc")


def test_empty_stop_strings_are_ignored() -> None:
    assert _run([""], ["abc"]) == ("abc", None)


def test_only_the_shortest_possible_suffix_is_held() -> None:
    watch = Stops(["aab"])
    assert watch.feed("xaaa") == ("xa", None)
    assert watch.held == "aa"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.text("abc", max_size=5), max_size=6))
def test_every_cutting_stops_at_the_same_place(stops: list[str], chunks: list[str]) -> None:
    whole = "".join(chunks)
    assert _run(stops, chunks) == _run(stops, [whole]) == _run(stops, list(whole))
