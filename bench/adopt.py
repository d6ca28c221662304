"""Another llama.cpp library beside the one in use: does it fit, does it answer alike, is it as fast?

    python -m bench.adopt VERSION|PATH [--quick] [--rounds N] [--threads N ...]

`modelyard setup --library` explains what VERSION may be. Nothing is changed: the library in use stays. It compares what
each library exports and how it lays out its structs, runs the self-test and the suite of architectures on the new one
(`--quick`: one or two of each kind), and measures both. The exit status is 1 if something fails or is slower.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.libraries import compare
from bench.report import console, show
from modelyard.engines.llama_cpp import selftest, setup
from modelyard.library import default_model
from modelyard.library.llama_cpp_package import library_folder

_SUITE = ("test_architectures.py", "test_mtp.py", "test_speculation.py")
_SLOWER = 0.97  # below it the new library loses


def describe(folder: Path) -> dict[str, Any]:
    """In a child: a process has one library."""
    code = (
        "import ctypes, json; from modelyard import libllama as l; x = l.load(); names = "
        "{id(s): n for n, s in l.CONTEXT_LAYOUTS.items()}; print(json.dumps({'version': x.version, 'layout': "
        "names[id(x.llama_context_params)], 'bytes': ctypes.sizeof(x.llama_context_params), "
        "'missing': sorted(x.missing)}))"
    )
    env = os.environ | {"LLAMA_CPP_LIB_PATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"fault": (done.stderr.strip().splitlines() or ["it died"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def exports(folder: Path) -> set[str]:
    """The functions of llama.h that a library has; needs binutils."""
    from modelyard.libllama import find_library

    command = ["nm", "-D", "--defined-only", str(find_library(folder))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    names = (line.split()[-1] for line in done.stdout.splitlines() if line.strip())
    return {name for name in names if name.startswith("llama_")}


def run_suite(folder: Path, *, quick: bool) -> bool:
    """The files of the suite are written by the library in use: both read the same ones."""
    from tests.engines.llama_cpp import architectures, mtp_models

    architectures.write_missing()
    for looks_at, sharp in (("hidden", True), ("token", False)):
        mtp_models.agreeing_model(looks_at, sharp=sharp)  # type: ignore[arg-type]
    env = os.environ | {"LLAMA_CPP_LIB_PATH": str(folder)} | ({} if quick else {"MODELYARD_ARCHITECTURES": "all"})
    tests = [f"tests/engines/llama_cpp/{name}" for name in _SUITE]
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], env=env, check=False).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    given = parser.parse_args()
    present, new = library_folder(), setup.find_library(given.version)
    for folder in (present, new):
        print(f"{folder}: {describe(folder)}", flush=True)
    before, after = exports(present), exports(new)
    print(
        f"gone: {', '.join(sorted(before - after)) or 'nothing'}\nnew: {', '.join(sorted(after - before)) or 'nothing'}"
    )
    result = selftest.examine_library(folder=new)
    print(f"self-test: {result.fault or 'passed'}", flush=True)
    if result.fault is not None:
        return 1
    passed = run_suite(new, quick=given.quick)
    print(f"suite: {'passed' if passed else 'FAILED'}", flush=True)
    found = compare((new, present), default_model.fetch(), given.threads, given.rounds)
    show("The new library beside the one in use", found, ("new", "in use"), [str(new), str(present)], console())
    slower = [one.name for one in found if one.ratio.middle < _SLOWER]
    print(f"slower: {', '.join(slower) or 'nothing'}")
    return 0 if passed and not slower else 1


if __name__ == "__main__":
    sys.exit(main())
