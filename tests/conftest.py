"""What holds for every test: nobody gives up on a busy machine that only needs longer."""

from __future__ import annotations

import os

from httpx._config import DEFAULT_TIMEOUT_CONFIG

# trio, which a browser's driver brings along, would hook itself into Hypothesis with a warning; warnings are errors.
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")

from hypothesis import settings

settings.register_profile("patient", settings.get_profile(settings.get_current_profile_name()), deadline=None)
settings.load_profile("patient")

for phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, phase, 60.0)
