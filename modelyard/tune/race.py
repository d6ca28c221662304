"""A race between settings: measured in turns, the losers stopped early, until the noise can no longer hide who is best.

Pure: a race yields what it wants measured and is sent what came of it, so a test, a journal or a real machine can drive
it. `None` is sent where there is no time left; the race then ends with what it has.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Literal, TypeVar

from msgspec import Struct

from modelyard.core.knobs import Setting
from modelyard.tune.ledger import Ledger, leader, log_mean

T = TypeVar("T")
Phase = Literal["baselines", "stage", "pairs", "proof"]


class Ask(Struct, frozen=True):
    """Measure this setting; or, with `loss`, say whether its rounded numbers are within the bound."""

    setting: Setting
    phase: Phase
    why: str = ""
    loss: bool = False


class Told(Struct, frozen=True):
    """A score, the higher the better; or None and the reason why there is none. Of a loss, any score is a pass."""

    score: float | None
    reason: str = ""


Steps = Generator[Ask, Told | None, T]


class Rules(Struct, frozen=True):
    rounds: int = 5  # most measurements of one setting in one race
    confidence: float = 0.9  # with which a loser is sent off: a wrong one costs little, another round costs time
    margin: float = 0.01  # what a change must bring to be taken
    passes: int = 5  # over all stages, with pairs after each that changed nothing
    worth: float = 0.3  # further behind than this (in logarithms) nothing is tried a second time
    pairs: int = 12  # changes of two stages at once that are looked at
    least: int = 4  # rounds of the proof, at least and at most
    most: int = 9


def race(
    entrants: Sequence[Setting],
    ledger: Ledger,
    rules: Rules,
    phase: Phase,
    why: str = "",
    measured: Mapping[Setting, float] | None = None,
    least: int = 1,
) -> Steps[Setting]:
    """The winner. The first entrant is what holds now: another must be better by the margin to take its place.
    `measured` are scores of a moment ago, which count as the first round of those who have one. Nobody is sent off
    before `least` rounds: the first races of all also have to find out how noisy the machine is."""
    seen = {setting: [measured[setting]] if measured and setting in measured else [] for setting in entrants}
    held, mine = entrants[0], list[float]()
    for number in range(rules.rounds):
        for setting in order([s for s, scores in seen.items() if len(scores) == number], number):
            told = yield Ask(setting, phase, why)
            if told is None:
                ledger.out_of_time = True
                break
            note(ledger, seen, setting, told)
        mine = seen.get(held, mine)
        if number + 1 < least and not ledger.out_of_time:
            continue
        seen = _standing(seen, ledger, rules)
        if ledger.out_of_time or len(seen) < 2 or _is_settled(seen, held, ledger, rules):
            break
    return _winner(seen, held, mine, ledger, rules)


def order(settings: list[Setting], number: int) -> list[Setting]:
    """There and back again: nobody is always first, and what drifts over a round cancels out over two."""
    return settings if number % 2 == 0 else settings[::-1]


def note(ledger: Ledger, seen: dict[Setting, list[float]], setting: Setting, told: Told) -> None:
    """A failure is a result: the setting is out of this race and does nobody else any harm."""
    if told.score is None:
        ledger.failures[setting] = told.reason
        seen.pop(setting, None)
    else:
        ledger.add(setting, told.score)
        seen[setting].append(told.score)


def _standing(seen: dict[Setting, list[float]], ledger: Ledger, rules: Rules) -> dict[Setting, list[float]]:
    """Those whom noise may still hold back; how far the others are behind is remembered."""
    measured = {setting: scores for setting, scores in seen.items() if scores}
    if not measured:
        return {}
    first = leader(measured)
    standing = {}
    for setting, scores in measured.items():
        behind = log_mean(measured[first]) - log_mean(scores)
        ledger.is_behind(setting, behind)
        reach = ledger.reach(len(measured[first]), len(scores), rules.confidence)
        if setting == first or behind <= reach:
            standing[setting] = scores
    return standing


def _is_settled(seen: dict[Setting, list[float]], held: Setting, ledger: Ledger, rules: Rules) -> bool:
    """Whether more rounds could change nothing worth the name: what holds now leads, and the rest is hardly apart."""
    if held not in seen or leader(seen) != held:
        return False
    worst = max(log_mean(seen[held]) - log_mean(scores) for scores in seen.values())
    count = min(map(len, seen.values()))
    return ledger.reach(count, count, rules.confidence) + worst < 2 * rules.margin


def _winner(
    seen: dict[Setting, list[float]], held: Setting, mine: list[float], ledger: Ledger, rules: Rules
) -> Setting:
    """Half a round is no fair one, but in a race that time has cut short it is all there is."""
    if not seen or (not mine and held not in ledger.failures):
        return held
    first = leader(seen)
    return held if mine and log_mean(seen[first]) - log_mean(mine) < rules.margin else first
