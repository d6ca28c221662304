"""Tunable parameters: a knob is one of an engine's fields with the values that the optimizer tries.

An engine package may have a module `knobs` with

    knobs(spec, here, goal)      the knobs of this model on this machine
    current(spec, cache)         each knob's effective value, set or default
    forbids(setting)             why the engine cannot run with these values together; None: it can
    fitted(spec)                 the values that the engine's program chooses for this machine (optional)

and a module `loss` with `loss(spec, reference, ids)`: the quality that values with lower precision cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct

Value = bool | int | float | str
Goal = Literal["chat", "agent", "batch", "memory"]

# The vertical axis of a run's chart; the other axis is memory.
COUNTS: dict[Goal, str] = {
    "chat": "replies in the same time",
    "agent": "speed of the first token",
    "batch": "tokens per second over all replies",
    "memory": "tokens per second",
}


class Knob(Struct, frozen=True, kw_only=True):
    """`stage`: those of one stage are tried together, the lowest first, since it should matter most."""

    name: str
    values: tuple[Value, ...]
    stage: int
    ordered: bool = True  # numbers on a scale
    lossy: bool = False  # lowers precision: checked against the quality bound before it is tried
    place: Literal["model", "cache"] = "model"  # its section of the configuration; a cache's value overrides a model's


class Setting(Struct, frozen=True):
    """One value for each knob, in the knobs' order."""

    pairs: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> Setting:
        return cls(tuple(values.items()))

    @property
    def values(self) -> dict[str, Value]:
        return dict(self.pairs)

    def __getitem__(self, name: str) -> Value:
        return self.values[name]

    def but(self, changes: Mapping[str, Value]) -> Setting:
        return Setting(tuple((name, changes.get(name, value)) for name, value in self.pairs))

    def only(self, names: Iterable[str]) -> Setting:
        wanted = set(names)
        return Setting(tuple(pair for pair in self.pairs if pair[0] in wanted))

    def changes(self, old: Setting) -> dict[str, Value]:
        """The values that differ from `old`."""
        before = old.values
        return {name: value for name, value in self.pairs if before.get(name) != value}

    def __str__(self) -> str:
        return ", ".join(f"{name} = {value}" for name, value in self.pairs)


class Loss(Struct, frozen=True):
    """The quality loss on a text: perplexity against the reference, and the divergence of the distribution."""

    perplexity: float
    reference: float
    divergence: float | None = None  # Kullback-Leibler, nats per token; None if only perplexity is known

    @property
    def rise(self) -> float:
        """Relative increase of perplexity: 0.01 is one per cent worse."""
        return self.perplexity / self.reference - 1
