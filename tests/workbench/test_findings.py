"""A run of the optimizer as the workbench shows it."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.workbench import findings


def row(name: str = "", *, score: float = 1.0, **more: Any) -> dict[str, Any]:
    base = {"changes": {"n_ubatch": 64}, "trials": 2, "speed": 100.0, "ttft_s": 0.25, "memory": 300 << 20}
    return {"name": name, "score": score, "front": False, "slow": False, **base, **more}


CURRENT = row("current", score=2.0, changes={}, speed=50.0)
LOST = {"values": {"type_k": "q4_0"}, "rise": 0.021, "divergence": 0.03, "within": False}


def run(**more: Any) -> dict[str, Any]:
    base = {
        "model": "m",
        "goal": "chat",
        "at": "2026-11-15T12:02:03+00:00",
        "finished": True,
        "better": True,
        "gain": "1.50 times as good",
        "ratio": {"middle": 1.5, "low": 1.4, "high": 1.6},
        "ratios": {"current": {"middle": 1.5, "low": 1.4, "high": 1.6}},
        "trials": 53,
        "grid": 1392,
        "spent_s": 264.9,
        "noise": 0.0467,
        "rows": [row("best", score=3.0, front=True), dict(CURRENT), row(score=1.0, front=True)],
        "losses": [],
        "failures": [],
        "left_out": [],
    }
    return base | more


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "m for chat · 1.50 times as good · 2026-11-15 12:02"),
        ({"better": False}, "m for chat · nothing better · 2026-11-15 12:02"),
        ({"better": False, "finished": False}, "m for chat · cut off · 2026-11-15 12:02"),
        ({"gain": None}, "m for chat · 1.50 times as good · 2026-11-15 12:02"),
        ({"gain": "", "ratio": None}, "m for chat · better than what does not run · 2026-11-15 12:02"),
    ],
)
def test_the_headline_says_of_whom_for_what_and_what_came_of_it(more: dict[str, Any], words: str) -> None:
    assert findings.headline(run(**more)) == words


def test_figures_are_ratios_trials_time_and_noise() -> None:
    told = dict(findings.figures(run()))
    assert told["against current"] == "1.50× [1.40, 1.60]"
    assert told["trials"] == "53 of 1\u202f392"
    assert told["noise of a trial"] == "4.7%"


def test_noise_that_was_never_seen_is_a_dash() -> None:
    assert dict(findings.figures(run(noise=None)))["noise of a trial"] == "–"


def test_every_setting_is_a_spot_against_the_current_one() -> None:
    best, current, other = findings.spots(run())
    assert (best.kind, best.gain, best.memory) == ("best", 1.5, 300)
    assert (current.kind, current.name, current.gain) == ("current", "current", 1.0)
    assert (other.kind, other.name, other.gain) == ("not beaten", "n_ubatch = 64", 0.5)


def test_for_memory_the_height_is_speed_since_memory_is_the_breadth() -> None:
    assert [spot.gain for spot in findings.spots(run(goal="memory"))] == [2.0, 1.0, 2.0]


def test_where_the_current_settings_did_not_run_the_best_is_the_measure() -> None:
    told = run(rows=[row(score=4.0), row(score=2.0)])
    assert [spot.gain for spot in findings.spots(told)] == [1.0, 0.5]
    assert "the best = 1" in findings.upward(told)
    assert [line["against"] for line in findings.table(told)] == ["–", "–"]


def test_a_run_that_measured_nothing_has_nothing_to_draw() -> None:
    assert findings.spots(run(rows=[])) == []


def test_the_table_has_numbers_as_people_read_them() -> None:
    first = findings.table(run())[0]
    assert first["setting"] == "best: n_ubatch = 64"
    assert (first["against"], first["speed"], first["first"], first["memory"]) == ("1.50×", "100", "250 ms", "300 MB")


def test_what_was_lost_failed_left_out_and_written_is_told_in_lines() -> None:
    told = run(losses=[LOST], failures=[{"changes": {"n": 1}, "reason": "died"}], left_out=["x: y"], applied=["f"])
    assert findings.remarks(told) == [
        "type_k = q4_0: perplexity +2.10%, divergence 0.0300: too much, never recommended",
        "n = 1 failed: died",
        "not tried: x: y",
        "written to f",
    ]


def test_a_run_that_an_older_version_has_kept_is_shown() -> None:
    told = run()
    del told["gain"]
    for one in told["rows"]:
        one.pop("slow", None)
    assert findings.headline(told).startswith("m for chat · 1.50 times as good")
    assert [line["against"] for line in findings.table(told)] == ["1.50×", "1.00×", "0.50×"]


def test_for_memory_the_table_tells_how_much_less_it_takes_and_what_is_too_slow() -> None:
    rows = [row("best", memory=200 << 20), row("current", changes={}), row(memory=100 << 20, slow=True)]
    assert [line["against"] for line in findings.table(run(goal="memory", rows=rows))] == ["1.50×", "1.00×", "too slow"]
