"""A run: questions become trials within the budget, outcomes become scores, and a broken-off run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from modelyard.config.load import load_config
from modelyard.core.engine import AvailableMemory
from modelyard.core.knobs import Loss, Setting
from modelyard.tune.journal import Journal
from modelyard.tune.order import Failure, Figures, Judged, Order, Outcome
from modelyard.tune.race import Ask
from modelyard.tune.run import Bounds, Plan, Run
from modelyard.tune.subject import Subject
from modelyard.tune.trial import Limits
from tests.engines.llama_cpp.stage import model_file


class Silent:
    def __init__(self) -> None:
        self.kept = 0
        self.warnings: list[str] = []

    def asked(self, ask: Ask, left_s: float) -> None:
        pass

    def told(self, ask: Ask, outcome: Outcome, best: Setting, *, kept: bool) -> None:
        self.kept += kept

    def warned(self, text: str) -> None:
        self.warnings.append(text)


class Lab:
    """Trials by a formula, with a clock that goes on by as much as each of them takes."""

    def __init__(self, seconds: float = 5.0) -> None:
        self.now, self.seconds = 0.0, seconds
        self.orders: list[Order] = []
        self.limits: list[Limits] = []
        self.stop_after: int | None = None

    async def measure(self, order: Order, limits: Limits) -> Outcome:
        if self.stop_after is not None and len(self.orders) == self.stop_after:
            raise KeyboardInterrupt
        self.orders.append(order)
        self.limits.append(limits)
        self.now += self.seconds
        model = order.config["models"]["m"]
        told = {**model.get("options", {}), **{key: model[key] for key in ("type_k", "type_v") if key in model}}
        return self.judge(told) if order.reference is not None else self.figures(told)

    def judge(self, told: dict) -> Outcome:
        coarse = "q4_0" in (told.get("type_k"), told.get("type_v"))
        return Judged(Loss(11.0 if coarse else 10.01, 10.0, 0.001))

    def figures(self, told: dict) -> Outcome:
        if told.get("n_ubatch", 512) >= 1024:
            return Failure("memory", "too large")
        speed = 10.0 * (2 if told.get("flash_attn") != "off" else 1) * (1.3 if told.get("type_k") == "q8_0" else 1)
        memory = {"q8_0": 600, "q4_0": 400}.get(told.get("type_k", "f16"), 1000) << 20
        return Figures(speed=speed, ttft_s=1 / speed, answer_s=10 / speed, memory=memory, wall_s=30 / speed)


def subject(goal: str = "chat", **model: object) -> Subject:
    chosen = {"backend": "llama_cpp", "path": str(model_file()), "flash_attn": "off", **model}
    config = load_config(env={}, overrides={"models": {"m": chosen}}).config
    return Subject(config, "m", goal, AvailableMemory(8 << 30))  # type: ignore[arg-type]


def run(lab: Lab, folder: Path, goal: str = "chat", screen: Silent | None = None, **plan: object) -> Run:
    chosen = Plan(goal=goal, **{"budget_s": 2000.0, **plan})  # type: ignore[arg-type]
    journal = Journal(folder / "run.jsonl")
    return Run(subject(goal), chosen, journal, screen or Silent(), lab.measure, lambda: lab.now)


async def test_the_best_is_found_and_proved(tmp_path: Path):
    found = await run(Lab(), tmp_path).go()
    assert found.better
    assert found.best["flash_attn"] == "on"
    assert found.best["type_k"] == "q8_0"
    assert found.ratio is not None
    assert found.ratio.middle == pytest.approx(2.6)


async def test_what_costs_too_much_quality_is_never_measured(tmp_path: Path):
    lab = Lab()
    made = run(lab, tmp_path)
    await made.go()
    measured = [order for order in lab.orders if order.reference is None]
    assert not [order for order in measured if "q4_0" in str(order.config)]
    assert any(loss.rise > 0.05 for loss in made.losses.values())


async def test_for_memory_two_searches_judge_each_way_of_rounding_once(tmp_path: Path):
    lab = Lab()
    made = run(lab, tmp_path, "memory")
    await made.go()
    judged = [order for order in lab.orders if order.reference is not None]
    assert len(judged) == len(made.losses) > 2


async def test_for_memory_the_floor_follows_what_the_fastest_setting_shows(tmp_path: Path):
    class Tired(Lab):
        """Every trial is a little slower than the one before."""

        def figures(self, told: dict) -> Outcome:
            seen, slower = super().figures(told), 1 + len(self.orders) / 1000
            return seen if isinstance(seen, Failure) else replace(seen, answer_s=seen.answer_s * slower)

    made = run(Tired(), tmp_path, "memory")
    await made.go()
    assert made.floor is not None
    assert made.floor < 0.95 * max(1 / one.answer_s for seen in made.figures.values() for one in seen)


async def test_a_looser_bound_lets_it_be_tried(tmp_path: Path):
    lab = Lab()
    await run(lab, tmp_path, bounds=Bounds(0.2, 1.0)).go()
    assert [order for order in lab.orders if order.reference is None and "q4_0" in str(order.config)]


async def test_failures_are_results(tmp_path: Path):
    made = run(Lab(), tmp_path)
    assert (await made.go()).better
    assert {failure.kind for failure in made.failures.values()} == {"memory"}


async def test_the_budget_is_kept_and_some_of_it_is_kept_for_the_proof(tmp_path: Path):
    lab = Lab(seconds=10.0)
    found = await run(lab, tmp_path, budget_s=300.0).go()
    assert lab.now <= 300.0
    assert len(found.rounds[found.best]) >= 4
    assert found.better


async def test_without_time_for_a_proof_nothing_is_better(tmp_path: Path):
    found = await run(Lab(seconds=20.0), tmp_path, budget_s=60.0).go()
    assert not found.better


async def test_where_the_first_trial_hangs_the_others_get_the_smallest_load(tmp_path: Path):
    class Loaded(Lab):
        async def measure(self, order: Order, limits: Limits) -> Outcome:
            if order.reference is None and order.workload.output_tokens > 16:
                self.now += limits.seconds
                return Failure("hang", "stopped")
            return await super().measure(order, limits)

    screen = Silent()
    found = await run(Loaded(), tmp_path, screen=screen).go()
    assert found.better
    assert "the smallest load" in screen.warnings[0]


async def test_where_trials_are_long_more_is_kept_so_that_the_proofs_rounds_fit(tmp_path: Path):
    lab = Lab(seconds=15.0)
    found = await run(lab, tmp_path, budget_s=420.0).go()
    assert lab.now <= 420.0
    assert len(found.rounds[found.best]) >= 4
    assert found.better


@pytest.mark.parametrize(("seconds", "warnings"), [(5.0, 0), (20.0, 1)])
async def test_a_budget_of_a_few_trials_only_is_said_once(seconds: float, warnings: int, tmp_path: Path):
    screen = Silent()
    await run(Lab(seconds), tmp_path, screen=screen, budget_s=300.0).go()
    assert len(screen.warnings) == warnings
    assert all("about 15 fit into the budget: --budget 20m would" in told for told in screen.warnings)


async def test_where_there_is_little_to_turn_a_shorter_budget_is_suggested(tmp_path: Path):
    config = load_config(env={}, overrides={"models": {"m": {"backend": "vllm", "path": "/nowhere"}}}).config
    little = Subject(config, "m", "chat", AvailableMemory(8 << 30))  # four settings
    lab, screen = Lab(30.0), Silent()
    await Run(
        little, Plan(goal="chat", budget_s=240.0), Journal(tmp_path / "j"), screen, lab.measure, lambda: lab.now
    ).go()
    assert ["about 8 fit into the budget: --budget 8m would" in told for told in screen.warnings] == [True]


async def test_a_trial_may_take_a_few_times_what_is_usual(tmp_path: Path):
    lab = Lab(seconds=10.0)
    await run(lab, tmp_path, memory=123).go()
    assert [round(limits.seconds) for limits in lab.limits[:3]] == [667, 663, 40]
    assert {limits.memory for limits in lab.limits} == {123}


async def test_where_every_trial_hangs_the_budget_ends_it_all_the_same(tmp_path: Path):
    class Stuck(Lab):
        async def measure(self, order: Order, limits: Limits) -> Outcome:
            self.orders.append(order)
            self.now += limits.seconds
            return Failure("hang", "stopped")

    lab = Stuck()
    found = await run(lab, tmp_path, budget_s=600.0).go()
    assert not found.better
    assert lab.now <= 700.0


async def test_a_load_that_is_too_large_for_the_budget_is_made_smaller(tmp_path: Path):
    lab = Lab()
    await run(lab, tmp_path, budget_s=96.0).go()
    first, others = lab.orders[0], lab.orders[1:]
    assert {order.conversations for order in others} == {1}
    assert all(order.workload.output_tokens < first.workload.output_tokens for order in others)


async def test_a_run_that_was_broken_off_goes_on_where_it_was(tmp_path: Path):
    whole = Lab()
    expected = await run(whole, tmp_path / "whole").go()
    broken = Lab()
    broken.stop_after = 7
    first = run(broken, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        await first.go()
    assert not first.so_far().better
    screen, rest = Silent(), Lab()
    found = await run(rest, tmp_path, screen=screen).go()
    assert screen.kept == 6  # and the calibration
    assert len(rest.orders) == len(whole.orders) - 7
    assert found.best == expected.best
    assert not (tmp_path / "run.jsonl").exists()


async def test_for_memory_the_smallest_that_is_fast_enough_wins(tmp_path: Path):
    made = run(Lab(), tmp_path, "memory", bounds=Bounds(0.2, 1.0))
    found = await made.go()
    assert found.best["type_k"] == "q8_0"  # q4_0 would be smaller and is too slow
    assert found.better
    assert made.floor == pytest.approx(0.95 * 2.6)


async def test_for_memory_more_slack_buys_less_memory(tmp_path: Path):
    found = await run(Lab(), tmp_path, "memory", bounds=Bounds(0.2, 1.0), slack=0.3).go()
    assert found.best["type_k"] == "q4_0"


def test_before_the_first_trial_the_best_is_what_holds_now(tmp_path: Path):
    made = run(Lab(), tmp_path)
    assert made.so_far().best == made.subject.current


@pytest.mark.parametrize(
    ("loss", "word"),
    [
        (Loss(10.05, 10.0, 0.01), None),
        (Loss(10.2, 10.0, 0.01), "perplexity"),
        (Loss(10.0, 10.0, 0.3), "odds"),
        (Loss(9.9, 10.0, None), None),
    ],
)
def test_the_bound_objects_to_perplexity_and_to_moved_odds(loss, word):
    objection = Bounds().objection(loss)
    assert (objection is None) if word is None else (objection is not None and word in objection)
