"""Which model a request gets: names, and consent to remote models."""

from __future__ import annotations

import msgspec
import pytest

from modelyard.core.errors import (
    Forbidden,
    NotFound,
)
from tests.gateway.harness import (
    CALLER,
    GatewayHarness,
    make_request,
    refusal,
)


async def test_a_remote_model_needs_consent() -> None:
    harness = GatewayHarness(remote=True)
    error = await refusal(harness, Forbidden)
    assert error.code == "remote_not_allowed"
    assert "x-modelyard-allow-remote" in error.message
    willing = msgspec.structs.replace(CALLER, allow_remote=True)
    assert await harness.gateway.prepare(make_request(), willing)
    assert await harness.gateway.prepare(make_request(allow_remote=True), CALLER)


async def test_a_route_can_give_consent_for_all_clients_whose_key_does_not_forbid_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = GatewayHarness(remote=True)
    target = harness.gateway.lookup.router.resolve("demo", CALLER.endpoint)
    consenting = msgspec.structs.replace(target, allow_remote=True)
    monkeypatch.setattr(harness.gateway.lookup.router, "resolve", lambda *_: consenting)
    assert await harness.gateway.prepare(make_request(), CALLER)
    assert await harness.gateway.prepare(make_request(), msgspec.structs.replace(CALLER, key="ann"))
    forbidden = msgspec.structs.replace(CALLER, key="ann", forbid_remote=True)
    with pytest.raises(Forbidden, match="the key 'ann' may not use it"):
        await harness.gateway.prepare(make_request(allow_remote=True), forbidden)


async def test_a_request_with_a_key_cannot_give_its_own_consent() -> None:
    harness = GatewayHarness(remote=True)
    with pytest.raises(Forbidden, match="set allow_remote = true on its route or your key"):
        await harness.gateway.prepare(make_request(allow_remote=True), msgspec.structs.replace(CALLER, key="ann"))


async def test_an_unknown_model_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = GatewayHarness()
    monkeypatch.setattr(harness.gateway.lookup.router, "routes", ())
    error = await refusal(harness, NotFound, model="unknown")
    assert "demo" in error.message
