"""llama.cpp's own server tests against this server: `make test-compliance LLAMA_CPP=FOLDER`, a checkout of llama.cpp.

They start `llama_server_shim.py` in place of llama-server, with a tiny model: theirs come from a hub. What depends on
the words of those models cannot pass with another one, on llama-server either. The tests in `llama_server_suite.txt`
must pass; docs/api.md names what this server declines.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.llama_cpp.tiny_models import bert, coder, seeing

pytestmark = pytest.mark.compliance

SUITE = os.environ.get("LLAMA_CPP", "")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PASSING = (HERE / "llama_server_suite.txt").read_text().splitlines()
FILES = sorted({name.partition("::")[0] for name in PASSING})
# Without the hub: nothing is fetched before the first test. The names of headers ignore case, in the tests, too.
PLUGIN = """
import sys, types
import requests
sys.modules.setdefault("wget", types.ModuleType("wget"))
import utils
utils.ServerPreset.load_all = staticmethod(lambda: None)
request = utils.ServerProcess.make_request

def make_request(*given, **named):
    reply = request(*given, **named)
    reply.headers = requests.structures.CaseInsensitiveDict(reply.headers)
    return reply

utils.ServerProcess.make_request = make_request
"""


def _models(folder: Path) -> Path:
    """Tiny models under the names that the shim takes."""
    sees, projector = seeing("block")
    files = {"stories": coder(), "infill": coder(), "bert": bert("mean"), "rank": bert("rank")}
    for name, file in {**files, "gemma3": sees, "mmproj": projector}.items():
        (folder / f"{name}.gguf").symlink_to(file)
    return folder


@pytest.mark.skipif(not SUITE, reason="LLAMA_CPP names no checkout of llama.cpp")
@pytest.mark.timeout(3600)
def test_llama_servers_own_tests_pass(tmp_path: Path) -> None:
    tests = Path(SUITE) / "tools" / "server" / "tests"
    (tmp_path / "llama_suite.py").write_text(PLUGIN)
    (tests / "tmp").mkdir(exist_ok=True)
    program = tmp_path / "llama-server"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "llama_server_shim.py"}" "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    environment = os.environ | {
        "LLAMA_SERVER_BIN_PATH": str(program),
        "LLAMA_TEST_MODELS": str(_models(tmp_path)),
        "PORT": "8193",
        "PYTHONPATH": os.pathsep.join((str(tmp_path), str(tests), str(ROOT))),
    }
    command = [sys.executable, "-m", "pytest", "-p", "llama_suite", "-p", "no:cacheprovider", "-W", "ignore"]
    command += ["-q", "-rA", "--tb=no", "-m", "not slow", *FILES]
    ran = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, timeout=3500, check=False)
    passed = {line.removeprefix("PASSED ") for line in ran.stdout.splitlines() if line.startswith("PASSED ")}
    print(f"llama.cpp's server tests: {len(passed)} passed in {', '.join(FILES)}")
    assert sorted(set(PASSING) - passed) == []
