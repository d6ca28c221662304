"""One run of the optimizer: the search's questions answered by trials, within a budget of time.

search asks ─→ journal has it? ─→ time left? ─→ trial in a child ─→ journal ─→ score ─→ search
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from math import ceil
from statistics import fmean, median
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.knobs import Goal, Loss, Setting
from modelyard.tune import goals, trial
from modelyard.tune.journal import Journal
from modelyard.tune.order import Benched, Failure, Figures, Judged, Order, Outcome
from modelyard.tune.race import Ask, Rules, Steps, Told
from modelyard.tune.search import Found, Search
from modelyard.tune.subject import Subject
from modelyard.tune.trial import Limits

Measure = Callable[[Order, Limits], Awaitable[Outcome]]

_PROOF, _MOST_PROOF = (
    0.3,
    0.6,
)  # of the budget is kept for the proof; more where its rounds would not fit, up to so much
_PATIENCE = 4  # times what a trial usually takes: a setting so much slower has lost anyway
_LEAST_S = 15.0
_TRIALS = 60  # that should fit into the budget
_FEW = 20  # with fewer, hardly anything but the baselines is measured
_CALIBRATION = Setting((("calibration", True),))
_ANSWER = 0.8  # of a trial's time may be one answer's, so that its error comes before its end


class Bounds(Struct, frozen=True):
    """How much rounded numbers may cost on our text: perplexity as a share, divergence in nats a token."""

    rise: float = 0.01
    divergence: float = 0.02

    def objection(self, loss: Loss) -> str | None:
        if loss.rise > self.rise:
            return f"perplexity rises by {loss.rise:.2%}, more than {self.rise:.2%}"
        if loss.divergence is not None and loss.divergence > self.divergence:
            return f"its odds move by {loss.divergence:.4f} nats a token, more than {self.divergence:g}"
        return None


class Plan(Struct, frozen=True, kw_only=True):
    goal: Goal
    budget_s: float = 600.0
    slack: float = 0.05  # for memory: how much slower than the best it may be
    streams: int | None = None
    seed: int = 0
    memory: int | None = None  # bytes of RAM that a trial may hold
    bounds: Bounds = Bounds()
    rules: Rules = Rules()


class Screen(Protocol):
    """Who is told how it goes. `left_s` is what the rest will take at most."""

    def asked(self, ask: Ask, left_s: float) -> None: ...
    def told(self, ask: Ask, outcome: Outcome, best: Setting, *, kept: bool) -> None: ...
    def warned(self, text: str) -> None: ...


class Run:
    def __init__(
        self,
        subject: Subject,
        plan: Plan,
        journal: Journal,
        screen: Screen,
        measure: Measure = trial.run,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.subject, self.plan = subject, plan
        self._journal, self._screen, self._measure, self._clock = journal, screen, measure, clock
        self._load = goals.load(plan.goal, plan.streams)
        self._began = clock()
        self._share = 1.0  # of the time to explore that the search may take which runs now
        self._took: list[float] = []
        self._search: Search | None = None
        self.figures: dict[Setting, list[Figures]] = {}
        self.failures: dict[Setting, Failure] = {}
        self.losses: dict[Setting, Loss] = {}
        self.benched: dict[Setting, Benched] = {}
        self._fast: Setting | None = None

    @property
    def spent_s(self) -> float:
        return self._clock() - self._began

    @property
    def floor(self) -> float | None:
        """For memory: the slowest that is fast enough. Whoever won a race was lucky, too, so what the fastest setting
        shows later counts as well."""
        seen = self.figures.get(self._fast, []) if self._fast is not None else []
        return (1 - self.plan.slack) * goals.pace(seen) if seen else None

    async def go(self) -> Found:
        baselines = list(self.subject.baselines.values())
        await self._calibrate(baselines[-1])
        if self.plan.goal == "memory":
            baselines.append(await self._fastest(baselines))
        found = await self._searched(baselines)
        if self.subject.benches:
            await self._bench(found)
        self._journal.forget()
        return found

    def so_far(self) -> Found:
        """What is known when it is broken off: nothing is proved."""
        search = self._search
        if search is None:
            current = self.subject.current
            return Found(current, current, Search(self.subject.space, [current]).ledger, {})
        return Found(search.best, search.current, search.ledger, {})

    async def _calibrate(self, setting: Setting) -> None:
        """One trial that nobody counts: it warms the machine, and says how large the load may be so that many fit."""
        outcome = self._journal.take(_CALIBRATION, False)
        if outcome is None:
            ask = Ask(setting, "baselines", "how long a trial takes")
            self._screen.asked(ask, self.plan.budget_s - self.spent_s)
            outcome = await self._measure(self._order(ask, self._limit_s()), Limits(self._limit_s(), self.plan.memory))
            self._journal.add(_CALIBRATION, False, outcome)
        if isinstance(outcome, Figures):
            self._load = goals.scaled(self._load, outcome, self.plan.budget_s / _TRIALS)
        elif isinstance(outcome, Failure) and outcome.kind == "hang":
            self._load = goals.smallest(self._load)
            self._screen.warned("a trial does not end in a third of the budget; the smallest load is taken")

    async def _fastest(self, baselines: list[Setting]) -> Setting:
        """How fast it can be: memory must not be bought with more than the slack of that."""
        self._share = 0.5
        found = await self._searched(baselines, prove=False)
        self._fast = found.best
        self._share = 1.0
        return found.best

    async def _bench(self, found: Found) -> None:
        """The best and the current setting by the engine's own program, too: not to decide by, but to compare."""
        for setting in dict.fromkeys([found.best, found.current]):
            order = replace(self._order(Ask(setting, "proof"), self._limit_s()), bench=True)
            outcome = await self._measure(order, Limits(self._limit_s(), self.plan.memory))
            if isinstance(outcome, Benched):
                self.benched[setting] = outcome

    async def _searched(self, baselines: list[Setting], *, prove: bool = True) -> Found:
        self._search = search = Search(self.subject.space, baselines, self.subject.default, self.plan.rules)
        steps = search.run(prove=prove)
        return await self._driven(steps, search)

    async def _driven(self, steps: Steps[Found], search: Search) -> Found:
        ask = next(steps)
        while True:
            told = await self._answered(ask, search)
            try:
                ask = steps.send(told)
            except StopIteration as over:
                found: Found = over.value
                return found

    # --- one question -------------------------------------------------------------------------------------------------

    async def _answered(self, ask: Ask, search: Search) -> Told | None:
        if ask.loss and (known := self.losses.get(self._rounding(ask))) is not None:
            return self._judged(known)
        outcome = self._journal.take(ask.setting, ask.loss)
        kept = outcome is not None
        if outcome is None:
            if not self._has_time(ask, search):
                return None
            self._screen.asked(ask, self.plan.budget_s - self.spent_s)
            outcome = await self._tried(ask)
            self._journal.add(ask.setting, ask.loss, outcome)
        self._screen.told(ask, outcome, search.best, kept=kept)
        return self._noted(ask, outcome)

    def _has_time(self, ask: Ask, search: Search) -> bool:
        """Whether another of the usual length ends in time. While nothing better is known, less is kept to prove it."""
        proof = self._proof_s / 2 if search.best == search.current else self._proof_s
        end = self.plan.budget_s if ask.phase == "proof" else self._share * (self.plan.budget_s - proof)
        return self.spent_s + self._usual_s < end

    @property
    def _usual_s(self) -> float:
        return fmean(self._took) if self._took else 0.0

    @property
    def _proof_s(self) -> float:
        """Kept for the proof: enough for its rounds, as long as that leaves something to be proved."""
        rounds = self.plan.rules.least * self._entrants * self._usual_s
        return self.plan.budget_s * min(_MOST_PROOF, max(_PROOF, rounds / self.plan.budget_s))

    @property
    def _entrants(self) -> int:
        """Of the proof: what it is compared with, and the best."""
        return len({*self.subject.baselines.values(), self._fast or self.subject.current}) + 1

    async def _tried(self, ask: Ask) -> Outcome:
        began = self._clock()
        seconds = self._limit_s()
        outcome = await self._measure(self._order(ask, seconds), Limits(seconds, self.plan.memory))
        if not isinstance(outcome, Failure):
            self._took.append(self._clock() - began)
            if len(self._took) == 1:
                self._warn(self._took[0])
        return outcome

    def _warn(self, took_s: float) -> None:
        fit = int(self.plan.budget_s / max(took_s, 1e-3))
        if fit < min(_FEW, self._useful):
            wanted = ceil(took_s * self._useful / 60)
            told = f"a trial takes {took_s:.0f} s here, so only about {fit} fit into the budget: --budget {wanted}m"
            self._screen.warned(f"{told} would be better")

    @property
    def _useful(self) -> int:
        """Trials that a budget should hold: where there is little to turn, fewer do for all of it and the proof."""
        return min(_TRIALS, 2 * self.subject.space.size + self.plan.rules.least * self._entrants)

    def _limit_s(self) -> float:
        """Before anything is known, a third of what is left; then a few times what is usual."""
        left = max(_LEAST_S, self.plan.budget_s - self.spent_s)
        usual = _PATIENCE * median(self._took) if self._took else left / 3
        return min(left, max(_LEAST_S, usual))

    def _order(self, ask: Ask, seconds: float) -> Order:
        return Order(
            config=self.subject.order(ask.setting),
            model=self.subject.model,
            workload=self._load.workload,
            conversations=self._load.conversations,
            seed=self.plan.seed,
            key="trial",
            answer_s=_ANSWER * seconds,
            reference=self.subject.exact() if ask.loss else None,
        )

    def _noted(self, ask: Ask, outcome: Outcome) -> Told:
        if isinstance(outcome, Figures):
            seen = self.figures.setdefault(ask.setting, [])
            seen.append(outcome)
            return Told(goals.score(self.plan.goal, outcome, self.floor, goals.pace(seen)))
        if isinstance(outcome, Judged):
            self.losses[self._rounding(ask)] = outcome.loss
            return self._judged(outcome.loss)
        failure = outcome if isinstance(outcome, Failure) else Failure("errors", f"no figures, but {outcome}")
        self.failures[ask.setting] = failure
        return Told(None, str(failure))

    def _rounding(self, ask: Ask) -> Setting:
        return ask.setting.only(self.subject.space.lossy)

    def _judged(self, loss: Loss) -> Told:
        objection = self.plan.bounds.objection(loss)
        return Told(None, objection) if objection is not None else Told(1.0)
