"""Runs a check on many random values, reports what it finds with the smallest value that shows it, and bounds the time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

DEADLINE_S = 20.0  # for one request, frame or file: longer is a hang


class Finding(AssertionError):
    """`kind` and `where` tell findings apart; `example` is the input that shows it."""

    def __init__(self, kind: str, where: str, detail: str, example: object = "") -> None:
        super().__init__(f"{kind} at {where}: {detail}\n{str(example)[:4000]}")
        self.kind, self.where, self.detail, self.example = kind, where, detail, example

    @property
    def signature(self) -> tuple[str, str, str]:
        return self.kind, self.where, self.detail[:60]


class Target(NamedTuple):
    """An interface under test. `check` raises Finding, and returns the outcome, such as an HTTP status."""

    name: str
    values: SearchStrategy[Any]
    check: Callable[[Any], str]


class Results:
    """Outcomes of each target, and findings without repetitions."""

    def __init__(self) -> None:
        self.outcomes: dict[str, Counter[str]] = {}
        self.findings: dict[tuple[str, str, str], Finding] = {}

    def add(self, target: str, outcome: str) -> None:
        self.outcomes.setdefault(target, Counter())[outcome] += 1

    def find(self, finding: Finding) -> bool:
        """Whether it is new, or smaller than the one that is known."""
        known = self.findings.get(finding.signature)
        if known is None or len(str(finding.example)) < len(str(known.example)):
            self.findings[finding.signature] = finding
        return known is None


def explore(target: Target, examples: int, start: int, results: Results | None = None) -> None:
    """Check `examples` values of one target; `start` is the seed. Raises the first finding, made small by Hypothesis.

    With `results`, findings that are there already are passed over.
    """
    known = set(results.findings) if results is not None else set()

    def check(value: Any) -> None:
        try:
            outcome = target.check(value)
        except Finding as finding:
            if results is not None:
                results.find(finding)
            if finding.signature not in known:
                raise
            outcome = finding.kind
        if results is not None:
            results.add(target.name, outcome)

    run = given(target.values)(check)
    seed(start)(
        settings(
            max_examples=examples,
            deadline=None,
            database=None,
            print_blob=False,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )(run)
    )()


def explore_for(targets: list[Target], seconds: float, start: int, results: Results, batch: int = 40) -> None:
    """Explore all targets in turn, with other seeds each time, until the time is over."""
    until, turn = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        for target in targets:
            if time.monotonic() >= until:
                return
            try:
                explore(target, batch, start + turn, results)
            except Finding as finding:
                results.find(finding)
            except BaseExceptionGroup:  # a finding that did not come back; `results` has it
                pass
        turn += 1
