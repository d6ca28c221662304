"""A run of the optimizer as the page shows it: a headline, figures, dots and rows. Pure."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from modelyard.core.knobs import COUNTS
from modelyard.workbench import words
from modelyard.workbench.client import Json


class Spot(Struct, frozen=True):
    """A setting: memory across, what the goal counts up. `kind` is its colour and its place in the legend."""

    kind: str
    name: str
    memory: float
    gain: float


def headline(run: Json) -> str:
    day, _, hour = str(run["at"]).partition("T")
    return f"{run['model']} for {run['goal']} · {_outcome(run)} · {day} {hour[:5]}"


def _outcome(run: Json) -> str:
    if not run["better"]:
        return "nothing better" if run["finished"] else "cut off"
    if gained := run.get("gain"):  # runs that an older version has kept have no words for it
        return str(gained)
    return f"{run['ratio']['middle']:.2f} times as good" if run["ratio"] else "better than what does not run"


def figures(run: Json) -> list[tuple[str, str]]:
    against = [(f"against {name}", ratio_words(ratio)) for name, ratio in run["ratios"].items()]
    return [
        *against,
        ("trials", f"{words.count(run['trials'])} of {words.count(run['grid'])}"),
        ("time", words.seconds(run["spent_s"])),
        ("noise of a trial", words.NOTHING if run["noise"] is None else f"{run['noise']:.1%}"),
    ]


def ratio_words(ratio: Json) -> str:
    return f"{ratio['middle']:.2f}× [{ratio['low']:.2f}, {ratio['high']:.2f}]"


def settings(changes: Json) -> str:
    return ", ".join(f"{name} = {value}" for name, value in changes.items()) or "the current settings"


def upward(run: Json) -> str:
    """What the chart's height means."""
    return f"{COUNTS.get(run['goal'], 'score')}, {'current' if _current(run['rows']) else 'the best'} = 1"


def spots(run: Json) -> list[Spot]:
    """Where the goal is memory, which stands on the other axis, the height is speed."""
    rows, counts = run["rows"], "speed" if run["goal"] == "memory" else "score"
    if not rows:
        return []
    base = (_current(rows) or rows[0])[counts]
    return [Spot(_kind(row), _named(row), row["memory"] / 2**20, row[counts] / base) for row in rows]


def _current(rows: list[Json]) -> Json | None:
    return next((row for row in rows if row["name"] == "current" or not row["changes"]), None)


def _kind(row: Json) -> str:
    return row["name"] or ("not beaten" if row["front"] else "tried")


def _named(row: Json) -> str:
    told = settings(row["changes"])
    return f"{row['name']}: {told}" if row["name"] and row["changes"] else row["name"] or told


def table(run: Json) -> list[dict[str, Any]]:
    base = _current(run["rows"])
    return [
        {
            "id": place,
            "setting": _named(row),
            "against": _against(row, base, run["goal"]),
            "speed": words.rate(row["speed"]),
            "first": words.seconds(row["ttft_s"]),
            "memory": words.size(row["memory"]),
            "trials": words.count(row["trials"]),
            "front": "•" if row["front"] else "",
        }
        for place, row in enumerate(run["rows"])
    ]


def _against(row: Json, base: Json | None, goal: str) -> str:
    if row.get("slow"):
        return "too slow"
    if base is None:
        return words.NOTHING
    return f"{base['memory'] / row['memory'] if goal == 'memory' else row['score'] / base['score']:.2f}×"


def remarks(run: Json) -> list[str]:
    """What rounded numbers cost, what failed and what was left out, a line each."""
    return [
        *(f"{settings(lost['values'])}: {_cost(lost)}" for lost in run["losses"]),
        *(f"{settings(failed['changes'])} failed: {failed['reason']}" for failed in run["failures"]),
        *(f"not tried: {left}" for left in run["left_out"]),
        *(f"written to {file}" for file in run.get("applied", [])),
    ]


def _cost(lost: Json) -> str:
    verdict = "within the bound" if lost["within"] else "too much, never recommended"
    moved = "" if lost["divergence"] is None else f", divergence {lost['divergence']:.4f}"
    return f"perplexity {lost['rise']:+.2%}{moved}: {verdict}"
