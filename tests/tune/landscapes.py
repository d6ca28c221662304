"""Synthetic machines: the speed of every setting is known, so that what a search finds can be held against the best."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from modelyard.core.knobs import Knob, Setting
from modelyard.tune.race import Ask, Told
from modelyard.tune.search import Found, Search
from modelyard.tune.space import Space

Speed = Callable[[Setting], float | None]  # None: it cannot run

KNOBS = (
    Knob(name="threads", values=(1, 2, 4, 8, 16, 32), stage=1),
    Knob(name="ubatch", values=(64, 128, 256, 512, 1024, 2048), stage=2),
    Knob(name="flash", values=("off", "on"), stage=3),
    Knob(name="kv", values=("f16", "q8_0", "q4_0"), stage=4, lossy=True),
    Knob(name="guess", values=("off", "ngram", "draft"), stage=5),
)
BAD = Setting((("threads", 1), ("ubatch", 64), ("flash", "off"), ("kv", "f16"), ("guess", "off")))
DEFAULT = Setting((("threads", 8), ("ubatch", 512), ("flash", "on"), ("kv", "f16"), ("guess", "off")))


def forbids(setting: Setting) -> str | None:
    rounded = setting["kv"] != "f16" and setting["flash"] == "off"
    return "a rounded cache needs flash attention" if rounded else None


SPACE = Space(KNOBS, forbids)


class Landscape:
    """A machine drawn by lot: where its best lies and how much each knob matters differs from seed to seed."""

    def __init__(self, seed: int, *, noise: float = 0.03, interaction: float = 0.0) -> None:
        dice = random.Random(seed)
        self._dice, self._noise, self._interaction = random.Random(seed + 1), noise, interaction
        self._threads = dice.choice((2, 4, 8, 16))
        self._ubatch = dice.choice((128, 256, 512, 1024))
        self._flash = dice.uniform(-0.2, 0.3)
        self._kv = {"f16": 0.0, "q8_0": dice.uniform(-0.15, 0.2), "q4_0": dice.uniform(-0.2, 0.25)}
        self._guess = {"off": 0.0, "ngram": dice.uniform(-0.1, 0.3), "draft": dice.uniform(-0.3, 0.4)}

    def speed(self, setting: Setting) -> float | None:
        threads = math.log2(float(setting["threads"]) / self._threads)
        ubatch = math.log2(float(setting["ubatch"]) / self._ubatch)
        told = -0.2 * threads**2 - 0.05 * ubatch**2 + self._flash * (setting["flash"] == "on")
        told += self._kv[str(setting["kv"])] + self._guess[str(setting["guess"])]
        return 100 * math.exp(told + self._together(setting, threads, ubatch))

    def _together(self, setting: Setting, threads: float, ubatch: float) -> float:
        """More threads want larger batches, and guessing pays less with rounded caches."""
        both = setting["kv"] != "f16" and setting["guess"] != "off"
        return self._interaction * (0.05 * max(-2, min(2, threads)) * max(-2, min(2, ubatch)) - 0.15 * both)

    def measured(self, setting: Setting) -> Told:
        speed = self.speed(setting)
        if speed is None:
            return Told(None, "it did not start")
        return Told(speed * math.exp(self._dice.gauss(0, self._noise)))

    def best(self) -> float:
        return max(speed for setting in SPACE.grid() if (speed := self.speed(setting)) is not None)


class Cliff(Landscape):
    """Large batches do not fit into memory and 32 threads kill the process, just behind what is fastest."""

    def speed(self, setting: Setting) -> float | None:
        if int(setting["ubatch"]) > self._ubatch or setting["threads"] == 32:
            return None
        return super().speed(setting)


class Heavy(Landscape):
    """Everything but rounded caches runs out of memory with large batches: what failed alone works with another."""

    def speed(self, setting: Setting) -> float | None:
        if setting["kv"] == "f16" and int(setting["ubatch"]) >= self._ubatch:
            return None
        return super().speed(setting)


def explore(land: Landscape, baselines: list[Setting], limit: int, reserve: int = 20) -> Found:
    """Drives a search as the real run does: no time to explore when only the reserve is left, none at all beyond it."""
    steps = Search(SPACE, baselines).run()
    ask, trials = next(steps), 0
    while True:
        told = _answer(land, ask, trials, limit, reserve)
        trials += told is not None and not ask.loss
        try:
            ask = steps.send(told)
        except StopIteration as over:
            found: Found = over.value
            return found


def _answer(land: Landscape, ask: Ask, trials: int, limit: int, reserve: int) -> Told | None:
    if ask.loss:
        return Told(1.0)
    room = limit if ask.phase == "proof" else limit - reserve
    return land.measured(ask.setting) if trials < room else None
