"""How far a run is."""

from __future__ import annotations

import io

from rich.console import Console

from modelyard.benchmark.bench.book import Subject
from modelyard.benchmark.bench.plan import Plan, Step, steps
from modelyard.benchmark.bench.progress import Bar, size
from modelyard.benchmark.sample import Sample
from modelyard.benchmark.workload import named

PLAN = Plan(workload=named("agent", turns=3), streams=(1, 2), rounds=2)


def test_a_step_is_as_large_as_its_answers_or_its_seconds() -> None:
    assert size(PLAN, Step(0, 2, 0)) == 6
    assert size(PLAN, Step(0, 2, -1)) == 6
    assert size(Plan(workload=named("chat"), streams=(1,), seconds=5.0), Step(0, 1, 0)) == 5.0


def test_the_bar_is_full_when_all_is_done_though_answers_failed() -> None:
    paper = io.StringIO()
    with Bar(PLAN, [Subject("A", "a")], Console(file=paper, force_terminal=True, width=100)) as bar:
        for step in steps(PLAN, 1):
            bar.begins(step)
            bar.saw(Sample(error="gone"))
            bar.ended(step)
        (task,) = bar._bar.tasks
        assert task.completed == task.total == 6 + 2 * (3 + 6)
        assert task.description == "round 2 of 2: A with 2 streams"
    assert "round 2 of 2" in paper.getvalue()


def test_where_nobody_looks_nothing_is_drawn() -> None:
    paper = io.StringIO()
    with Bar(PLAN, [Subject("A", "a")], Console(file=paper)) as bar:
        bar.say("loading")
    assert paper.getvalue() == ""
