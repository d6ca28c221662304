"""Settings of all tests: generous time limits for busy machines, and fast TLS contexts."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import signal
import ssl
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG, create_ssl_context
from httpx._transports import default as transports

# Bytecode is kept, whatever this machine's setting: else pytest rewrites every assertion again in each run, and each of
# some hundred child processes compiles all modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# trio, a dependency of the browser driver, registers a Hypothesis plugin that warns; warnings are errors.
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")

# No test reads the configuration of the user who runs it.
os.environ["XDG_CONFIG_HOME"] = str(Path(tempfile.gettempdir()) / "no-user-configuration")
# Its data are not touched either; a run has its own, because servers with the same file accept the same keys.
_data = tempfile.mkdtemp(prefix="no-user-data-")
atexit.register(shutil.rmtree, _data, ignore_errors=True)
os.environ["XDG_DATA_HOME"] = _data
# And no test sees which models that user has pulled.
os.environ["MODELYARD_LIBRARY"] = "false"

from hypothesis import settings  # noqa: E402

from modelyard.library import llama_cpp_package  # noqa: E402

settings.register_profile("no_deadline", settings.get_profile(settings.get_current_profile_name()), deadline=None)
settings.load_profile("no_deadline")

# Tests run on the library that users get, whatever this machine has chosen; other processes inherit it.
if "LLAMA_CPP_LIB_PATH" not in os.environ and (prebuilt := llama_cpp_package.packages_for("cpu")):
    os.environ["LLAMA_CPP_LIB_PATH"] = str(llama_cpp_package.fetch(prebuilt[0]))

for phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, phase, 180.0)


# Loading the system's certificates takes 30 ms per client; no test needs them more than once.
@cache
def _default_context() -> ssl.SSLContext:
    return create_ssl_context()


def _create_ssl_context(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    return _default_context() if verify is True and cert is None else create_ssl_context(verify, cert, trust_env)


transports.create_ssl_context = _create_ssl_context


@pytest.fixture(autouse=True, scope="session")
def _sigint_is_not_ignored() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and child processes inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _log_is_restored() -> Iterator[None]:
    """A command that runs inside a test sends the log to its own stderr, which is closed when the command ends."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
