"""What holds for every test: nobody gives up on a busy machine that only needs longer."""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG, create_ssl_context
from httpx._transports import default as transports

# trio, which a browser's driver brings along, would hook itself into Hypothesis with a warning; warnings are errors.
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")

from hypothesis import settings

settings.register_profile("patient", settings.get_profile(settings.get_current_profile_name()), deadline=None)
settings.load_profile("patient")

for phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, phase, 180.0)


# Nobody here speaks TLS with strangers, and reading all their certificates takes each client 30 ms of the suite's time.
@cache
def _strangers() -> ssl.SSLContext:
    return create_ssl_context()


def _context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    return _strangers() if verify is True and cert is None else create_ssl_context(verify, cert, trust_env)


transports.create_ssl_context = _context


@pytest.fixture(autouse=True, scope="session")
def _interrupts_reach_what_is_started() -> Iterator[None]:
    """A shell that runs the tests in its background has them, and what they start, ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
