"""What «best» means: each goal's workload, its score, and which settings no other beats in everything. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import get_args

from msgspec import Struct
from msgspec.structs import replace

from modelyard.benchmark.workload import Workload, get_workload
from modelyard.core.errors import InvalidRequest
from modelyard.core.knobs import Goal, Setting
from modelyard.tune.order import Figures

GOALS: tuple[Goal, ...] = get_args(Goal)
ABOUT: dict[Goal, str] = {
    "chat": "the time of one answer, one conversation at a time",
    "agent": "the time to the first token of long prompts that build on each other",
    "batch": "tokens a second of many answers at once",
    "memory": "memory, at no less than a share of the best speed",
}
_START_S = 1.5  # of a process, before it loads anything
_LEAST = 0.25
_WORTH = 0.25  # of the time that loading takes is always measured
_STEEP = 8  # how much a setting that is too slow pays for it


class Load(Struct, frozen=True):
    workload: Workload
    conversations: int


def load(goal: Goal, streams: int | None = None) -> Load:
    """Small enough to be repeated often: what a long trial knows better, many short ones know sooner."""
    if goal == "agent":
        return Load(get_workload("agent", prompt_tokens=1024, output_tokens=8, turns=3), 1)
    if goal == "batch":
        return Load(get_workload("batch", output_tokens=48, streams=streams), 1)
    return Load(get_workload("chat", prompt_tokens=192, output_tokens=64), 3)


def scaled(load: Load, seen: Figures, want_s: float) -> Load:
    """The load made so much smaller that a trial like this one takes no longer than is wanted: first fewer
    conversations, then shorter ones, down to a quarter; less would measure the start of an engine and not its work.
    Where the start is what takes long, a smaller load would save little and only be noisier."""
    room = max(want_s - seen.load_s - _START_S, _WORTH * seen.load_s)
    share = min(1.0, room / seen.wall_s) if seen.wall_s > 0 else 1.0
    kept = max(1, int(share * load.conversations))
    return _shortened(load.workload, min(1.0, max(_LEAST, share * load.conversations / kept)), kept)


def smallest(load: Load) -> Load:
    """What is asked where even one trial was too long."""
    return _shortened(load.workload, _LEAST, 1)


def _shortened(workload: Workload, share: float, conversations: int) -> Load:
    sizes = {name: max(1, round(share * getattr(workload, name))) for name in ("prompt_tokens", "output_tokens")}
    return Load(replace(workload, **sizes), conversations)


def goal_named(name: str) -> Goal:
    if name not in GOALS:
        raise InvalidRequest(f"there is no goal {name!r}; there are {', '.join(GOALS)}", param="for")
    return name


def pace(seen: Sequence[Figures]) -> float:
    """Answers a second: the middle of all that a setting has shown."""
    return geometric_mean(1 / max(one.answer_s, 1e-6) for one in seen)


def score(goal: Goal, seen: Figures, floor: float | None = None, paced: float | None = None) -> float:
    """The higher the better. `floor` is the speed that memory must not be bought with; `paced` what is known of the
    setting's, since one trial's would carry its noise into a figure that has hardly any."""
    if goal == "agent":
        return 1 / max(seen.ttft_s, 1e-6)
    if goal == "batch":
        return seen.speed
    if goal == "chat" or floor is None:
        return 1 / max(seen.answer_s, 1e-6)
    return 2**30 / seen.memory * min(1.0, (paced or pace([seen])) / floor) ** _STEEP


def unit(goal: Goal) -> str:
    return {"chat": "answers/s", "agent": "1/s to the first token", "batch": "tok/s", "memory": "1/GiB"}[goal]


class Standing(Struct, frozen=True, kw_only=True):
    """A setting with the middle of all its measurements."""

    setting: Setting
    trials: int
    score: float
    speed: float
    ttft_s: float
    memory: int
    slow: bool = False  # for memory: slower than the slack allows
    front: bool = False  # no other is at least as good in speed, first token and memory, and better in one


def standings(goal: Goal, seen: Mapping[Setting, Sequence[Figures]], floor: float | None = None) -> list[Standing]:
    """The best first."""
    rows = [_standing(goal, setting, figures, floor) for setting, figures in seen.items() if figures]
    marked = [_marked(row, rows) for row in rows]
    return sorted(marked, key=lambda row: row.score, reverse=True)


def _standing(goal: Goal, setting: Setting, figures: Sequence[Figures], floor: float | None) -> Standing:
    paced = pace(figures)
    return Standing(
        setting=setting,
        trials=len(figures),
        score=geometric_mean(score(goal, one, floor, paced) for one in figures),
        speed=geometric_mean(one.speed for one in figures),
        ttft_s=geometric_mean(max(one.ttft_s, 1e-6) for one in figures),
        memory=int(geometric_mean(one.memory for one in figures)),
        slow=floor is not None and paced < floor,
    )


def _marked(row: Standing, rows: Sequence[Standing]) -> Standing:
    return replace(row, front=not any(_beats(other, row) for other in rows))


def _beats(one: Standing, other: Standing) -> bool:
    """At least as good in everything and better in something."""
    mine, theirs = (one.speed, -one.ttft_s, -one.memory), (other.speed, -other.ttft_s, -other.memory)
    return mine != theirs and all(a >= b for a, b in zip(mine, theirs, strict=True))
