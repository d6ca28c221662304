"""A race: who is measured how often, who is sent off, and who wins."""

from __future__ import annotations

from collections import Counter

from modelyard.core.knobs import Setting
from modelyard.tune.ledger import Ledger
from modelyard.tune.race import Rules, Told, order, race

A, B, C = (Setting((("n", n),)) for n in (1, 2, 3))


def run(scores, ledger: Ledger | None = None, **more) -> tuple[Setting, Counter]:
    ledger = ledger or Ledger()
    steps, count = race([A, B, C], ledger, Rules(), "stage", **more), Counter()
    ask = next(steps)
    while True:
        count[ask.setting] += 1
        try:
            ask = steps.send(scores(ask.setting, count[ask.setting]))
        except StopIteration as over:
            return over.value, count


def test_a_hopeless_loser_is_measured_once():
    winner, count = run(lambda setting, _: Told({A: 100.0, B: 102.0, C: 50.0}[setting]))
    assert count[C] == 1
    assert count[A] > 1
    assert winner in (A, B)


def test_what_is_clearly_better_takes_the_place_of_what_holds_now():
    assert run(lambda setting, _: Told({A: 50.0, B: 100.0, C: 60.0}[setting]))[0] == B


def test_a_gain_within_the_margin_changes_nothing():
    assert run(lambda setting, _: Told({A: 100.0, B: 100.5, C: 99.9}[setting]))[0] == A


def test_a_failure_costs_only_the_one_that_failed():
    ledger = Ledger()
    scores = {A: Told(10.0), B: Told(None, "it died"), C: Told(20.0)}
    winner, count = run(lambda setting, _: scores[setting], ledger)
    assert winner == C
    assert count[B] == 1
    assert ledger.failures == {B: "it died"}


def test_a_race_that_time_cuts_short_before_all_are_measured_keeps_what_holds():
    ledger = Ledger()
    winner, _ = run(lambda setting, _: None, ledger)
    assert winner == A
    assert ledger.out_of_time


def test_scores_of_a_moment_ago_count_as_the_first_round():
    _, count = run(lambda setting, _: Told({A: 100.0, B: 10.0, C: 10.0}[setting]), measured={B: 10.0, C: 10.0})
    assert count == {A: 1}


def test_rounds_go_there_and_back():
    assert order([A, B, C], 0) == [A, B, C]
    assert order([A, B, C], 1) == [C, B, A]
