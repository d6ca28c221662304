"""What a run has measured so far."""

from __future__ import annotations

from modelyard.benchmark.bench.book import Book, Subject
from modelyard.benchmark.bench.plan import Plan, Step
from modelyard.benchmark.intervals import SAME
from modelyard.benchmark.sample import Round, Sample
from modelyard.benchmark.workload import named
from tests.benchmark.bench.books import answer, filled


def test_results_stand_by_streams_then_by_subject_and_the_warm_up_nowhere() -> None:
    book = filled(1.0, 2.0)
    told = [(found.streams, subject.label, found.rounds, found.answers) for subject, found, _ in book.results()]
    assert told == [(1, "A", 4, 4), (1, "B", 4, 4), (4, "A", 4, 16), (4, "B", 4, 16)]
    assert len(book.warmup) == 2


def test_every_later_subject_is_held_against_the_first() -> None:
    pairings = filled(1.0, 2.0, 1.0, streams=(1,)).pairings()
    assert [(p.subject.label, p.first.label) for p in pairings] == [("B", "A")] * 3 + [("C", "A")] * 3
    assert [p.found.verdict for p in pairings] == ["worse"] * 3 + [SAME] * 3


def test_one_subject_has_nobody_to_be_held_against() -> None:
    assert filled(1.0).pairings() == []


def one(*samples: Sample) -> Round:
    return Round(streams=1, wall_s=1.0, samples=samples)


def empty() -> Book:
    return Book(Plan(workload=named("chat"), streams=(1,)), [Subject("A", "a"), Subject("B", "b", "given")])


def test_a_round_that_was_cut_short_counts_only_where_there_is_no_whole_one() -> None:
    book = empty()
    book.note(Step(0, 1, 0), one(answer()))
    book.note(Step(0, 1, 1), one(answer(), answer()), whole=False)
    book.note(Step(1, 1, 0), one(answer(), answer(), answer()), whole=False)
    assert [(subject.label, found.answers) for subject, found, _ in book.results()] == [("A", 1), ("B", 3)]
    assert book.pairings() == []
    assert book.answers == 4


def test_a_round_that_was_cut_before_its_first_answer_is_nothing() -> None:
    book = empty()
    book.note(Step(0, 1, 0), one(), whole=False)
    assert list(book.results()) == []


def test_errors_of_the_warm_up_are_kept_apart() -> None:
    book = empty()
    book.note(Step(0, 1, -1), one(Sample(error="cold")))
    assert book.warmup_errors == {"cold": 1}
    assert book.answers == 0


def test_models_that_nobody_named_are_called_as_the_servers_call_them() -> None:
    book = empty()
    book.name_models(["found", "other"])
    assert [subject.model for subject in book.subjects] == ["found", "given"]
