"""The search: its space, scores and noise, the selection among settings, and whole searches on synthetic machines."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from modelyard.core.knobs import Knob, Setting
from modelyard_optimize.search import (
    ScoreRequest,
    ScoreTable,
    Search,
    SearchResult,
    SearchRules,
    SearchSpace,
    TrialScore,
    alternating,
    is_numeric_scale,
    leader,
    rounds_needed,
    select_best,
    sides,
)
from tests.optimize.fakes import BAD, DEFAULT, KNOBS, SPACE, Cliff, Heavy, Landscape, explore

KV = next(knob for knob in KNOBS if knob.name == "kv")
FLASH = next(knob for knob in KNOBS if knob.name == "flash")


def test_the_grid_leaves_out_forbidden_settings():
    assert SPACE.size == len(list(SPACE.grid())) == 6 * 6 * 3 * 4
    assert all(SPACE.allows(setting) for setting in SPACE.grid())


def test_neighbours_differ_in_one_stage_only():
    around = SPACE.neighbours(BAD.but({"flash": "on"}), (KV,))
    assert [setting["kv"] for setting in around] == ["q8_0", "q4_0"]
    assert all(len(setting.changes(BAD.but({"flash": "on"}))) == 1 for setting in around)


def test_a_value_that_needs_another_changes_both():
    around = SPACE.neighbours(BAD, (KV,))
    assert [(setting["kv"], setting["flash"]) for setting in around] == [("q8_0", "on"), ("q4_0", "on")]


def test_knobs_of_one_stage_are_combined():
    both = SearchSpace([Knob(name="a", values=(1, 2), stage=1), Knob(name="b", values=(1, 2, 3), stage=1)])
    assert len(both.stages) == 1
    assert len(both.neighbours(Setting((("a", 1), ("b", 1))), both.stages[0])) == 5


def test_a_value_that_can_never_run_is_left_out():
    stuck = SearchSpace([Knob(name="a", values=(1, 2), stage=1)], lambda setting: "no" if setting["a"] == 2 else None)
    assert stuck.neighbours(Setting((("a", 1),)), stuck.stages[0]) == []


def test_stages_are_sorted():
    space = SearchSpace([KV, FLASH])
    assert [stage[0].name for stage in space.stages] == ["flash", "kv"]


def test_words_and_booleans_are_not_a_numeric_scale():
    assert is_numeric_scale(True, (1, 2.5))
    assert not is_numeric_scale(True, ("on", "off"))
    assert not is_numeric_scale(True, (False, True))
    assert not is_numeric_scale(False, (-1, 0, 8))


A, B, C = (Setting((("n", n),)) for n in (1, 2, 3))


def test_some_noise_is_assumed_before_anything_is_measured():
    spread, freedom = ScoreTable().noise()
    assert 0.01 < spread < 0.1
    assert freedom > 0


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_repeated_measurements_reveal_the_noise(noise):
    rng, table = random.Random(1), ScoreTable()
    for n in range(20):
        for _ in range(10):
            table.add(Setting((("n", n),)), (n + 1) * math.exp(rng.gauss(0, noise)))
    assert table.noise()[0] == pytest.approx(noise, rel=0.2)


def test_more_measurements_give_a_smaller_margin():
    table = ScoreTable()
    assert table.margin(1, 1, 0.9) > table.margin(4, 4, 0.9)
    assert table.margin(4, 4, 0.99) > table.margin(4, 4, 0.9)


def test_the_leader_has_the_highest_mean():
    assert leader({A: [1.0, 4.0], B: [3.0, 3.0]}) == B


def test_the_latest_gap_comes_last():
    table = ScoreTable()
    for setting in (A, B, A):
        table.set_gap(setting, 0.5)
    assert list(table.gaps) == [B, A]


def test_failures_count_as_trials():
    table = ScoreTable()
    table.add(A, 1.0)
    table.failures[B] = "died"
    assert table.trials == 2


def run(scores, table: ScoreTable | None = None, **more) -> tuple[Setting, Counter]:
    table = table or ScoreTable()
    steps, count = select_best([A, B, C], table, SearchRules(), "stage", **more), Counter()
    request = next(steps)
    while True:
        count[request.setting] += 1
        try:
            request = steps.send(scores(request.setting, count[request.setting]))
        except StopIteration as stop:
            return stop.value, count


def test_a_clear_loser_is_measured_once():
    winner, count = run(lambda setting, _: TrialScore({A: 100.0, B: 102.0, C: 50.0}[setting]))
    assert count[C] == 1
    assert count[A] > 1
    assert winner in (A, B)


def test_a_clearly_better_setting_replaces_the_current_one():
    assert run(lambda setting, _: TrialScore({A: 50.0, B: 100.0, C: 60.0}[setting]))[0] == B


def test_a_gain_within_the_margin_changes_nothing():
    assert run(lambda setting, _: TrialScore({A: 100.0, B: 100.5, C: 99.9}[setting]))[0] == A


def test_a_failure_affects_only_the_setting_that_failed():
    table = ScoreTable()
    scores = {A: TrialScore(10.0), B: TrialScore(None, "it died"), C: TrialScore(20.0)}
    winner, count = run(lambda setting, _: scores[setting], table)
    assert winner == C
    assert count[B] == 1
    assert table.failures == {B: "it died"}


def test_without_time_the_current_setting_is_kept():
    table = ScoreTable()
    winner, _ = run(lambda setting, _: None, table)
    assert winner == A
    assert table.out_of_time


def test_fresh_scores_count_as_the_first_round():
    _, count = run(lambda setting, _: TrialScore({A: 100.0, B: 10.0, C: 10.0}[setting]), measured={B: 10.0, C: 10.0})
    assert count == {A: 1}


def test_rounds_alternate_in_direction():
    assert alternating([A, B, C], 0) == [A, B, C]
    assert alternating([A, B, C], 1) == [C, B, A]


SEEDS = range(40)
QUARTER = SPACE.size // 4


def shares(make, baselines: list[Setting]) -> list[float]:
    found = []
    for seed in SEEDS:
        land = make(seed)
        result = explore(land, baselines, QUARTER)
        assert result.trials <= QUARTER
        found.append((land.speed(result.best) or 0.0) / land.best())
    return found


@pytest.mark.parametrize(
    ("make", "baselines", "most"),
    [
        (Landscape, [BAD, DEFAULT], 0.95),
        (Landscape, [DEFAULT], 0.95),
        (Landscape, [BAD], 0.95),
        (lambda seed: Landscape(seed, interaction=1), [BAD, DEFAULT], 0.95),
        (lambda seed: Landscape(seed, interaction=2), [BAD, DEFAULT], 0.9),
        (Cliff, [BAD, DEFAULT], 0.95),
        (Cliff, [DEFAULT], 0.9),
        (Heavy, [BAD, DEFAULT], 0.95),
        (Heavy, [DEFAULT], 0.9),
        (lambda seed: Landscape(seed, noise=0.06), [BAD, DEFAULT], 0.85),
    ],
    ids=[
        "from a bad start",
        "from the default",
        "without a default",
        "interactions",
        "strong interactions",
        "cliff",
        "cliff under the start",
        "out of memory",
        "out of memory at the start",
        "noisy",
    ],
)
def test_a_quarter_of_the_grid_finds_95_per_cent_of_the_best(make, baselines, most):
    found = shares(make, baselines)
    assert sum(share >= 0.95 for share in found) >= most * len(found), sorted(found)[:8]
    assert sum(found) / len(found) >= 0.97


def test_equal_settings_are_not_called_better():
    """On a flat landscape all settings are equal: the apparent best was only lucky."""

    class Flat(Landscape):
        def speed(self, setting: Setting) -> float | None:
            return 100.0

    wrong = [seed for seed in SEEDS if explore(Flat(seed, noise=0.05), [DEFAULT], QUARTER).better]
    assert len(wrong) <= 2


def test_a_large_gain_is_confirmed_in_few_rounds():
    found = explore(Landscape(3), [BAD, DEFAULT], QUARTER)
    assert found.better
    assert found.ratio is not None
    assert found.ratio.low > 1
    assert len(found.rounds[found.best]) == len(found.rounds[BAD]) == 4


@pytest.mark.parametrize(
    ("ratio", "noise", "rounds"), [(2.0, 0.03, 4), (1.1, 0.08, 21), (1.005, 0.03, None), (1.05, 0.5, None)]
)
def test_the_rounds_that_a_gain_needs_grow_with_the_noise(ratio: float, noise: float, rounds: int | None):
    assert rounds_needed(ratio, noise, SearchRules()) == rounds


def test_a_gain_is_confirmed_on_a_noisy_machine_with_more_rounds():
    class Noisy(Landscape):
        def speed(self, setting: Setting) -> float | None:
            return 130.0 if setting["threads"] == 8 else 100.0

    found = [explore(Noisy(seed, noise=0.15), [BAD, DEFAULT], 1000) for seed in range(10)]
    confirmed = [one for one in found if one.better]
    assert len(confirmed) >= 7
    assert max(len(one.rounds[one.best]) for one in confirmed) > SearchRules().max_rounds


def answered(search: Search, answer) -> tuple[SearchResult, list[ScoreRequest]]:
    """A search answered by a function; the result, and its requests."""
    steps, requests = search.run(), []
    request = next(steps)
    while True:
        requests.append(request)
        try:
            request = steps.send(answer(request))
        except StopIteration as stop:
            return stop.value, requests


TWO = SearchSpace(
    [
        Knob(name="threads", values=(1, 2, 4, 8, 16, 32), stage=1),
        Knob(name="kv", values=("f16", "q8_0", "q4_0"), stage=2, lossy=True),
    ]
)
START = Setting((("threads", 4), ("kv", "f16")))


def test_the_same_answers_lead_to_the_same_requests():
    def answer(request: ScoreRequest) -> TrialScore:
        return TrialScore(1.0) if request.quality else TrialScore(float(request.setting["threads"]))

    assert answered(Search(TWO, [START]), answer)[1] == answered(Search(TWO, [START]), answer)[1]


def test_a_value_beyond_one_that_fails_is_not_tried():
    def answer(request: ScoreRequest) -> TrialScore:
        threads = int(request.setting["threads"])
        return (
            TrialScore(1.0)
            if request.quality
            else TrialScore(None, "it died")
            if threads >= 8
            else TrialScore(threads + 10.0)
        )

    found, requests = answered(Search(TWO, [START]), answer)
    assert max(int(request.setting["threads"]) for request in requests) == 8
    assert found.best["threads"] == 4
    assert set(found.table.failures.values()) == {"it died"}


def test_a_value_clearly_below_its_neighbour_ends_that_direction():
    def answer(request: ScoreRequest) -> TrialScore:
        return (
            TrialScore(1.0)
            if request.quality
            else TrialScore(100 / (1 + abs(math.log2(int(request.setting["threads"]) / 4))))
        )

    _, requests = answered(Search(TWO, [START]), answer)
    assert {request.setting["threads"] for request in requests} == {2, 4, 8}


def test_rejected_rounding_is_never_measured():
    def answer(request: ScoreRequest) -> TrialScore:
        if request.quality:
            return TrialScore(None, "too much") if request.setting["kv"] == "q4_0" else TrialScore(1.0)
        return TrialScore({"f16": 10.0, "q8_0": 12.0, "q4_0": 20.0}[str(request.setting["kv"])])

    found, requests = answered(Search(TWO, [START]), answer)
    assert found.best["kv"] == "q8_0"
    assert not [request for request in requests if request.setting["kv"] == "q4_0" and not request.quality]
    assert list(found.table.rejected.values()) == ["too much"]


@pytest.mark.parametrize(("gain", "kept"), [(1.0, "f16"), (1.5, "q4_0")])
def test_rounding_without_a_confirmed_gain_gives_way_to_an_exact_baseline(gain: float, kept: str):
    bad, default = Setting((("threads", 1), ("kv", "f16"))), START

    def answer(request: ScoreRequest) -> TrialScore:
        luck = 1.0 if request.phase == "confirmation" or request.setting["kv"] != "q4_0" else 1.05  # while exploring
        speed = 100.0 if int(request.setting["threads"]) > 1 else 50.0
        return (
            TrialScore(1.0)
            if request.quality
            else TrialScore(speed * luck * (gain if request.setting["kv"] == "q4_0" else 1.0))
        )

    found, _ = answered(Search(TWO, [bad, default]), answer)
    assert found.better
    assert found.best["kv"] == kept


def test_each_rounding_is_checked_once():
    _, requests = answered(
        Search(TWO, [START]), lambda request: TrialScore(1.0) if request.quality else TrialScore(5.0)
    )
    assert len([request for request in requests if request.quality]) == 2


def test_the_rounding_of_the_current_setting_is_not_checked():
    rounded = START.but({"kv": "q4_0"})
    _, requests = answered(
        Search(TWO, [rounded], START), lambda request: TrialScore(1.0) if request.quality else TrialScore(5.0)
    )
    assert {request.setting["kv"] for request in requests if request.quality} == {"q8_0"}


def test_a_search_without_time_keeps_the_current_setting():
    found, requests = answered(Search(TWO, [START]), lambda _: None)
    assert found.best == START
    assert not found.better
    assert len(requests) == 1


def test_a_search_cut_short_confirms_nothing():
    answers = iter([TrialScore(10.0), *[TrialScore(30.0)] * 3])

    def answer(request: ScoreRequest) -> TrialScore | None:
        return next(answers, None)

    found, _ = answered(Search(TWO, [START]), answer)
    assert not found.better
    assert found.ratio is None


def test_a_current_setting_that_cannot_run_loses_to_one_that_can():
    def answer(request: ScoreRequest) -> TrialScore:
        if request.quality:
            return TrialScore(1.0)
        return TrialScore(None, "it cannot be loaded") if request.setting["threads"] == 4 else TrialScore(7.0)

    found, _ = answered(Search(TWO, [START]), answer)
    assert found.best["threads"] != 4
    assert found.better


def test_a_current_setting_that_fails_only_in_the_confirmation_confirms_nothing():
    """It ran before: its settings may not be the reason."""

    def answer(request: ScoreRequest) -> TrialScore:
        if request.phase == "confirmation" and request.setting == START:
            return TrialScore(None, "it died")
        return TrialScore(1.0 if request.quality else float(request.setting["threads"]))

    found, _ = answered(Search(TWO, [START]), answer)
    assert found.best != START
    assert not found.better


def test_a_round_of_the_confirmation_that_times_out_is_repeated():
    """On a busy machine: the current setting ran before."""
    rounds = 0

    def answer(request: ScoreRequest) -> TrialScore:
        nonlocal rounds
        if request.phase == "confirmation" and request.setting == START:
            rounds += 1
            if rounds == 2:
                return TrialScore(None, "stopped after 15 s", timed_out=True)
        return TrialScore(1.0 if request.quality else float(request.setting["threads"]))

    found, _ = answered(Search(TWO, [START]), answer)
    assert found.better
    assert len(found.rounds[START]) == len(found.rounds[found.best]) == rounds - 1


@pytest.mark.parametrize("ends", [True, False])
def test_a_current_setting_that_timed_out_is_tried_again_before_it_counts_as_one_that_does_not_run(ends: bool):
    def answer(request: ScoreRequest) -> TrialScore:
        if request.setting == START and not (ends and request.phase == "confirmation"):
            return TrialScore(None, "stopped after 15 s", timed_out=True)
        return TrialScore(1.0 if request.quality else float(request.setting["threads"]))

    found, _ = answered(Search(TWO, [START]), answer)
    assert found.better
    assert (START in found.rounds) == ends
    assert (found.ratio is not None) == ends


def test_a_confirmation_goes_on_while_the_best_looks_better_and_there_is_time():
    """A gain under a noise that nine rounds cannot see through, and that the search has underrated."""
    found = [answered(Search(TWO, [START]), _noisy_confirmation(seed))[0] for seed in range(10)]
    confirmed = [one for one in found if one.better]
    assert len(confirmed) >= 8
    assert max(len(one.rounds[one.best]) for one in confirmed) > SearchRules().max_rounds


def _noisy_confirmation(seed: int) -> Callable[[ScoreRequest], TrialScore]:
    rng = random.Random(seed)

    def answer(request: ScoreRequest) -> TrialScore:
        noise = 0.25 if request.phase == "confirmation" else 0.0
        return TrialScore(math.exp(rng.gauss(0, noise)) * (1.5 if request.setting["threads"] == 8 else 1.0))

    return answer


def test_nothing_is_recommended_if_everything_fails():
    found, _ = answered(Search(TWO, [START]), lambda request: TrialScore(None, "out of memory"))
    assert found.best == START
    assert not found.better


def test_the_nearest_values_come_first():
    settings = [START.but({"threads": n}) for n in (1, 2, 8, 16)]
    above, below = sides(settings, "threads", 4)
    assert [s["threads"] for s in above] == [8, 16]
    assert [s["threads"] for s in below] == [2, 1]


def test_another_baseline_that_times_out_costs_no_round():
    other = START.but({"threads": 8})

    def answer(request: ScoreRequest) -> TrialScore:
        if request.phase == "confirmation" and request.setting == other:
            return TrialScore(None, "stopped after 15 s", timed_out=True)
        return TrialScore(1.0 if request.quality else float(request.setting["threads"]))

    found, _ = answered(Search(TWO, [START, other]), answer)
    assert found.better
    assert other not in found.rounds
