"""Builds libmtmd, which encodes images and audio, beside a llama.cpp library: `modelyard setup --media`.

No prebuilt package has it. Its source is in the pinned release of llama-cpp-python, the same release of llama.cpp as
the packages', and it uses libllama and ggml through their C functions only. So it is compiled alone, in a third of the
time of a whole build, and works with the library of any device.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from modelyard.library import llama_cpp_build
from modelyard.library.cache_dir import cache_dir, file_lock
from modelyard.library.default_model import pip_command
from modelyard.library.llama_cpp_build import BuildFailed, display, print_status, run
from modelyard.library.llama_cpp_package import PACKAGES, package_folder

LLAMA_CPP_RELEASE = "v0.5.0"  # of the source
_LIBRARY = re.compile(r"(?:lib)?(llama|ggml|ggml-base)(?:\.v[\d.]+)?\.(?:so|dylib)")
_NEEDED = re.compile(r"[^/]+/vendor/llama\.cpp/(?:tools/mtmd|vendor|include|ggml/include)/.*\.(?:c|cpp|h)")
# libmtmd's helpers call these, and the prebuilt libraries lack them. We do not use those helpers.
_ABSENT = (
    "llama_batch_ext_add_embd",
    "llama_batch_ext_add_token",
    "llama_batch_ext_clear",
    "llama_batch_ext_free",
    "llama_batch_ext_init",
    "llama_batch_ext_set_output_logits",
    "llama_batch_ext_set_pos",
    "llama_process",
)
_CMAKE = """\
cmake_minimum_required(VERSION 3.20)
project(mtmd C CXX)
set(SOURCE ${LLAMA_CPP}/tools/mtmd)
set(HASH ${LLAMA_CPP}/vendor/hash)
file(GLOB files ${SOURCE}/mtmd*.cpp ${SOURCE}/clip.cpp ${SOURCE}/models/*.cpp ${HASH}/hash.cpp ${HASH}/*/*.c)
list(FILTER files EXCLUDE REGEX "mtmd-cli|mtmd-helper-gen")
set_source_files_properties(${HASH}/sha1/sha1.c PROPERTIES LANGUAGE CXX)
find_package(Threads REQUIRED)
add_library(mtmd SHARED ${files} absent.c)
target_compile_features(mtmd PRIVATE cxx_std_17)
target_compile_definitions(mtmd PRIVATE LLAMA_BUILD LLAMA_SHARED GGML_SHARED)
target_include_directories(
  mtmd PRIVATE ${SOURCE} ${LLAMA_CPP}/include ${LLAMA_CPP}/ggml/include ${LLAMA_CPP}/vendor ${HASH})
target_link_libraries(mtmd PRIVATE Threads::Threads ${LIBRARIES})
if(NOT APPLE)
  target_link_options(mtmd PRIVATE -s)
endif()
set(PLACE "$<IF:$<BOOL:${APPLE}>,@loader_path,\\$ORIGIN>")
set_target_properties(mtmd PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "${PLACE}")
"""


def build(folder: Path, *, fresh: bool = False, env: Mapping[str, str] = os.environ) -> Path:
    """libmtmd in the folder of a llama.cpp library; it is compiled if it is missing, or `fresh`. Other processes wait
    for the first."""
    target = folder / ("libmtmd.dylib" if sys.platform == "darwin" else "libmtmd.so")
    if target.is_file() and not fresh:
        return target
    try:
        with file_lock(folder / ".media.lock", lambda: print_status("another process is building it: waiting for it")):
            if fresh or not target.is_file():
                _build(target, env)
    except OSError as error:  # no space, no permission
        raise BuildFailed(f"libmtmd cannot be built in {folder}: {error}") from error
    return target


def _build(target: Path, env: Mapping[str, str]) -> None:
    libraries = link_libraries(target.parent)
    has_pip = importlib.util.find_spec("pip") is not None
    command = llama_cpp_build.install_command(sys.executable, has_pip, shutil.which("uv"))
    plan = llama_cpp_build.plan_build(env, sys.platform, any(map(shutil.which, ("cc", "gcc", "clang"))))
    log = cache_dir(env) / "libmtmd-build.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    print_status(f"Building libmtmd for images and audio {plan.description}: 2 to 5 minutes, once. The log is {log}")
    with tempfile.TemporaryDirectory(prefix=".media-", dir=target.parent) as name, log.open("w") as file:
        work = Path(name)
        environment = llama_cpp_build.build_environment(env, plan)
        llama_cpp_build.add_tools(work, plan, command, environment, file.write)
        source = _fetch_source(work, file.write)
        (work / "CMakeLists.txt").write_text(_CMAKE)
        (work / "absent.c").write_text(absent_functions(libraries[0].read_bytes()))
        linked = ";".join(map(str, libraries))
        options = [f"-DLLAMA_CPP={source}", f"-DLIBRARIES={linked}", "-DCMAKE_BUILD_TYPE=Release"]
        out, cmake = str(work / "out"), str(work / "bin" / "cmake")
        with display() as show:
            run([cmake, "-G", "Ninja", "-S", name, "-B", out, *options], environment, file.write, lambda _: None)
            run([cmake, "--build", out], environment, file.write, show)
        (work / "out" / target.name).replace(target)


def link_libraries(folder: Path) -> list[Path]:
    """libllama, libggml and libggml-base, which libmtmd is linked to."""
    for package in PACKAGES:
        if package_folder(package) == folder and package.release != LLAMA_CPP_RELEASE:
            raise BuildFailed(
                f"The prebuilt library for this machine is llama.cpp {package.release}, and the source of libmtmd is "
                f"{LLAMA_CPP_RELEASE}: `modelyard setup --build` compiles both."
            )
    found: dict[str, Path] = {}
    for file in sorted(folder.iterdir(), key=lambda file: len(file.name)):
        if name := _LIBRARY.fullmatch(file.name):
            found.setdefault(name[1], file)
    missing = [name for name in ("llama", "ggml", "ggml-base") if name not in found]
    if missing:
        raise BuildFailed(f"There is no lib{missing[0]} in {folder} that libmtmd could be linked to.")
    return [found[name] for name in ("llama", "ggml", "ggml-base")]


def absent_functions(library: bytes) -> str:
    """C code of the functions that the library lacks: whoever calls them ends the process."""
    names = [name for name in _ABSENT if b"\0" + name.encode() + b"\0" not in library]
    return "#include <stdlib.h>\n" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in names)


def _fetch_source(work: Path, log: Callable[[str], object]) -> Path:
    """llama.cpp's folder in the source package."""
    print_status(f"Fetching the source, {llama_cpp_build.SOURCE} …")
    options = ["--no-deps", "--no-binary", "llama-cpp-python", "--disable-pip-version-check", "--no-input"]
    run(
        [*pip_command(), "download", *options, "--dest", str(work), llama_cpp_build.SOURCE],
        os.environ,
        log,
        lambda _: None,
    )
    archive = next(work.glob("llama_cpp_python-*.tar.gz"), None)
    if archive is None:
        raise BuildFailed(f"The package index has no source package of {llama_cpp_build.SOURCE}.")
    with tarfile.open(archive) as source:
        source.extractall(work, [member for member in source if _NEEDED.fullmatch(member.name)], filter="data")
    return next(work.glob("llama_cpp_python-*/vendor/llama.cpp"))
