"""Runs checks on many random values for a bounded time, and keeps what they find with the smallest input."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Generic, NamedTuple, TypeVar

DEADLINE_S = 20.0  # for one request, frame or file: longer is a hang

T = TypeVar("T")


class Finding(AssertionError):
    """`kind`, `where` and the first words of `detail` tell findings apart; `example` is the input that shows it."""

    def __init__(self, kind: str, where: str, detail: str, example: object = "") -> None:
        super().__init__(f"{kind} at {where}: {detail}\n{str(example)[:4000]}")
        self.kind, self.where, self.detail, self.example = kind, where, detail, example

    @property
    def signature(self) -> tuple[str, str, str]:
        return self.kind, self.where, re.sub(r"0x[0-9a-f]+|\d+|'[^']*'|\"[^\"]*\"", "#", self.detail)[:60]


class Target(NamedTuple, Generic[T]):
    """An interface under test. `check` returns the outcome, such as an HTTP status, or raises Finding. `shrink` makes
    an input smaller while it still fails."""

    name: str
    make: Callable[[Random], T]
    check: Callable[[T], str]
    shrink: Callable[[T, Callable[[T], bool]], T] = lambda value, _: value


class Results:
    """Outcomes of each target, and findings without repetitions."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}
        self.findings: dict[tuple[str, str, str], Finding] = {}

    def add(self, target: str, outcome: str) -> None:
        self.outcomes.setdefault(target, Counter())[outcome] += 1


def explore(target: Target[Any], rng: Random, results: Results) -> None:
    """One value of one target."""
    value = target.make(rng)
    try:
        results.add(target.name, target.check(value))
    except Finding as finding:
        results.add(target.name, finding.kind)
        if finding.signature not in results.findings:
            results.findings[finding.signature] = finding
            if finding.kind != "hang":  # each attempt would take the whole deadline
                results.findings[finding.signature] = _shrink(target, value, finding)


def _shrink(target: Target[Any], value: Any, finding: Finding) -> Finding:
    last = finding

    def still_fails(smaller: Any) -> bool:
        nonlocal last
        try:
            target.check(smaller)
        except Finding as found:
            if found.signature == finding.signature:
                last = found
                return True
        return False

    target.shrink(value, still_fails)
    return last


def explore_all(targets: Sequence[Target[Any]], times: int, start: int, results: Results) -> None:
    """The same values for the same seed `start`, whatever the other targets do."""
    for target in targets:
        rng = Random(f"{target.name} {start}")
        for _ in range(times):
            explore(target, rng, results)


def explore_for(targets: Sequence[Target[Any]], seconds: float, start: int, results: Results, batch: int = 40) -> None:
    """All targets in turn, with another seed in each turn, until the time is over."""
    until, turn = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        for target in targets:
            if time.monotonic() < until:
                explore_all([target], batch, start + turn, results)
        turn += 1
