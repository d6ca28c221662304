"""The build of llama.cpp: its plan, its scripts, its progress, and where the result goes. No compiler runs here."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from modelyard.library import cores
from modelyard.library import llama_cpp_build as setup
from modelyard.library.llama_cpp_build import BuildFailed


def ignore(*_: object) -> None:
    pass


# --- decisions --------------------------------------------------------------------------------------------------------


def test_zig_is_the_default_even_if_the_system_has_a_compiler():
    plan = setup.plan_build({}, "linux", True)
    assert (plan.zig, plan.custom, plan.cmake_args) == (True, False, setup.CMAKE_ARGS)


@pytest.mark.parametrize("name", ["CC", "CXX"])
def test_a_custom_compiler_is_used_without_caches(name: str):
    plan = setup.plan_build({name: "clang"}, "linux", True)
    assert (plan.zig, plan.custom) == (False, True)


def test_custom_cmake_arguments_come_last_and_win():
    plan = setup.plan_build({"CMAKE_ARGS": "-DGGML_CUDA=ON -DGGML_OPENMP=ON"}, "linux", True)
    assert (plan.zig, plan.custom) == (False, True)
    assert plan.cmake_args == f"{setup.CMAKE_ARGS} -DGGML_CUDA=ON -DGGML_OPENMP=ON"


def test_custom_arguments_without_a_compiler_go_to_zig():
    plan = setup.plan_build({"CMAKE_ARGS": "-DGGML_NATIVE=OFF"}, "linux", False)
    assert (plan.zig, plan.custom) == (True, True)


def test_a_mac_uses_its_own_compiler_if_it_has_one():
    assert not setup.plan_build({}, "darwin", True).zig
    assert setup.plan_build({}, "darwin", False).zig


def test_the_build_does_not_inherit_variables_of_make():
    plan = setup.plan_build({}, "linux", False)
    env = setup.build_environment({"MAKEFLAGS": "-j1", "MAKELEVEL": "1", "HOME": "h"}, plan)
    jobs = env.pop("CMAKE_BUILD_PARALLEL_LEVEL")
    assert int(jobs) == cores.logical()
    assert env == {"CMAKE_GENERATOR": "Ninja", "HOME": "h", "CMAKE_ARGS": setup.CMAKE_ARGS}
    assert setup.build_environment({"CMAKE_GENERATOR": "Xcode"}, plan)["CMAKE_GENERATOR"] == "Xcode"


def test_pip_is_used_if_the_environment_has_it_else_uv():
    assert setup.install_command("py", True, "/bin/uv")[:4] == ["py", "-m", "pip", "install"]
    assert setup.install_command("py", False, "/bin/uv")[:5] == ["/bin/uv", "pip", "install", "--python", "py"]
    with pytest.raises(BuildFailed, match="neither pip nor uv"):
        setup.install_command("py", False, None)


def test_a_rebuild_skips_the_cache_of_either_installer():
    assert "--no-cache-dir" in setup.no_cache_options(setup.install_command("py", True, None))
    assert "--no-cache" in setup.no_cache_options(setup.install_command("py", False, "uv"))


# --- scripts ----------------------------------------------------------------------------------------------------------


def test_a_wrapper_adds_its_arguments_before_others(tmp_path: Path):
    script = tmp_path / "zig-cc"
    script.write_text(setup.wrapper_script(Path("/bin/echo"), "cc"))
    script.chmod(stat.S_IRWXU)
    assert subprocess.run([script, "-c", "a b.c"], capture_output=True, text=True).stdout == "cc -c a b.c\n"


def test_a_wrapper_quotes_the_programs_path():
    assert setup.wrapper_script(Path("/a b/zig"), "c++") == "#!/bin/sh\nexec '/a b/zig' c++ \"$@\"\n"


@pytest.mark.parametrize(
    ("machine", "flags"), [("x86_64", "-mno-avx512fp16 "), ("AMD64", "-mno-avx512fp16 "), ("aarch64", "")]
)
def test_scripts_run_the_tools_and_zig_only_if_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, flags: str
):
    monkeypatch.setattr("platform.machine", lambda: machine)
    for place in ("cmake/data/bin/cmake", "bin/ninja", "bin/cmake"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    scripts = setup.tool_scripts(tmp_path, zig=True)
    assert set(scripts) == {"cmake", "ninja", "zig-cc", "zig-c++"}
    assert f"{tmp_path}/cmake/data/bin/cmake" in scripts["cmake"], "not the launcher, which needs its package"
    assert scripts["zig-c++"].splitlines()[1] == f'exec {tmp_path}/ziglang/zig c++ {flags}"$@"'
    assert set(setup.tool_scripts(tmp_path, zig=False)) == {"cmake", "ninja"}


def test_a_package_without_its_program_is_named(tmp_path: Path):
    with pytest.raises(BuildFailed, match="has no program ninja"):
        setup.binary(tmp_path, "ninja")


# --- progress ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "done"),
    [
        ("  [35/140] /x/zig-cc -DGGML_BUILD -c ggml.c", 0.25),
        ("DEBUG [140/140] linking", 1.0),
        ("[1/2] Building C object CMakeFiles/cmTC_1.dir/test.c.o", 0.0),
        ("Collecting llama-cpp-python==0.3.36", 0.0),
        ("  a[3/40 of it", 0.0),
        ("", 0.0),
    ],
)
def test_progress_is_read_from_ninjas_steps(line: str, done: float):
    assert setup.fraction(line) == done


def test_progress_never_goes_back():
    shown: list[float] = []
    assert setup.track_progress(["[50/100] a", "note", "[10/40] b", "[80/100] c"], shown.append)
    assert shown == [0.5, 0.5, 0.5, 0.8]
    assert not setup.track_progress(["Using cached llama_cpp_python.whl"], shown.append)


def test_without_a_terminal_a_line_is_printed_every_five_percent():
    lines: list[str] = []
    show = setup.line_progress(lines.append)
    for step in range(141):
        show(step / 140)
    assert len(lines) == 21
    assert (lines[0], lines[-1]) == ("compiling llama.cpp: 0 %", "compiling llama.cpp: 100 %")


# --- running and failing ----------------------------------------------------------------------------------------------


def test_a_failed_build_shows_its_last_lines_and_advice():
    code = "for n in range(100): print('line', n)\nraise SystemExit(2)"
    with pytest.raises(BuildFailed, match=r"line 99\n") as caught:
        setup.run([sys.executable, "-c", code], os.environ, ignore, ignore)
    assert "line 69\n" not in str(caught.value)
    assert "CMAKE_ARGS=-DGGML_NATIVE=OFF modelyard setup --build" in str(caught.value)


def test_all_output_of_a_build_is_logged():
    log: list[str] = []
    assert setup.run([sys.executable, "-c", "print('[1/20] a'); print('b')"], os.environ, log.append, ignore)
    assert log == ["[1/20] a\n", "b\n"]


# --- the result -------------------------------------------------------------------------------------------------------


class Installer:
    """Stands in for pip: writes the tools, then a library, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[list[str]] = []
        self.environment: Mapping[str, str] = {}
        self.fails = False
        monkeypatch.setattr(setup, "run", self.run)

    def run(self, command: list[str], env: Mapping[str, str], *_: object) -> bool:
        self.commands.append(command)
        target = Path(command[command.index("--target") + 1])
        if setup.SOURCE not in command:
            for place in ("bin/cmake", "bin/ninja"):
                (target / place).parent.mkdir(parents=True, exist_ok=True)
                (target / place).touch()
            return False
        if self.fails:
            raise BuildFailed("no compiler")
        self.environment = env
        (target / "llama_cpp" / "lib").mkdir(parents=True)
        (target / "llama_cpp" / "lib" / "libllama.so").write_text(str(len(self.commands)))
        return True


