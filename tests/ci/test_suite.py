"""The CI's run of all tests: what fails by chance is named and forgiven once; nothing else is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import DEADLINE, ROOT, environment

# A stand-in for pytest: each call takes the next exit code, and writes down what it was given and who failed.
STANDIN = """
import json, pathlib, sys
codes, asked = pathlib.Path("codes"), pathlib.Path("asked")
first, *rest = json.loads(codes.read_text())
codes.write_text(json.dumps(rest))
asked.write_text(asked.read_text() + " ".join(sys.argv[1:]) + "\\n")
cache = pathlib.Path(".pytest_cache/v/cache")
cache.mkdir(parents=True, exist_ok=True)
if first:
    (cache / "lastfailed").write_text(pathlib.Path("failing").read_text())
sys.exit(first)
"""
AGAIN = "--last-failed --last-failed-no-failures none"


def checkout(folder: Path, pytest_code: str, check: str = "true") -> Path:
    """A project with this pytest; `check` is what its linters do."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "suite", folder / ".ci" / "suite")
    (folder / "Makefile").write_text(f"check:\n\t@{check}\n")
    (folder / "asked").touch()
    for name, text in {"python": f'exec {sys.executable} "$@"', "pytest": pytest_code}.items():
        program = folder / ".venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    return folder


def standin(folder: Path, codes: list[int], failing: list[str], check: str = "true") -> Path:
    (folder / "standin.py").write_text(STANDIN)
    (folder / "codes").write_text(json.dumps(codes))
    (folder / "failing").write_text(json.dumps(dict.fromkeys(failing, True)))
    return checkout(folder, f'exec {sys.executable} -I -S standin.py "$@"', check)


def run(folder: Path) -> tuple[int, str]:
    env = environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_ADDOPTS="")
    done = subprocess.run(
        ["bash", ".ci/suite"],
        cwd=folder,
        env={name: value for name, value in env.items() if not name.startswith("MAKE")},  # these may run under make
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    return done.returncode, done.stdout


def test_what_passes_is_run_once(tmp_path: Path) -> None:
    assert run(standin(tmp_path, [0], [])) == (0, "")
    assert (tmp_path / "asked").read_text() == "\n"


def test_a_few_that_pass_the_second_time_are_forgiven_and_named(tmp_path: Path) -> None:
    code, said = run(standin(tmp_path, [1, 0], ["a.py::one", "a.py::two", "b.py::three"]))
    assert code == 0
    assert [line.split()[1] for line in said.splitlines() if line.startswith("FLAKY: ")] == [
        "a.py::one",
        "a.py::two",
        "b.py::three",
    ]
    assert (tmp_path / "asked").read_text() == f"\n{AGAIN}\n"


def test_one_that_fails_twice_fails_it(tmp_path: Path) -> None:
    code, said = run(standin(tmp_path, [1, 1], ["a.py::one"]))
    assert code == 1
    assert "FAILED AT FIRST: a.py::one" in said
    assert "FLAKY" not in said


def test_too_many_are_not_tried_again(tmp_path: Path) -> None:
    code, said = run(standin(tmp_path, [1], [f"a.py::test_{number}" for number in range(4)]))
    assert code == 1
    assert "4 tests failed: too many for chance" in said


@pytest.mark.parametrize("code", [2, 3, 4, 5, 139])
def test_a_run_that_did_not_come_to_its_end_is_not_forgiven(tmp_path: Path, code: int) -> None:
    """Interrupted, or with a file that cannot be imported, some tests were never run: two that pass say nothing."""
    assert run(standin(tmp_path, [code], ["a.py"]))[0] == code
    assert (tmp_path / "asked").read_text() == "\n"


def test_a_linter_is_never_forgiven_and_no_test_is_run(tmp_path: Path) -> None:
    code, _ = run(standin(tmp_path, [0], [], check="false"))
    assert code != 0
    assert (tmp_path / "asked").read_text() == ""


def test_the_real_pytest_runs_those_alone_that_failed(tmp_path: Path) -> None:
    """One that fails the first time only, beside one that must not be run again."""
    (tmp_path / "test_it.py").write_text(
        "from pathlib import Path\n"
        "def test_moody():\n    seen = Path('seen'); before = seen.exists(); seen.touch(); assert before\n"
        "def test_once():\n    Path('once').touch(exist_ok=False)\n"
    )
    code, said = run(checkout(tmp_path, f'exec {sys.executable} -m pytest "$@"'))
    assert code == 0, said
    assert "FLAKY: test_it.py::test_moody failed, and passed when it was run once more" in said
