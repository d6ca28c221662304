"""Changes told to those who listen."""

from __future__ import annotations

import asyncio
import gc

from modelyard.core.pool import ModelStateChange
from modelyard.telemetry.broadcast import ModelChangeBroadcast


def change(number: int) -> ModelStateChange:
    return ModelStateChange(model="m", state="loading", progress=number / 100)


async def test_every_listener_hears_everything_from_its_beginning_on():
    changes = ModelChangeBroadcast()
    early = changes.listen()
    changes.tell(change(1))
    late = changes.listen()
    changes.tell(change(2))
    changes.end()
    assert [c.progress async for c in early] == [0.01, 0.02]
    assert [c.progress async for c in late] == [0.02]


async def test_one_who_lags_misses_the_oldest_and_is_told_how_many():
    changes = ModelChangeBroadcast()
    listener = changes.listen(kept=2)
    for number in range(5):
        changes.tell(change(number))
    changes.end()
    assert [(c.progress, c.missed) async for c in listener] == [(0.03, 3), (0.04, 0)]


async def test_a_listener_waits_for_what_comes():
    changes = ModelChangeBroadcast()
    listener = changes.listen()
    reading = asyncio.create_task(anext(listener))
    await asyncio.sleep(0)
    changes.tell(change(7))
    assert (await reading).progress == 0.07


async def test_a_listener_that_nobody_holds_is_forgotten():
    changes = ModelChangeBroadcast()
    changes.listen()
    gc.collect()
    assert len(changes._listeners) == 0


async def test_listening_after_the_end_hears_nothing():
    changes = ModelChangeBroadcast()
    changes.end()
    assert [c async for c in changes.listen()] == []
