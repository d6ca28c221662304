"""`modelyard doctor`: what this machine has, what Modelyard uses of it, what is missing, and the command that fixes it.

Each section reads one area and returns lines; none of them raises. A line is an error only if something does not work
that is needed: the engine's library, the configuration, the cache folder.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil
from msgspec import Struct

from modelyard import __version__, plugins
from modelyard.config.library_models import read_library_models
from modelyard.config.load import load_config
from modelyard.config.problems import ConfigError
from modelyard.config.settings import LoadedConfig
from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound
from modelyard.core.units import format_size
from modelyard.engines.llama_cpp import gpu_library, selftest
from modelyard.engines.llama_cpp.estimate import draft_kinds
from modelyard.engines.llama_cpp.library import cpu_features, has_gpu_backend
from modelyard.engines.llama_cpp.model_shape import read_model_shape
from modelyard.engines.llama_cpp.selftest import SelfTest
from modelyard.libllama import FEATURES
from modelyard.library import cores
from modelyard.library.cache_dir import cache_dir, models_dir
from modelyard.library.cgroup import cgroup_limits
from modelyard.library.llama_cpp_package import BUILD_PREFIX, library_folder
from modelyard.library.model_files import find_model_file
from modelyard.plugins import MissingLibrary
from modelyard.protocols.common.openai_fields import DEFAULT_MODEL
from modelyard.server.can_run import unrunnable_models
from modelyard.server.running_servers import RunningServer, running_servers
from modelyard.telemetry import gpus
from modelyard.telemetry.gpus import FoundGpus, NvidiaDriver, Vendor

Status = Literal["ok", "note", "warning", "error"]


class Line(Struct, frozen=True):
    """One finding; `fix` is a command or a sentence that says what to do."""

    name: str
    value: str
    status: Status = "ok"
    fix: str = ""


class Section(Struct, frozen=True):
    title: str
    lines: tuple[Line, ...]


def examine(config: Path | None = None, env: Mapping[str, str] = os.environ) -> list[Section]:
    """Takes a few seconds: drivers start, and the self-test decodes."""
    found = gpus.find_gpus()
    return [
        Section("machine", tuple(machine_lines())),
        Section("GPU", tuple(gpu_lines(found))),
        Section("llama.cpp", tuple(library_lines(found, env))),
        Section("other engines", tuple(engine_lines())),
        Section("server", tuple(server_lines(config, env))),
        Section("storage", tuple(storage_lines(env))),
    ]


def is_broken(sections: Sequence[Section]) -> bool:
    return any(line.status == "error" for section in sections for line in section.lines)


# --- the machine ------------------------------------------------------------------------------------------------------

_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "asimddp", "i8mm", "sve")


def machine_lines() -> Iterator[Line]:
    yield Line("Modelyard", f"{__version__}, Python {platform.python_version()} ({sys.executable})")
    yield Line("system", f"{_system_name()}, {platform.machine()}, kernel {platform.release()}")
    features = " ".join(name for name in _FEATURES if name in cpu_features())
    yield Line("CPU", f"{_cpu_name()}, {cores.physical()} cores, {cores.logical()} threads; {features}")
    memory = psutil.virtual_memory()
    limits = cgroup_limits()
    yield Line("memory", f"{format_size(memory.total)}, {format_size(memory.available)} free")
    if limits.memory is not None or limits.cpus is not None:
        parts = [f"{format_size(limits.memory)} of memory"] if limits.memory is not None else []
        parts += [f"{limits.cpus:g} CPUs"] if limits.cpus is not None else []
        yield Line("container limit", ", ".join(parts), "note")


def _system_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform(terse=True)


def _cpu_name() -> str:
    names = (line.partition(":")[2].strip() for line in selftest.cpu_description().splitlines() if "name" in line)
    return next(names, platform.processor() or platform.machine())


# --- GPUs -------------------------------------------------------------------------------------------------------------

_DRIVERS: dict[Vendor, str] = {
    "nvidia": "install NVIDIA's driver: https://www.nvidia.com/drivers",
    "amd": "install the Vulkan driver and loader (Debian, Ubuntu: apt install mesa-vulkan-drivers libvulkan1)",
    "intel": "install the Vulkan driver and loader (Debian, Ubuntu: apt install mesa-vulkan-drivers libvulkan1)",
}


def gpu_lines(found: FoundGpus) -> Iterator[Line]:
    if found.apple is not None:
        yield Line("Apple", f"{found.apple.name}, shares {format_size(found.apple.memory)} of memory")
    if isinstance(found.nvidia, NvidiaDriver):
        version = ".".join(map(str, found.nvidia.cuda))
        for gpu in found.nvidia.gpus:
            capability = ".".join(map(str, gpu.compute_capability))
            sizes = f"{format_size(gpu.memory)}, {format_size(gpu.free)} free"
            yield Line("NVIDIA", f"{gpu.name}, compute capability {capability}, {sizes}")
        yield Line("NVIDIA driver", f"{found.nvidia.version}, runs CUDA {version}")
        if hint := gpu_library.many_users_hint(found):
            yield Line("many users", hint, "note", "docs/gpu-performance.md")
    else:
        is_needed = "nvidia" in found.pci
        yield Line("NVIDIA", found.nvidia, "warning" if is_needed else "note")
    if isinstance(found.vulkan, str):
        yield Line("Vulkan", found.vulkan, "note")
    else:
        for device in found.vulkan:
            kind = "computes in software: not used" if device.kind == "cpu" else device.kind
            api = ".".join(map(str, device.api))
            yield Line("Vulkan", f"{device.name} ({kind}), Vulkan {api}, {format_size(device.memory)}")
    for vendor in found.without_driver:
        yield Line(vendor, "there is a GPU of this vendor, and no driver offers it", "warning", _DRIVERS[vendor])


# --- llama.cpp --------------------------------------------------------------------------------------------------------

Examiner = Callable[[Path], SelfTest]


def library_lines(
    found: FoundGpus, env: Mapping[str, str] = os.environ, examiner: Examiner | None = None
) -> Iterator[Line]:
    """The library in use, its self-test, and why the libraries for the GPU are not used."""
    try:
        folder = library_folder(env)
    except MissingLibrary:
        yield Line("library", "there is none yet; the first start fetches it", "warning", "modelyard setup")
        yield from _candidate_lines(found)
        return
    yield Line("library", f"{describe_library(folder)}, in {folder}")
    on_gpu = has_gpu_backend(folder)
    result = (examiner or _examine)(folder)
    if result.fault is not None:
        yield Line("self-test", result.fault, "error", "modelyard setup")
    else:
        places = ", ".join(result.gpus) or "the CPU"
        yield Line("self-test", f"llama.cpp {result.version} passed in {result.seconds:.1f} s on {places}")
        yield _speculation_line(result)
        if on_gpu and not result.gpus:
            yield Line("GPU", "the library is for a GPU, and it finds none: the CPU is used", "warning")
    usable = [each for each in gpu_library.candidates(found) if each.misfit is None]
    if usable and not on_gpu:
        title = gpu_library.TITLES[usable[0].variant]
        yield Line("GPU", f"the library in use is for CPUs; {title} may work here", "warning", "modelyard setup")
    yield from _candidate_lines(found)


def _speculation_line(result: SelfTest) -> Line:
    """Which kinds the library can do."""
    kinds = ["ngram", "draft", *(feature for feature in FEATURES if feature not in result.lacking)]
    lacking = "".join(f"; not {feature}: it does not export {names}" for feature, names in result.lacking.items())
    return Line("speculation", ", ".join(kinds) + lacking, "note" if lacking else "ok")


def _candidate_lines(found: FoundGpus) -> Iterator[Line]:
    listed = gpu_library.candidates(found)
    for candidate in listed:
        if candidate.misfit is None:
            yield Line("GPU library", f"{gpu_library.TITLES[candidate.variant]} has code for this GPU")
        else:
            value = f"{gpu_library.TITLES[candidate.variant]} cannot be used: {candidate.misfit}"
            yield Line("GPU library", value, "note", _loader_fix(candidate))
    if listed and all(candidate.misfit for candidate in listed):
        yield Line("GPU library", gpu_library.no_library(found), "warning", gpu_library.BUILD_COMMAND)


def _loader_fix(candidate: gpu_library.Candidate) -> str:
    is_missing = candidate.variant == "vulkan" and "loader" in (candidate.misfit or "")
    return "apt install libvulkan1, or your system's package of Vulkan's loader" if is_missing else ""


def _examine(folder: Path) -> SelfTest:
    return selftest.examine_library(folder=folder)


def describe_library(folder: Path) -> str:
    """Where the library comes from and its release, as far as its files say."""
    try:
        build = json.loads((folder / "_nlcBuildMetadata.json").read_text("utf-8"))["buildOptions"]
        release = f"llama.cpp {build['llamaCpp']['release']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "llama.cpp, built here" if folder.name.startswith(BUILD_PREFIX) else "llama.cpp of another origin"
    device = next((name for name in ("cuda12", "cuda", "vulkan", "metal") if f"-{name}-" in folder.name), "cpu")
    return f"prebuilt {release} ({device})"


# --- other engines ----------------------------------------------------------------------------------------------------


def engine_lines() -> Iterator[Line]:
    """The programs that the engines would start, and the packages that they use."""
    for name in plugins.names("engines"):
        try:
            engine = plugins.engine(name)
        except ModelyardError as error:
            yield Line(name, error.message, "warning")
            continue
        if engine.find_program is not None:
            yield _binary_line(engine.title or name, _program(engine.find_program), f"backend {name}")
        elif engine.distributions:
            yield _package_line(engine.title or name, engine.distributions, f"backend {name}")
    yield _package_line("Ray", ("ray",), "serve --cluster")


def _package_line(title: str, packages: Sequence[str], use: str) -> Line:
    version = next(filter(None, map(_installed_version, packages)), None)
    return Line(title, f"{version} ({use})" if version else f"not installed ({use})", "ok" if version else "note")


def _program(find: Callable[[], str]) -> str | None:
    try:
        return find()
    except NotFound:
        return None


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _binary_line(title: str, path: str | None, use: str) -> Line:
    if path is None:
        return Line(title, f"no such program ({use})", "note")
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)  # noqa: S603
        lines = (done.stdout + done.stderr).strip().splitlines()
        version = next((line for line in lines if "version" in line), lines[0] if lines else "no version")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Line(title, f"{path} does not start: {error}", "warning")
    return Line(title, f"{path}, {version} ({use})")


# --- the server -------------------------------------------------------------------------------------------------------


def server_lines(config: Path | None, env: Mapping[str, str] = os.environ) -> Iterator[Line]:
    """The configuration's files, the running servers, and whether the configured port is free."""
    try:
        loaded = load_config(config, env=env, library=read_library_models)
    except ConfigError as error:
        first = error.problems[0] if error.problems else None
        reason = f"{len(error.problems)} problems, the first: {first}" if first else str(error)
        yield Line("configuration", reason, "error", "modelyard check")
        return
    except ModelyardError as error:
        yield Line("configuration", error.message, "error", "modelyard check")
        return
    yield Line("configuration", ", ".join(map(str, loaded.sources)))
    faults = unrunnable_models(loaded.config, set_up=False)
    needed = loaded.config.needed_models()
    for name, message in faults.items():
        yield Line("model", f"{name}: {message}", "error" if name in needed else "note", "modelyard check")
    if able := [name for name in loaded.config.models if name not in faults]:
        yield Line("models", f"{', '.join(able)} can be loaded here")
        yield from _draft_lines(loaded, able)
    with suppress(NotFound, InvalidRequest):  # then a request has to name a model
        target = loaded.config.router().resolve(DEFAULT_MODEL, "/v1/chat/completions")
        yield Line("without a name", f"{target.model} answers ({target.rule or 'the only one that can'})")
    try:
        servers = running_servers(env)
    except (OSError, ModelyardError) as error:
        yield Line("running", f"unknown: {error}", "warning")
        servers = []
    for server in servers:
        yield Line("running", f"{server.url}, process {server.pid}")
    yield _port_line(loaded, servers)


