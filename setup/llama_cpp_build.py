"""Builds llama.cpp for this machine into the environment that runs this script: `make install` does it.

python setup/llama_cpp_build.py             build it if the pinned release is missing or broken
python setup/llama_cpp_build.py --rebuild   build it again, without caches

llama-cpp-python has no prebuilt wheel: it is compiled here. The compiler is zig from the package index, so a machine
with nothing but Python can build it, and bugs of system compilers do no harm. Your own CC, CXX and CMAKE_ARGS are used
if set. Only the standard library is needed; with rich the progress bar is better.
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
# Only the library: no multimodal part, no programs, and ggml's own threads instead of OpenMP's, which zig lacks.
CMAKE_ARGS = (
    "-DLLAVA_BUILD=OFF -DGGML_OPENMP=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
)
# On a CPU with AVX512-FP16 this release sums fp16 values in blocks of 128 and takes the remainder one by one: with
# heads of 64 flash attention then decodes at less than half the speed at depth.
_X86 = ("x86_64", "AMD64")
_X86_FLAGS = ("-mno-avx512fp16",)
_NINJA_STEP = re.compile(r"\[(\d+)/(\d+)\]")
_MIN_STEPS = 20  # fewer steps are one of cmake's compiler checks
_TAIL_LINES = 30

_EXIT_BROKEN = 3
_SELF_TEST = f"""
import sys
from modelyard.core.errors import ModelyardError
from modelyard.engines import llama_cpp
try:
    llama_cpp.verify()
except ModelyardError as error:
    print(error.message)
    sys.exit({_EXIT_BROKEN})
