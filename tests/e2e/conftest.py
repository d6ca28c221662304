"""One shared server for tests that do not change its state."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.helpers import config
from tests.e2e.protocols import PROTOCOLS, Protocol
from tests.live_server import LiveServer, live_server


@pytest.fixture(scope="package")
def server() -> Iterator[LiveServer]:
    with live_server(config()) as running:
        yield running


@pytest.fixture(scope="package")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


@pytest.fixture(params=list(PROTOCOLS))
def protocol(request: pytest.FixtureRequest) -> Protocol:
    return PROTOCOLS[request.param]


@pytest.fixture(params=[False, True], ids=["whole", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)
