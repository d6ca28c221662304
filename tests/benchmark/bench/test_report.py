"""Tables and JSON of a run."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from modelyard.benchmark.bench.book import Book
from modelyard.benchmark.bench.plan import Step
from modelyard.benchmark.bench.report import notes, show, values
from modelyard.benchmark.sample import Round, Sample
from tests.benchmark.bench.books import filled


def printed(book: Book) -> str:
    paper = io.StringIO()
    show(book, Console(file=paper, width=80))
    return paper.getvalue()


def test_a_table_tells_percentiles_and_rates_of_each_number_of_streams() -> None:
    text = printed(filled(1.0, rounds=2))
    assert "A http://h:0 m" in text
    rows = [line.split() for line in text.splitlines() if line.startswith("A  ")]
    assert [row[:3] for row in rows] == [["A", "1", "2"], ["A", "4", "8"]]
    assert "100/102/102" in rows[0]
    assert "ratio" not in text


@pytest.mark.parametrize(
    ("scale", "said"), [(2.0, "B is worse"), (0.5, "B is better"), (1.0, "no difference beyond noise")]
)
def test_two_subjects_get_a_verdict_a_line(scale: float, said: str) -> None:
    lines = [line for line in printed(filled(1.0, scale)).splitlines() if line.startswith("B over A")]
    assert len(lines) == 6
    assert all(line.rstrip().endswith(said) for line in lines)
    assert all("[" in line for line in lines)


def test_one_round_of_two_says_that_nothing_can_be_said() -> None:
    text = printed(filled(1.0, 2.0, rounds=1))
    assert "one round says nothing of noise" in text
    assert "is worse" not in text


def test_errors_are_counted_in_the_table_and_told_below_it() -> None:
    book = filled(1.0, streams=(1,))
    book.note(
        Step(0, 1, 9), Round(streams=1, wall_s=1.0, samples=(Sample(error="no [room]"), Sample(error="no [room]")))
    )
    book.note(Step(0, 1, -1), Round(streams=1, wall_s=1.0, samples=(Sample(error="cold"),)))
    text = printed(book)
    assert "4 +2 failed" in text
    assert "error 2 × A at 1: no [room]" in text
    assert "error 1 × in the warm-up: cold" in text


def test_counted_tokens_are_said_to_be_counted() -> None:
    said = notes(filled(1.0, is_counted=True, streams=(1,)))
    assert any("the server does not tell" in note for note in said)


def test_lengths_are_said_once_where_they_are_the_same() -> None:
    said = [note for note in notes(filled(1.0)) if note.startswith("A at")]
    assert said == ["A at 1, 4: 64 tokens of prompt, 0 of them from a cache, 10 of answer"]


def test_a_run_without_an_answer_still_prints() -> None:
    book = filled(1.0, streams=(1,), error="gone")
    text = printed(book)
    assert "A at 1: no answer" in text
    assert "–/–/–" in text


def test_a_run_that_was_left_before_its_first_answer_says_that_there_is_nothing() -> None:
    assert "nothing was measured" in printed(filled(1.0, rounds=0))


def test_an_interrupted_run_says_so() -> None:
    book = filled(1.0)
    book.is_interrupted = True
    assert "interrupted" in printed(book)
    assert values(book)["interrupted"] is True


def test_json_holds_results_comparisons_and_every_sample_but_its_gaps() -> None:
    found = msgspec.json.decode(msgspec.json.encode(values(filled(1.0, 2.0, rounds=1))))
    assert found["plan"] == {
        "streams": [1, 4], "rounds": 1, "requests": None, "seconds": None, "warmup": 1, "seed": 7
    }  # fmt: skip
    assert [(r["subject"], r["streams"], r["answers"]) for r in found["results"]] == [
        ("A", 1, 1), ("B", 1, 1), ("A", 4, 4), ("B", 4, 4)
    ]  # fmt: skip
    sample = found["results"][0]["of_rounds"][0]["samples"][0]
    assert (sample["ttft_s"], sample["output_tokens"], sample["rate"]) == (0.1, 10, pytest.approx(100.0))
    assert "gaps_s" not in sample
    assert found["comparisons"][0]["over"] == "A"
    assert found["comparisons"][0]["ratio"]["high"] is None  # infinite: one round
    assert {c["verdict"] for c in found["comparisons"]} == {"no difference beyond noise"}
