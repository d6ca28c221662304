"""Synthetic machines, whose best setting is known, and trials by a formula with a clock of their own."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

from modelyard.config.load import load_config
from modelyard.core.engine import AvailableMemory
from modelyard.core.knobs import Knob, Loss, Setting
from modelyard_optimize.optimizer import Optimizer, OptimizerPlan, TrialHistory
from modelyard_optimize.search import ScoreRequest, Search, SearchResult, SearchSpace, TrialScore
from modelyard_optimize.trial import Measurement, Outcome, QualityResult, TrialFailure, TrialJob, TrialLimits
from modelyard_optimize.tuned_model import TunedModel

Speed = Callable[[Setting], float | None]  # None: it cannot run

KNOBS = (
    Knob(name="threads", values=(1, 2, 4, 8, 16, 32), stage=1),
    Knob(name="ubatch", values=(64, 128, 256, 512, 1024, 2048), stage=2),
    Knob(name="flash", values=("off", "on"), stage=3),
    Knob(name="kv", values=("f16", "q8_0", "q4_0"), stage=4, lossy=True),
    Knob(name="speculation", values=("off", "ngram", "draft"), stage=5),
)
BAD = Setting((("threads", 1), ("ubatch", 64), ("flash", "off"), ("kv", "f16"), ("speculation", "off")))
DEFAULT = Setting((("threads", 8), ("ubatch", 512), ("flash", "on"), ("kv", "f16"), ("speculation", "off")))


def forbids(setting: Setting) -> str | None:
    rounded = setting["kv"] != "f16" and setting["flash"] == "off"
    return "a rounded cache needs flash attention" if rounded else None


SPACE = SearchSpace(KNOBS, forbids)


class Landscape:
    """A random machine: its best setting and the effect of each knob depend on the seed."""

    def __init__(self, seed: int, *, noise: float = 0.03, interaction: float = 0.0) -> None:
        rng = random.Random(seed)
        self._rng, self._noise, self._interaction = random.Random(seed + 1), noise, interaction
        self._threads = rng.choice((2, 4, 8, 16))
        self._ubatch = rng.choice((128, 256, 512, 1024))
        self._flash = rng.uniform(-0.2, 0.3)
        self._kv = {"f16": 0.0, "q8_0": rng.uniform(-0.15, 0.2), "q4_0": rng.uniform(-0.2, 0.25)}
        self._speculation = {"off": 0.0, "ngram": rng.uniform(-0.1, 0.3), "draft": rng.uniform(-0.3, 0.4)}

    def speed(self, setting: Setting) -> float | None:
        threads = math.log2(float(setting["threads"]) / self._threads)
        ubatch = math.log2(float(setting["ubatch"]) / self._ubatch)
        log_speed = -0.2 * threads**2 - 0.05 * ubatch**2 + self._flash * (setting["flash"] == "on")
        log_speed += self._kv[str(setting["kv"])] + self._speculation[str(setting["speculation"])]
        return 100 * math.exp(log_speed + self._interactions(setting, threads, ubatch))

    def _interactions(self, setting: Setting, threads: float, ubatch: float) -> float:
        """More threads need larger batches, and speculation gains less with rounded caches."""
        both = setting["kv"] != "f16" and setting["speculation"] != "off"
        return self._interaction * (0.05 * max(-2, min(2, threads)) * max(-2, min(2, ubatch)) - 0.15 * both)

    def measured(self, setting: Setting) -> TrialScore:
        speed = self.speed(setting)
        if speed is None:
            return TrialScore(None, "it did not start")
        return TrialScore(speed * math.exp(self._rng.gauss(0, self._noise)))

    def best(self) -> float:
        return max(speed for setting in SPACE.grid() if (speed := self.speed(setting)) is not None)


class Cliff(Landscape):
    """Large batches do not fit into memory and 32 threads crash the process, just beyond the fastest setting."""

    def speed(self, setting: Setting) -> float | None:
        if int(setting["ubatch"]) > self._ubatch or setting["threads"] == 32:
            return None
        return super().speed(setting)


class Heavy(Landscape):
    """With large batches only rounded caches fit into memory: a value that failed alone works with another."""

    def speed(self, setting: Setting) -> float | None:
        if setting["kv"] == "f16" and int(setting["ubatch"]) >= self._ubatch:
            return None
        return super().speed(setting)


def explore(land: Landscape, baselines: list[Setting], limit: int, reserve: int = 20) -> SearchResult:
    """Drive a search like the optimizer: exploring ends when only the reserve is left, confirming when all is used."""
    steps = Search(SPACE, baselines).run()
    request, trials = next(steps), 0
    while True:
        answer = _answer(land, request, trials, limit, reserve)
        trials += answer is not None and not request.quality
        try:
            request = steps.send(answer)
        except StopIteration as stop:
            found: SearchResult = stop.value
            return found


def _answer(land: Landscape, request: ScoreRequest, trials: int, limit: int, reserve: int) -> TrialScore | None:
    if request.quality:
        return TrialScore(1.0)
    room = limit if request.phase == "confirmation" else limit - reserve
    return land.measured(request.setting) if trials < room else None


# --- trials by a formula ----------------------------------------------------------------------------------------------


class SilentObserver:
    def __init__(self) -> None:
        self.replayed = 0
        self.warnings: list[str] = []

    def trial_started(self, request: ScoreRequest, left_s: float) -> None:
        pass

    def trial_ended(self, request: ScoreRequest, outcome: Outcome, best: Setting, *, replayed: bool) -> None:
        self.replayed += replayed

    def warning(self, text: str) -> None:
        self.warnings.append(text)


class FormulaTrials:
    """Trials by a formula, with a clock that advances by the duration of each."""

    def __init__(self, seconds: float = 5.0) -> None:
        self.now, self.seconds = 0.0, seconds
        self.jobs: list[TrialJob] = []
        self.limits: list[TrialLimits] = []
        self.stop_after: int | None = None

    async def run_trial(self, job: TrialJob, limits: TrialLimits) -> Outcome:
        if self.stop_after is not None and len(self.jobs) == self.stop_after:
            raise KeyboardInterrupt
        self.jobs.append(job)
        self.limits.append(limits)
        self.now += self.seconds
        model = job.config["models"]["m"]
        options = {**model.get("options", {}), **{key: model[key] for key in ("type_k", "type_v") if key in model}}
        return self.quality(options) if job.reference is not None else self.measurement(options)

    def quality(self, options: dict) -> Outcome:
        coarse = "q4_0" in (options.get("type_k"), options.get("type_v"))
        return QualityResult(Loss(11.0 if coarse else 10.01, 10.0, 0.001))

    def measurement(self, options: dict) -> Outcome:
        if options.get("n_ubatch", 512) >= 1024:
            return TrialFailure("memory", "too large")
        speed = (
            10.0 * (2 if options.get("flash_attn") != "off" else 1) * (1.3 if options.get("type_k") == "q8_0" else 1)
        )
        memory = {"q8_0": 600, "q4_0": 400}.get(options.get("type_k", "f16"), 1000) << 20
        return Measurement(speed=speed, ttft_s=1 / speed, answer_s=10 / speed, memory=memory, wall_s=30 / speed)


def tuned_model(goal: str = "chat", **model: object) -> TunedModel:
    from tests.engines.llama_cpp.helpers import model_file

    chosen = {"backend": "llama_cpp", "path": str(model_file()), "flash_attn": "off", **model}
    config = load_config(env={}, overrides={"models": {"m": chosen}}).config
    return TunedModel(config, "m", goal, AvailableMemory(8 << 30))  # type: ignore[arg-type]


def optimizer(
    trials: FormulaTrials, folder: Path, goal: str = "chat", observer: SilentObserver | None = None, **plan: object
) -> Optimizer:
    chosen = OptimizerPlan(goal=goal, **{"budget_s": 2000.0, **plan})  # type: ignore[arg-type]
    history = TrialHistory(folder / "run.jsonl")
    return Optimizer(
        tuned_model(goal), chosen, history, observer or SilentObserver(), trials.run_trial, lambda: trials.now
    )


@functools.cache
def finished_run(goal: str = "chat") -> tuple[Optimizer, SearchResult]:
    """A whole run, shared by the tests of what is made of it."""
    with tempfile.TemporaryDirectory() as folder:
        made = optimizer(FormulaTrials(), Path(folder), goal)
        return made, asyncio.run(made.run())
