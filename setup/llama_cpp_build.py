"""Builds llama.cpp for this machine into the environment that runs this script: `make install` does it.

python setup/llama_cpp_build.py             build it where the pinned release is missing or broken
python setup/llama_cpp_build.py --rebuild   build it anew, past every cache

llama-cpp-python has no ready-made wheel: it is compiled here. The compiler is zig from the package index, so that a
machine with nothing but Python can do it and no system compiler's faults reach us; CC, CXX and CMAKE_ARGS of your own
are honoured instead. Only the standard library is needed; with rich there is a better progress bar.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Only the library: no multimodal part, no programs, and threads of its own instead of OpenMP's, which zig has not.
CMAKE_ARGS = (
    "-DLLAVA_BUILD=OFF -DGGML_OPENMP=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
)
# Where the CPU has AVX512-FP16, this release sums half-precision values in blocks of 128 and takes what is left over
# one by one: with heads of 64 flash attention then decodes at less than half the speed at depth.
_X86 = ("x86_64", "AMD64")
_WITHOUT = ("-mno-avx512fp16",)
_STEP = re.compile(r"\[(\d+)/(\d+)\]")  # ninja's
_FEWEST = 20  # a shorter run of steps is one of cmake's trials
_TAIL = 30

_FAULTY = 3
_SELF_TEST = f"""
import sys
from modelyard.core.errors import ModelyardError
from modelyard.engines import llama_cpp
try:
    llama_cpp.verify()
except ModelyardError as error:
    print(error.message)
    sys.exit({_FAULTY})
"""

Progress = Callable[[float], None]


class Failed(Exception):
    """The message is for the person at the terminal."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build llama.cpp for this machine.")
    parser.add_argument("--rebuild", action="store_true", help="build anew, past every cache")
    try:
        ensure(rebuild=parser.parse_args(arguments).rebuild)
    except Failed as failure:
        print(f"\nThe llama.cpp engine is not there, and Modelyard needs it.\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("\nStopped; nothing was changed.")
        return 130
    return 0


def ensure(*, rebuild: bool = False) -> None:
    needs = read_needs((ROOT / "pyproject.toml").read_text())
    if not rebuild and self_test() is None:
        return
    compiled = build(needs, fresh=rebuild)
    fault = self_test()
    if fault is not None and not compiled:
        say(f"The copy in the package cache does not work here ({fault}): building it anew.")
        build(needs, fresh=True)
        fault = self_test()
    if fault is not None:
        raise Failed(f"It was built, but it does not work on this machine: {fault}\n{ADVICE}")
    say("llama.cpp is built and works on this machine.")


@dataclass(frozen=True)
class Needs:
    """What pyproject.toml pins: the engine with what it imports, and the tools that build it."""

    engine: tuple[str, ...]
    tools: tuple[str, ...]


def read_needs(pyproject: str) -> Needs:
    extras = tomllib.loads(pyproject)["project"]["optional-dependencies"]
    return Needs(tuple(extras["llama_cpp"]), tuple(extras["build"]))


def self_test() -> str | None:
    """What is wrong with the installed library, or None: the package's own test says it."""
    done = subprocess.run([sys.executable, "-c", _SELF_TEST], capture_output=True, text=True, cwd=ROOT)
    if done.returncode not in (0, _FAULTY):  # then compiling would not help
        raise Failed(f"The self-test could not be run: {last_line(done.stderr)}")
    return done.stdout.strip() if done.returncode else None


# --- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """With `zig` the compiler comes from the package index. With `own` flags or an own compiler no cache may answer:
    caches know neither, and what they hold was built in another way."""

    zig: bool
    own: bool
    cmake_args: str
    how: str


def decide(env: Mapping[str, str], platform: str, has_compiler: bool) -> Plan:
    """The user's compiler and flags come first: their CMAKE_ARGS stand last, where cmake lets them win."""
    flags = env.get("CMAKE_ARGS", "")
    args = f"{CMAKE_ARGS} {flags}".strip()
    if env.get("CC") or env.get("CXX"):
        return Plan(False, True, args, "with your compiler (CC, CXX)")
    if flags and has_compiler:
        return Plan(False, True, args, "with the system's compiler and your CMAKE_ARGS")
    if has_compiler and not platform.startswith("linux"):  # on a Mac only Apple's compiler knows Metal
        return Plan(False, False, args, "with the system's compiler")
    return Plan(True, bool(flags), args, "with zig, a compiler from the package index")


def installer(python: str, has_pip: bool, uv: str | None) -> list[str]:
    """pip where the environment has one; an environment that uv made has none."""
    if has_pip:
        return [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "-v"]
    if uv:
        return [uv, "pip", "install", "--python", python, "-v"]
    raise Failed("There is neither pip nor uv in this environment to install it with: install one of them.")


def past_caches(command: list[str]) -> list[str]:
    """The engine is built from source although it is installed or cached; what it needs is left as it is."""
    alike = ["--no-deps", "--no-binary", "llama-cpp-python"]
    return alike + (["--no-cache-dir", "--force-reinstall"] if "-m" in command else ["--no-cache", "--reinstall"])


def wrapper(binary: Path, *arguments: str) -> str:
    """A script that runs the binary itself: the launchers of Python packages fail inside pip's isolated build."""
    return f'#!/bin/sh\nexec {shlex.join([str(binary), *arguments])} "$@"\n'


# --- the build --------------------------------------------------------------------------------------------------------


def build(needs: Needs, *, fresh: bool) -> bool:
    """True where something was compiled, False where a cache had it."""
    plan = decide(os.environ, sys.platform, any(map(shutil.which, ("cc", "gcc", "clang"))))
    command = installer(sys.executable, importlib.util.find_spec("pip") is not None, shutil.which("uv"))
    log = cache_folder(os.environ) / "llama_cpp-build.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    say(f"Building llama.cpp for this machine {plan.how}: 3 to 10 minutes, once. The log is {log}")
    with tempfile.TemporaryDirectory(prefix="build-", dir=log.parent) as folder, log.open("w") as file:
        env = build_environment(os.environ, plan)
        add_tools(Path(folder), needs, plan, command, env, file.write)
        with display() as show:
            if fresh or plan.own:
                run([*command, *past_caches(command), needs.engine[0]], env, file.write, show)
            return run([*command, *needs.engine], env, file.write, show) or fresh or plan.own


def build_environment(env: Mapping[str, str], plan: Plan) -> dict[str, str]:
    """Without the words of the `make` that runs us: ninja would take its job limit for its own."""
    outer = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    kept = {name: value for name, value in env.items() if name not in outer}
    return {"CMAKE_GENERATOR": "Ninja", **kept, "CMAKE_ARGS": plan.cmake_args}


def cache_folder(env: Mapping[str, str]) -> Path:
    """As modelyard/library/cache_dir.py has it, which may not be importable yet."""
    if own := env.get("MODELYARD_CACHE"):
        return Path(own).expanduser()
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelyard"


def add_tools(
    folder: Path, needs: Needs, plan: Plan, command: list[str], env: dict[str, str], log: Callable[[str], object]
) -> None:
    """Put cmake, ninja and, where it is wanted, zig into the folder, and their names in front of PATH."""
    packages, scripts = folder / "packages", folder / "bin"
    wanted = [tool for tool in needs.tools if plan.zig or not tool.startswith("ziglang")]
    say("Fetching " + ", ".join(re.split(r"[<>=~ ]", tool)[0] for tool in wanted) + " …")
    run([*command, "--target", str(packages), *wanted], os.environ, log, lambda _: None)
    scripts.mkdir()
    for name, text in tool_scripts(packages, plan.zig).items():
        (scripts / name).write_text(text)
        (scripts / name).chmod(0o755)
    env["PATH"] = f"{scripts}{os.pathsep}{env.get('PATH', '')}"
    if plan.zig:
        env |= {"CC": str(scripts / "zig-cc"), "CXX": str(scripts / "zig-c++")}
        env |= {"ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"), "ZIG_LOCAL_CACHE_DIR": str(folder / "zig")}


