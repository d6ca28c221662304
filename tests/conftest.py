"""What holds for every test: nobody gives up on a busy machine that only needs longer."""

from __future__ import annotations

from httpx._config import DEFAULT_TIMEOUT_CONFIG

for phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, phase, 60.0)
