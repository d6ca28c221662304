"""One optimization: answers the requests of the search with trials, within a budget of time.

search request ──→ in the history? ──→ time left? ──→ trial in a child process ──→ history ──→ score ──→ search
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from itertools import cycle
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from modelyard.core.knobs import Goal, Loss, Setting
from modelyard_optimize import goals
from modelyard_optimize.search import ScoreRequest, Search, SearchResult, SearchRules, TrialScore, rounds_needed
from modelyard_optimize.trial import (
    EngineBenchResult,
    Measurement,
    Outcome,
    QualityResult,
    TrialFailure,
    TrialJob,
    TrialLimits,
    run_trial,
)
from modelyard_optimize.tuned_model import TunedModel

if TYPE_CHECKING:
    from modelyard_optimize.report import TerminalReport

log = logging.getLogger(__name__)

RunTrial = Callable[[TrialJob, TrialLimits], Awaitable[Outcome]]

_CONFIRM_SHARE = 0.3  # of the budget is reserved for the confirmation,
_MAX_CONFIRM_SHARE = 0.6  # and up to this if its rounds would not fit
_PATIENCE = 4  # times the usual duration: a setting that takes longer has lost anyway
_MIN_LIMIT_S = 15.0
# Of the remaining time for a trial while none has ended. Each has a quarter of the load of the one before; a busy
# machine also needs longer to start a program at all.
_FIRST_SHARES = (1 / 6, 1 / 4, 1 / 2)
# Where several programs want each processor, the smaller load is the first one, and the time goes to fewer attempts.
_CROWDED = 2.0
_CROWDED_SHARES = (1 / 3, 1 / 2)
_TRIALS = 60  # that should fit into the budget
_FEW_TRIALS = 20  # with fewer, little but the baselines is measured
_NOISY = 0.05  # deviation of a trial on an idle machine: 1 to 3 %
_KNOWN_AFTER = 3  # measurements of one setting, after which the noise is known
_USEFUL_GAIN = 1.1  # the smallest gain that a user would want to be told of
_LONGER = 1.25  # a run that was too short needs at least so many times its budget
_CALIBRATION = Setting((("calibration", True),))
_ANSWER_SHARE = 0.8  # of a trial's limit is that of one answer, so that its error comes before the trial is stopped


# --- the history of a run ---------------------------------------------------------------------------------------------


class HistoryEntry(Struct, frozen=True):
    setting: Setting
    loss: bool
    outcome: Outcome


class TrialHistory:
    """Every outcome on a line of a file, so that an interrupted run is resumed.

    A search that gets the same answers makes the same requests: recorded outcomes are replayed in their order, and
    only what comes after them is measured.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._recorded: dict[tuple[Setting, bool], deque[Outcome]] = defaultdict(deque)
        for line in file.read_bytes().splitlines() if file.is_file() else ():
            try:
                entry = msgspec.json.decode(line, type=HistoryEntry)
            except msgspec.MsgspecError:  # the last line of a process that was killed while it wrote
                log.warning("%s has an incomplete line; this trial will be measured again", file)
                continue
            self._recorded[entry.setting, entry.loss].append(entry.outcome)

    def __len__(self) -> int:
        return sum(map(len, self._recorded.values()))

    def take(self, setting: Setting, quality: bool) -> Outcome | None:
        """The next recorded outcome that was not replayed yet."""
        recorded = self._recorded.get((setting, quality))
        return recorded.popleft() if recorded else None

    def add(self, setting: Setting, quality: bool, outcome: Outcome) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(HistoryEntry(setting, quality, outcome)) + b"\n")

    def clear(self) -> None:
        """Delete it: the next run starts from the beginning."""
        self._recorded.clear()
        self._file.unlink(missing_ok=True)


def fingerprint(*parts: Any) -> str:
    """A hash of everything that outcomes depend on: another model, goal or machine has another history."""
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:16]


# --- a run ------------------------------------------------------------------------------------------------------------


