"""The settings that a search may choose from: knobs with their values, and what cannot go together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, groupby, product
from math import prod

from modelyard.core.knobs import Knob, Setting, Value

Forbids = Callable[[Setting], str | None]
Stage = tuple[Knob, ...]


class Space:
    def __init__(self, knobs: Sequence[Knob], forbids: Forbids = lambda _: None) -> None:
        self.knobs = tuple(sorted(knobs, key=lambda knob: knob.stage))
        self._forbids = forbids

    def __repr__(self) -> str:
        return f"<Space {' × '.join(f'{len(knob.values)} {knob.name}' for knob in self.knobs)}>"

    @property
    def size(self) -> int:
        """Trials of a full grid, one for each combination that can run."""
        if prod(len(knob.values) for knob in self.knobs) > 1_000_000:
            return prod(len(knob.values) for knob in self.knobs)
        return sum(1 for _ in self.grid())

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
        return self._forbids(setting) is None

    def around(self, setting: Setting, stage: Stage) -> list[Setting]:
        """The setting with every other value of a stage's knobs. Where that cannot run, with one more knob turned, too:
        what a constraint keeps apart would never be tried otherwise."""
        names = [knob.name for knob in stage]
        turned = (setting.but(dict(zip(names, values, strict=True))) for values in _values(stage))
        mended = (self._mended(other, names) for other in turned if other != setting)
        return [other for other in mended if other is not None]

    def _mended(self, setting: Setting, kept: Sequence[str]) -> Setting | None:
        if self.allows(setting):
            return setting
        others = (setting.but({knob.name: v}) for knob in self.knobs if knob.name not in kept for v in knob.values)
        return next(filter(self.allows, others), None)

    def pairs(self) -> Iterator[tuple[Stage, Stage]]:
        yield from combinations(self.stages, 2)


def _values(stage: Stage) -> Iterator[tuple[Value, ...]]:
    yield from product(*(knob.values for knob in stage))


def is_scale(ordered: bool, values: Sequence[Value]) -> bool:
    return ordered and all(type(value) in (int, float) for value in values)
