"""The search: knobs in stages by expected effect, again where later ones changed what earlier ones saw, pairs, a proof.

    baselines ─→ each stage: a race of its values ─→ stages whose surroundings changed, again ─→ pairs of runners-up
              ─→ the proof: best and baselines in fresh interleaved rounds, until the noise cannot explain the ratio

Pure: a generator that yields what it wants to know and is sent the answer (`race.Ask`, `race.Told`). Given the same
answers it asks the same questions, so that a journal of answers is all that is needed to go on with a broken-off run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from msgspec import Struct

from modelyard.benchmark.statistics import Interval, joint_confidence, ratio_interval
from modelyard.core.knobs import Setting, Value
from modelyard.tune.ledger import Ledger
from modelyard.tune.race import Ask, Rules, Steps, note, order, race
from modelyard.tune.space import Space, Stage, is_scale

_CONFIDENCE = 0.95


class Found(Struct):
    """`rounds` has the fresh scores of the proof, round by round; `ratio` is the best's over the current one's."""

    best: Setting
    current: Setting
    ledger: Ledger
    rounds: dict[Setting, list[float]]
    ratio: Interval | None = None
    better: bool = False

    @property
    def trials(self) -> int:
        return self.ledger.trials


class Search:
    """`baselines[0]` is the current setting; whatever it and the reference round is not held against the bound."""

    def __init__(
        self, space: Space, baselines: Sequence[Setting], reference: Setting | None = None, rules: Rules = Rules()
    ) -> None:
        self._space, self._baselines, self._rules = space, list(dict.fromkeys(baselines)), rules
        self.current = self.best = baselines[0]
        self.ledger = Ledger()
        lossy = space.lossy
        self._passed = {setting.only(lossy) for setting in (self.current, reference or self.current)}
        self._seen_from: dict[Stage, Setting] = {}  # what all other knobs were when a stage was last raced

    def run(self, *, prove: bool = True) -> Steps[Found]:
        least = 2 if len(self._baselines) > 1 else 3
        self.best = yield from race(self._baselines, self.ledger, self._rules, "baselines", least=least)
        for number in range(self._rules.passes):
            before = self.best
            for stage in self._space.stages:
                yield from self._turn(stage, again=number > 0)
            if self.best == before or number == 0:
                yield from self._pair()
            if self.best == before:
                break
        return (yield from self._prove()) if prove else Found(self.best, self.current, self.ledger, {})

    # --- exploring ----------------------------------------------------------------------------------------------------

    def _turn(self, stage: Stage, *, again: bool) -> Steps[None]:
        names = {knob.name for knob in stage}
        around = self.best.only(knob.name for knob in self._space.knobs if knob.name not in names)
        if self.ledger.out_of_time or self._seen_from.get(stage) == around:
            return
        others = self._space.around(self.best, stage)
        if again:
            others = self._worth_a_second_look(others, stage)
        self._seen_from[stage] = around
        told = ", ".join(knob.name for knob in stage)
        yield from self._race((yield from self._within_bound(others, told)), told, stage)

    def _race(self, others: list[Setting], why: str, stage: Stage) -> Steps[None]:
        if others and not self.ledger.out_of_time:
            measured = yield from self._climb(others, why, stage)
            entrants = [self.best, *(others if measured is None else measured)]
            self.best = yield from race(entrants, self.ledger, self._rules, "stage", why, measured)

    def _climb(self, others: list[Setting], why: str, stage: Stage) -> Steps[dict[Setting, float] | None]:
        """Of one knob with many ordered numbers, only those that are worth a race, with their first scores: away from
        what holds now, step by step, until it clearly goes down or fails. None for other stages."""
        name = stage[0].name
        if len(stage) != 1 or not is_scale(stage[0].ordered, stage[0].values) or len(others) < 3:
            return None
        worth: dict[Setting, float] = {}
        for side in sides(others, name, self.best[name]):
            worth |= yield from self._walk(side, why)
        return worth

    def _walk(self, side: list[Setting], why: str) -> Steps[dict[Setting, float]]:
        worth: dict[Setting, float] = {}
        before = self.best
        for setting in side:
            told = yield Ask(setting, "stage", why)
            if told is None:
                self.ledger.out_of_time = True
                break
            note(self.ledger, {setting: []}, setting, told)
            if told.score is None and self.best not in self.ledger.scores:
                continue  # nothing runs yet: what does may lie behind others that do not
            if told.score is None or self._falls(setting, before):
                break
            worth[setting] = told.score
            before = setting
        return worth

    def _falls(self, setting: Setting, before: Setting) -> bool:
        """Clearly below what it was compared with, and no better than what holds now."""
        ledger, score = self.ledger, self.ledger.mean(setting)
        reach = ledger.reach(1, len(ledger.scores.get(before, [0.0])), self._rules.confidence)
        if before not in ledger.scores or self.best not in ledger.scores:
            return False
        falls = score < ledger.mean(before) - reach and score < ledger.mean(self.best) - reach
        if falls:
            ledger.is_behind(setting, ledger.mean(self.best) - score)
        return falls

    def _within_bound(self, settings: list[Setting], why: str) -> Steps[list[Setting]]:
        """Without those that round numbers too much; each kind of rounding is judged once."""
        allowed = []
        for setting in settings:
            rounding = setting.only(self._space.lossy)
            if rounding not in self._passed and rounding not in self.ledger.refused:
                told = yield Ask(setting, "stage", why, loss=True)
                if told is None:
                    self.ledger.out_of_time = True
                    break
                if told.score is None:
                    self.ledger.refused[rounding] = told.reason
                else:
                    self._passed.add(rounding)
            if rounding in self._passed:
                allowed.append(setting)
        return allowed

    def _worth_a_second_look(self, others: list[Setting], stage: Stage) -> list[Setting]:
        """Values that were not far behind, those that failed (it may have been for what stood around them), and those
        that were never reached."""
        far = ((setting, self._behind(setting, stage)) for setting in others)
        return [setting for setting, behind in far if behind is None or behind < self._rules.worth]

    def _behind(self, setting: Setting, stage: Stage) -> float | None:
        """How far a stage's values were behind when they were last raced, whatever stood around them: not at all
        where they failed, None where they were never tried."""
        mine = _of(setting, stage)
        known = [far for other, far in self.ledger.behind.items() if _of(other, stage) == mine]
        if known:
            return known[-1]
        return 0.0 if any(_of(other, stage) == mine for other in self.ledger.failures) else None

    def _pair(self) -> Steps[None]:
        """Two stages' runners-up at once: what each alone does not show."""
        if self.ledger.out_of_time:
            return
        candidates = [setting for *_, setting in sorted(self._pairs(), key=lambda pair: pair[:2])]
        candidates = candidates[: self._rules.pairs]
        allowed = yield from self._within_bound(candidates, "pairs")
        if allowed and not self.ledger.out_of_time:
            self.best = yield from race([self.best, *allowed], self.ledger, self._rules, "pairs", "two at once")

    def _pairs(self) -> Iterator[tuple[int, float, Setting]]:
        """Those that were never tried: the most promising of each two stages, then the second of each, and so on;
        among these, by how far behind both of their changes were by themselves."""
        known = self.ledger.scores.keys() | self.ledger.failures.keys()
        for one, other in self._space.pairs():
            found = [
                (a + b, setting)
                for (a, mine), (b, theirs) in product(self._near(one), self._near(other))
                if (setting := self.best.but({**mine, **theirs})) not in known and self._space.allows(setting)
            ]
            found.sort(key=lambda pair: pair[0])
            yield from ((rank, far, setting) for rank, (far, setting) in enumerate(found))

    def _near(self, stage: Stage) -> list[tuple[float, dict[str, Value]]]:
        others = [(self._behind(other, stage), _of(other, stage)) for other in self._space.around(self.best, stage)]
        return [(far, values) for far, values in others if far is not None and far < self._rules.worth]

    # --- the proof ----------------------------------------------------------------------------------------------------

    def _prove(self) -> Steps[Found]:
        """Fresh rounds only: whoever won many races has also been lucky in some of them."""
        found = Found(self.best, self.current, self.ledger, {})
        if self.best == self.current:
            return found
        rules, entrants = self._rules, list(dict.fromkeys([self.best, *self._baselines]))
        seen = {setting: list[float]() for setting in entrants if setting not in self.ledger.failures}
        looks = rules.most - rules.least + 1
        for number in range(rules.most):
            if not (yield from self._round(seen, number)):
                break
            ours, theirs = seen.get(self.best, []), seen.get(self.current, [])
            found.better, found.ratio = _decide(ours, theirs, rules, looks)
            found.better = found.better and (bool(theirs) or self.current not in self.ledger.scores)
            if found.better or self.best not in seen:
                break
        found.rounds = seen
        return self._exact(found, looks)

    def _exact(self, found: Found, looks: int) -> Found:
        """Coarser numbers have to earn it: where fresh rounds show no gain over a baseline that rounds otherwise, and
        that one is better than the current setting, too, it is taken instead."""
        rounds, lossy = found.rounds, self._space.lossy
        for other in self._baselines[1:]:
            ours, theirs = rounds.get(self.best, []), rounds.get(other, [])
            if other.only(lossy) == self.best.only(lossy) or len(ours) != len(theirs) or not ours:
                continue
            if ratio_interval(ours, theirs).middle > 1 + 2 * self._rules.margin:
                continue
            better, ratio = _decide(theirs, rounds.get(self.current, []), self._rules, looks)
            if better:
                self.best = other
                return Found(other, self.current, self.ledger, rounds, ratio, better=True)
        return found

    def _round(self, seen: dict[Setting, list[float]], number: int) -> Steps[bool]:
        for setting in order(list(seen), number):
            told = yield Ask(setting, "proof", "the proof")
            if told is None:
                return False
            note(self.ledger, seen, setting, told)
        return True


def _decide(ours: list[float], theirs: list[float], rules: Rules, looks: int) -> tuple[bool, Interval | None]:
    """Looked at after every round, so each look has to be surer than one alone would."""
    if not ours:
        return False, None
    if not theirs:  # the current setting does not run
        return len(ours) >= rules.least, None
    ratio = ratio_interval(ours, theirs, joint_confidence(_CONFIDENCE, looks))
    return len(ours) >= rules.least and ratio.low > 1 + rules.margin, ratio


def _of(setting: Setting, stage: Stage) -> dict[str, Value]:
    return {knob.name: setting[knob.name] for knob in stage}


def sides(settings: list[Setting], name: str, here: Value) -> tuple[list[Setting], list[Setting]]:
    """Those above a knob's value and those below it, the nearest first."""
    ordered = sorted(settings, key=lambda setting: float(setting[name]))
    above = [setting for setting in ordered if float(setting[name]) > float(here)]
    below = [setting for setting in ordered if float(setting[name]) < float(here)]
    return above, below[::-1]
