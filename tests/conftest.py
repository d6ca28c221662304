"""Settings of all tests: generous time limits for busy machines, and fast TLS contexts."""

from __future__ import annotations

import atexit
import gc
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

# As in a server: the collector would traverse the modules and cases of the whole suite again and again.
gc.set_threshold(50_000, 20, 100)

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
# A test must not continue what another one has saved.
os.environ["MODELYARD_KV_STORE"] = "off"

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


# A file runs in one process, so a long one that began last would make the other processes wait. Those with a browser
# are apart: each keeps a core busy.
LONGEST_FIRST = (
    "workbench/test_browser_pages.py",
    "scanner/test_vocabularies.py",
    "e2e/test_llama_cpp.py",
    "e2e/test_hostile.py",
    "server/test_drain.py",
    "e2e/test_other_user.py",
    "engines/llama_cpp/test_sequence_manager.py",
    "engines/conformance/test_lifecycle.py",
    "engines/llama_cpp/test_architectures.py",
    "workbench/test_browser_config.py",
    "engines/llama_cpp/test_engine.py",
    "e2e/test_next_to_llama_server.py",
    "e2e/test_gemma.py",
    "workbench/test_browser_chat.py",
    "engines/conformance/test_generation.py",
    "optimize/test_optimize.py",
    "optimize/test_trial.py",
    "workers/test_worker_processes.py",
    "workers/test_tokenizer_files.py",
    "e2e/test_managed_engines.py",
    "e2e/test_gemma.py",
    "bench/test_hostile.py",
    "e2e/test_native_assertion.py",
    "e2e/test_without_chat_template.py",
    "e2e/test_resuming.py",
    "processes/test_sandbox.py",
    "e2e/test_gateway_processes.py",
    "e2e/test_bad_input.py",
    "scheduler/test_two_models.py",
    "scanner/test_properties.py",
    "fuzz/test_fuzz.py",
    "engines/llama_cpp/test_speculation.py",
    "engines/llama_cpp/test_sampler.py",
    "engines/llama_cpp/test_isolation.py",
    "bench/test_cycles.py",
    "bench/test_loading.py",
    "cli/test_app.py",
    "cli/test_run.py",
    "workbench/test_peer_proxy.py",
    "workbench/test_app.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST_FIRST)}
    assert all(map(Path.is_file, places)), "a file of LONGEST_FIRST was renamed"
    items.sort(key=lambda item: places.get(item.path, len(places)))


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