def _draft_lines(loaded: LoadedConfig, names: Sequence[str]) -> Iterator[Line]:
    """The kinds of speculation that models of llama.cpp can do, by their files."""
    for name in names:
        settings = loaded.config.models[name]
        file = find_model_file(settings.path) if settings.backend == "llama_cpp" and settings.path else None
        if file is not None:
            kinds = draft_kinds(read_model_shape(file))
            value = ", ".join(kinds) or "none: it does not generate, or llama.cpp cannot take tokens of it back"
            yield Line("speculation", f"{name}: {value}")


def _port_line(loaded: LoadedConfig, servers: Sequence[RunningServer]) -> Line:
    host, port = loaded.config.http.host, loaded.config.http.port
    if any(server.port == port for server in servers):
        return Line("port", f"{host}:{port}, in use by Modelyard")
    if is_port_free(host, port):
        return Line("port", f"{host}:{port}, free")
    return Line("port", f"{host}:{port} is in use by another program", "warning", "modelyard serve --port N")


def is_port_free(host: str, port: int) -> bool:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True


# --- storage ----------------------------------------------------------------------------------------------------------

_LOW_SPACE = 2 << 30


def storage_lines(env: Mapping[str, str] = os.environ) -> Iterator[Line]:
    folder = cache_dir(env)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        yield Line("cache", f"{folder} cannot be written to", "error", "set MODELYARD_CACHE to a folder of your own")
        return
    free = shutil.disk_usage(existing).free
    value = f"{folder}, {format_size(_size(folder))} used, {format_size(free)} free"
    if free < _LOW_SPACE:
        yield Line("cache", value, "warning", "models need space: set MODELYARD_CACHE to another disk")
    else:
        yield Line("cache", value)
    yield Line("models", f"{models_dir(env)}, {format_size(_size(models_dir(env)))}")


def _size(folder: Path) -> int:
    """Bytes on the disk; a file with several names counts once."""
    files: dict[tuple[int, int], int] = {}
    for path in folder.rglob("*"):
        try:
            stat = path.lstat()
        except OSError:
            continue
        files[stat.st_dev, stat.st_ino] = stat.st_blocks * 512 if hasattr(stat, "st_blocks") else stat.st_size
    return sum(files.values())
