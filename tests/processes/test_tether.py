from __future__ import annotations

import os
import subprocess
import sys

from modelyard.processes import tether


def test_a_tethered_program_runs_with_its_arguments_and_exit_code() -> None:
    argv = tether.tethered([sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(5)", "a b", "--c"])
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (5, "['a b', '--c']\n")


def test_a_program_that_does_not_exist_is_named() -> None:
    done = subprocess.run(tether.tethered(["/no/such/program"]), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "cannot start /no/such/program: No such file or directory\n"


def test_a_program_whose_parent_is_gone_already_does_not_start() -> None:
    argv = tether.tethered([sys.executable, "-c", "print('started')"])
    argv[argv.index(str(os.getpid()))] = "1"
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
