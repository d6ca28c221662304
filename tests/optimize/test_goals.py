"""Goals: scores, loads, and the ranking of settings."""

from __future__ import annotations

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.knobs import Setting
from modelyard_optimize.goals import GOALS, answer_rate, parse_goal, rank, scale_load, score, shorter_load, trial_load
from modelyard_optimize.trial import Measurement

SLOW = Measurement(speed=10, ttft_s=1.0, answer_s=4.0, memory=1000)
FAST = Measurement(speed=40, ttft_s=0.2, answer_s=1.0, memory=2000)


def setting(n: int) -> Setting:
    return Setting((("n", n),))


@pytest.mark.parametrize("goal", ["chat", "agent", "batch"])
def test_the_faster_setting_scores_more(goal):
    assert score(goal, FAST) == pytest.approx({"chat": 4, "agent": 5, "batch": 4}[goal] * score(goal, SLOW))


def test_for_memory_the_smaller_setting_scores_more_if_it_is_fast_enough():
    enough, too_slow = 0.2, 0.9
    assert score("memory", SLOW, enough) == pytest.approx(2 * score("memory", FAST, enough))
    assert score("memory", SLOW, too_slow) < score("memory", FAST, too_slow)


def test_for_memory_one_noisy_trial_does_not_make_a_setting_too_slow():
    noisy = Measurement(speed=36, ttft_s=0.2, answer_s=1.1, memory=2000)
    floor, rate = 0.95, answer_rate([FAST, FAST, FAST, noisy])
    assert score("memory", noisy, floor, rate) == score("memory", FAST, floor, rate) > score("memory", noisy, floor)


def test_for_memory_a_too_slow_setting_is_marked():
    rows = rank("memory", {setting(1): [SLOW], setting(2): [FAST]}, 0.9)
    assert {row.setting["n"]: row.slow for row in rows} == {1: True, 2: False}


def test_for_memory_speed_is_the_score_until_the_floor_is_known():
    assert score("memory", FAST) > score("memory", SLOW)


@pytest.mark.parametrize("goal", GOALS)
def test_every_goal_has_a_load(goal):
    assert trial_load(goal).workload.prompt_tokens > 0
    assert trial_load(goal).conversations > 0


@pytest.mark.parametrize(
    ("want_s", "conversations", "tokens"),
    [(100.0, 3, 64), (12.5, 3, 64), (9.0, 2, 64), (5.6, 1, 64), (4.5, 1, 43), (0.1, 1, 16)],
)
def test_a_load_shrinks_to_the_wanted_time(want_s, conversations, tokens):
    measured = Measurement(speed=1, ttft_s=1, answer_s=3, memory=1, load_s=1.0, wall_s=9.0)
    small = scale_load(trial_load("chat"), measured, want_s)
    assert small.conversations == conversations
    assert small.workload.output_tokens == pytest.approx(tokens, abs=4)


def test_a_load_is_not_shrunk_if_loading_takes_most_of_the_trial():
    measured = Measurement(speed=1, ttft_s=1, answer_s=3, memory=1, load_s=40.0, wall_s=9.0)
    assert scale_load(trial_load("chat"), measured, 4.0) == trial_load("chat")


def test_the_shorter_load_is_a_quarter_of_one_conversation():
    small = shorter_load(trial_load("chat"))
    assert (small.conversations, small.workload.prompt_tokens, small.workload.output_tokens) == (1, 48, 16)


def test_batch_uses_the_given_number_of_streams():
    assert trial_load("batch", 16).workload.streams == 16


def test_an_unknown_goal_names_those_that_exist():
    with pytest.raises(InvalidRequest, match="chat, agent, batch, memory"):
        parse_goal("speed")


def test_settings_that_no_other_dominates_are_on_the_front():
    worst = Measurement(speed=9, ttft_s=1.5, answer_s=5.0, memory=2500)
    rows = rank("chat", {setting(1): [SLOW], setting(2): [FAST, FAST], setting(3): [worst], setting(4): []})
    assert [(row.setting["n"], row.front, row.trials) for row in rows] == [(2, True, 2), (1, True, 1), (3, False, 1)]


def test_equal_settings_are_both_on_the_front():
    assert all(row.front for row in rank("chat", {setting(1): [FAST], setting(2): [FAST]}))
