"""What a run has found: the verdict in words, the rows, and a file that JSON can hold."""

from __future__ import annotations

import math

import msgspec
import pytest

from modelyard.benchmark.intervals import Interval
from modelyard.core.knobs import Setting
from modelyard.tune.ledger import Ledger
from modelyard.tune.report import gain, report, save, verdict
from modelyard.tune.search import Found
from tests.tune.test_run import Lab, run

A, B = Setting((("n", 1),)), Setting((("n", 2),))


def failing() -> Ledger:
    ledger = Ledger()
    ledger.failures[A] = "out of memory"
    return ledger


def hurried() -> Ledger:
    ledger = Ledger()
    ledger.out_of_time = True
    return ledger


@pytest.mark.parametrize(
    ("found", "finished", "words"),
    [
        (Found(A, A, Ledger(), {}), True, "nothing better"),
        (Found(A, A, hurried(), {}), True, "before the time was up: a longer --budget"),
        (Found(A, A, failing(), {}), True, "nothing could be measured: out of memory"),
        (Found(A, A, Ledger(), {}), False, "broken off before"),
        (Found(B, A, Ledger(), {}), False, "broken off: the best so far"),
        (Found(B, A, Ledger(), {}, Interval(2.0, 1.5, 2.5), True), True, "2.00 times as good"),
        (Found(B, A, Ledger(), {}, None, True), True, "runs where the current does not"),
        (Found(B, A, Ledger(), {}, None, False), True, "not proved: 0 of at least 4 rounds"),
        (
            Found(B, A, Ledger(), {B: [2.0] * 3}, Interval(2.0, 1.9, 2.1), False),
            True,
            "not proved: 3 of at least 4 rounds",
        ),
        (Found(B, A, Ledger(), {B: [1.0] * 4}, Interval(1.0, 0.9, 1.1), False), True, "no difference"),
    ],
)
def test_the_verdict_says_what_was_proved_and_what_was_not(found, finished, words):
    gained = gain("chat", found, [], found.ratio)
    assert words in verdict(found, gained, finished=finished, least=4)


async def test_a_report_has_everything_and_can_be_written(tmp_path):
    made = run(Lab(), tmp_path)
    told = report(made, await made.go())
    assert told.better
    assert told.changes == {"flash_attn": "on", "type_k": "q8_0", "type_v": "q8_0"}
    assert {row.name for row in told.rows} >= {"best", "current", "engine default"}
    assert told.rows[0].score == max(row.score for row in told.rows)
    assert {lost.within for lost in told.losses} == {True, False}
    assert told.failures
    assert told.trials <= told.grid
    kept = msgspec.json.decode(save(told, tmp_path / "tune").read_bytes())
    assert kept["verdict"] == told.verdict
    assert kept["toml"].startswith("[models.m]")


async def test_names_of_models_make_no_folders(tmp_path):
    made = run(Lab(), tmp_path)
    told = msgspec.structs.replace(report(made, made.so_far(), finished=False), model="org/name")
    assert save(told, tmp_path).parent == tmp_path


async def test_a_ratio_of_one_round_is_left_out_since_json_knows_no_infinity(tmp_path):
    made = run(Lab(), tmp_path)
    found = await made.go()
    once = {setting: scores[:1] for setting, scores in found.rounds.items()}
    one = Found(found.best, found.current, found.ledger, once, Interval(2.0, 0.0, math.inf), False)
    told = report(made, one)
    assert told.ratio is None
    assert told.ratios == {}


async def test_the_ratio_that_is_shown_is_the_one_that_was_decided_by(tmp_path):
    made = run(Lab(), tmp_path)
    told = report(made, await made.go())
    assert told.ratios["current"] == told.ratio


async def test_noise_that_was_never_seen_is_not_told(tmp_path):
    made = run(Lab(), tmp_path)
    assert report(made, made.so_far(), finished=False).noise is None
    assert report(made, await made.go()).noise is not None


async def test_for_memory_ratios_are_of_memory_and_the_gain_tells_of_speed_too(tmp_path):
    made = run(Lab(), tmp_path, "memory")
    told = report(made, await made.go())
    assert told.better
    assert told.ratios["current"].middle == pytest.approx(1000 / 600)
    assert (
        told.gain == "0.60 times the memory, 2.60 times the speed; the current settings are slower than --slack allows"
    )
    assert told.gain in told.verdict
    assert {row.name: row.slow for row in told.rows if row.name} == {
        "best": False,
        "current": True,
        "engine default": True,
    }
