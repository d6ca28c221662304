"""What a run has measured so far, by subject and number of streams, and what it comes to. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from modelyard.benchmark.bench.plan import Plan, Step
from modelyard.benchmark.sample import Round
from modelyard.benchmark.summary import FIGURES, Compared, Summary, compare, errors, summarize


class Subject(Struct, frozen=True):
    """`label` is what tables call it: A, B …"""

    label: str
    name: str
    model: str = ""


class Pairing(Struct, frozen=True):
    """One figure of a subject against the first's."""

    subject: Subject
    first: Subject
    found: Compared


class Book:
    """A round that was cut short stands for its cell only until a whole one does."""

    def __init__(self, plan: Plan, subjects: Sequence[Subject]) -> None:
        self.plan, self.subjects = plan, tuple(subjects)
        self._rounds: dict[tuple[int, int], list[Round]] = {}
        self._cut: dict[tuple[int, int], Round] = {}
        self.warmup: list[Round] = []
        self.notes: list[str] = []
        self.is_interrupted = False

    def note(self, step: Step, one: Round, *, whole: bool = True) -> None:
        if step.is_warmup:
            self.warmup.append(one)
        elif whole:
            self._rounds.setdefault((step.subject, step.streams), []).append(one)
        elif one.samples:
            self._cut[step.subject, step.streams] = one

    def name_models(self, models: Sequence[str]) -> None:
        """As the servers call them, where nobody had said which."""
        named = zip(self.subjects, models, strict=True)
        self.subjects = tuple(replace(subject, model=subject.model or model) for subject, model in named)

    def rounds(self, subject: int, streams: int) -> list[Round]:
        key = (subject, streams)
        return self._rounds.get(key) or ([self._cut[key]] if key in self._cut else [])

    def results(self) -> Iterator[tuple[Subject, Summary, list[Round]]]:
        for streams in self.plan.streams:
            for number, subject in enumerate(self.subjects):
                if found := self.rounds(number, streams):
                    yield subject, summarize(found), found

    def pairings(self) -> list[Pairing]:
        """Of whole rounds only, and of as many as both have."""
        cells = [(number, streams) for streams in self.plan.streams for number in range(1, len(self.subjects))]
        cells = [(number, streams) for number, streams in cells if self._whole(number, streams)]
        lines = len(cells) * len(FIGURES)
        return [
            Pairing(self.subjects[number], self.subjects[0], found)
            for number, streams in cells
            for found in compare(self._rounds[number, streams], self._rounds[0, streams], lines=lines)
        ]

    def _whole(self, number: int, streams: int) -> bool:
        return (number, streams) in self._rounds and (0, streams) in self._rounds

    @property
    def answers(self) -> int:
        return sum(summary.answers for _, summary, _ in self.results())

    @property
    def warmup_errors(self) -> dict[str, int]:
        return errors(self.warmup)
