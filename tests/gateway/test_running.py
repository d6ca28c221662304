"""The requests that run are ended from outside."""

from __future__ import annotations

from modelyard.core.errors import (
    Unavailable,
)
from tests.gateway.harness import (
    GatewayHarness,
)


async def test_stop_fails_running_and_queued_requests_with_its_reason() -> None:
    error = Unavailable("the server is shutting down")
    async with GatewayHarness(slots=1) as harness:
        holder, waiter = await harness.start(), await harness.start()
        harness.gateway.running.end(error)
        for stream in (waiter, holder):
            _, events = await anext(stream)
            assert [event.error for event in events if hasattr(event, "error")] == [error]
            stream.close()
        assert (harness.running, harness.waiting) == (0, 0)
