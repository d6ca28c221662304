"""The script that fetches llama-server."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from modelyard.core.errors import Unavailable
from modelyard.library.progress import ProgressReporter
from setup import llama_server
from tests.setup.mirror import Mirror, mirror

ROOT = Path(__file__).parent.parent.parent
LOADER = '#!/bin/sh\nfor word; do echo "$word"; done\n'  # prints its arguments


def recorder() -> tuple[ProgressReporter, list[str]]:
    lines: list[str] = []
    return ProgressReporter(Console(file=io.StringIO()), lines.append), lines


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    with mirror(tmp_path / "web") as running:
        monkeypatch.setattr(llama_server, "debian_mirror", lambda: running.url)
        monkeypatch.setattr(llama_server, "PACKAGES", ("tools", "libc"))
        running.add("tools", {"usr/bin/llama-server": "", "usr/lib/llama/libggml-cpu-x.so": ""})
        running.add("libc", {"usr/lib/arch/ld-linux-x.so.2": LOADER, "usr/lib/arch/gconv/odd.so": ""})
        yield running


def publish(web: Mirror) -> None:
    web.publish(llama_server.SUITE, llama_server.debian_architecture())


def test_the_program_runs_with_the_unpacked_loader_and_libraries(web: Mirror, tmp_path: Path):
    publish(web)
    home = tmp_path / "my home"
    program = llama_server.fetch_binary(recorder()[0], home)
    arguments = subprocess.run(
        [program, "--port", "1 2"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    libraries = f"{home}/root/usr/lib/arch:{home}/root/usr/lib/llama"
    assert program == llama_server.binary_path(home)
    assert arguments[:2] == ["--argv0", str(program)]
    assert arguments[2:] == ["--library-path", libraries, f"{home}/root/usr/bin/llama-server", "--port", "1 2"]


def test_the_cpu_backends_are_linked_next_to_the_loader(web: Mirror, tmp_path: Path):
    publish(web)
    llama_server.fetch_binary(recorder()[0], tmp_path / "home")
    assert (tmp_path / "home/root/usr/lib/arch/libggml-cpu-x.so").is_file()


def test_the_program_is_fetched_once(web: Mirror, tmp_path: Path):
    publish(web)
    (first, lines), (second, more) = recorder(), recorder()
    program = llama_server.fetch_binary(first, tmp_path / "home")
    assert lines[0] == "fetching llama-server (1.0)"
    assert llama_server.fetch_binary(second, tmp_path / "home") == program
    assert more == []


def test_a_failed_fetch_leaves_no_program_and_can_be_repeated(web: Mirror, tmp_path: Path):
    with pytest.raises(Unavailable, match="could not be read"):
        llama_server.fetch_binary(recorder()[0], tmp_path / "home")
    (tmp_path / "home" / "root").mkdir()  # left by a killed process
    publish(web)
    assert llama_server.fetch_binary(recorder()[0], tmp_path / "home").is_file()


def test_an_unwritable_folder_is_an_error(web: Mirror, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot be written to"):
        llama_server.fetch_binary(recorder()[0], tmp_path / "file" / "home")


# --- Debian packages --------------------------------------------------------------------------------------------------


def ignore(*_: object) -> None:
    pass


def test_the_debian_archive_is_chosen_among_the_repositories_of_apt():
    for urls, chosen in (
        (["http://a.example/debian/", "http://a.example/debian-security/"], "http://a.example/debian/"),
        (["http://a.example/ubuntu", "https://b.example/x/debian"], "https://b.example/x/debian/"),
    ):
        assert llama_server.choose_mirror(urls) == chosen


def test_a_missing_mirror_is_an_error():
    for urls in ([], ["http://a.example/ubuntu/"], ["cdrom://debian"]):
        with pytest.raises(Unavailable, match="apt has no Debian mirror configured"):
            llama_server.choose_mirror(urls)


def test_a_system_without_apt_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llama_server.shutil, "which", lambda _: None)
    with pytest.raises(Unavailable, match="this is not a Debian system"):
        llama_server.debian_mirror()


def test_processors_have_debian_names():
    assert (llama_server.debian_architecture("x86_64"), llama_server.debian_architecture("aarch64")) == (
        "amd64",
        "arm64",
    )
    with pytest.raises(Unavailable, match="the processor riscv64"):
        llama_server.debian_architecture("riscv64")


def test_packages_are_unpacked_into_one_root_with_progress(tmp_path: Path):
    progress: list[tuple[int, int]] = []
    with mirror(tmp_path / "web") as web:
        web.add("one", {"usr/bin/one": "1"})
        web.add("two", {"usr/lib/two.so": "2"})
        web.publish("s", "amd64")
        packages = llama_server.package_index(web.url, "s", "amd64", ("two", "one"))
        root = tmp_path / "root"
        root.mkdir()
        llama_server.unpack_packages(web.url, packages, root, lambda done, total: progress.append((done, total)))
    assert [package.name for package in packages] == ["two", "one"]
    assert (root / "usr/bin/one").read_text() == "1"
    assert (root / "usr/lib/two.so").read_text() == "2"
    assert progress[-1][0] == progress[-1][1] == sum(package.size for package in packages)
    assert not list(root.glob("*.deb"))


def test_a_package_with_a_wrong_checksum_is_refused(tmp_path: Path):
    with mirror(tmp_path / "web") as web:
        web.add("one", {"usr/bin/one": "1"}, sha256="0" * 64)
        web.publish("s", "amd64")
        packages = llama_server.package_index(web.url, "s", "amd64", ("one",))
        root = tmp_path / "root"
        root.mkdir()
        with pytest.raises(Unavailable, match="the checksum of one"):
            llama_server.unpack_packages(web.url, packages, root, ignore)
    assert not (root / "usr").exists()


def test_a_missing_package_is_an_error(tmp_path: Path):
    with mirror(tmp_path / "web") as web:
        web.add("one", {"usr/bin/one": "1"})
        web.publish("s", "amd64")
        with pytest.raises(Unavailable, match="Debian s has no two"):
            llama_server.package_index(web.url, "s", "amd64", ("one", "two"))


def test_a_missing_index_is_an_error(tmp_path: Path):
    with mirror(tmp_path / "web") as web:
        web.publish("s", "amd64")
        address = web.url
        with pytest.raises(Unavailable, match=f"{address}dists/other"):
            llama_server.package_index(address, "other", "amd64", ())


# --- the script -------------------------------------------------------------------------------------------------------


def run(**env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "setup" / "llama_server.py")]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, check=False)


def test_the_path_of_a_working_program_is_printed():
    program = run().stdout.strip()
    assert program == str(llama_server.fetch_binary())
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert "version: " in done.stdout + done.stderr


def test_without_the_tools_of_debian_it_fails_with_a_message(tmp_path: Path):
    done = run(PATH=str(tmp_path), MODELYARD_CACHE=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "no prebuilt package can be fetched: this is not a Debian system: apt-get and dpkg-deb are missing"
    )
