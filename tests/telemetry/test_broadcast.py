from __future__ import annotations

import asyncio
import gc

from modelyard.core.pool import ModelStateChange
from modelyard.telemetry.broadcast import ModelChangeBroadcast


def change(number: int) -> ModelStateChange:
    return ModelStateChange(model="m", state="loading", progress=number / 100)


async def test_a_subscription_receives_every_change_after_it_began():
    broadcast = ModelChangeBroadcast()
    early = broadcast.subscribe()
    broadcast.publish(change(1))
    late = broadcast.subscribe()
    broadcast.publish(change(2))
    broadcast.close()
    assert [c.progress async for c in early] == [0.01, 0.02]
    assert [c.progress async for c in late] == [0.02]


async def test_a_slow_subscription_loses_the_oldest_and_counts_them():
    broadcast = ModelChangeBroadcast()
    subscription = broadcast.subscribe(max_queued=2)
    for number in range(5):
        broadcast.publish(change(number))
    broadcast.close()
    assert [(c.progress, c.missed) async for c in subscription] == [(0.03, 3), (0.04, 0)]


async def test_a_subscription_waits_for_the_next_change():
    broadcast = ModelChangeBroadcast()
    subscription = broadcast.subscribe()
    reading = asyncio.create_task(anext(subscription))
    await asyncio.sleep(0)
    broadcast.publish(change(7))
    assert (await reading).progress == 0.07


async def test_an_unreferenced_subscription_is_dropped():
    broadcast = ModelChangeBroadcast()
    broadcast.subscribe()
    gc.collect()
    assert len(broadcast._subscriptions) == 0


async def test_a_subscription_after_close_ends_at_once():
    broadcast = ModelChangeBroadcast()
    broadcast.close()
    assert [c async for c in broadcast.subscribe()] == []
