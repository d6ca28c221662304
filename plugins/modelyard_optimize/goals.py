"""The goals of an optimization: the load of a trial, its score, and the ranking of settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import get_args

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.errors import InvalidRequest
from modelyard.core.knobs import Goal, Setting
from modelyard_bench.workload import Workload, get_workload
from modelyard_optimize.trial import Measurement

GOALS: tuple[Goal, ...] = get_args(Goal)
ABOUT: dict[Goal, str] = {
    "chat": "the time of one answer, one conversation at a time",
    "agent": "the time to first token of long prompts that build on each other",
    "batch": "tokens per second of many concurrent answers",
    "memory": "memory, at no less than a share of the best speed",
}
_START_S = 1.5  # of a process, before it loads anything
_MIN_SHARE = 0.25  # of a load that is kept however short the budget is
_LOAD_TIME_SHARE = 0.25  # of the loading time is always measured
_SLOW_PENALTY = 8  # exponent by which the score of a too slow setting falls


class TrialLoad(Struct, frozen=True):
    workload: Workload
    conversations: int


def trial_load(goal: Goal, streams: int | None = None) -> TrialLoad:
    """Small enough to be repeated often: many short trials find the noise sooner than few long ones."""
    if goal == "agent":
        return TrialLoad(get_workload("agent", prompt_tokens=1024, output_tokens=8, turns=3), 1)
    if goal == "batch":
        return TrialLoad(get_workload("batch", output_tokens=48, streams=streams), 1)
    return TrialLoad(get_workload("chat", prompt_tokens=192, output_tokens=64), 3)


def scale_load(load: TrialLoad, measured: Measurement, wanted_s: float) -> TrialLoad:
    """Shrink the load so that a trial like the measured one takes no longer than wanted: first fewer conversations,
    then shorter ones, down to a quarter. Less would measure the start of an engine and not its work. If loading takes
    most of the time, a smaller load would save little and only be noisier."""
    available = max(wanted_s - measured.load_s - _START_S, _LOAD_TIME_SHARE * measured.load_s)
    share = min(1.0, available / measured.wall_s) if measured.wall_s > 0 else 1.0
    conversations = max(1, int(share * load.conversations))
    return _shorten(load.workload, min(1.0, max(_MIN_SHARE, share * load.conversations / conversations)), conversations)


def shorter_load(load: TrialLoad) -> TrialLoad:
    """For a budget of which one trial takes too much: one conversation, a quarter as long."""
    return _shorten(load.workload, _MIN_SHARE, 1)


def _shorten(workload: Workload, share: float, conversations: int) -> TrialLoad:
    sizes = {name: max(1, round(share * getattr(workload, name))) for name in ("prompt_tokens", "output_tokens")}
    return TrialLoad(replace(workload, **sizes), conversations)


def parse_goal(name: str) -> Goal:
    if name not in GOALS:
        raise InvalidRequest(f"there is no goal {name!r}; choose one of {', '.join(GOALS)}", param="for")
    return name


def answer_rate(measurements: Sequence[Measurement]) -> float:
    """Answers per second, over all measurements of a setting."""
    return geometric_mean(1 / max(one.answer_s, 1e-6) for one in measurements)


def score(goal: Goal, measured: Measurement, floor: float | None = None, rate: float | None = None) -> float:
    """Higher is better. For memory, `floor` is the slowest acceptable answer rate and `rate` that of the setting over
    all its trials: the rate of one trial would add its noise to a figure that has hardly any."""
    if goal == "agent":
        return 1 / max(measured.ttft_s, 1e-6)
    if goal == "batch":
        return measured.speed
    if goal == "chat" or floor is None:
        return 1 / max(measured.answer_s, 1e-6)
    return 2**30 / measured.memory * min(1.0, (rate or answer_rate([measured])) / floor) ** _SLOW_PENALTY


class RankedSetting(Struct, frozen=True, kw_only=True):
    """A setting with the mean of its measurements."""

    setting: Setting
    trials: int
    score: float
    speed: float
    ttft_s: float
    memory: int
    slow: bool = False  # for memory: slower than the slack allows
    front: bool = False  # on the Pareto front of speed, time to first token and memory


def rank(
    goal: Goal, measurements: Mapping[Setting, Sequence[Measurement]], floor: float | None = None
) -> list[RankedSetting]:
    """The best first."""
    rows = [_ranked(goal, setting, found, floor) for setting, found in measurements.items() if found]
    marked = [replace(row, front=not any(_dominates(other, row) for other in rows)) for row in rows]
    return sorted(marked, key=lambda row: row.score, reverse=True)


def _ranked(goal: Goal, setting: Setting, found: Sequence[Measurement], floor: float | None) -> RankedSetting:
    rate = answer_rate(found)
    return RankedSetting(
        setting=setting,
        trials=len(found),
        score=geometric_mean(score(goal, one, floor, rate) for one in found),
        speed=geometric_mean(one.speed for one in found),
        ttft_s=geometric_mean(max(one.ttft_s, 1e-6) for one in found),
        memory=int(geometric_mean(one.memory for one in found)),
        slow=floor is not None and rate < floor,
    )


def _dominates(one: RankedSetting, other: RankedSetting) -> bool:
    """At least as good in everything and better in something."""
    ours, theirs = (one.speed, -one.ttft_s, -one.memory), (other.speed, -other.ttft_s, -other.memory)
    return ours != theirs and all(a >= b for a, b in zip(ours, theirs, strict=True))