class QualityBounds(Struct, frozen=True):
    """How much rounded numbers may cost on our text: perplexity as a share, divergence in nats per token."""

    rise: float = 0.01
    divergence: float = 0.02

    def objection(self, loss: Loss) -> str | None:
        if loss.rise > self.rise:
            return f"perplexity rises by {loss.rise:.2%}, more than {self.rise:.2%}"
        if loss.divergence is not None and loss.divergence > self.divergence:
            return f"the divergence is {loss.divergence:.4f} nats per token, more than {self.divergence:g}"
        return None


class OptimizerPlan(Struct, frozen=True, kw_only=True):
    goal: Goal
    budget_s: float = 600.0
    slack: float = 0.05  # for memory: how much slower than the best it may be
    streams: int | None = None
    seed: int = 0
    memory: int | None = None  # bytes of RAM that a trial may use
    crowding: float = 1.0  # programs that want each processor: everything takes so many times as long
    bounds: QualityBounds = QualityBounds()
    rules: SearchRules = SearchRules()


class Optimizer:
    def __init__(
        self,
        model: TunedModel,
        plan: OptimizerPlan,
        history: TrialHistory,
        observer: TerminalReport,
        run_trial: RunTrial = run_trial,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.plan = model, plan
        self._history, self._observer, self._run_trial, self._clock = history, observer, run_trial, clock
        self._load = goals.trial_load(plan.goal, plan.streams)
        self._began = clock()
        self._explore_share = 1.0  # of the time for exploring that the current search may use
        self._durations: list[float] = []
        self._longest: dict[Setting, float] = {}
        self._first_limit = _FIRST_SHARES[0] * plan.budget_s
        self._search: Search | None = None
        self._fastest: Setting | None = None
        self._warned_of_noise = False
        self.needed_s: float | None = None  # the budget that would have confirmed the best; None: known or hopeless
        self.measurements: dict[Setting, list[Measurement]] = {}
        self.failures: dict[Setting, TrialFailure] = {}
        self.losses: dict[Setting, Loss] = {}
        self.engine_bench: dict[Setting, EngineBenchResult] = {}

    @property
    def spent_s(self) -> float:
        return self._clock() - self._began

    @property
    def floor(self) -> float | None:
        """For memory: the slowest acceptable answer rate. The winner of a comparison was also lucky, so the later
        measurements of the fastest setting count as well."""
        found = self.measurements.get(self._fastest, []) if self._fastest is not None else []
        return (1 - self.plan.slack) * goals.answer_rate(found) if found else None

    async def run(self) -> SearchResult:
        baselines = list(self.model.baselines.values())
        await self._calibrate(baselines)
        if self.plan.goal == "memory":
            # Find out how fast it can be: memory must not cost more than the slack of that.
            self._explore_share = 0.5
            self._fastest = (await self._run_search(baselines, confirm=False)).best
            self._explore_share = 1.0
            baselines.append(self._fastest)
        result = await self._run_search(baselines)
        self.needed_s = self._needed_s(result)
        if self.model.has_engine_bench:
            await self._run_engine_bench(result)
        if result.better or not result.table.out_of_time or not self.measurements:
            self._history.clear()  # else the same command goes on where the time was up
        return result

    def interim_result(self) -> SearchResult:
        """The best so far of an interrupted run; nothing is confirmed."""
        search = self._search or Search(self.model.space, [self.model.current])
        return SearchResult(search.best, search.current, search.table, {})

    async def _calibrate(self, baselines: list[Setting]) -> None:
        """A trial that does not count: it warms up the machine and shows how large the load may be. If it does not end
        in time, the next baseline is tried with a smaller load."""
        is_crowded = self.plan.crowding >= _CROWDED
        shares = _CROWDED_SHARES if is_crowded else _FIRST_SHARES
        self._load = goals.shorter_load(self._load) if is_crowded else self._load
        for share, setting in zip(shares, cycle(reversed(baselines)), strict=False):
            began, self._first_limit = self._clock(), share * (self.plan.budget_s - self.spent_s)
            outcome = self._history.take(_CALIBRATION, False)
            if outcome is None:
                request = ScoreRequest(setting, "baselines", "calibration")
                self._observer.trial_started(request, self.plan.budget_s - self.spent_s)
                outcome = await self._measure(request)
                self._history.add(_CALIBRATION, False, outcome)
            if isinstance(outcome, Measurement):
                self._load = goals.scale_load(self._load, outcome, self.plan.budget_s / _TRIALS)
                self._first_limit = max(self._first_limit, _PATIENCE * (self._clock() - began))
            if not isinstance(outcome, TrialFailure) or outcome.kind != "hang":
                return
            self._load = goals.shorter_load(self._load)
            tokens = self._load.workload.output_tokens
            self._observer.warning(f"a trial takes too much of the budget; using a smaller load, {tokens} tokens out")

    async def _run_engine_bench(self, result: SearchResult) -> None:
        """The best and the current setting by the engine's own benchmark: for comparison, not for the decision."""
        for setting in dict.fromkeys([result.best, result.current]):
            outcome = await self._measure(ScoreRequest(setting, "confirmation"), bench=True)
            if isinstance(outcome, EngineBenchResult):
                self.engine_bench[setting] = outcome

    async def _run_search(self, baselines: list[Setting], *, confirm: bool = True) -> SearchResult:
        self._search = search = Search(self.model.space, baselines, self.model.default, self.plan.rules)
        steps = search.run(confirm=confirm)
        request = next(steps)
        while True:
            answer = await self._answer(request, search)
            try:
                request = steps.send(answer)
            except StopIteration as stop:
                result: SearchResult = stop.value
                return result

    # --- one request ----------------------------------------------------------------------------------------------

    async def _answer(self, request: ScoreRequest, search: Search) -> TrialScore | None:
        if request.quality and (known := self.losses.get(self._rounding(request))) is not None:
            return self._quality_score(known)
        outcome = self._history.take(request.setting, request.quality)
        replayed = outcome is not None
        if outcome is None:
            if not self._has_time(request, search):
                return None
            self._observer.trial_started(request, self.plan.budget_s - self.spent_s)
            began = self._clock()
            outcome = await self._measure(request)
            if not isinstance(outcome, TrialFailure):
                took = self._clock() - began
                self._durations.append(took)
                self._longest[request.setting] = max(took, self._longest.get(request.setting, 0.0))
                if len(self._durations) == 1:
                    self._warn_of_short_budget(self._durations[0])
            self._history.add(request.setting, request.quality, outcome)
        self._observer.trial_ended(request, outcome, search.best, replayed=replayed)
        self._warn_of_noise(search)
        return self._record(request, outcome)

    def _has_time(self, request: ScoreRequest, search: Search) -> bool:
        """Whether another trial ends in time. Less is reserved for the confirmation while nothing better is known, and
        nothing if its rounds would not fit into that: the same command goes on with what is found then."""
        reserved = self._confirm_s
        if search.best == search.current:
            reserved = reserved / 2 if reserved / 2 >= self._rounds_s else 0.0
        if request.phase in ("baselines", "confirmation"):  # without the first there is nothing to confirm
            end = self.plan.budget_s
        else:
            end = self._explore_share * (self.plan.budget_s - reserved)
        return self.spent_s + self._usual_s < end

    @property
    def _usual_s(self) -> float:
        return fmean(self._durations) if self._durations else 0.0

    @property
    def _confirm_s(self) -> float:
        """Reserved for the confirmation: enough for its rounds, if that leaves time to find something."""
        share = max(_CONFIRM_SHARE, self._rounds_s / self.plan.budget_s)
        return self.plan.budget_s * min(_MAX_CONFIRM_SHARE, share)

    @property
    def _rounds_s(self) -> float:
        """The fewest rounds of a confirmation."""
        return self.plan.rules.min_rounds * self._confirm_candidates * self._usual_s

    @property
    def _confirm_candidates(self) -> int:
        return len({*self.model.baselines.values(), self._fastest or self.model.current}) + 1

    def _warn_of_noise(self, search: Search) -> None:
        """Once, as soon as a setting was measured often enough: what can be confirmed here in this time."""
        table = search.table
        if self._warned_of_noise or max(map(len, table.scores.values()), default=0) < _KNOWN_AFTER:
            return
        self._warned_of_noise, rules = True, self.plan.rules
        deviation = table.noise()[0]
        rounds = rounds_needed(_USEFUL_GAIN, deviation, rules)
        if deviation < _NOISY:
            return
        noisy = f"the machine is noisy: the result of one setting varies by {deviation:.0%}"
        if rounds is None:
            self._observer.warning(f"{noisy}; only gains far above {_USEFUL_GAIN - 1:.0%} can be confirmed now")
            return
        needed = self._budget_for(rounds)
        if needed > self.plan.budget_s:
            text = f"to confirm a gain of {_USEFUL_GAIN - 1:.0%} takes {rounds} rounds: --budget {ceil(needed / 60)}m"
            self._observer.warning(f"{noisy}; {text}")

    def _budget_for(self, rounds: int) -> float:
        """Seconds of a run whose confirmation has so many rounds: at most a share of it is the confirmation."""
        return rounds * self._confirm_candidates * self._usual_s / _MAX_CONFIRM_SHARE

    def _needed_s(self, result: SearchResult) -> float | None:
        """How long a run would have to be to confirm the best, if it is as good as it looks."""
        if result.better or result.best == result.current or result.ratio is None:
            return None
        rounds = rounds_needed(result.ratio.middle, result.table.noise()[0], self.plan.rules)
        return None if rounds is None else max(self._budget_for(rounds), self.plan.budget_s * _LONGER)

    def _warn_of_short_budget(self, duration_s: float) -> None:
        # With few settings to try, fewer trials are enough for all of them and the confirmation.
        useful = min(_TRIALS, 2 * self.model.space.size + self.plan.rules.min_rounds * self._confirm_candidates)
        fit = int(self.plan.budget_s / max(duration_s, 1e-3))
        if fit < min(_FEW_TRIALS, useful):
            wanted = ceil(duration_s * useful / 60)
            self._observer.warning(
                f"a trial takes {duration_s:.0f} s here, so only about {fit} fit into the budget: "
                f"--budget {wanted}m would be better"
            )

    async def _measure(self, request: ScoreRequest, *, bench: bool = False) -> Outcome:
        """The limit is a few times the usual duration, or that of this setting if it is slower. One that never ended
        may not take much of the time that is left."""
        most = _FIRST_SHARES[1] * self.plan.budget_s
        least = max(_MIN_LIMIT_S, min(most, _MIN_LIMIT_S * self.plan.crowding))
        left = max(least, self.plan.budget_s - self.spent_s)
        usual = _PATIENCE * median(self._durations) if self._durations else self._first_limit
        known = _PATIENCE * self._longest.get(request.setting, 0.0)
        limit_s = min(left, max(least, min(usual, _FIRST_SHARES[1] * left), known))
        job = TrialJob(
            config=self.model.trial_config(request.setting),
            model=self.model.name,
            workload=self._load.workload,
            conversations=self._load.conversations,
            seed=self.plan.seed,
            key="trial",
            answer_s=_ANSWER_SHARE * limit_s,
            reference=self.model.exact_config() if request.quality else None,
            bench=bench,
        )
        return await self._run_trial(job, TrialLimits(limit_s, self.plan.memory))

    def _record(self, request: ScoreRequest, outcome: Outcome) -> TrialScore:
        if isinstance(outcome, Measurement):
            found = self.measurements.setdefault(request.setting, [])
            found.append(outcome)
            return TrialScore(goals.score(self.plan.goal, outcome, self.floor, goals.answer_rate(found)))
        if isinstance(outcome, QualityResult):
            self.losses[self._rounding(request)] = outcome.loss
            return self._quality_score(outcome.loss)
        if not isinstance(outcome, TrialFailure):
            outcome = TrialFailure("errors", f"no measurement, but {outcome}")
        self.failures[request.setting] = outcome
        return TrialScore(None, str(outcome), timed_out=outcome.kind == "hang")

    def _rounding(self, request: ScoreRequest) -> Setting:
        return request.setting.only(self.model.space.lossy)

    def _quality_score(self, loss: Loss) -> TrialScore:
        objection = self.plan.bounds.objection(loss)
        return TrialScore(None, objection) if objection is not None else TrialScore(1.0)
