"""The Makefile: what is installed for which command, and an environment of an unsupported Python version. Interpreters
are small scripts; nothing is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

PYTHON = """#!/bin/sh
echo "$0 $*" >> {log}
case "$*" in
    *version_info*) exit {unsupported} ;;
    --version) echo "Python {version}" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/modelyard" ;;
    *"config list") echo "{pip_config}" ;;
    *"--target .venv/uv uv") {uv} ;;
esac
"""


class Checkout:
    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        self.venv = folder / ".venv"
        shutil.copy(ROOT / "Makefile", folder)
        for name in ("pyproject.toml", "modelyard/__init__.py"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).touch()
        for name in ("llama_cpp_package.py", "llama_cpp_build.py"):
            (folder / "modelyard" / "library").mkdir(exist_ok=True)
            (folder / "modelyard" / "library" / name).touch()
        self.log.touch()
        self.pip_config, self.uv = "", "exit 1"  # the package index has no uv

    def interpreter(self, version: str, place: str = "python3") -> Path:
        """A stand-in for a Python of this version."""
        program = self.folder / place
        program.parent.mkdir(parents=True, exist_ok=True)
        unsupported = int(version.startswith("3.10"))
        values = {"version": version, "unsupported": unsupported, "pip_config": self.pip_config, "uv": self.uv}
        program.write_text(PYTHON.format(log=self.log, **values))
        program.chmod(0o755)
        return program

    def make(self, target: str, version: str) -> subprocess.CompletedProcess[str]:
        python = self.interpreter(version)
        env = {**os.environ, "PATH": f"/usr/bin:{os.defpath}", "MODELYARD_CACHE": str(self.folder / "cache")}
        env.pop("MAKEFLAGS", None)
        command = ["make", "--no-print-directory", target, f"PYTHON={python}"]
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, check=False)

    @property
    def runs(self) -> list[str]:
        """What the interpreters were asked to do, without the version checks."""
        lines = [line.partition(" ")[::2] for line in self.log.read_text().splitlines()]
        checks = ("version_info", "config list")
        found = [f"{Path(program).name} {rest}" for program, rest in lines if not any(c in rest for c in checks)]
        return [run for run in found if not run.endswith("--version")]

    @property
    def installed(self) -> list[str]:
        """By which program what was installed."""
        return [f"{run.split()[0]} {run.split()[-1]}" for run in self.runs if " install " in run]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    if shutil.which("uv", path=f"/usr/bin:{os.defpath}"):
        pytest.fail("these stand-ins are for pip")
    return Checkout(tmp_path)


@pytest.mark.parametrize("target", ["serve", "test", "install"])
def test_an_unsupported_python_is_refused_in_one_sentence_before_anything_is_installed(
    checkout: Checkout, target: str
) -> None:
    done = checkout.make(target, "3.10.12")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].endswith(
        f"python3 is Python 3.10.12: name another one with make PYTHON=python3.12 {target}"
    )
    assert done.stderr.startswith("Modelyard needs Python 3.11 or newer")
    assert not checkout.venv.exists()
    assert checkout.runs == []


def test_a_broken_environment_is_replaced(checkout: Checkout) -> None:
    checkout.interpreter("3.10.12", ".venv/bin/python")
    for stamp in (".venv", ".installed"):
        (checkout.venv / stamp).touch()
    done = checkout.make("serve", "3.12.1")
    assert done.returncode == 0, done.stderr
    assert "version_info" not in "".join(checkout.runs)
    assert f"python3 -m venv {checkout.venv.name}" in checkout.runs
    assert checkout.runs[-1] == "modelyard serve"


def test_serve_installs_no_development_tools_and_compiles_nothing(checkout: Checkout) -> None:
    assert checkout.make("serve", "3.11.9").returncode == 0
    assert checkout.installed == ["python uv", "python ."]
    assert not any("setup" in run for run in checkout.runs)
    assert any("download" in run and "/models/.prefetch" in run for run in checkout.runs)
    before = len(checkout.runs)
    assert checkout.make("serve", "3.11.9").returncode == 0
    assert checkout.runs[before:] == ["modelyard serve"], "the second time nothing is installed"


def test_install_prepares_the_tools_and_both_libraries_once(checkout: Checkout) -> None:
    assert checkout.make("install", "3.13.0").returncode == 0
    assert checkout.installed == ["python uv", "python .[dev]"]
    assert [run for run in checkout.runs if run.startswith("modelyard")] == [
        "modelyard setup",
        "modelyard setup --build",
    ]
    before = len(checkout.runs)
    assert checkout.make("install", "3.13.0").returncode == 0
    assert checkout.make("serve", "3.13.0").returncode == 0
    assert checkout.runs[before:] == ["modelyard serve"]


def install_tools(checkout: Checkout) -> None:
    assert checkout.make("install", "3.12.1").returncode == 0
    for name in ("ruff", "mypy", "lint-imports", "pytest"):
        checkout.interpreter("3.12.1", f".venv/bin/{name}")


def test_the_browser_of_the_tests_is_installed_before_they_run(checkout: Checkout) -> None:
    install_tools(checkout)
    assert checkout.make("test", "3.12.1").returncode == 0
    assert checkout.runs[-2] == "python setup/browser.py"
    assert checkout.runs[-1].startswith("pytest ")


def test_without_a_browser_the_tests_run_and_say_what_they_skip(checkout: Checkout) -> None:
    install_tools(checkout)
    python = checkout.venv / "bin" / "python"
    python.write_text(python.read_text().replace("case", 'case "$*" in *browser.py) exit 1 ;; esac\ncase', 1))
    done = checkout.make("test", "3.12.1")
    assert done.returncode == 0, done.stderr
    assert "the tests of the workbench in a browser will be skipped" in done.stderr
    assert checkout.runs[-1].startswith("pytest ")


COPY_UV = 'mkdir -p .venv/uv/bin && cp "$0" .venv/uv/bin/uv'


def test_uv_of_the_package_index_installs_the_packages(checkout: Checkout) -> None:
    checkout.uv = COPY_UV
    assert checkout.make("serve", "3.11.9").returncode == 0
    assert checkout.installed == ["python uv", "uv ."]


def test_pip_installs_them_if_uv_fails(checkout: Checkout) -> None:
    checkout.uv = 'mkdir -p .venv/uv/bin && printf "#!/bin/sh\nexit 1" > .venv/uv/bin/uv && chmod +x .venv/uv/bin/uv'
    assert checkout.make("serve", "3.11.9").returncode == 0
    assert checkout.installed == ["python uv", "python ."]


@pytest.mark.parametrize("line", ["global.index-url='https://mirror.example/simple'", ":env:.no-index='1'"])
def test_pip_installs_them_if_it_is_configured_for_another_index(checkout: Checkout, line: str) -> None:
    checkout.uv, checkout.pip_config = COPY_UV, line
    assert checkout.make("serve", "3.11.9").returncode == 0
    assert checkout.installed == ["python ."]


def test_rebuild_engine_compiles_without_caches(checkout: Checkout) -> None:
    assert checkout.make("rebuild-engine", "3.11.9").returncode == 0
    assert checkout.runs[-1] == "modelyard setup --rebuild"