"""

Progress = Callable[[float], None]


class BuildError(Exception):
    """The message is printed."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build llama.cpp for this machine.")
    parser.add_argument("--rebuild", action="store_true", help="build again, without caches")
    try:
        ensure(rebuild=parser.parse_args(arguments).rebuild)
    except BuildError as failure:
        print(f"\nThe llama.cpp engine is missing, and Modelyard needs it.\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print_status("\nStopped; nothing was changed.")
        return 130
    return 0


def ensure(*, rebuild: bool = False) -> None:
    needs = read_requirements((ROOT / "pyproject.toml").read_text())
    if not rebuild and self_test() is None:
        return
    compiled = build(needs, fresh=rebuild)
    fault = self_test()
    if fault is not None and not compiled:
        print_status(f"The copy in the package cache does not work here ({fault}): building it again.")
        build(needs, fresh=True)
        fault = self_test()
    if fault is not None:
        raise BuildError(f"It was built, but it does not work on this machine: {fault}\n{ADVICE}")
    print_status("llama.cpp is built and works on this machine.")


@dataclass(frozen=True)
class Requirements:
    """Of pyproject.toml: the engine with its dependencies, and the tools that build it."""

    engine: tuple[str, ...]
    tools: tuple[str, ...]


def read_requirements(pyproject: str) -> Requirements:
    extras = tomllib.loads(pyproject)["project"]["optional-dependencies"]
    return Requirements(tuple(extras["llama_cpp"]), tuple(extras["build"]))


def self_test() -> str | None:
    """What is wrong with the installed library, or None."""
    done = subprocess.run([sys.executable, "-c", _SELF_TEST], capture_output=True, text=True, cwd=ROOT)
    if done.returncode not in (0, _EXIT_BROKEN):  # compiling would not help
        raise BuildError(f"The self-test could not be run: {last_line(done.stderr)}")
    return done.stdout.strip() if done.returncode else None


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BuildPlan:
    """With `zig` the compiler comes from the package index. A `custom` compiler or custom flags must not use caches:
    what they hold was built differently."""

    zig: bool
    custom: bool
    cmake_args: str
    description: str


def plan_build(env: Mapping[str, str], platform: str, has_compiler: bool) -> BuildPlan:
    """The user's compiler and flags win: their CMAKE_ARGS come last."""
    flags = env.get("CMAKE_ARGS", "")
    args = f"{CMAKE_ARGS} {flags}".strip()
    if env.get("CC") or env.get("CXX"):
        return BuildPlan(False, True, args, "with your compiler (CC, CXX)")
    if flags and has_compiler:
        return BuildPlan(False, True, args, "with the system's compiler and your CMAKE_ARGS")
    if has_compiler and not platform.startswith("linux"):  # on a Mac only Apple's compiler supports Metal
        return BuildPlan(False, False, args, "with the system's compiler")
    return BuildPlan(True, bool(flags), args, "with zig, a compiler from the package index")


def install_command(python: str, has_pip: bool, uv: str | None) -> list[str]:
    """With pip if the environment has it; an environment of uv has none."""
    if has_pip:
        return [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "-v"]
    if uv:
        return [uv, "pip", "install", "--python", python, "-v"]
    raise BuildError("There is neither pip nor uv in this environment to install it with: install one of them.")


def no_cache_options(command: list[str]) -> list[str]:
    """Builds the engine from source even if it is installed or cached; its dependencies stay."""
    common = ["--no-deps", "--no-binary", "llama-cpp-python"]
    return common + (["--no-cache-dir", "--force-reinstall"] if "-m" in command else ["--no-cache", "--reinstall"])


def wrapper_script(binary: Path, *arguments: str) -> str:
    """Runs the binary itself: the launchers of Python packages fail inside pip's isolated build."""
    return f'#!/bin/sh\nexec {shlex.join([str(binary), *arguments])} "$@"\n'


# --- the build --------------------------------------------------------------------------------------------------------


def build(needs: Requirements, *, fresh: bool) -> bool:
    """True if something was compiled, False if a cache had it."""
    plan = plan_build(os.environ, sys.platform, any(map(shutil.which, ("cc", "gcc", "clang"))))
    command = install_command(sys.executable, importlib.util.find_spec("pip") is not None, shutil.which("uv"))
    log = cache_folder(os.environ) / "llama_cpp-build.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    print_status(f"Building llama.cpp for this machine {plan.description}: 3 to 10 minutes, once. The log is {log}")
    with tempfile.TemporaryDirectory(prefix="build-", dir=log.parent) as folder, log.open("w") as file:
        env = build_environment(os.environ, plan)
        add_tools(Path(folder), needs, plan, command, env, file.write)
        with display() as show:
            if fresh or plan.custom:
                run([*command, *no_cache_options(command), needs.engine[0]], env, file.write, show)
            return run([*command, *needs.engine], env, file.write, show) or fresh or plan.custom


def build_environment(env: Mapping[str, str], plan: BuildPlan) -> dict[str, str]:
    """Without the variables of an outer `make`: ninja would use its job limit."""
    outer = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    kept = {name: value for name, value in env.items() if name not in outer}
    return {"CMAKE_GENERATOR": "Ninja", **kept, "CMAKE_ARGS": plan.cmake_args}


def cache_folder(env: Mapping[str, str]) -> Path:
    """The same as modelyard/library/cache_dir.py, which may not be importable yet."""
    if own := env.get("MODELYARD_CACHE"):
        return Path(own).expanduser()
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelyard"


def add_tools(
    folder: Path,
    needs: Requirements,
    plan: BuildPlan,
    command: list[str],
    env: dict[str, str],
    log: Callable[[str], object],
) -> None:
    """Installs cmake, ninja and, if planned, zig into the folder, and puts them first on the PATH."""
    packages, scripts = folder / "packages", folder / "bin"
    wanted = [tool for tool in needs.tools if plan.zig or not tool.startswith("ziglang")]
    print_status("Fetching " + ", ".join(re.split(r"[<>=~ ]", tool)[0] for tool in wanted) + " …")
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
    scripts = {name: wrapper_script(binary(packages, name)) for name in ("cmake", "ninja")}
    if zig:
        compiler = packages / "ziglang" / "zig"
        flags = _X86_FLAGS if platform.machine() in _X86 else ()
        scripts |= {
            "zig-cc": wrapper_script(compiler, "cc", *flags),
            "zig-c++": wrapper_script(compiler, "c++", *flags),
        }
    return scripts


def binary(packages: Path, name: str) -> Path:
    """The program itself; its place differs between releases of its package."""
    places = (packages / name / "data" / "bin" / name, packages / "bin" / name)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise BuildError(f"The package {name} has no program {name}.")
    return found


def run(command: list[str], env: Mapping[str, str], log: Callable[[str], object], show: Progress) -> bool:
    """Runs the command with its output in the log. Returns whether it compiled; an error has the last lines."""
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        compiled = track_progress(logged(process.stdout or (), log, tail), show)
    if process.returncode:
        raise BuildError(f"The last lines of the build:\n\n{''.join(tail)}\n{ADVICE}")
    return compiled


def logged(lines: Iterable[str], log: Callable[[str], object], tail: deque[str]) -> Iterator[str]:
    for line in lines:
        log(line)
        tail.append(line[:400])
        yield line


def track_progress(lines: Iterable[str], show: Progress) -> bool:
    """Shows how much is compiled, never backwards. Returns whether anything was compiled."""
    done = 0.0
    for line in lines:
        done = max(done, fraction(line))
        if done:
            show(done)
    return done > 0


def fraction(line: str) -> float:
    step = _NINJA_STEP.search(line[:200])
    if step is None or int(step[2]) < _MIN_STEPS:
        return 0.0
    return min(1.0, int(step[1]) / int(step[2]))


ADVICE = (
    "Try another compiler (CC=clang CXX=clang++ make rebuild-engine), a build for any CPU of this kind\n"
    "(CMAKE_ARGS=-DGGML_NATIVE=OFF make rebuild-engine), and on a machine without network, the wheels of\n"
    "pyproject.toml's extras llama_cpp and build in a folder that PIP_FIND_LINKS names."
)


# --- output -----------------------------------------------------------------------------------------------------------


@contextmanager
def display() -> Iterator[Progress]:
    """A progress bar on a terminal with rich, else a line every five percent."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(console=Console(stderr=True)) as bar:
            task = bar.add_task("compiling llama.cpp", total=1.0)
            yield lambda done: bar.update(task, completed=done)
    else:
        yield line_progress(print_status)


def line_progress(write: Callable[[str], None]) -> Progress:
    shown = -1

    def show(done: float) -> None:
        nonlocal shown
        step = int(done * 20)
        if step > shown:
            shown = step
            write(f"compiling llama.cpp: {step * 5} %")

    return show


def print_status(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


if __name__ == "__main__":
    sys.exit(main())
