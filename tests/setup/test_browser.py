"""The script that installs a browser."""

from __future__ import annotations

from pathlib import Path

from setup import browser as script


def unpack(root: Path) -> None:
    for name in ("usr/lib/chromium/chromium", "usr/bin/chromedriver", "usr/lib/x86_64-linux-gnu/libx.so"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_an_installed_browser_is_preferred(tmp_path: Path) -> None:
    unpack(tmp_path)
    installed = {"google-chrome": "/opt/chrome", "chromedriver": "/opt/driver"}
    assert script.find(installed.get, tmp_path) == (Path("/opt/chrome"), Path("/opt/driver"), {})


def test_a_browser_without_a_driver_is_not_found(tmp_path: Path) -> None:
    assert script.find({"chromium": "/usr/bin/chromium"}.get, tmp_path) is None


def test_an_unpacked_browser_uses_its_own_libraries(tmp_path: Path) -> None:
    unpack(tmp_path)
    found = script.find(lambda _: None, tmp_path)
    assert found is not None
    assert found.browser == tmp_path / "usr/lib/chromium/chromium"
    assert str(tmp_path / "usr/lib/x86_64-linux-gnu") in found.environment["LD_LIBRARY_PATH"]
