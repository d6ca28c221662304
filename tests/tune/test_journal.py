"""The journal: a run that was broken off goes on with what it knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.core.knobs import Loss, Setting
from modelyard.tune.journal import Journal, fingerprint
from modelyard.tune.order import Failure, Figures, Judged

A = Setting((("n_threads", 2), ("flash_attn", "on"), ("p", 0.5), ("x", True)))
SEEN = Figures(speed=1.0, ttft_s=2.0, answer_s=3.0, memory=4)


def test_outcomes_come_back_in_their_order_and_once(tmp_path: Path):
    file = tmp_path / "deep" / "run.jsonl"
    first = Journal(file)
    for outcome in (SEEN, Failure("crash", "it died")):
        first.add(A, False, outcome)
    first.add(A, True, Judged(Loss(2.0, 1.0, 0.1)))
    second = Journal(file)
    assert len(second) == 3
    assert second.take(A, False) == SEEN
    assert second.take(A, False) == Failure("crash", "it died")
    assert second.take(A, False) is None
    assert second.take(A, True) == Judged(Loss(2.0, 1.0, 0.1))


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "run.jsonl"
    Journal(file).add(A, False, SEEN)
    file.write_bytes(file.read_bytes() + b'{"setting": [[["n_thr')
    assert len(Journal(file)) == 1
    assert "will be measured again" in caplog.text


def test_a_run_that_is_over_leaves_no_journal(tmp_path: Path):
    journal = Journal(tmp_path / "run.jsonl")
    journal.add(A, False, SEEN)
    journal.forget()
    journal.forget()
    assert list(tmp_path.iterdir()) == []


def test_another_model_or_goal_has_another_journal():
    assert fingerprint({"b": 1, "a": 2}, "chat") == fingerprint({"a": 2, "b": 1}, "chat")
    assert fingerprint({"a": 2}, "chat") != fingerprint({"a": 2}, "batch")
