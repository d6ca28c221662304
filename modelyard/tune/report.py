"""What a run has found, as values: for the table, the JSON that the workbench shows, and the recommendation."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.benchmark.statistics import Interval, ratio_interval
from modelyard.core.errors import Unavailable
from modelyard.core.knobs import Goal, Setting, Value
from modelyard.tune import edit, goals
from modelyard.tune.goals import Standing
from modelyard.tune.order import Benched
from modelyard.tune.run import Run
from modelyard.tune.search import Found


class Row(Struct, frozen=True, kw_only=True):
    """One setting of the table: what it is called, how it did, and how often it was tried."""

    name: str
    changes: dict[str, Value]  # from the current setting
    trials: int
    score: float
    speed: float
    ttft_s: float
    memory: int
    front: bool
    slow: bool = False  # for memory: slower than the slack allows


class Failed(Struct, frozen=True):
    changes: dict[str, Value]
    reason: str


class Lost(Struct, frozen=True):
    """What a way of rounding costs in quality, and whether that is within the bound."""

    values: dict[str, Value]
    perplexity: float
    reference: float
    rise: float
    divergence: float | None
    within: bool


class Report(Struct, frozen=True, kw_only=True):
    model: str
    backend: str
    goal: Goal
    about: str
    at: str
    machine: dict[str, Any]
    budget_s: float
    spent_s: float
    trials: int
    grid: int
    noise: float | None  # of one trial; None where nothing was measured twice
    finished: bool
    better: bool
    verdict: str
    gain: str  # what the best brings, in words; empty where that is not known
    ratio: Interval | None
    ratios: dict[str, Interval]  # of the best to each baseline, from the proof's rounds
    best: dict[str, Value]
    baselines: dict[str, dict[str, Value]]
    changes: dict[str, Value]
    toml: str
    rows: tuple[Row, ...]
    failures: tuple[Failed, ...]
    losses: tuple[Lost, ...]
    left_out: tuple[str, ...]
    bench: dict[str, Benched] = {}
    applied: tuple[str, ...] = ()


def report(run: Run, found: Found, *, finished: bool = True) -> Report:
    subject, plan = run.subject, run.plan
    names = {setting: name for name, setting in reversed(subject.baselines.items())} | _best(found)
    changed = subject.changes(found.best)
    standings = goals.standings(plan.goal, run.figures, run.floor)
    ratios = _ratios(run, found)
    gained = gain(plan.goal, found, standings, ratios.get("current"))
    return Report(
        model=subject.model,
        backend=subject.backend,
        goal=plan.goal,
        about=goals.ABOUT[plan.goal],
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine={"system": platform.system(), "cpu": platform.processor() or platform.machine()},
        budget_s=plan.budget_s,
        spent_s=round(run.spent_s, 1),
        trials=sum(map(len, run.figures.values())) + len(run.failures),
        grid=subject.space.size,
        noise=found.ledger.noise()[0] if found.ledger.knows_noise else None,
        finished=finished,
        better=found.better,
        verdict=verdict(found, gained, finished=finished, least=plan.rules.least),
        gain=gained,
        ratio=ratios.get("current"),
        ratios=ratios,
        best=found.best.values,
        baselines={name: setting.values for name, setting in subject.baselines.items()},
        changes=found.best.changes(found.current),
        toml=edit.fragment({tuple(map(str, loc)): value for loc, value in changed.items()}),
        rows=tuple(_row(one, names, found.current) for one in standings),
        failures=tuple(Failed(s.changes(found.current), str(why)) for s, why in run.failures.items()),
        losses=tuple(_lost(run, rounding) for rounding in run.losses),
        left_out=tuple(subject.left_out),
        bench={names.get(setting, "current"): benched for setting, benched in run.benched.items()},
    )


def _best(found: Found) -> dict[Setting, str]:
    return {} if found.best == found.current else {found.best: "best"}


def gain(goal: Goal, found: Found, standings: Sequence[Standing], ratio: Interval | None) -> str:
    """What the best brings over the current setting. Less memory may cost speed, within the slack: both are told."""
    if found.best == found.current:
        return ""
    known = {one.setting: one for one in standings}
    best, current = known.get(found.best), known.get(found.current)
    if goal == "memory" and best is not None and current is not None:
        told = f"{best.memory / current.memory:.2f} times the memory, {best.speed / current.speed:.2f} times the speed"
        return f"{told}; the current settings are slower than --slack allows" if current.slow else told
    return f"{ratio.middle:.2f} times as good" if ratio is not None else ""


def verdict(found: Found, gained: str, *, finished: bool, least: int) -> str:
    if found.best == found.current:
        return _unchanged(found) if finished else "broken off before anything better"
    if not finished:
        return "broken off: the best so far was not proved"
    if found.better:
        return f"better than the current settings beyond the noise: {gained or 'runs where the current does not'}"
    rounds = len(found.rounds.get(found.best, []))
    if found.ratio is None or rounds < least:
        return f"not proved: {rounds} of at least {least} rounds fitted into the time; a longer --budget may show it"
    return "no difference to the current settings beyond the noise"


def _unchanged(found: Found) -> str:
    if found.ledger.failures and not found.ledger.scores:
        return f"nothing could be measured: {next(iter(found.ledger.failures.values()))}"
    nothing = "nothing better than the current settings was found"
    return f"{nothing} before the time was up: a longer --budget tries more" if found.ledger.out_of_time else nothing


def _ratios(run: Run, found: Found) -> dict[str, Interval]:
    """Of scores; to the current setting it is the interval that was decided by, which is the wider one. Where the goal
    is memory, of memory: a score that also counts what is too slow is no ratio that anybody could read."""
    told = {name: _over(run, found, setting) for name, setting in run.subject.baselines.items()}
    if told.get("current") is not None and run.plan.goal != "memory":
        told["current"] = _finite(found.ratio)
    return {name: ratio for name, ratio in told.items() if ratio is not None}


def _over(run: Run, found: Found, other: Setting) -> Interval | None:
    """Round by round; a round that was cut short has no pair."""
    ours, theirs = found.rounds.get(found.best, []), found.rounds.get(other, [])
    rounds = min(len(ours), len(theirs))
    if other == found.best or not rounds:
        return None
    if run.plan.goal == "memory":
        ours, theirs = ([1 / one.memory for one in run.figures[each][-rounds:]] for each in (found.best, other))
    return _finite(ratio_interval(ours[:rounds], theirs[:rounds]))


def _finite(ratio: Interval | None) -> Interval | None:
    """One round alone says nothing of its noise, and JSON knows no infinity."""
    return ratio if ratio is not None and ratio.high < float("inf") else None


def _row(one: Standing, names: dict[Setting, str], current: Setting) -> Row:
    return Row(
        name=names.get(one.setting, ""),
        changes=one.setting.changes(current),
        trials=one.trials,
        score=one.score,
        speed=one.speed,
        ttft_s=one.ttft_s,
        memory=one.memory,
        front=one.front,
        slow=one.slow,
    )


def _lost(run: Run, rounding: Setting) -> Lost:
    loss = run.losses[rounding]
    within = run.plan.bounds.objection(loss) is None
    return Lost(rounding.values, loss.perplexity, loss.reference, loss.rise, loss.divergence, within)


def save(told: Report, folder: Path) -> Path:
    """Where the workbench looks; its newest is the last by name."""
    stamp = told.at.replace("-", "").replace(":", "")[:15]
    file = folder / f"{stamp}-{told.model.replace('/', '_')}-{told.goal}.json"
    write(told, file)
    return file


def write(told: Report, file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=2) + b"\n")
    except OSError as error:
        raise Unavailable(f"{file} cannot be written: {error.strerror}") from error
