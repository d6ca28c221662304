"""A request that is prepared while the configuration is reloaded."""

from __future__ import annotations

import asyncio

import msgspec

from tests.gateway.harness import (
    CALLER,
    GatewayHarness,
    make_request,
    with_settings,
)


async def test_a_request_that_a_reload_overtakes_is_prepared_for_the_new_model() -> None:
    async with GatewayHarness() as harness:
        gateway, old = harness.gateway, harness.gateway.lookup.models["demo"]
        new = with_settings(
            msgspec.structs.replace(old, text=msgspec.structs.replace(old.pipeline)), system_prompt="Be brief."
        )
        preparing = asyncio.ensure_future(gateway.prepare(make_request("Hello"), CALLER))
        await asyncio.sleep(0)  # it is rendered
        assert not preparing.done()
        gateway.lookup.models = {**gateway.lookup.models, "demo": new}
        prepared = await preparing
    assert prepared.model is new
    assert "Be brief." in prepared.prompts[0].text
