"""Debian packages from a mirror: which mirror, which packages, and nothing with a wrong checksum."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.core.errors import Unavailable
from modelyard.library import llama_server
from tests.library.mirror import mirror


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
