"""A llama-server from packages: fetched once, started through the loader that came with it."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from modelyard.core.errors import Unavailable
from modelyard.library import llama_server
from modelyard.library import llama_server as debian
from modelyard.library.progress import ProgressReporter
from tests.library.mirror import Mirror, mirror

LOADER = '#!/bin/sh\nfor word; do echo "$word"; done\n'  # says what it was started with


def told() -> tuple[ProgressReporter, list[str]]:
    said: list[str] = []
    return ProgressReporter(Console(file=io.StringIO()), said.append), said


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    with mirror(tmp_path / "web") as running:
        monkeypatch.setattr(debian, "mirror", lambda: running.url)
        monkeypatch.setattr(llama_server, "WANTED", ("tools", "libc"))
        running.add("tools", {"usr/bin/llama-server": "", "usr/lib/llama/libggml-cpu-x.so": ""})
        running.add("libc", {"usr/lib/arch/ld-linux-x.so.2": LOADER, "usr/lib/arch/gconv/odd.so": ""})
        yield running


def publish(web: Mirror) -> None:
    web.publish(llama_server.SUITE, debian.debian_architecture())


def test_the_program_runs_through_its_own_loader_with_its_own_libraries(web: Mirror, tmp_path: Path):
    publish(web)
    home = tmp_path / "my home"
    program = llama_server.fetch_binary(told()[0], home)
    said = subprocess.run([program, "--port", "1 2"], capture_output=True, text=True, check=True).stdout.splitlines()
    libraries = f"{home}/root/usr/lib/arch:{home}/root/usr/lib/llama"
    assert program == llama_server.binary_path(home)
    assert said[:2] == ["--argv0", str(program)]
    assert said[2:] == ["--library-path", libraries, f"{home}/root/usr/bin/llama-server", "--port", "1 2"]


def test_the_cpu_backends_lie_beside_the_loader(web: Mirror, tmp_path: Path):
    publish(web)
    llama_server.fetch_binary(told()[0], tmp_path / "home")
    assert (tmp_path / "home/root/usr/lib/arch/libggml-cpu-x.so").is_file()


def test_it_is_fetched_once(web: Mirror, tmp_path: Path):
    publish(web)
    (first, said), (second, more) = told(), told()
    program = llama_server.fetch_binary(first, tmp_path / "home")
    assert said[0] == "fetching llama-server (1.0)"
    assert llama_server.fetch_binary(second, tmp_path / "home") == program
    assert more == []


def test_a_fetch_that_fails_leaves_no_program_and_the_next_one_works(web: Mirror, tmp_path: Path):
    with pytest.raises(Unavailable, match="could not be read"):
        llama_server.fetch_binary(told()[0], tmp_path / "home")
    (tmp_path / "home" / "root").mkdir()  # as a killed process leaves it
    publish(web)
    assert llama_server.fetch_binary(told()[0], tmp_path / "home").is_file()


def test_a_folder_that_cannot_be_written_is_named(web: Mirror, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot be put into"):
        llama_server.fetch_binary(told()[0], tmp_path / "file" / "home")
