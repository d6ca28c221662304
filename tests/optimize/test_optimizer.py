"""An optimization: requests become trials within the budget, outcomes become scores, interrupted runs resume."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from modelyard.config.load import load_config
from modelyard.core.engine import AvailableMemory
from modelyard.core.knobs import Loss, Setting
from modelyard_optimize.optimizer import Optimizer, OptimizerPlan, QualityBounds, TrialHistory, fingerprint
from modelyard_optimize.trial import Measurement, Outcome, QualityResult, TrialFailure, TrialJob, TrialLimits
from modelyard_optimize.tuned_model import TunedModel
from tests.optimize.fakes import FormulaTrials, SilentObserver, optimizer

A = Setting((("n_threads", 2), ("flash_attn", "on"), ("p", 0.5), ("x", True)))
SEEN = Measurement(speed=1.0, ttft_s=2.0, answer_s=3.0, memory=4)


def test_recorded_outcomes_are_replayed_once_and_in_order(tmp_path: Path):
    file = tmp_path / "deep" / "run.jsonl"
    first = TrialHistory(file)
    for outcome in (SEEN, TrialFailure("crash", "it died")):
        first.add(A, False, outcome)
    first.add(A, True, QualityResult(Loss(2.0, 1.0, 0.1)))
    second = TrialHistory(file)
    assert len(second) == 3
    assert second.take(A, False) == SEEN
    assert second.take(A, False) == TrialFailure("crash", "it died")
    assert second.take(A, False) is None
    assert second.take(A, True) == QualityResult(Loss(2.0, 1.0, 0.1))


def test_an_incomplete_line_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "run.jsonl"
    TrialHistory(file).add(A, False, SEEN)
    file.write_bytes(file.read_bytes() + b'{"setting": [[["n_thr')
    assert len(TrialHistory(file)) == 1
    assert "will be measured again" in caplog.text


def test_a_finished_run_leaves_no_history(tmp_path: Path):
    history = TrialHistory(tmp_path / "run.jsonl")
    history.add(A, False, SEEN)
    history.clear()
    history.clear()
    assert list(tmp_path.iterdir()) == []


def test_another_model_or_goal_has_another_history():
    assert fingerprint({"b": 1, "a": 2}, "chat") == fingerprint({"a": 2, "b": 1}, "chat")
    assert fingerprint({"a": 2}, "chat") != fingerprint({"a": 2}, "batch")


async def test_the_best_is_found_and_confirmed(tmp_path: Path):
    found = await optimizer(FormulaTrials(), tmp_path).run()
    assert found.better
    assert found.best["flash_attn"] == "on"
    assert found.best["type_k"] == "q8_0"
    assert found.ratio is not None
    assert found.ratio.middle == pytest.approx(2.6)


async def test_rounding_beyond_the_quality_bound_is_never_measured(tmp_path: Path):
    trials = FormulaTrials()
    made = optimizer(trials, tmp_path)
    await made.run()
    measured = [job for job in trials.jobs if job.reference is None]
    assert not [job for job in measured if "q4_0" in str(job.config)]
    assert any(loss.rise > 0.05 for loss in made.losses.values())


async def test_for_memory_two_searches_check_each_rounding_once(tmp_path: Path):
    trials = FormulaTrials()
    made = optimizer(trials, tmp_path, "memory")
    await made.run()
    judged = [job for job in trials.jobs if job.reference is not None]
    assert len(judged) == len(made.losses) > 2


async def test_for_memory_the_floor_follows_later_measurements_of_the_fastest_setting(tmp_path: Path):
    class Tired(FormulaTrials):
        """Every trial is a little slower than the one before."""

        def measurement(self, options: dict) -> Outcome:
            seen, slower = super().measurement(options), 1 + len(self.jobs) / 1000
            return seen if isinstance(seen, TrialFailure) else replace(seen, answer_s=seen.answer_s * slower)

    made = optimizer(Tired(), tmp_path, "memory")
    await made.run()
    assert made.floor is not None
    assert made.floor < 0.95 * max(1 / one.answer_s for seen in made.measurements.values() for one in seen)


async def test_a_looser_quality_bound_allows_more_rounding(tmp_path: Path):
    trials = FormulaTrials()
    await optimizer(trials, tmp_path, bounds=QualityBounds(0.2, 1.0)).run()
    assert [job for job in trials.jobs if job.reference is None and "q4_0" in str(job.config)]


async def test_failures_are_results(tmp_path: Path):
    made = optimizer(FormulaTrials(), tmp_path)
    assert (await made.run()).better
    assert {failure.kind for failure in made.failures.values()} == {"memory"}


async def test_the_budget_holds_and_part_of_it_is_reserved_for_the_confirmation(tmp_path: Path):
    trials = FormulaTrials(seconds=10.0)
    found = await optimizer(trials, tmp_path, budget_s=300.0).run()
    assert trials.now <= 300.0
    assert len(found.rounds[found.best]) >= 4
    assert found.better


async def test_without_time_for_a_confirmation_nothing_is_better(tmp_path: Path):
    found = await optimizer(FormulaTrials(seconds=20.0), tmp_path, budget_s=60.0).run()
    assert not found.better


async def test_a_budget_without_room_for_a_confirmation_is_spent_whole_on_the_search(tmp_path: Path):
    class Flat(FormulaTrials):
        """Nothing is better than the current settings."""

        def measurement(self, options: dict) -> Outcome:
            return Measurement(speed=10.0, ttft_s=0.1, answer_s=1.0, memory=1 << 30)

    trials = Flat(seconds=10.0)
    await optimizer(trials, tmp_path, budget_s=120.0).run()
    assert 100.0 < trials.now <= 120.0


async def test_the_smallest_load_is_used_if_the_first_trial_hangs(tmp_path: Path):
    class Loaded(FormulaTrials):
        async def run_trial(self, job: TrialJob, limits: TrialLimits) -> Outcome:
            if job.reference is None and job.workload.output_tokens > 16:
                self.now += limits.seconds
                return TrialFailure("hang", "stopped")
            return await super().run_trial(job, limits)

    observer = SilentObserver()
    found = await optimizer(Loaded(), tmp_path, observer=observer).run()
    assert found.better
    assert "a smaller load" in observer.warnings[0]


async def test_the_load_shrinks_until_a_trial_ends_in_time_and_the_run_still_answers(tmp_path: Path):
    class Busy(FormulaTrials):
        """Only an answer of a few tokens ends in time."""

        async def run_trial(self, job: TrialJob, limits: TrialLimits) -> Outcome:
            if job.reference is None and job.workload.output_tokens > 4:
                self.now += limits.seconds
                return TrialFailure("hang", "stopped")
            return await super().run_trial(job, limits)

    trials = Busy()
    made = optimizer(trials, tmp_path, budget_s=600.0)
    assert (await made.run()).better
    assert trials.now <= 600.0
    assert not [failure for failure in made.failures.values() if failure.kind == "hang"]


async def test_on_a_crowded_machine_the_first_load_is_small_and_no_trial_is_stopped_while_it_starts(tmp_path: Path):
    class Crowded(FormulaTrials):
        """The start of a program alone takes 25 s."""

        async def run_trial(self, job: TrialJob, limits: TrialLimits) -> Outcome:
            self.seconds = 25.0
            if limits.seconds < self.seconds:
                self.now += limits.seconds
                return TrialFailure("hang", "stopped")
            return await super().run_trial(job, limits)

    trials = Crowded()
    made = optimizer(trials, tmp_path, budget_s=180.0, crowding=8.0)
    await made.run()
    assert made.measurements
    assert not made.failures
    assert trials.jobs[0].workload.output_tokens == 16
    calm = optimizer(Crowded(), tmp_path / "calm", budget_s=120.0)
    await calm.run()
    assert not calm.measurements


async def test_a_run_that_ran_out_of_time_goes_on_with_the_same_command(tmp_path: Path):
    first = await optimizer(FormulaTrials(seconds=20.0), tmp_path, budget_s=150.0).run()
    assert not first.better
    observer = SilentObserver()
    second = await optimizer(FormulaTrials(seconds=5.0), tmp_path, observer=observer, budget_s=2000.0).run()
    assert observer.replayed > 2
    assert second.better
    assert not (tmp_path / "run.jsonl").exists()


async def test_a_slow_setting_has_time_in_proportion_to_what_it_took_before(tmp_path: Path):
    class Slow(FormulaTrials):
        """Flash attention off takes five times as long, and the second time seven."""

        async def run_trial(self, job: TrialJob, limits: TrialLimits) -> Outcome:
            off = job.config["models"]["m"].get("options", {}).get("flash_attn") == "off"
            took = self.seconds * (6 if off and len(self.jobs) > 2 else 4 if off else 1)
            if took > limits.seconds:
                self.now += limits.seconds
                return TrialFailure("hang", "stopped")
            self.now += took - self.seconds
            return await super().run_trial(job, limits)

    made = optimizer(Slow(), tmp_path, budget_s=2000.0)
    assert (await made.run()).better
    assert made.model.current not in made.failures


async def test_more_is_reserved_for_the_confirmation_of_long_trials(tmp_path: Path):
    trials = FormulaTrials(seconds=15.0)
    found = await optimizer(trials, tmp_path, budget_s=420.0).run()
    assert trials.now <= 420.0
    assert len(found.rounds[found.best]) >= 4
    assert found.better


@pytest.mark.parametrize(("seconds", "warnings"), [(5.0, 0), (20.0, 1)])
async def test_a_short_budget_is_warned_of_once(seconds: float, warnings: int, tmp_path: Path):
    observer = SilentObserver()
    await optimizer(FormulaTrials(seconds), tmp_path, observer=observer, budget_s=300.0).run()
    assert len(observer.warnings) == warnings
    assert all("about 15 fit into the budget: --budget 20m would" in line for line in observer.warnings)


class NoisyTrials(FormulaTrials):
    """As on a machine with other work: a setting varies by `noise`, and nothing but 20 % is to be gained."""

    def __init__(self, noise: float, seconds: float = 5.0) -> None:
        super().__init__(seconds)
        self._noise, self._random = noise, random.Random(1)

    def measurement(self, options: dict) -> Outcome:
        speed = (12.0 if options.get("flash_attn") != "off" else 10.0) * math.exp(self._random.gauss(0, self._noise))
        return Measurement(speed=speed, ttft_s=1 / speed, answer_s=10 / speed, memory=1 << 30, wall_s=30 / speed)


@pytest.mark.parametrize(
    ("noise", "words"),
    [
        (0.02, None),
        (0.09, "varies by 7%; to confirm a gain of 10% takes 17 rounds: --budget 8m"),
        (0.5, "far above 10%"),
    ],
)
async def test_a_noisy_machine_is_reported_with_the_time_that_it_needs(noise: float, words: str | None, tmp_path: Path):
    observer = SilentObserver()
    await optimizer(NoisyTrials(noise), tmp_path, observer=observer, budget_s=400.0).run()
    said = [line for line in observer.warnings if "the machine is noisy" in line]
    assert len(said) == (words is not None)
    assert words is None or words in said[0]


async def test_a_gain_that_the_noise_hid_is_reported_with_the_budget_that_it_needs(tmp_path: Path):
    made = optimizer(NoisyTrials(0.08, seconds=20.0), tmp_path, budget_s=400.0)
    found = await made.run()
    assert not found.better
    assert found.best == found.current or made.needed_s is None or made.needed_s > 400.0


async def test_a_small_space_needs_a_shorter_budget(tmp_path: Path):
    config = load_config(env={}, overrides={"models": {"m": {"backend": "vllm", "path": "/nowhere"}}}).config
    little = TunedModel(config, "m", "chat", AvailableMemory(8 << 30))  # four settings
    trials, observer = FormulaTrials(30.0), SilentObserver()
    await Optimizer(
        little,
        OptimizerPlan(goal="chat", budget_s=240.0),
        TrialHistory(tmp_path / "j"),
        observer,
        trials.run_trial,
        lambda: trials.now,
    ).run()
    assert ["about 8 fit into the budget: --budget 8m would" in line for line in observer.warnings] == [True]


async def test_the_limit_of_a_trial_is_a_few_times_the_usual_duration(tmp_path: Path):
    trials = FormulaTrials(seconds=10.0)
    await optimizer(trials, tmp_path, memory=123).run()
    assert [round(limits.seconds) for limits in trials.limits[:3]] == [333, 333, 40]
    assert {limits.memory for limits in trials.limits} == {123}


async def test_the_budget_holds_even_if_every_trial_hangs(tmp_path: Path):
    class Stuck(FormulaTrials):
        async def run_trial(self, job: TrialJob, limits: TrialLimits) -> Outcome:
            self.jobs.append(job)
            self.now += limits.seconds
            return TrialFailure("hang", "stopped")

    trials = Stuck()
    found = await optimizer(trials, tmp_path, budget_s=600.0).run()
    assert not found.better
    assert trials.now <= 700.0


async def test_a_load_too_large_for_the_budget_is_shrunk(tmp_path: Path):
    trials = FormulaTrials()
    await optimizer(trials, tmp_path, budget_s=96.0).run()
    first, others = trials.jobs[0], trials.jobs[1:]
    assert {job.conversations for job in others} == {1}
    assert all(job.workload.output_tokens < first.workload.output_tokens for job in others)


async def test_an_interrupted_run_is_resumed(tmp_path: Path):
    whole = FormulaTrials()
    expected = await optimizer(whole, tmp_path / "whole").run()
    broken = FormulaTrials()
    broken.stop_after = 7
    first = optimizer(broken, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        await first.run()
    assert not first.interim_result().better
    observer, rest = SilentObserver(), FormulaTrials()
    found = await optimizer(rest, tmp_path, observer=observer).run()
    assert observer.replayed == 6  # and the calibration
    assert len(rest.jobs) == len(whole.jobs) - 7
    assert found.best == expected.best
    assert not (tmp_path / "run.jsonl").exists()


async def test_for_memory_the_smallest_fast_enough_setting_wins(tmp_path: Path):
    made = optimizer(FormulaTrials(), tmp_path, "memory", bounds=QualityBounds(0.2, 1.0))
    found = await made.run()
    assert found.best["type_k"] == "q8_0"  # q4_0 would be smaller and is too slow
    assert found.better
    assert made.floor == pytest.approx(0.95 * 2.6)


async def test_for_memory_more_slack_buys_less_memory(tmp_path: Path):
    found = await optimizer(FormulaTrials(), tmp_path, "memory", bounds=QualityBounds(0.2, 1.0), slack=0.3).run()
    assert found.best["type_k"] == "q4_0"


def test_before_the_first_trial_the_best_is_the_current_setting(tmp_path: Path):
    made = optimizer(FormulaTrials(), tmp_path)
    assert made.interim_result().best == made.model.current


@pytest.mark.parametrize(
    ("loss", "word"),
    [
        (Loss(10.05, 10.0, 0.01), None),
        (Loss(10.2, 10.0, 0.01), "perplexity"),
        (Loss(10.0, 10.0, 0.3), "divergence"),
        (Loss(9.9, 10.0, None), None),
    ],
)
def test_the_quality_bounds_limit_perplexity_and_divergence(loss, word):
    objection = QualityBounds().objection(loss)
    assert (objection is None) if word is None else (objection is not None and word in objection)
