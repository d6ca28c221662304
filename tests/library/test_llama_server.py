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


# Debian packages from a mirror: which mirror, which packages, and nothing with a wrong checksum.


def ignore(*_: object) -> None:
    pass


@pytest.mark.parametrize(
    ("addresses", "chosen"),
    [
        (["http://a.example/debian/", "http://a.example/debian-security/"], "http://a.example/debian/"),
        (["http://a.example/ubuntu", "https://b.example/x/debian"], "https://b.example/x/debian/"),
    ],
)
def test_of_all_that_apt_knows_debians_own_archive_is_taken(addresses: list[str], chosen: str):
    assert llama_server.choose_mirror(addresses) == chosen


@pytest.mark.parametrize("addresses", [[], ["http://a.example/ubuntu/"], ["cdrom://debian"]])
def test_without_a_mirror_one_sentence_says_so(addresses: list[str]):
    with pytest.raises(Unavailable, match="apt knows no Debian mirror"):
        llama_server.choose_mirror(addresses)


def test_a_system_without_apt_is_told_that_it_is_no_debian(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llama_server.shutil, "which", lambda _: None)
    with pytest.raises(Unavailable, match="this is no Debian"):
        llama_server.debian_mirror()


def test_processors_have_debians_names_or_none():
    assert (llama_server.debian_architecture("x86_64"), llama_server.debian_architecture("aarch64")) == (
        "amd64",
        "arm64",
    )
    with pytest.raises(Unavailable, match="the processor riscv64"):
        llama_server.debian_architecture("riscv64")


def test_packages_are_unpacked_into_one_root_and_counted(tmp_path: Path):
    told: list[tuple[int, int]] = []
    with mirror(tmp_path / "web") as web:
        web.add("one", {"usr/bin/one": "1"})
        web.add("two", {"usr/lib/two.so": "2"})
        web.publish("s", "amd64")
        packages = llama_server.package_index(web.url, "s", "amd64", ("two", "one"))
        root = tmp_path / "root"
        root.mkdir()
        llama_server.unpack_packages(web.url, packages, root, lambda done, total: told.append((done, total)))
    assert [package.name for package in packages] == ["two", "one"]
    assert (root / "usr/bin/one").read_text() == "1"
    assert (root / "usr/lib/two.so").read_text() == "2"
    assert told[-1][0] == told[-1][1] == sum(package.size for package in packages)
    assert not list(root.glob("*.deb"))


def test_a_package_that_is_not_what_the_index_says_is_refused(tmp_path: Path):
    with mirror(tmp_path / "web") as web:
        web.add("one", {"usr/bin/one": "1"}, sha256="0" * 64)
        web.publish("s", "amd64")
        packages = llama_server.package_index(web.url, "s", "amd64", ("one",))
        root = tmp_path / "root"
        root.mkdir()
        with pytest.raises(Unavailable, match="the checksum of one"):
            llama_server.unpack_packages(web.url, packages, root, ignore)
    assert not (root / "usr").exists()


def test_what_the_suite_does_not_have_is_named(tmp_path: Path):
    with mirror(tmp_path / "web") as web:
        web.add("one", {"usr/bin/one": "1"})
        web.publish("s", "amd64")
        with pytest.raises(Unavailable, match="Debian s has no two"):
            llama_server.package_index(web.url, "s", "amd64", ("one", "two"))


def test_a_mirror_that_cannot_be_reached_is_named(tmp_path: Path):
    with mirror(tmp_path / "web") as web:
        web.publish("s", "amd64")
        address = web.url
        with pytest.raises(Unavailable, match=f"{address}dists/other"):
            llama_server.package_index(address, "other", "amd64", ())
