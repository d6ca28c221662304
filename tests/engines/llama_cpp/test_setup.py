"""Setting the library up: which one is used, what happens if it does not work, and that both kinds agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.engines.llama_cpp import gpu_library, setup
from modelyard.engines.llama_cpp.selftest import BrokenLibrary
from modelyard.library import default_model, llama_cpp_build, llama_cpp_package
from modelyard.library.llama_cpp_package import LibraryPackage, chosen_library, use_library
from modelyard.library.progress import ProgressReporter
from tests.engines.llama_cpp.exact_models import exact_model

OLD, NEW = (LibraryPackage("cpu", "linux-x64", f"@x/{name}", "1", "v1", "", 0) for name in ("old", "new"))


class Machine:
    """Stands in for downloads, builds and the self-test. `broken` has the names of the folders that do not work."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = cache / "llama_cpp"
        self.broken: set[str] = set()
        self.builds: list[bool] = []
        self.lines: list[str] = []
        monkeypatch.setattr(setup, "candidates", lambda: [NEW, OLD])
        monkeypatch.setattr(setup, "fetch", lambda package, progress: self.folder(package.folder_name))
        monkeypatch.setattr(setup, "find_fault", lambda f: f"{f.name} died" if f.name in self.broken else None)
        monkeypatch.setattr(llama_cpp_build, "build", self.build)
        monkeypatch.setattr(gpu_library, "install", lambda *_: None)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        monkeypatch.delenv("LLAMA_CPP_LIB_PATH")

    def folder(self, name: str) -> Path:
        made = self.home / name
        made.mkdir(parents=True, exist_ok=True)
        return made

    def build(self, *, fresh: bool) -> Path:
        self.builds.append(fresh)
        return self.folder("build-fresh" if fresh else "build-cached")

    @property
    def progress(self) -> ProgressReporter:
        return ProgressReporter(write_line=self.lines.append)

    @property
    def used(self) -> str | None:
        found = chosen_library()
        return found.name if found else None


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path))
    return Machine(tmp_path, monkeypatch)


def test_the_first_use_fetches_the_best_library(machine: Machine) -> None:
    assert setup.ensure_library(machine.progress).name == machine.used == "new-1"
    assert machine.builds == []


def test_the_first_use_offers_the_build_where_it_is_faster(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "build_hint", lambda folder: f"faster than {folder.name}")
    for _ in range(2):
        setup.ensure_library(machine.progress)
    assert machine.lines == ["faster than new-1"]


def test_a_library_that_works_is_kept(machine: Machine) -> None:
    use_library(machine.folder("build-1"))
    assert setup.ensure_library(machine.progress).name == machine.used == "build-1"


def test_a_library_that_fails_the_self_test_is_passed_over(machine: Machine) -> None:
    machine.broken = {"new-1"}
    assert setup.ensure_library(machine.progress).name == machine.used == "old-1"
    assert machine.lines == ["llama.cpp v1 (cpu, linux-x64) is not used: new-1 died"]


def test_a_library_of_another_machine_is_replaced(machine: Machine) -> None:
    """The cache folder may be on a disk that several machines share."""
    use_library(machine.folder("build-1"))
    machine.broken = {"build-1"}
    assert setup.ensure_library(machine.progress).name == machine.used == "new-1"
    assert machine.lines == [f"The library in {machine.home / 'build-1'} is not used any more: build-1 died"]


def test_if_no_prebuilt_library_works_one_is_built(machine: Machine) -> None:
    machine.broken = {"new-1", "old-1"}
    assert setup.ensure_library(machine.progress).name == machine.used == "build-cached"
    assert machine.builds == [False]
    assert "compiled now" in machine.lines[-1]


def test_a_built_copy_that_does_not_work_is_compiled_again(machine: Machine) -> None:
    machine.broken = {"build-cached"}
    assert setup.set_up_build().name == machine.used == "build-fresh"
    assert machine.builds == [False, True]


def test_a_build_that_does_not_work_is_not_used(machine: Machine) -> None:
    use_library(machine.folder("old-1"))
    machine.broken = {"build-cached", "build-fresh"}
    with pytest.raises(BrokenLibrary, match="was built, but it does not work on this machine: build-fresh died"):
        setup.set_up_build()
    assert machine.used == "old-1"


