"""Random operations in random order: no limit is broken, and every request is served or refused in the end."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import pytest

from modelyard.core.engine import CacheInfo
from modelyard.core.errors import Conflict, InvalidRequest, ModelyardError, Unavailable
from modelyard.core.pool import KeyLimits
from tests.scheduler.harness import Harness

LIMIT = 10
SIZES = {"a": 6, "b": 5, "c": 4, "d": 2}
CACHES = {"main": CacheInfo(100, 2), "fast": CacheInfo(100, 1)}


class RandomOperations:
    """Random requests, releases, cancellations, crashes, admin commands and reloads on a fake clock."""

    def __init__(self, harness: Harness, random: Random) -> None:
        self.harness, self.random = harness, random
        self.tickets: list[Any] = []
        self.versions = dict.fromkeys(SIZES, 0)
        harness.scheduler.reconfigure(self.specs())

    def specs(self) -> dict[str, Any]:
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
        choices = [self.request] * 8 + [self.finish] * 6 + [self.crash, self.admin_command, self.reload]
        with suppress(ModelyardError):  # a refusal is a valid outcome
            self.random.choice(choices)()
        if self.random.random() < 0.6:
            await self.harness.clock.advance(self.random.choice((0.0, 0.2, 1.5, 7.0, 40.0)))

    def request(self) -> None:
        model, cache = self.random.choice(list(SIZES)), self.random.choice(list(CACHES))
        more = {"key": self.random.choice(("", "ann", "bob")), "priority": self.random.choice(("main", "background"))}
        weight, session = self.random.choice((1, 1, 1, 3)), self.random.choice((None, "s1", "s2"))
        self.tickets.append(self.harness.request(model, cache, weight=weight, session=session, tokens=9, **more))

    def finish(self) -> None:
        if self.tickets:
            ticket = self.random.choice(self.tickets)
            ticket.on_revoke(lambda _: ticket.cancel())
            ticket.cancel()

    def crash(self) -> None:
        engines = [engine for model in self.harness.models.values() for engine in model.engines if not engine.closed]
        if engines and not (engine := self.random.choice(engines)).lost.done():
            engine.lost.set_result(Unavailable("killed"))

    def admin_command(self) -> None:
        scheduler, name = self.harness.scheduler, self.random.choice(list(SIZES))
        self.random.choice(
            (
                lambda: scheduler.load(name),
                lambda: scheduler.unload(name),
                lambda: scheduler.unload(name, force=True),
                lambda: scheduler.drain(name),
                lambda: scheduler.scale(name, self.random.choice((1, 2))),
            )
        )()

    def reload(self) -> None:
        self.versions[self.random.choice(list(SIZES))] += 1
        self.harness.scheduler.reconfigure(self.specs())

    def check(self) -> None:
        manager = self.harness.scheduler._manager
        self.tickets = [ticket for ticket in self.tickets if not ticket.is_finished]
        assert sum(sum(held.values()) for held in manager.held_bytes()) <= LIMIT
        for model in manager:
            for one in model.ready:
                assert all(0 <= one.free_slots[cache] <= info.parallel for cache, info in CACHES.items())
                assert one.running <= one.max_running
                assert one.running == sum(info.parallel - one.free_slots[cache] for cache, info in CACHES.items())
            assert model.running == sum(t.weight for t in self.tickets if t.granted and t.model is model)
            assert model.waiting == sum(not t.granted for t in self.tickets if t.model is model)
        assert set(self.tickets) == self.harness.scheduler._leases

    async def finish_all(self) -> None:
        """Release running leases until none is left."""
        for name in SIZES:
            self.harness.scheduler.load(name)  # reopens drained models
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
async def test_random_operations_break_no_limit_and_leave_no_request_waiting(seed: int):
    keys = {"ann": KeyLimits(max_concurrent=5), "bob": KeyLimits(requests_per_minute=60)}
    async with Harness(limit=LIMIT, max_waiting=20, keys=keys, timeout_s=5.0) as harness:
        operations = RandomOperations(harness, Random(seed))
        for _ in range(150):
            await operations.step()
            operations.check()
        await operations.finish_all()
        assert harness.scheduler.requests() == ()
        assert harness.scheduler._rate_limiters["ann"].active == 0


@pytest.mark.parametrize("seed", range(5))
async def test_random_load_failures_leave_no_request_waiting(seed: int):
    random = Random(seed)
    async with Harness(limit=LIMIT) as harness:
        operations = RandomOperations(harness, random)
        for _ in range(80):
            for model in harness.models.values():
                model.fault = InvalidRequest("bad file") if random.random() < 0.5 else None
            await operations.step()
            operations.check()
        for model in harness.models.values():
            model.fault = None
        await harness.clock.advance(100.0)
        await operations.finish_all()
        assert set(harness.states().values()) <= {"ready", "stopped", "loading"}


async def test_a_refused_request_leaves_no_lease():
    async with Harness(limit=LIMIT) as harness:
        operations = RandomOperations(harness, Random(0))
        with pytest.raises(Conflict):
            harness.request("d")
        operations.check()
        assert operations.tickets == []
