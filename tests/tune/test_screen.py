"""A run on the terminal: lines while it goes, a table and the recommendation at the end."""

from __future__ import annotations

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from modelyard.core.knobs import Loss, Setting
from modelyard.tune.order import Benched, Failure, Figures, Judged
from modelyard.tune.race import Ask
from modelyard.tune.report import Row, report
from modelyard.tune.screen import Terminal, against, span, words
from tests.tune.test_run import Lab, run

NOW = Setting((("n_threads", 1), ("flash_attn", "off")))
NEW = NOW.but({"n_threads": 2})


def terminal() -> tuple[Terminal, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Terminal("chat", NOW, 600.0, Console(file=out, width=160), Console(file=err, width=160)), out, err


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (Figures(speed=12.34, ttft_s=0.5, answer_s=1.0, memory=100 << 20), "12.3 tok/s, first token 500 ms, 100 MiB"),
        (Failure("memory", "stopped at 3 MiB"), "out of memory: stopped at 3 MiB"),
        (Judged(Loss(10.2, 10.0, 0.01)), "perplexity +2.00%, divergence 0.0100"),
        (Judged(Loss(10.2, 10.0)), "perplexity +2.00%"),
        (Benched(1.0, 2.0), "Benched"),
    ],
)
def test_every_outcome_is_a_line(outcome, told):
    screen, _, err = terminal()
    with screen.shown():
        screen.asked(Ask(NEW, "stage", "n_threads"), 300.0)
        screen.told(Ask(NEW, "stage", "n_threads"), outcome, NOW, kept=False)
    assert "n_threads = 2" in err.getvalue()
    assert told in err.getvalue()


def test_what_comes_from_the_journal_is_said_to():
    screen, _, err = terminal()
    screen.told(Ask(NOW, "stage"), Failure("hang", "late"), NOW, kept=True)
    assert "current settings: not finished in time: late (from the journal)" in err.getvalue()


async def test_the_end_has_a_table_the_losses_the_failures_and_the_recommendation(tmp_path):
    made = run(Lab(), tmp_path)
    told = report(made, await made.go())
    screen, out, _ = terminal()
    screen.report(told)
    said = out.getvalue()
    assert "2.60×" in said
    assert "too much: never recommended" in said
    assert "within the bound" in said
    assert "failed n_ubatch = 1024" in said
    assert "unproved" not in said
    assert "[models.m]" in said
    assert 'flash_attn = "on"' in said


async def test_what_did_best_but_was_not_proved_is_said_to_be_so(tmp_path):
    made = run(Lab(), tmp_path)
    screen, out, _ = terminal()
    screen.report(replace(report(made, await made.go()), better=False, noise=None))
    assert "unproved" in out.getvalue()
    assert "One trial's noise" not in out.getvalue()


def test_a_setting_is_held_against_the_current_one_by_what_the_goal_counts():
    one = Row(name="", changes={"n": 1}, trials=1, score=2.0, speed=1.0, ttft_s=1.0, memory=100, front=True)
    now = replace(one, changes={}, score=1.0, memory=150)
    assert (against(one, now, "chat"), against(one, now, "memory")) == ("2.00×", "1.50×")
    assert against(replace(one, slow=True), now, "memory") == "too slow"
    assert against(one, None, "chat") == ""


def test_a_warning_is_for_people():
    screen, out, err = terminal()
    screen.warned("only 3 [trials] fit")
    assert "warning only 3 [trials] fit" in err.getvalue()
    assert not out.getvalue()


def test_spans_and_changes_are_told_in_words():
    assert (span(59.4), span(61), span(-3)) == ("59s", "1m 01s", "0s")
    assert words({}) == "current settings"
    assert words({"a": 1, "b": "x"}) == "a = 1, b = x"
