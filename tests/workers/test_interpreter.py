"""Engines in other Python environments."""

from __future__ import annotations

import os
import sys
import venv
from collections.abc import Callable
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import modelyard_fake as fake
from modelyard import plugins
from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.core.errors import InvalidRequest
from modelyard.workers import interpreter
from modelyard.workers.process_engine import ProcessTextEngine, create_process_engine
from modelyard.workers.transport import HeartbeatConfig
from modelyard.workers.worker_pool import WorkerPool
from tests.engines.fake.helpers import prompt
from tests.engines.reading import end, ids, read

Program = Callable[[str], str]
# The packages of a worker with their dependencies, the fake engine's library, and nothing else.
PACKAGES = (
    "msgspec",
    "pydantic",
    "pydantic_core",
    "annotated_types",
    "typing_extensions",
    "typing_inspection",
    "zmq",
    "tokenizers",
)


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Writes a program that runs this script, whatever its arguments."""

    def write(script: str) -> str:
        file = tmp_path / "python"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        return str(file)

    return write


@pytest.fixture(scope="module")
def other_interpreter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An environment without Modelyard and without most of its dependencies."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    for name in PACKAGES:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        place = Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)
        (packages / place.name).symlink_to(place)
        for beside in place.parent.glob(f"*{name.removeprefix('_')}*.libs"):
            (packages / beside.name).symlink_to(beside)
    return str(folder / "bin" / "python")


def test_the_default_is_this_interpreter() -> None:
    assert interpreter.interpreter_path(None) == sys.executable


def test_the_symlink_of_an_environment_is_kept(other_interpreter: str) -> None:
    """The target of the symlink is the base interpreter, without the packages of the environment."""
    assert interpreter.interpreter_path(other_interpreter) == other_interpreter


async def test_a_missing_interpreter_is_reported() -> None:
    with pytest.raises(InvalidRequest, match="there is no such program") as caught:
        await interpreter.check_interpreter("/nowhere/bin/python")
    assert caught.value.param == "python"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo '[[3, 9], []]'", "it is Python 3.9, and an engine's process needs 3.11"),
        ("""echo '[[3, 11], ["msgspec", "zmq"]]'""", "lacks msgspec pyzmq: .* -m pip install msgspec pyzmq"),
        ("echo no snake >&2; exit 3", "exit code 3: no snake"),
        ("echo hello", "no output"),
    ],
)
async def test_an_unusable_interpreter_is_reported_in_one_line(program: Program, script: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        await interpreter.check_interpreter(program(script))
    assert "\n" not in caught.value.message


async def test_this_interpreter_is_usable() -> None:
    await interpreter.check_interpreter(sys.executable)


def test_the_environment_of_this_interpreter_is_unchanged(tmp_path: Path) -> None:
    assert interpreter.worker_environment(None, tmp_path, {"PYTHONPATH": "x"}) == {"PYTHONPATH": "x"}


def test_another_environment_gets_links_to_this_package_and_its_engines_only(tmp_path: Path) -> None:
    for _ in range(2):
        env = interpreter.worker_environment("/other/python", tmp_path, {"PYTHONPATH": "/mine", "HOME": "/me"})
    first, mine = env["PYTHONPATH"].split(os.pathsep)
    assert (mine, env["HOME"]) == ("/mine", "/me")
    linked = {each.name for each in Path(first).iterdir() if each.is_symlink()}
    assert linked == {
        *("modelyard", "modelyard_ct2", "modelyard_exllamav3", "modelyard_fake", "modelyard_litellm", "modelyard_vllm")
    }
    found = {point.name for point in next(iter(distributions(path=[first]))).entry_points}
    assert found == set(plugins.outside("engines"))


async def test_an_engine_runs_in_an_environment_without_modelyard(other_interpreter: str) -> None:
    spec = EngineSpec(
        "demo", fake.Options(token_delay=0), {"main": CacheInfo(512)}, python=other_interpreter, backend="fake"
    )
    engine = create_process_engine(spec, HeartbeatConfig(worker_misses=1000))
    assert isinstance(engine, ProcessTextEngine)
    try:
        await engine.open(lambda *_: None)
        chunks = await read(engine.generate(prompt()))
        assert end(chunks).error is None
        assert ids(chunks)
    finally:
        await engine.close()


async def test_an_engine_with_an_unusable_interpreter_does_not_open(program: Program) -> None:
    unusable = program("""echo '[[3, 11], ["zmq"]]'""")
    engine = create_process_engine(
        EngineSpec("demo", fake.Options(), {"main": CacheInfo(512)}, python=unusable, backend="fake")
    )
    with pytest.raises(InvalidRequest, match="pyzmq"):
        await engine.open(lambda *_: None)
    await engine.close()


async def test_the_worker_pool_starts_a_worker_with_another_interpreter(other_interpreter: str, tmp_path: Path) -> None:
    workers = WorkerPool(tmp_path, heartbeat=HeartbeatConfig(worker_misses=1000))
    worker = await workers.acquire(EngineSpec("demo", fake.Options(), python=other_interpreter, backend="fake"))
    try:
        assert worker.session.welcome is not None
        assert psutil.Process(worker.session.welcome.pid).cmdline()[0] == other_interpreter
    finally:
        await worker.close()
