"""Sets the llama.cpp library up: fetches a prebuilt one or builds one, tests it in a child process, and remembers it.

A library for which the self-test fails is passed over. If no prebuilt one is left, one is built here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.engines.llama_cpp import gpu_library
from modelyard.engines.llama_cpp.library import cpu_features, has_gpu_backend
from modelyard.engines.llama_cpp.selftest import BrokenLibrary, find_fault
from modelyard.library import llama_cpp_build, llama_cpp_package, media_build
from modelyard.library.llama_cpp_package import (
    PACKAGES,
    LibraryPackage,
    Variant,
    chosen_library,
    fetch,
    library_folder,
    packages_for,
    this_platform,
)
from modelyard.library.progress import ProgressReporter
from modelyard.plugins import MissingLibrary
from modelyard.telemetry.gpus import find_gpus


def ensure_library(progress: ProgressReporter | None = None) -> Path:
    """The library that works here. At first use, or if the chosen one does not work any more, it is set up."""
    progress = progress or ProgressReporter()
    try:
        folder = library_folder()
    except MissingLibrary:
        pass
    else:
        fault = find_fault(folder)
        if fault is None:
            return folder
        if folder != chosen_library():  # the user's own
            raise BrokenLibrary(fault)
        progress.write_line(f"The library in {folder} is not used any more: {fault}")
    folder = set_up(progress)
    if hint := build_hint(folder):
        progress.write_line(hint)
    return folder


def candidates() -> list[LibraryPackage]:
    """The prebuilt libraries for this machine, the best first."""
    return [*packages_for("metal"), *packages_for("cpu")]


def set_up(progress: ProgressReporter | None = None, packages: Iterable[LibraryPackage] | None = None) -> Path:
    """Fetch and use the first prebuilt library that works here, for a GPU if there is one; if none does, build one."""
    progress = progress or ProgressReporter()
    if packages is None and (found := gpu_library.install(progress.write_line, progress)) is not None:
        return found
    for package in candidates() if packages is None else packages:
        folder = fetch(package, progress)
        fault = find_fault(folder)
        if fault is None:
            llama_cpp_package.use_library(folder)
            return folder
        progress.write_line(f"{package.title} is not used: {fault}")
    progress.write_line("No prebuilt llama.cpp works on this machine: it is compiled now.")
    return set_up_build()


def set_up_variant(variant: Variant, progress: ProgressReporter | None = None) -> Path:
    """Fetch and use the library for one kind of device."""
    progress = progress or ProgressReporter()
    packages = packages_for(variant)
    if not packages:
        raise Unavailable(f"there is no prebuilt llama.cpp library ({variant}) for {this_platform()}")
    if variant == "cpu":
        return set_up(progress, packages)
    reasons = list[str]()
    found = gpu_library.install(reasons.append, progress, (variant,))
    if found is None:
        raise BrokenLibrary(f"{reasons[0].rstrip('.')}. The library in use has not changed.")
    return found


def set_up_library(choice: str, progress: ProgressReporter | None = None) -> Path:
    """Use another library: a file or a folder, or a version. The one in use stays if that does not work here."""
    folder = find_library(choice, progress)
    if (fault := find_fault(folder)) is not None:
        raise BrokenLibrary(f"{folder} is not used: {fault} The library in use has not changed.")
    llama_cpp_package.use_library(folder)
    return folder


def find_library(choice: str, progress: ProgressReporter | None = None) -> Path:
    """The folder of the library; a version is fetched, or compiled from llama-cpp-python's source."""
    path = Path(choice).expanduser()
    if path.exists():
        return (path if path.is_dir() else path.parent).resolve()
    if package := next((each for each in PACKAGES if each.version == choice and each in packages_for("cpu")), None):
        return fetch(package, progress)
    if re.fullmatch(r"20\d\d(\.\d+){2,3}", choice):
        return llama_cpp_package.fetch_wheel(choice, progress)
    if re.fullmatch(r"0\.\d+\.\d+", choice):
        return llama_cpp_build.build(release=choice)
    raise InvalidRequest(
        f"{choice!r} is neither a file, a folder nor a version: use a version of the npm package such as 3.22.1, of "
        "xllamacpp such as 2026.10.11549, or of llama-cpp-python such as 0.3.36",
        code="library_unknown",
    )


def set_up_build(*, fresh: bool = False) -> Path:
    """Build a library for this machine and use it. If the copy in pip's cache does not work, compile it again."""
    folder = llama_cpp_build.build(fresh=fresh)
    fault = find_fault(folder)
    if fault is not None and not fresh:
        folder = llama_cpp_build.build(fresh=True)
        fault = find_fault(folder)
    if fault is not None:
        raise BrokenLibrary(f"llama.cpp was built, but it does not work on this machine: {fault}")
    llama_cpp_package.use_library(folder)
    return folder


def set_up_media(*, fresh: bool = False) -> Path:
    """Build libmtmd, for images and audio, beside the library in use. Returns its file."""
    return media_build.build(ensure_library(), fresh=fresh)


def build_in_background() -> Path:
    """Start a build that outlives this process; the next start uses its library. Returns the log."""
    log = llama_cpp_build.build_log().with_name("llama_cpp-setup.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    priority = ["nice"] if shutil.which("nice") else []
    with log.open("w") as file:
        subprocess.Popen(  # noqa: S603  our own program
            [*priority, sys.executable, "-P", "-m", "modelyard", "setup", "--build"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    return log


# --- is a build worth it? ---------------------------------------------------------------------------------------------

# Speed of a build with zig as a multiple of the prebuilt library's: prefill, decode. bench/libraries.py measures it;
# docs/performance.md has the figures. The first row whose instruction the CPU has counts.
BUILD_GAINS = (("amx_int8", 1.2, 1.1), ("avx512f", 1.2, 1.1))
_WORTH_IT = 1.1


def build_gain(folder: Path) -> tuple[float, float] | None:
    """How much faster a library built here is than this one (prefill, decode); None: not known, or not worth it."""
    if folder not in [llama_cpp_package.package_folder(package) for package in packages_for("cpu")]:
        return None
    found = next(((prefill, decode) for name, prefill, decode in BUILD_GAINS if name in cpu_features()), None)
    return found if found is not None and max(found) > _WORTH_IT else None


def setup_hint(folder: Path) -> str | None:
    """What else is worth knowing after the set-up: a build, or another engine for many users of a GPU."""
    return build_hint(folder) or (gpu_library.many_users_hint(find_gpus()) if has_gpu_backend(folder) else None)


def build_hint(folder: Path) -> str | None:
    """One sentence that offers the build if it is worth it."""
    gain = build_gain(folder)
    if gain is None:
        return None
    return (
        f"On a CPU like this one a library that is compiled here reads prompts {gain[0]:.1f} times and writes "
        f"{gain[1]:.1f} times as fast: `modelyard setup --build --background` compiles it while you work, and the next "
        "start uses it."
    )