@pytest.fixture
def installer(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Installer:
    for name in ("CC", "CXX", "CMAKE_ARGS"):
        monkeypatch.delenv(name, raising=False)
    return Installer(monkeypatch)


def test_the_library_is_built_once_into_the_cache_folder(installer: Installer, cache: Path) -> None:
    folder = setup.build()
    assert folder == setup.build() == cache / "llama_cpp" / f"build-{setup.RELEASE}"
    assert (folder / "libllama.so").read_text() == "2"
    assert len(installer.commands) == 2, "the tools and the library, once"
    assert installer.environment["CC"].endswith("zig-cc")
    assert [left.name for left in folder.parent.iterdir() if left.is_dir()] == [folder.name]


def test_a_fresh_build_replaces_the_library_without_caches(installer: Installer) -> None:
    setup.build()
    folder = setup.build(fresh=True)
    assert (folder / "libllama.so").read_text() == "4"
    assert "--no-cache-dir" in installer.commands[-1]


def test_flags_of_the_user_build_it_again(installer: Installer, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.build()
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=ON")
    setup.build()
    assert len(installer.commands) == 4
    assert installer.environment["CMAKE_ARGS"].endswith("-DGGML_CUDA=ON")


def test_a_failed_build_leaves_the_old_library(installer: Installer) -> None:
    folder = setup.build()
    installer.fails = True
    with pytest.raises(BuildFailed, match="no compiler"):
        setup.build(fresh=True)
    assert (folder / "libllama.so").read_text() == "2"


def test_a_full_disk_is_one_sentence(installer: Installer, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(setup, "_build", full)
    with pytest.raises(BuildFailed, match=rf"cannot be built in {cache}/llama_cpp: .*No space left"):
        setup.build()
