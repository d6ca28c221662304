"""Finds Chrome or Chromium with its driver for the tests of the workbench, or installs Debian's.

`python setup/browser.py` prints both paths, or why there is no browser; `make test` runs it. An installed browser is
preferred. As root, apt installs one; without root, apt's packages are unpacked into the cache folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from modelyard.library.cache_dir import cache_dir

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
DRIVER = "chromedriver"
PACKAGES = ("chromium", "chromium-driver", "fonts-dejavu-core")
_TIMEOUT_S = 900
_TRIES, _PAUSE_S = 3, 10.0  # a package mirror may fail once


class Browser(NamedTuple):
    """`environment` holds additional variables for both programs."""

    browser: Path
    driver: Path
    environment: Mapping[str, str]


class NoBrowser(Exception):
    """There is no browser and none can be installed."""


def find(which: Callable[[str], str | None] = shutil.which, folder: Path | None = None) -> Browser | None:
    """The installed browser, else the one in the cache folder. A browser without a driver is not usable."""
    browser, driver = next(filter(None, map(which, BROWSERS)), None), which(DRIVER)
    if browser and driver:
        return Browser(Path(browser), Path(driver), {})
    return _find_unpacked(folder or browser_dir())


def browser_dir() -> Path:
    return cache_dir() / "browser"


def _find_unpacked(root: Path) -> Browser | None:
    browser, driver = root / "usr/lib/chromium/chromium", root / "usr/bin/chromedriver"
    if not (browser.is_file() and driver.is_file()):
        return None
    libraries = [str(folder) for folder in sorted(root.glob("usr/lib/*-linux-gnu*"))]
    return Browser(browser, driver, {"LD_LIBRARY_PATH": os.pathsep.join([*libraries, str(root / "usr/lib/chromium")])})


def install() -> Browser:
    if (found := find()) is not None:
        return found
    if shutil.which("apt-get") is None:
        raise NoBrowser("Chrome or Chromium and chromedriver are not installed, and there is no apt: install them")
    for left in reversed(range(_TRIES)):
        try:
            _install_with_apt() if os.geteuid() == 0 else _install_without_root(browser_dir())
            break
        except NoBrowser as error:
            if not left:
                raise
            print(f"{error}; trying again", file=sys.stderr)
            time.sleep(_PAUSE_S)
    if (found := find()) is None:
        raise NoBrowser("apt did not install chromium and chromedriver")
    return found


def _install_with_apt() -> None:
    _run("apt-get", "update", "-q")
    _run("apt-get", "install", "-q", "-y", "--no-install-recommends", *PACKAGES)


def _install_without_root(root: Path) -> None:
    """apt resolves and downloads the packages in private folders; they are unpacked, not installed."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="modelyard-browser-", dir=root.parent) as name:
        work = Path(name)
        for folder in ("lists/partial", "archives/partial", "root"):
            (work / folder).mkdir(parents=True)
        options = [
            f"-oDir::State::lists={work / 'lists'}",
            f"-oDir::Cache={work}",
            f"-oDir::Cache::archives={work / 'archives'}",
            "-oDebug::NoLocking=1",
            "-oAPT::Sandbox::User=",
        ]
        _run("apt-get", *options, "update", "-q")
        _run("apt-get", *options, "install", "-q", "-y", "--download-only", "--no-install-recommends", *PACKAGES)
        for package in sorted((work / "archives").glob("*.deb")):
            _run("dpkg-deb", "-x", str(package), str(work / "root"))
        shutil.rmtree(root, ignore_errors=True)
        (work / "root").rename(root)


def _run(*command: str) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment)
    if done.returncode:
        raise NoBrowser(f"{' '.join(command[:2])} failed: {done.stderr.strip()[-600:]}")


def main() -> int:
    try:
        found = install()
    except NoBrowser as error:
        print(error, file=sys.stderr)
        return 1
    print(found.browser, found.driver, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
