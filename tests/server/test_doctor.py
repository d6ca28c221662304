"""`modelyard doctor` with stand-ins for machines that we do not have."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner

from modelyard.cli.app import app
from modelyard.engines.llama_cpp import gpu_library
from modelyard.engines.llama_cpp.selftest import SelfTest
from modelyard.library.llama_cpp_package import use_library
from modelyard.server import doctor
from modelyard.server.doctor import (
    Line,
    describe_library,
    engine_lines,
    gpu_lines,
    is_port_free,
    library_lines,
    machine_lines,
    server_lines,
    storage_lines,
)
from modelyard.telemetry.gpus import AppleGpu, FoundGpus, NvidiaDriver, NvidiaGpu, VulkanGpu
from tests.engines.llama_cpp.architectures import model

GIB = 2**30
LOADER = "there is no Vulkan loader (libvulkan.so.1)"
NOTHING = FoundGpus(nvidia="there is no NVIDIA driver", vulkan=LOADER)
H200 = FoundGpus(
    nvidia=NvidiaDriver(
        version="580.159.04",
        cuda=(13, 0),
        gpus=(NvidiaGpu(name="NVIDIA H200", compute_capability=(9, 0), memory=140 * GIB, free=139 * GIB),),
    ),
    vulkan=LOADER,
    pci=("nvidia",),
)


def texts(lines: Any) -> list[str]:
    return [f"{line.status} {line.name}: {line.value}" + (f" → {line.fix}" if line.fix else "") for line in lines]


def test_the_machine_is_described() -> None:
    names = [line.name for line in machine_lines()]
    assert names[:4] == ["Modelyard", "system", "CPU", "memory"]


def test_gpus_are_listed_with_what_decides_about_the_library() -> None:
    assert texts(gpu_lines(H200)) == [
        "ok NVIDIA: NVIDIA H200, compute capability 9.0, 140.0 GiB, 139.0 GiB free",
        "ok NVIDIA driver: 580.159.04, runs CUDA 13.0",
        "note many users: for tens of answers at once vLLM (backend vllm, safetensors) writes about twice as fast as "
        "llama.cpp; for a few people llama.cpp is as fast → docs/gpu-performance.md",
        f"note Vulkan: {LOADER}",
    ]
    assert isinstance(H200.nvidia, NvidiaDriver)
    small = structs.replace(H200.nvidia, gpus=(structs.replace(H200.nvidia.gpus[0], memory=8 * GIB),))
    assert gpu_library.many_users_hint(structs.replace(H200, nvidia=small)) is None
    software = VulkanGpu(name="llvmpipe", vendor="other", kind="cpu", memory=2 * GIB, api=(1, 3))
    found = FoundGpus(nvidia="there is no NVIDIA driver", vulkan=(software,), pci=("amd",))
    lines = texts(gpu_lines(found))
    assert "ok Vulkan: llvmpipe (computes in software: not used), Vulkan 1.3, 2.0 GiB" in lines
    assert lines[-1].startswith("warning amd: there is a GPU of this vendor, and no driver offers it → install the Vul")
    apple = FoundGpus(nvidia="", vulkan="", apple=AppleGpu(name="Apple GPU", memory=32 * GIB))
    assert texts(gpu_lines(apple))[0] == "ok Apple: Apple GPU, shares 32.0 GiB of memory"


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(gpu_library, "this_platform", lambda: "linux-x64")
    values = {"MODELYARD_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


def library(env: dict[str, str], *files: str, name: str = "linux-x64-3.22.1") -> Path:
    folder = Path(env["MODELYARD_CACHE"]) / "llama_cpp" / name
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).touch()
    release = {"buildOptions": {"llamaCpp": {"release": "v0.5.0"}}}
    (folder / "_nlcBuildMetadata.json").write_text(json.dumps(release))
    use_library(folder, env)
    return folder


def test_a_library_without_the_functions_of_mtp_says_which(env: dict[str, str]) -> None:
    library(env, "libllama.so")
    result = SelfTest(None, (), 1.0, "0.5.0", {"mtp": "llama_set_embeddings_nextn"})
    lines = texts(library_lines(NOTHING, env, lambda _: result))
    assert "note speculation: ngram, draft, eagle3; not mtp: it does not export llama_set_embeddings_nextn" in lines


def test_an_unused_gpu_is_a_warning_with_the_command_that_uses_it(env: dict[str, str]) -> None:
    folder = library(env, "libllama.so")
    lines = texts(library_lines(H200, env, lambda _: SelfTest(None, (), 1.0)))
    assert lines[0] == f"ok library: prebuilt llama.cpp v0.5.0 (cpu), in {folder}"
    assert lines[1] == "ok self-test: llama.cpp ? passed in 1.0 s on the CPU"
    assert lines.pop(2) == "ok speculation: ngram, draft, mtp, eagle3"
    assert lines[2] == (
        "warning GPU: the library in use is for CPUs; the CUDA 12 library may work here → modelyard setup"
    )
    assert lines[3].startswith("note GPU library: the CUDA 13 library cannot be used: it has no machine code")
    assert lines[4] == "ok GPU library: the CUDA 12 library has code for this GPU"
    assert lines[5].endswith("→ apt install libvulkan1, or your system's package of Vulkan's loader")


def test_a_library_on_the_gpu_is_reported_with_the_device(env: dict[str, str]) -> None:
    folder = library(env, "libllama.so", "libggml-cuda.so", name="linux-x64-cuda12-3.22.1")
    assert describe_library(folder) == "prebuilt llama.cpp v0.5.0 (cuda12)"
    lines = texts(library_lines(H200, env, lambda _: SelfTest(None, ("CUDA0: NVIDIA H200, 139.8 GiB",), 1.5)))
    assert lines[1] == "ok self-test: llama.cpp ? passed in 1.5 s on CUDA0: NVIDIA H200, 139.8 GiB"
    assert not any(line.startswith("warning") for line in lines)
    hidden = texts(library_lines(NOTHING, env, lambda _: SelfTest(None, (), 1.5)))
    assert "warning GPU: the library is for a GPU, and it finds none: the CPU is used" in hidden


def test_a_library_that_is_broken_is_an_error(env: dict[str, str]) -> None:
    library(env, "libllama.so")
    lines = list(library_lines(NOTHING, env, lambda _: SelfTest("it died")))
    assert lines[1] == Line("self-test", "it died", "error", "modelyard setup")


def test_a_gpu_that_no_prebuilt_library_supports_gets_the_build_command(env: dict[str, str]) -> None:
    library(env, "libllama.so")
    old = FoundGpus(
        nvidia=NvidiaDriver(
            version="470",
            cuda=(11, 4),
            gpus=(NvidiaGpu(name="K40", compute_capability=(3, 5), memory=1, free=1),),
        ),
        vulkan=LOADER,
    )
    last = list(library_lines(old, env, lambda _: SelfTest(None)))[-1]
    assert (last.status, last.fix) == ("warning", "CMAKE_ARGS=-DGGML_CUDA=ON modelyard setup --build")


def test_engines_that_are_not_installed_are_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\necho 'version: 1.2.3' >&2\n")
    program.chmod(0o755)
    lines = texts(engine_lines())
    assert f"ok llama-server: {program}, version: 1.2.3 (backend llama_server)" in lines
    assert "note vllm serve: no such program (backend vllm_serve)" in lines
    assert "note vLLM: not installed (backend vllm)" in lines
    assert not any(line.startswith(("warning", "error")) for line in lines)


def test_a_wrong_configuration_is_an_error_that_names_the_first_problem(env: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text('[models.m]\nbackend = "llama_cpp"\npath = "x.gguf"\nn_gpu_layers = "many"\n')
    (line,) = server_lines(file, env)
    assert (line.status, line.fix) == ("error", "modelyard check")
    assert "n_gpu_layers" in line.value


def test_the_kinds_of_speculation_that_a_model_can_do_are_named(env: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "modelyard.toml"
    names = {"qwen": "qwen35-mtp", "step": "step35-mtp", "mamba": "mamba2", "gemma": "gemma4"}
    models = "".join(f'[models.{name}]\npath = "{model(of)}"\nn_ctx = 64\n' for name, of in names.items())
    file.write_text(models)
    lines = texts(server_lines(file, env))
    assert "ok speculation: qwen: ngram, draft, mtp (1 layer of its own), eagle3 (with a file for it)" in lines
    assert "ok speculation: step: ngram, draft, mtp (3 layers of its own)" in lines
    assert "ok speculation: gemma: ngram, draft, mtp (with an assistant's file), eagle3 (with a file for it)" in lines
    assert any(line.startswith("ok speculation: mamba: none") for line in lines)


def test_a_port_of_another_program_is_a_warning(env: dict[str, str], tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        file = tmp_path / "m.toml"
        file.write_text(f'[http]\nport = {port}\n[models.m]\nbackend = "fake"\n')
        last = list(server_lines(file, env))[-1]
        assert (last.status, last.fix) == ("warning", "modelyard serve --port N")
        assert not is_port_free("127.0.0.1", port)
    assert is_port_free("127.0.0.1", 0)


def test_the_cache_folder_is_measured(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    library(env, "libllama.so")
    first, _ = storage_lines(env)
    assert first.status == "ok"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    assert next(iter(storage_lines(env))).status == "warning"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert next(iter(storage_lines(env))).status == "error"


@pytest.mark.parametrize(("status", "code"), [("warning", 0), ("error", 1)])
def test_the_command_prints_text_or_json_and_fails_only_for_errors(
    status: Any, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [doctor.Section("llama.cpp", (Line("library", "none [yet]", status, "modelyard setup"),))]
    monkeypatch.setattr(doctor, "examine", lambda _: found)
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == code
    assert "none [yet]" in shown.output
    assert "→ modelyard setup" in shown.output
    answer = CliRunner().invoke(app, ["doctor", "--json"])
    assert answer.exit_code == code
    assert json.loads(answer.output)[0]["lines"][0] == {
        "name": "library",
        "value": "none [yet]",
        "status": status,
        "fix": "modelyard setup",
    }