def tool_scripts(packages: Path, zig: bool) -> dict[str, str]:
    scripts = {name: wrapper(binary(packages, name)) for name in ("cmake", "ninja")}
    if zig:
        compiler = packages / "ziglang" / "zig"
        flags = _WITHOUT if platform.machine() in _X86 else ()
        scripts |= {"zig-cc": wrapper(compiler, "cc", *flags), "zig-c++": wrapper(compiler, "c++", *flags)}
    return scripts


def binary(packages: Path, name: str) -> Path:
    """The program itself; releases of its package differ in where they keep it."""
    places = (packages / name / "data" / "bin" / name, packages / "bin" / name)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise Failed(f"The package {name} holds no program {name}.")
    return found


def run(command: list[str], env: Mapping[str, str], log: Callable[[str], object], show: Progress) -> bool:
    """Run to the end with its output in the log; whether it compiled. A failure shows the last that was said."""
    tail: deque[str] = deque(maxlen=_TAIL)
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        compiled = follow(kept(process.stdout or (), log, tail), show)
    if process.returncode:
        raise Failed(f"The end of what the build said:\n\n{''.join(tail)}\n{ADVICE}")
    return compiled


def kept(lines: Iterable[str], log: Callable[[str], object], tail: deque[str]) -> Iterator[str]:
    for line in lines:
        log(line)
        tail.append(line[:400])
        yield line


def follow(lines: Iterable[str], show: Progress) -> bool:
    """Tell how much of the compiling is done, never backwards; whether there was any."""
    done = 0.0
    for line in lines:
        done = max(done, fraction(line))
        if done:
            show(done)
    return done > 0


def fraction(line: str) -> float:
    step = _STEP.search(line[:200])
    if step is None or int(step[2]) < _FEWEST:
        return 0.0
    return min(1.0, int(step[1]) / int(step[2]))


ADVICE = (
    "What helps: a compiler of your own (CC=clang CXX=clang++ make rebuild-engine), a build for any CPU of this kind\n"
    "(CMAKE_ARGS=-DGGML_NATIVE=OFF make rebuild-engine), and on a machine without network, the wheels of\n"
    "pyproject.toml's extras llama_cpp and build in a folder that PIP_FIND_LINKS names."
)


# --- telling ----------------------------------------------------------------------------------------------------------


@contextmanager
def display() -> Iterator[Progress]:
    """A bar on a terminal that rich can draw on; a line every five percent elsewhere."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True)) as bar:
            task = bar.add_task("compiling llama.cpp", total=1.0)
            yield lambda done: bar.update(task, completed=done)
    else:
        yield in_lines(say)


def in_lines(tell: Callable[[str], None]) -> Progress:
    told = -1

    def show(done: float) -> None:
        nonlocal told
        step = int(done * 20)
        if step > told:
            told = step
            tell(f"compiling llama.cpp: {step * 5} %")

    return show


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


if __name__ == "__main__":
    sys.exit(main())
