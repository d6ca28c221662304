"""The search for the best setting: knobs stage by stage, then pairs of changes, then a confirmation with fresh rounds.

    baselines ──→ each stage: select the best of its values ──→ again for stages whose surroundings changed
              ──→ pairs of runners-up ──→ confirmation: best and baselines in fresh interleaved rounds

Pure: a generator that yields a `ScoreRequest` and is sent a `TrialScore`, or None if no time is left. For the same
answers it makes the same requests, so that a log of answers is enough to resume an interrupted run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import combinations, groupby, product
from statistics import fmean
from typing import Literal, TypeVar

from msgspec import Struct

from modelyard.core.knobs import Knob, Setting, Value
from modelyard_bench.statistics import Interval, joint_confidence, ratio_interval, t_quantile

T = TypeVar("T")

Constraint = Callable[[Setting], str | None]
Stage = tuple[Knob, ...]
Phase = Literal["baselines", "stage", "pairs", "confirmation"]

_CONFIDENCE = 0.95
_LATE_LOOKS = (2, 4)  # times the planned rounds of a confirmation, at which it is judged again if there is time
_PRIOR_NOISE, _PRIOR_WEIGHT = 0.03, 3  # assumed noise of a trial before any is repeated, and its weight in trials


# --- the search space -------------------------------------------------------------------------------------------------


class SearchSpace:
    """Knobs with their values, and a constraint that says why a combination cannot run (None: it can)."""

    def __init__(self, knobs: Sequence[Knob], constraint: Constraint = lambda _: None) -> None:
        self.knobs = tuple(sorted(knobs, key=lambda knob: knob.stage))
        self._constraint = constraint

    def __repr__(self) -> str:
        return f"<SearchSpace {' × '.join(f'{len(knob.values)} {knob.name}' for knob in self.knobs)}>"

    @property
    def size(self) -> int:
        """Trials of a full grid, one for each combination that can run."""
        whole = math.prod(len(knob.values) for knob in self.knobs)
        return whole if whole > 1_000_000 else sum(1 for _ in self.grid())

    @property
    def lossy(self) -> tuple[str, ...]:
        return tuple(knob.name for knob in self.knobs if knob.lossy)

    @property
    def stages(self) -> list[Stage]:
        return [tuple(same) for _, same in groupby(self.knobs, key=lambda knob: knob.stage)]

    def grid(self) -> Iterator[Setting]:
        names = [knob.name for knob in self.knobs]
        for values in product(*(knob.values for knob in self.knobs)):
            if self.allows(setting := Setting(tuple(zip(names, values, strict=True)))):
                yield setting

    def allows(self, setting: Setting) -> bool:
        return self._constraint(setting) is None

    def neighbours(self, setting: Setting, stage: Stage) -> list[Setting]:
        """The setting with every other value of a stage's knobs. If that cannot run, one more knob is changed:
        otherwise values that a constraint keeps apart would never be tried."""
        names = [knob.name for knob in stage]
        changed = [
            setting.but(dict(zip(names, values, strict=True))) for values in product(*(knob.values for knob in stage))
        ]
        repaired = (self._repair(other, names) for other in changed if other != setting)
        return [other for other in repaired if other is not None]

    def _repair(self, setting: Setting, kept: Sequence[str]) -> Setting | None:
        if self.allows(setting):
            return setting
        others = (setting.but({knob.name: v}) for knob in self.knobs if knob.name not in kept for v in knob.values)
        return next(filter(self.allows, others), None)


def is_numeric_scale(ordered: bool, values: Sequence[Value]) -> bool:
    return ordered and all(type(value) in (int, float) for value in values)


# --- scores -----------------------------------------------------------------------------------------------------------


class ScoreTable:
    """What the search knows: every score of every setting, the failures, and how noisy the machine is."""

    def __init__(self) -> None:
        self.scores: dict[Setting, list[float]] = {}
        self.failures: dict[Setting, str] = {}  # settings that could not be measured, with the reason
        self.timed_out = set[Setting]()  # of the failures: a busy machine may be the reason
        self.rejected: dict[Setting, str] = {}  # rounding that exceeds the quality bound, with the reason
        self.gaps: dict[Setting, float] = {}  # log distance to the winner of its last comparison; the latest last
        self.out_of_time = False

    def add(self, setting: Setting, score: float) -> None:
        self.scores.setdefault(setting, []).append(score)

    def set_gap(self, setting: Setting, gap: float) -> None:
        self.gaps.pop(setting, None)
        self.gaps[setting] = gap

    @property
    def trials(self) -> int:
        return sum(map(len, self.scores.values())) + len(self.failures)

    def mean(self, setting: Setting) -> float:
        return log_mean(self.scores[setting])

    @property
    def has_repeats(self) -> bool:
        """Whether any setting was measured twice; otherwise the noise is only assumed."""
        return any(len(scores) > 1 for scores in self.scores.values())

    def noise(self) -> tuple[float, int]:
        """The standard deviation of one log score, and its degrees of freedom.

        Pooled over all settings: two measurements of one setting say little, thirty of ten say much.
        """
        repeated = [scores for scores in self.scores.values() if len(scores) > 1]
        squares = sum((math.log(score) - log_mean(scores)) ** 2 for scores in repeated for score in scores)
        freedom = sum(len(scores) - 1 for scores in repeated) + _PRIOR_WEIGHT
        return math.sqrt((squares + _PRIOR_WEIGHT * _PRIOR_NOISE**2) / freedom), freedom

    def margin(self, ours: int, theirs: int, confidence: float) -> float:
        """How far apart the log means of so many measurements may lie by noise alone."""
        deviation, freedom = self.noise()
        return t_quantile(freedom, confidence) * deviation * math.sqrt(1 / ours + 1 / theirs)


def log_mean(scores: Sequence[float]) -> float:
    return fmean(map(math.log, scores))


def leader(scores: Mapping[Setting, Sequence[float]]) -> Setting:
    return max(scores, key=lambda setting: log_mean(scores[setting]))


# --- selecting the best of several settings ---------------------------------------------------------------------------


class ScoreRequest(Struct, frozen=True):
    """Measure this setting; with `quality`, check whether its rounding is within the quality bound instead."""

    setting: Setting
    phase: Phase
    reason: str = ""
    quality: bool = False


class TrialScore(Struct, frozen=True):
    """A score (higher is better), or None and the reason. Any score of a quality check means that it passed."""

    score: float | None
    reason: str = ""
    timed_out: bool = False


SearchSteps = Generator[ScoreRequest, TrialScore | None, T]


class SearchRules(Struct, frozen=True):
    rounds: int = 5  # most measurements of one setting in one comparison
    confidence: float = 0.9  # to drop a setting; low, because a wrong drop costs little and another round costs time
    margin: float = 0.01  # the gain that a change must bring to be taken
    passes: int = 5  # over all stages, with pairs after each that changed nothing
    max_gap: float = 0.3  # settings further behind than this (in logarithms) are not tried again
    pairs: int = 12  # pairs of changes that are tried
    min_rounds: int = 4  # of the confirmation
    max_rounds: int = 9
    most_rounds: int = 30  # of the confirmation on a noisy machine, if the time allows it


def rounds_needed(ratio: float, noise: float, rules: SearchRules) -> int | None:
    """Rounds of a confirmation after which a gain of this ratio shows beyond the noise of a trial; None: too many."""
    beyond = math.log(ratio) - math.log1p(rules.margin) if ratio > 0 else 0.0
    for rounds in range(max(2, rules.min_rounds), rules.most_rounds + 1):
        confidence = joint_confidence(_CONFIDENCE, max(rounds, rules.max_rounds) - rules.min_rounds + 1)
        if t_quantile(rounds - 1, confidence) * noise * math.sqrt(2 / rounds) < beyond:
            return rounds
    return None


def select_best(
    candidates: Sequence[Setting],
    table: ScoreTable,
    rules: SearchRules,
    phase: Phase,
    reason: str = "",
    measured: Mapping[Setting, float] | None = None,
    min_rounds: int = 1,
) -> SearchSteps[Setting]:
    """Measure in interleaved rounds and drop losers early (a race, as in irace), until noise cannot hide the best.

    The first candidate is the current choice: another must be better by the margin to replace it. `measured` holds
    fresh scores that count as the first round. No candidate is dropped before `min_rounds`: the first comparisons
    also have to find the noise of the machine.
    """
    scores = {setting: [measured[setting]] if measured and setting in measured else [] for setting in candidates}
    current, current_scores = candidates[0], list[float]()
    for number in range(rules.rounds):
        for setting in alternating([s for s, found in scores.items() if len(found) == number], number):
            answer = yield ScoreRequest(setting, phase, reason)
            if answer is None:
                table.out_of_time = True
                break
            record(table, scores, setting, answer)
        current_scores = scores.get(current, current_scores)
        if number + 1 < min_rounds and not table.out_of_time:
            continue
        scores = _drop_losers(scores, table, rules)
        if table.out_of_time or len(scores) < 2 or _is_settled(scores, current, table, rules):
            break
    if not scores or (not current_scores and current not in table.failures):
        return current
    first = leader(scores)  # in a comparison cut short by time, an incomplete round counts too
    return current if current_scores and log_mean(scores[first]) - log_mean(current_scores) < rules.margin else first


def alternating(settings: list[Setting], number: int) -> list[Setting]:
    """Forwards and backwards in turn: a drift within a round cancels out over two."""
    return settings if number % 2 == 0 else settings[::-1]


def record(table: ScoreTable, scores: dict[Setting, list[float]], setting: Setting, answer: TrialScore) -> None:
    """A failure removes the setting from this comparison and affects no other."""
    if answer.score is None:
        table.failures[setting] = answer.reason
        if answer.timed_out:
            table.timed_out.add(setting)
        scores.pop(setting, None)
    else:
        table.add(setting, answer.score)
        scores[setting].append(answer.score)


def _drop_losers(
    scores: dict[Setting, list[float]], table: ScoreTable, rules: SearchRules
) -> dict[Setting, list[float]]:
    """Those that may still be the best within the noise; the gap of each is recorded."""
    measured = {setting: found for setting, found in scores.items() if found}
    if not measured:
        return {}
    first = leader(measured)
    kept = {}
    for setting, found in measured.items():
        gap = log_mean(measured[first]) - log_mean(found)
        table.set_gap(setting, gap)
        if setting == first or gap <= table.margin(len(measured[first]), len(found), rules.confidence):
            kept[setting] = found
    return kept


def _is_settled(scores: dict[Setting, list[float]], current: Setting, table: ScoreTable, rules: SearchRules) -> bool:
    """Whether more rounds could change nothing relevant: the current choice leads, and the others are close."""
    if current not in scores or leader(scores) != current:
        return False
    worst = max(log_mean(scores[current]) - log_mean(found) for found in scores.values())
    count = min(map(len, scores.values()))
    return table.margin(count, count, rules.confidence) + worst < 2 * rules.margin


# --- the whole search -------------------------------------------------------------------------------------------------


class SearchResult(Struct):
    """`rounds` holds the fresh scores of the confirmation; `ratio` is that of the best to the current setting."""

    best: Setting
    current: Setting
    table: ScoreTable
    rounds: dict[Setting, list[float]]
    ratio: Interval | None = None
    better: bool = False

    @property
    def trials(self) -> int:
        return self.table.trials


class Search:
    """`baselines[0]` is the current setting. Rounding that it or `reference` uses is not checked for quality."""

    def __init__(
        self,
        space: SearchSpace,
        baselines: Sequence[Setting],
        reference: Setting | None = None,
        rules: SearchRules = SearchRules(),
    ) -> None:
        self._space, self._baselines, self._rules = space, list(dict.fromkeys(baselines)), rules
        self.current = self.best = baselines[0]
        self.table = ScoreTable()
        self._accepted = {setting.only(space.lossy) for setting in (self.current, reference or self.current)}
        self._surroundings: dict[Stage, Setting] = {}  # the other knobs when a stage was last compared

    def run(self, *, confirm: bool = True) -> SearchSteps[SearchResult]:
        min_rounds = 2 if len(self._baselines) > 1 else 3
        self.best = yield from select_best(self._baselines, self.table, self._rules, "baselines", min_rounds=min_rounds)
        for number in range(self._rules.passes):
            before = self.best
            for stage in self._space.stages:
                yield from self._search_stage(stage, again=number > 0)
            if self.best == before or number == 0:
                yield from self._search_pairs()
            if self.best == before:
                break
        return (yield from self._confirm()) if confirm else SearchResult(self.best, self.current, self.table, {})

    # Stages.

    def _search_stage(self, stage: Stage, *, again: bool) -> SearchSteps[None]:
        names = {knob.name for knob in stage}
        surroundings = self.best.only(knob.name for knob in self._space.knobs if knob.name not in names)
        if self.table.out_of_time or self._surroundings.get(stage) == surroundings:
            return
        others = self._space.neighbours(self.best, stage)
        if again:  # those that were never tried, failed (perhaps because of the values around them), or were close
            gaps = {setting: self._gap(setting, stage) for setting in others}
            others = [setting for setting, gap in gaps.items() if gap is None or gap < self._rules.max_gap]
        self._surroundings[stage] = surroundings
        reason = ", ".join(knob.name for knob in stage)
        others = yield from self._within_quality_bound(others, reason)
        if others and not self.table.out_of_time:
            measured = yield from self._climb(others, reason, stage)
            candidates = [self.best, *(others if measured is None else measured)]
            self.best = yield from select_best(candidates, self.table, self._rules, "stage", reason, measured)

    def _climb(self, others: list[Setting], reason: str, stage: Stage) -> SearchSteps[dict[Setting, float] | None]:
        """For one knob with many ordered numbers: step away from the current value in both directions until the score
        clearly falls or a trial fails. The values worth a comparison, with their scores; None for other stages."""
        name = stage[0].name
        if len(stage) != 1 or not is_numeric_scale(stage[0].ordered, stage[0].values) or len(others) < 3:
            return None
        promising: dict[Setting, float] = {}
        for side in sides(others, name, self.best[name]):
            promising |= yield from self._climb_side(side, reason)
        return promising

    def _climb_side(self, side: list[Setting], reason: str) -> SearchSteps[dict[Setting, float]]:
        promising: dict[Setting, float] = {}
        before = self.best
        for setting in side:
            answer = yield ScoreRequest(setting, "stage", reason)
            if answer is None:
                self.table.out_of_time = True
                break
            record(self.table, {setting: []}, setting, answer)
            if answer.score is None and self.best not in self.table.scores:
                continue  # nothing runs yet: a value that does may lie beyond others that do not
            if answer.score is None or self._falls(setting, before):
                break
            promising[setting] = answer.score
            before = setting
        return promising

    def _falls(self, setting: Setting, before: Setting) -> bool:
        """Clearly below its neighbour, and not better than the current choice."""
        table = self.table
        if before not in table.scores or self.best not in table.scores:
            return False
        score, margin = table.mean(setting), table.margin(1, len(table.scores[before]), self._rules.confidence)
        falls = score < table.mean(before) - margin and score < table.mean(self.best) - margin
        if falls:
            table.set_gap(setting, table.mean(self.best) - score)
        return falls

    def _within_quality_bound(self, settings: list[Setting], reason: str) -> SearchSteps[list[Setting]]:
        """Without those whose rounding loses too much quality; each kind of rounding is checked once."""
        allowed = []
        for setting in settings:
            rounding = setting.only(self._space.lossy)
            if rounding not in self._accepted and rounding not in self.table.rejected:
                answer = yield ScoreRequest(setting, "stage", reason, quality=True)
                if answer is None:
                    self.table.out_of_time = True
                    break
                if answer.score is None:
                    self.table.rejected[rounding] = answer.reason
                else:
                    self._accepted.add(rounding)
            if rounding in self._accepted:
                allowed.append(setting)
        return allowed

    def _gap(self, setting: Setting, stage: Stage) -> float | None:
        """How far a stage's values were behind when last compared, whatever the other knobs were: 0 if they failed,
        None if they were never tried."""
        values = _values_of(setting, stage)
        known = [gap for other, gap in self.table.gaps.items() if _values_of(other, stage) == values]
        if known:
            return known[-1]
        return 0.0 if any(_values_of(other, stage) == values for other in self.table.failures) else None

    # Pairs.

    def _search_pairs(self) -> SearchSteps[None]:
        """Runners-up of two stages at once: gains that no single stage shows."""
        if self.table.out_of_time:
            return
        candidates = [setting for *_, setting in sorted(self._pairs(), key=lambda pair: pair[:2])]
        allowed = yield from self._within_quality_bound(candidates[: self._rules.pairs], "pairs")
        if allowed and not self.table.out_of_time:
            self.best = yield from select_best(
                [self.best, *allowed], self.table, self._rules, "pairs", "two changes at once"
            )

    def _pairs(self) -> Iterator[tuple[int, float, Setting]]:
        """Untried pairs as (rank within the two stages, sum of both gaps, setting)."""
        known = self.table.scores.keys() | self.table.failures.keys()
        for one, other in combinations(self._space.stages, 2):
            found = [
                (a + b, setting)
                for (a, ours), (b, theirs) in product(self._runners_up(one), self._runners_up(other))
                if (setting := self.best.but({**ours, **theirs})) not in known and self._space.allows(setting)
            ]
            found.sort(key=lambda pair: pair[0])
            yield from ((rank, gap, setting) for rank, (gap, setting) in enumerate(found))

    def _runners_up(self, stage: Stage) -> list[tuple[float, dict[str, Value]]]:
        neighbours = self._space.neighbours(self.best, stage)
        found = [(self._gap(other, stage), _values_of(other, stage)) for other in neighbours]
        return [(gap, values) for gap, values in found if gap is not None and gap < self._rules.max_gap]

    # Confirmation.

    def _confirm(self) -> SearchSteps[SearchResult]:
        """Fresh rounds only: the winner of many comparisons was also lucky in some of them."""
        result = SearchResult(self.best, self.current, self.table, {})
        if self.best == self.current:
            return result
        rules = self._rules
        candidates = dict.fromkeys([self.best, *self._baselines])
        failed = self.table.failures.keys() - ({self.current} & self.table.timed_out)  # it gets a second chance
        scores = {setting: list[float]() for setting in candidates if setting not in failed}
        most = self._confirmation_rounds()
        looks = most - rules.min_rounds + 1 + len(_LATE_LOOKS)
        for number in range(most * _LATE_LOOKS[-1]):
            if not (yield from self._confirmation_round(scores, number)):
                break
            ours, theirs = scores.get(self.best, []), scores.get(self.current, [])
            if number >= most and number + 1 not in [most * times for times in _LATE_LOOKS]:
                continue
            better, result.ratio = _is_confirmed(ours, theirs, rules, looks)
            # A current setting that ran before and fails only now proves nothing.
            result.better = better and (bool(theirs) or self.current not in self.table.scores)
            if result.better or self.best not in scores or (number + 1 >= most and not self._is_hopeful(result)):
                break
        result.rounds = scores
        return self._prefer_exact(result, looks)

    def _confirmation_rounds(self) -> int:
        """As many as the noise demands, decided before the first of them. The winner was also lucky: enough for half of
        the gain that the search saw, unless even all of it would take too many."""
        rules, table = self._rules, self.table
        if self.best not in table.scores or self.current not in table.scores or not table.has_repeats:
            return rules.max_rounds
        gap, noise = table.mean(self.best) - table.mean(self.current), table.noise()[0]
        if rounds_needed(math.exp(gap), noise, rules) is None:
            return rules.max_rounds
        return max(rules.max_rounds, rounds_needed(math.exp(gap / 2), noise, rules) or rules.most_rounds)

    def _is_hopeful(self, result: SearchResult) -> bool:
        """Whether more rounds could show that the best is as good as it looks."""
        ratio = result.ratio
        return ratio is not None and rounds_needed(ratio.middle, self.table.noise()[0], self._rules) is not None

    def _confirmation_round(self, scores: dict[Setting, list[float]], number: int) -> SearchSteps[bool]:
        """False if no time is left. A round in which the best or the current setting times out, which have run before,
        counts for none: the machine was too busy. Another baseline is left out."""
        answers = dict[Setting, TrialScore]()
        for setting in alternating(list(scores), number):
            answer = yield ScoreRequest(setting, "confirmation", "confirmation")
            if answer is None:
                return False
            answers[setting] = answer
        ran_before = {self.best, self.current} & self.table.scores.keys()
        if not any(answers[setting].timed_out for setting in ran_before & answers.keys()):
            for setting, answer in answers.items():
                record(self.table, scores, setting, answer)
        return True

    def _prefer_exact(self, result: SearchResult, looks: int) -> SearchResult:
        """Coarser numbers must bring a gain: if the fresh rounds show none over a baseline with other rounding, and
        that baseline is better than the current setting too, it is chosen instead."""
        rounds, lossy = result.rounds, self._space.lossy
        for other in self._baselines[1:]:
            ours, theirs = rounds.get(self.best, []), rounds.get(other, [])
            if other.only(lossy) == self.best.only(lossy) or len(ours) != len(theirs) or not ours:
                continue
            if ratio_interval(ours, theirs).middle > 1 + 2 * self._rules.margin:
                continue
            better, ratio = _is_confirmed(theirs, rounds.get(self.current, []), self._rules, looks)
            if better:
                self.best = other
                return SearchResult(other, self.current, self.table, rounds, ratio, better=True)
        return result


def _is_confirmed(
    ours: list[float], theirs: list[float], rules: SearchRules, looks: int
) -> tuple[bool, Interval | None]:
    """Checked after every round, so that each check needs more confidence than a single one would."""
    if not ours:
        return False, None
    if not theirs:  # the current setting does not run
        return len(ours) >= rules.min_rounds, None
    ratio = ratio_interval(ours, theirs, joint_confidence(_CONFIDENCE, looks))
    return len(ours) >= rules.min_rounds and ratio.low > 1 + rules.margin, ratio


def _values_of(setting: Setting, stage: Stage) -> dict[str, Value]:
    return {knob.name: setting[knob.name] for knob in stage}


def sides(settings: list[Setting], name: str, value: Value) -> tuple[list[Setting], list[Setting]]:
    """The settings above and below a knob's value, the nearest first."""
    ordered = sorted(settings, key=lambda setting: float(setting[name]))
    above = [setting for setting in ordered if float(setting[name]) > float(value)]
    below = [setting for setting in ordered if float(setting[name]) < float(value)]
    return above, below[::-1]
