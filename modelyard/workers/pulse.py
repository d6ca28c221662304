"""Whether the other side still lives, counted in our own ticks: a pause of ours never looks like its death. Pure."""

from __future__ import annotations

from msgspec import Struct


class Pace(Struct, frozen=True):
    """A beat every `beat_s`; a worker that is silent for `patience` of them is lost, a client for `indulgence` of them.

    The defaults notice a worker that is stopped within two seconds.
    """

    beat_s: float = 0.4
    patience: int = 4
    indulgence: int = 25

    @property
    def notice_s(self) -> float:
        """So long after its last sign of life, at most, a worker counts as lost: the ticks it may miss, and one more.
        All other waits for a worker are measured by it, so that they add up to something that can be promised."""
        return self.beat_s * (self.patience + 1)


class Pulse:
    """Whoever blocks our loop for five seconds makes us miss one tick, not twelve: only whole ticks in which the other
    side had its chance count against it."""

    __slots__ = ("_allowed", "_silent", "number")

    def __init__(self, allowed: int) -> None:
        self._allowed, self._silent, self.number = allowed, 0, 0

    def heard(self) -> None:
        self._silent = 0

    def tick(self) -> bool:
        """True: it has been silent for too long."""
        self.number += 1
        self._silent += 1
        return self._silent > self._allowed
