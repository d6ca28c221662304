"""Builds llama.cpp for this machine into the cache folder: `modelyard setup --build`.

The source is the llama.cpp inside the pinned release of llama-cpp-python, which the package index has and pip compiles.
The compiler is zig from the package index, so a machine with nothing but Python can build it, and bugs of system
compilers do no harm. Your own CC, CXX and CMAKE_ARGS are used if set, for example for a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct
from rich.console import Console
from rich.progress import Progress

from modelyard.core.errors import Unavailable
from modelyard.library import cores
from modelyard.library.cache_dir import cache_dir, file_lock
from modelyard.library.llama_cpp_package import BUILD_PREFIX, libraries_dir

RELEASE = "0.3.36"  # of llama-cpp-python; modelyard/libllama.py declares its functions
SOURCE = f"llama-cpp-python=={RELEASE}"
TOOLS = ("cmake>=4,<5", "ninja>=1.13,<2", "ziglang==0.17.0")

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

OnFraction = Callable[[float], None]


class BuildFailed(Unavailable):
    default_code = "build_failed"


def build_folder(env: Mapping[str, str] = os.environ, release: str = RELEASE) -> Path:
    """Where `build` puts the libraries."""
    return libraries_dir(env) / f"{BUILD_PREFIX}{release}"


def build_log(env: Mapping[str, str] = os.environ) -> Path:
    return cache_dir(env) / "llama_cpp-build.log"


def build(*, fresh: bool = False, env: Mapping[str, str] = os.environ, release: str = RELEASE) -> Path:
    """The folder of the libraries. They are compiled if they are missing, or `fresh`, or if the user names a compiler
    or flags. Other processes wait for the first."""
    target = build_folder(env, release)
    wait = "another process is building llama.cpp: waiting for it"
    try:
        with file_lock(target.with_name(f".{target.name}.lock"), lambda: print_status(wait)):
            if fresh or not target.is_dir() or has_own_flags(env):
                _build(target, f"llama-cpp-python=={release}", fresh=fresh, env=env)
    except OSError as error:  # no space, no permission
        raise BuildFailed(f"llama.cpp cannot be built in {target.parent}: {error}") from error
    return target


# --- the plan ---------------------------------------------------------------------------------------------------------


class BuildPlan(Struct, frozen=True):
    """With `zig` the compiler comes from the package index. A `custom` compiler or custom flags must not use caches:
    what they hold was built differently."""

    zig: bool
    custom: bool
    cmake_args: str
    description: str


def has_own_flags(env: Mapping[str, str]) -> bool:
    return any(env.get(name) for name in ("CC", "CXX", "CMAKE_ARGS"))


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
    raise BuildFailed("There is neither pip nor uv in this environment to install it with: install one of them.")


def no_cache_options(command: list[str]) -> list[str]:
    """Builds the engine from source even if it is installed or cached; its dependencies stay."""
    common = ["--no-deps", "--no-binary", "llama-cpp-python"]
    return common + (["--no-cache-dir", "--force-reinstall"] if "-m" in command else ["--no-cache", "--reinstall"])


def wrapper_script(binary: Path, *arguments: str) -> str:
    """Runs the binary itself: the launchers of Python packages fail inside pip's isolated build."""
    return f'#!/bin/sh\nexec {shlex.join([str(binary), *arguments])} "$@"\n'


# --- the build --------------------------------------------------------------------------------------------------------


def _build(target: Path, source: str, *, fresh: bool, env: Mapping[str, str]) -> None:
    for stale in target.parent.glob(".build-*"):  # left by a killed process: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    plan = plan_build(env, sys.platform, any(map(shutil.which, ("cc", "gcc", "clang"))))
    command = install_command(sys.executable, importlib.util.find_spec("pip") is not None, shutil.which("uv"))
    log = build_log(env)
    print_status(f"Building llama.cpp for this machine {plan.description}: 3 to 10 minutes, once. The log is {log}")
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as name, log.open("w") as file:
        folder, made = Path(name), Path(name) / "made"
        environment = build_environment(env, plan)
        add_tools(folder, plan, command, environment, file.write)
        options = no_cache_options(command) if fresh or plan.custom else ["--no-deps"]
        with display() as show:
            run([*command, *options, "--target", str(made), source], environment, file.write, show)
        if target.is_dir():  # two renames: a process that has loaded the old library keeps its open files
            target.rename(folder / "old")
        (made / "llama_cpp" / "lib").rename(target)


def build_environment(env: Mapping[str, str], plan: BuildPlan) -> dict[str, str]:
    """Without the variables of an outer `make`: ninja would use its job limit."""
    outer = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
    kept = {name: value for name, value in env.items() if name not in outer}
    usual = {"CMAKE_GENERATOR": "Ninja", "CMAKE_BUILD_PARALLEL_LEVEL": str(cores.logical())}
    return {**usual, **kept, "CMAKE_ARGS": plan.cmake_args}


def add_tools(
    folder: Path,
    plan: BuildPlan,
    command: list[str],
    env: dict[str, str],
    log: Callable[[str], object],
) -> None:
    """Installs cmake, ninja and, if planned, zig into the folder, and puts them first on the PATH."""
    packages, scripts = folder / "packages", folder / "bin"
    wanted = [tool for tool in TOOLS if plan.zig or not tool.startswith("ziglang")]
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
        raise BuildFailed(f"The package {name} has no program {name}.")
    return found


def run(command: list[str], env: Mapping[str, str], log: Callable[[str], object], show: OnFraction) -> bool:
    """Runs the command with its output in the log. Returns whether it compiled; an error has the last lines."""
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(  # noqa: S603
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        compiled = track_progress(logged(process.stdout or (), log, tail), show)
    if process.returncode:
        raise BuildFailed(f"llama.cpp could not be built. The last lines of the build:\n\n{''.join(tail)}\n{ADVICE}")
    return compiled


def logged(lines: Iterable[str], log: Callable[[str], object], tail: deque[str]) -> Iterator[str]:
    for line in lines:
        log(line)
        tail.append(line[:400])
        yield line


def track_progress(lines: Iterable[str], show: OnFraction) -> bool:
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
    "Try another compiler (CC=clang CXX=clang++ modelyard setup --build), a build for any CPU of this kind\n"
    "(CMAKE_ARGS=-DGGML_NATIVE=OFF modelyard setup --build), and on a machine without network, a folder with the\n"
    f"packages {SOURCE}, cmake, ninja and ziglang that PIP_FIND_LINKS names."
)


# --- output -----------------------------------------------------------------------------------------------------------


@contextmanager
def display() -> Iterator[OnFraction]:
    """A progress bar on a terminal, else a line every five percent."""
    if sys.stderr.isatty():
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("compiling llama.cpp", total=1.0)
            yield lambda done: bar.update(task, completed=done)
    else:
        yield line_progress(print_status)


def line_progress(write: Callable[[str], None]) -> OnFraction:
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
