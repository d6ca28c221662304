"""The search on synthetic machines: what it finds beside the best there is, and how few trials that takes."""

from __future__ import annotations

import math

import pytest

from modelyard.core.knobs import Knob, Setting
from modelyard.tune.race import Ask, Told
from modelyard.tune.search import Found, Search, sides
from modelyard.tune.space import Space
from tests.tune.landscapes import BAD, DEFAULT, SPACE, Cliff, Heavy, Landscape, explore

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
def test_a_quarter_of_the_grid_finds_the_best_but_for_five_per_cent(make, baselines, most):
    found = shares(make, baselines)
    assert sum(share >= 0.95 for share in found) >= most * len(found), sorted(found)[:8]
    assert sum(found) / len(found) >= 0.97


def test_what_is_not_better_is_not_said_to_be():
    """On a flat land all settings are alike: whatever looks best has only been lucky."""

    class Flat(Landscape):
        def speed(self, setting: Setting) -> float | None:
            return 100.0

    wrong = [seed for seed in SEEDS if explore(Flat(seed, noise=0.05), [DEFAULT], QUARTER).better]
    assert len(wrong) <= 2


def test_a_gain_far_beyond_the_noise_is_proved_in_few_rounds():
    found = explore(Landscape(3), [BAD, DEFAULT], QUARTER)
    assert found.better
    assert found.ratio is not None
    assert found.ratio.low > 1
    assert len(found.rounds[found.best]) == len(found.rounds[BAD]) == 4


def answered(search: Search, answer) -> tuple[Found, list[Ask]]:
    """A search driven by a function of its questions; also what it asked."""
    steps, asked = search.run(), []
    ask = next(steps)
    while True:
        asked.append(ask)
        try:
            ask = steps.send(answer(ask))
        except StopIteration as over:
            return over.value, asked


TWO = Space(
    [
        Knob(name="threads", values=(1, 2, 4, 8, 16, 32), stage=1),
        Knob(name="kv", values=("f16", "q8_0", "q4_0"), stage=2, lossy=True),
    ]
)
START = Setting((("threads", 4), ("kv", "f16")))


def test_the_same_answers_lead_to_the_same_questions():
    def answer(ask: Ask) -> Told:
        return Told(1.0) if ask.loss else Told(float(ask.setting["threads"]))

    assert answered(Search(TWO, [START]), answer)[1] == answered(Search(TWO, [START]), answer)[1]


def test_a_value_beyond_one_that_fails_is_not_tried():
    def answer(ask: Ask) -> Told:
        threads = int(ask.setting["threads"])
        return Told(1.0) if ask.loss else Told(None, "it died") if threads >= 8 else Told(threads + 10.0)

    found, asked = answered(Search(TWO, [START]), answer)
    assert max(int(ask.setting["threads"]) for ask in asked) == 8
    assert found.best["threads"] == 4
    assert set(found.ledger.failures.values()) == {"it died"}


def test_a_value_clearly_below_its_neighbour_ends_that_direction():
    def answer(ask: Ask) -> Told:
        return Told(1.0) if ask.loss else Told(100 / (1 + abs(math.log2(int(ask.setting["threads"]) / 4))))

    _, asked = answered(Search(TWO, [START]), answer)
    assert {ask.setting["threads"] for ask in asked} == {2, 4, 8}


def test_what_rounds_too_much_is_never_measured():
    def answer(ask: Ask) -> Told:
        if ask.loss:
            return Told(None, "too much") if ask.setting["kv"] == "q4_0" else Told(1.0)
        return Told({"f16": 10.0, "q8_0": 12.0, "q4_0": 20.0}[str(ask.setting["kv"])])

    found, asked = answered(Search(TWO, [START]), answer)
    assert found.best["kv"] == "q8_0"
    assert not [ask for ask in asked if ask.setting["kv"] == "q4_0" and not ask.loss]
    assert list(found.ledger.refused.values()) == ["too much"]


@pytest.mark.parametrize(("gain", "kept"), [(1.0, "f16"), (1.5, "q4_0")])
def test_coarser_numbers_that_only_looked_faster_give_way_to_a_baseline_without_them(gain: float, kept: str):
    bad, default = Setting((("threads", 1), ("kv", "f16"))), START

    def answer(ask: Ask) -> Told:
        luck = 1.0 if ask.phase == "proof" or ask.setting["kv"] != "q4_0" else 1.05  # while it is explored
        speed = 100.0 if int(ask.setting["threads"]) > 1 else 50.0
        return Told(1.0) if ask.loss else Told(speed * luck * (gain if ask.setting["kv"] == "q4_0" else 1.0))

    found, _ = answered(Search(TWO, [bad, default]), answer)
    assert found.better
    assert found.best["kv"] == kept


def test_each_way_of_rounding_is_judged_once():
    _, asked = answered(Search(TWO, [START]), lambda ask: Told(1.0) if ask.loss else Told(5.0))
    assert len([ask for ask in asked if ask.loss]) == 2


def test_what_the_user_has_chosen_himself_is_not_judged():
    rounded = START.but({"kv": "q4_0"})
    _, asked = answered(Search(TWO, [rounded], START), lambda ask: Told(1.0) if ask.loss else Told(5.0))
    assert {ask.setting["kv"] for ask in asked if ask.loss} == {"q8_0"}


def test_without_time_the_search_ends_with_what_holds_now():
    found, asked = answered(Search(TWO, [START]), lambda _: None)
    assert found.best == START
    assert not found.better
    assert len(asked) == 1


def test_a_search_cut_short_keeps_what_it_has_won_and_proves_nothing():
    told = iter([Told(10.0), *[Told(30.0)] * 3])

    def answer(ask: Ask) -> Told | None:
        return next(told, None)

    found, _ = answered(Search(TWO, [START]), answer)
    assert not found.better
    assert found.ratio is None


def test_a_current_setting_that_cannot_run_loses_to_any_that_can():
    def answer(ask: Ask) -> Told:
        if ask.loss:
            return Told(1.0)
        return Told(None, "it cannot be loaded") if ask.setting["threads"] == 4 else Told(7.0)

    found, _ = answered(Search(TWO, [START]), answer)
    assert found.best["threads"] != 4
    assert found.better


def test_a_current_setting_that_fails_only_in_the_proof_proves_nothing():
    """It has run before: what broke it may not have been its settings."""

    def answer(ask: Ask) -> Told:
        if ask.phase == "proof" and ask.setting == START:
            return Told(None, "it died")
        return Told(1.0 if ask.loss else float(ask.setting["threads"]))

    found, _ = answered(Search(TWO, [START]), answer)
    assert found.best != START
    assert not found.better


def test_where_everything_fails_nothing_is_recommended():
    found, _ = answered(Search(TWO, [START]), lambda ask: Told(None, "out of memory"))
    assert found.best == START
    assert not found.better


def test_the_sides_of_a_value_come_nearest_first():
    settings = [START.but({"threads": n}) for n in (1, 2, 8, 16)]
    above, below = sides(settings, "threads", 4)
    assert [s["threads"] for s in above] == [8, 16]
    assert [s["threads"] for s in below] == [2, 1]
