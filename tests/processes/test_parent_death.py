from __future__ import annotations

import os
import subprocess
import sys

import psutil

from modelyard.processes.parent_death import die_with_parent


def test_the_program_runs_with_its_arguments_and_exit_code() -> None:
    argv = die_with_parent([sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(5)", "a b", "--c"])
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (5, "['a b', '--c']\n")


def test_a_missing_program_is_reported() -> None:
    done = subprocess.run(die_with_parent(["/no/such/program"]), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "cannot start /no/such/program: No such file or directory\n"


def test_the_program_does_not_start_if_its_parent_is_dead() -> None:
    argv = die_with_parent([sys.executable, "-c", "print('started')"])
    argv[argv.index(str(os.getpid()))] = "1"
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


PROGRAM = """
import subprocess, sys
grandchild = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"], env={})
print(grandchild.pid, flush=True)
import signal; signal.pause()
"""
OWNER = f"""
import subprocess, sys
from modelyard.processes.parent_death import die_with_parent
argv = die_with_parent([sys.executable, "-I", "-S", "-c", {PROGRAM!r}], group=True)
subprocess.Popen(argv, start_new_session=True).wait()
"""


def test_descendants_die_with_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        grandchild = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    grandchild.wait(60)


def test_a_signal_to_the_group_is_not_mistaken_for_the_death_of_the_program() -> None:
    code = "import os, signal; signal.signal(15, signal.SIG_IGN); os.killpg(0, 15); print('alive')"
    argv = die_with_parent([sys.executable, "-c", code], group=True)
    done = subprocess.run(argv, capture_output=True, text=True, check=False, start_new_session=True)
    assert (done.returncode, done.stdout) == (0, "alive\n")
