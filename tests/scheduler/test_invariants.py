"""Whatever happens in whatever order: no limit is broken, and everybody is answered or refused in the end."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import Conflict, InvalidRequest, ModelyardError, Unavailable
from modelyard.scheduler.rate_limit import KeyLimits
from tests.scheduler.harness import Harness

LIMIT = 10
SIZES = {"a": 6, "b": 5, "c": 4, "d": 2}
CACHES = {"main": CacheInfo(100, 2), "fast": CacheInfo(100, 1)}


class Storm:
    """Random requests, ends, cancels, crashes, orders and reloads, all on the test's own clock."""

    def __init__(self, harness: Harness, dice: Random) -> None:
        self.harness, self.dice = harness, dice
        self.tickets: list[Any] = []
        self.versions = dict.fromkeys(SIZES, 0)
        harness.scheduler.reconfigure(self.blueprints())

    def blueprints(self) -> dict[str, Any]:
        return {
            name: self.harness.spec(
                name,
                size=size,
                caches=CACHES,
                autoload=name != "d",
                identity=f"{name}{self.versions[name]}",
                target_inflight=2 if name == "b" else None,
                idle_ttl_s=30.0 if name == "c" else None,
                replica_max=2,
            )
            for name, size in SIZES.items()
        }

    async def step(self) -> None:
        deeds = [self.ask] * 8 + [self.end] * 6 + [self.crash, self.order, self.reload]
        with suppress(ModelyardError):  # refused at once: that is an answer, too
            self.dice.choice(deeds)()
        if self.dice.random() < 0.6:
            await self.harness.clock.advance(self.dice.choice((0.0, 0.2, 1.5, 7.0, 40.0)))

    def ask(self) -> None:
        model, cache = self.dice.choice(list(SIZES)), self.dice.choice(list(CACHES))
        more = {"key": self.dice.choice(("", "ann", "bob")), "priority": self.dice.choice(("main", "background"))}
        weight, session = self.dice.choice((1, 1, 1, 3)), self.dice.choice((None, "s1", "s2"))
        self.tickets.append(self.harness.request(model, cache, weight=weight, session=session, tokens=9, **more))

    def end(self) -> None:
        if self.tickets:
            ticket = self.dice.choice(self.tickets)
            ticket.on_revoke(lambda _: ticket.cancel())
            ticket.cancel()

    def crash(self) -> None:
        engines = [engine for model in self.harness.models.values() for engine in model.engines if not engine.closed]
        if engines and not (engine := self.dice.choice(engines)).lost.done():
            engine.lost.set_result(Unavailable("killed"))

    def order(self) -> None:
        scheduler, name = self.harness.scheduler, self.dice.choice(list(SIZES))
        self.dice.choice(
            (
                lambda: scheduler.load(name),
                lambda: scheduler.unload(name),
                lambda: scheduler.unload(name, force=True),
                lambda: scheduler.drain(name),
                lambda: scheduler.scale(name, self.dice.choice((1, 2))),
            )
        )()

    def reload(self) -> None:
        self.versions[self.dice.choice(list(SIZES))] += 1
        self.harness.scheduler.reconfigure(self.blueprints())

    def check(self) -> None:
        depot = self.harness.scheduler._manager
        self.tickets = [ticket for ticket in self.tickets if not ticket.is_finished]
        assert sum(sum(held.values()) for held in depot.held_bytes()) <= LIMIT
        for model in depot:
            for one in model.ready:
                assert all(0 <= one.free_slots[cache] <= info.parallel for cache, info in CACHES.items())
                assert one.running <= one.max_running
                assert one.running == sum(info.parallel - one.free_slots[cache] for cache, info in CACHES.items())
            assert model.running == sum(t.weight for t in self.tickets if t.granted and t.model is model)
            assert model.waiting == sum(not t.granted for t in self.tickets if t.model is model)
        assert set(self.tickets) == self.harness.scheduler._leases

    async def calm(self) -> None:
        """Everybody who runs ends, again and again, until nobody is left."""
        for name in SIZES:
            self.harness.scheduler.load(name)  # opens what was drained
        for _ in range(200):
            for ticket in self.tickets:
                if ticket.granted:
                    ticket.cancel()
            await self.harness.clock.advance(12.0)
            self.check()
            if not self.tickets:
                return
        raise AssertionError(f"still waiting: {self.harness.scheduler!r}")


@pytest.mark.parametrize("seed", range(25))
async def test_a_storm_breaks_no_limit_and_leaves_nobody_waiting(seed: int):
    keys = {"ann": KeyLimits(max_concurrent=5), "bob": KeyLimits(requests_per_minute=60)}
    async with Harness(limit=LIMIT, max_waiting=20, keys=keys, timeout_s=5.0) as harness:
        storm = Storm(harness, Random(seed))
        for _ in range(150):
            await storm.step()
            storm.check()
        await storm.calm()
        assert harness.scheduler.requests() == ()
        assert harness.scheduler._rate_limiters["ann"].active == 0


@pytest.mark.parametrize("seed", range(5))
async def test_a_storm_of_failing_loads_leaves_nobody_waiting(seed: int):
    dice = Random(seed)
    async with Harness(limit=LIMIT) as harness:
        storm = Storm(harness, dice)
        for _ in range(80):
            for model in harness.models.values():
                model.fault = InvalidRequest("bad file") if dice.random() < 0.5 else None
            await storm.step()
            storm.check()
        for model in harness.models.values():
            model.fault = None
        await harness.clock.advance(100.0)
        await storm.calm()
        assert set(harness.states().values()) <= {"ready", "stopped", "loading"}


async def test_a_refusal_at_once_is_no_ticket():
    async with Harness(limit=LIMIT) as harness:
        storm = Storm(harness, Random(0))
        with pytest.raises(Conflict):
            harness.request("d")
        storm.check()
        assert storm.tickets == []