def test_a_failed_download_is_the_error_and_nothing_is_compiled(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(package: LibraryPackage, progress: ProgressReporter) -> Path:
        raise Unavailable("offline")

    monkeypatch.setattr(setup, "fetch", offline)
    with pytest.raises(Unavailable, match="offline"):
        setup.ensure_library(machine.progress)
    assert machine.builds == []


def test_a_library_that_the_user_names_is_not_replaced(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(machine.folder("mine")))
    machine.broken = {"mine"}
    with pytest.raises(BrokenLibrary, match="mine died"):
        setup.ensure_library(machine.progress)


# --- the offer of a build ---------------------------------------------------------------------------------------------


def test_the_build_is_offered_where_it_is_known_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    prebuilt = llama_cpp_package.package_folder(llama_cpp_package.packages_for("cpu")[0])
    monkeypatch.setattr(setup, "BUILD_GAINS", (("fast", 1.5, 1.2), ("slow", 1.05, 1.0)))
    offers = {}
    for name in ("fast", "slow", "unknown"):
        monkeypatch.setattr(setup, "cpu_features", lambda name=name: frozenset({name}))
        offers[name] = setup.build_hint(prebuilt)
    assert offers["slow"] is offers["unknown"] is None
    assert "reads prompts 1.5 times and writes 1.2 times as fast: `modelyard setup --build --background`" in str(
        offers["fast"]
    )
    monkeypatch.setattr(setup, "cpu_features", lambda: frozenset({"fast"}))
    assert setup.build_hint(llama_cpp_build.build_folder()) is None


def test_a_build_in_the_background_outlives_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path))
    started: list[tuple[list[str], bool]] = []
    monkeypatch.setattr(
        setup.subprocess, "Popen", lambda command, **options: started.append((command, options["start_new_session"]))
    )
    log = setup.build_in_background()
    ((command, detached),) = started
    assert command[-3:] == ["modelyard", "setup", "--build"]
    assert detached
    assert log.is_relative_to(tmp_path)


# --- both libraries ---------------------------------------------------------------------------------------------------

GREEDY = """
import asyncio, json, sys
from pathlib import Path
from modelyard.core.engine import CacheInfo, EngineSpec, Prompt, TokenRun, Tokens
from modelyard.core.request import Sampling
from modelyard.engines import llama_cpp
from modelyard.tokenizer import open_tokenizer

async def generate(file, ids):
    options = llama_cpp.Options(path=file, n_threads=1, speculation="off")
    engine = llama_cpp.create(EngineSpec("m", options, {"main": CacheInfo(128, 1)}))
    await engine.open(lambda *_: None)
    prompt = Prompt(parts=(TokenRun(ids),), sampling=Sampling(temperature=0.0), max_tokens=20)
    items = [item async for batch in engine.generate(prompt) for item in batch]
    await engine.close()
    return [id for item in items if isinstance(item, Tokens) for id in item.ids]

async def main():
    model, exact = sys.argv[1:]
    tokenizer = open_tokenizer(Path(model))
    text = tokenizer.decode(await generate(model, tokenizer.encode("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16")))
    print(json.dumps([text, await generate(exact, list(range(40)))]))

asyncio.run(main())
"""


def test_both_libraries_write_the_same_greedy_text() -> None:
    """In each a process of its own. Their flash attention rounds differently, so the text must leave no doubt."""
    built, prebuilt = llama_cpp_build.build_folder(), Path(os.environ["LLAMA_CPP_LIB_PATH"])
    assert built.is_dir(), "`make install` builds it"
    found = []
    for folder in (built, prebuilt):
        done = subprocess.run(
            [sys.executable, "-c", GREEDY, str(default_model.fetch()), str(exact_model())],
            env=os.environ | {"LLAMA_CPP_LIB_PATH": str(folder)},
            stdout=subprocess.PIPE,
            check=True,
        )
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    assert found[0][0].startswith(" 17 18 19 20")


# --- another library --------------------------------------------------------------------------------------------------


def test_a_library_of_your_own_is_used_if_it_works(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "libllama.so").touch()
    assert setup.set_up_library(str(folder)) == setup.find_library(str(folder / "libllama.so")) == folder
    assert chosen_library() == folder
    machine.broken.add("mine")
    use_library(machine.folder("old"))
    with pytest.raises(BrokenLibrary, match="mine died The library in use has not changed"):
        setup.set_up_library(str(folder))
    assert machine.used == "old"


def test_a_version_is_fetched_or_compiled(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels, releases = list[str](), list[str]()
    fetched, compiled = machine.folder("wheel"), machine.folder("build-0.3.35")
    monkeypatch.setattr(llama_cpp_package, "fetch_wheel", lambda version, _: wheels.append(version) or fetched)
    monkeypatch.setattr(llama_cpp_build, "build", lambda *, release: releases.append(release) or compiled)
    assert setup.set_up_library("2026.10.11549") == fetched
    assert setup.set_up_library("0.3.35") == compiled
    assert (wheels, releases) == (["2026.10.11549"], ["0.3.35"])
    with pytest.raises(InvalidRequest, match="neither a file, a folder nor a version"):
        setup.set_up_library("newest")


def test_the_library_inside_a_wheel_is_unpacked(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(requirement: str, folder: Path, _: object) -> Path:
        assert requirement == "xllamacpp==2026.1.1"
        wheel = folder / "xllamacpp.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("xllamacpp/xllamacpp.abi3.so", b"library")
            archive.writestr("xllamacpp/other.so", b"other")
        return wheel

    monkeypatch.setattr(llama_cpp_package, "pip_download", download)
    folder = llama_cpp_package.fetch_wheel("2026.1.1")
    assert [(file.name, file.read_bytes()) for file in folder.iterdir()] == [("libllama.so", b"library")]
    assert folder.parent == machine.home
