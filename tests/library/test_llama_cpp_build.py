"""The build script: its plan, its scripts, its progress. No compiler runs here."""

from __future__ import annotations

import importlib.util
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from modelyard.engines.llama_cpp.library import RELEASE
from modelyard.library.cache_dir import cache_dir

ROOT = Path(__file__).parent.parent.parent


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("llama_cpp_build", ROOT / "setup" / "llama_cpp_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


setup = load()
NEEDS = setup.read_requirements((ROOT / "pyproject.toml").read_text())


def ignore(*_: object) -> None:
    pass


# --- what is pinned ---------------------------------------------------------------------------------------------------


def test_the_pinned_release_is_the_one_of_the_self_test():
    assert NEEDS.engine[0] == f"llama-cpp-python=={RELEASE}"


def test_the_tools_are_a_compiler_cmake_and_ninja():
    assert [tool.split(">")[0].split("=")[0] for tool in NEEDS.tools] == ["cmake", "ninja", "ziglang"]


def test_the_cache_folder_is_the_same_as_the_programs(tmp_path: Path):
    for env in ({"MODELYARD_CACHE": "~/own"}, {"XDG_CACHE_HOME": str(tmp_path)}, {}):
        assert setup.cache_folder(env) == cache_dir(env)


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
    assert env == {"CMAKE_GENERATOR": "Ninja", "HOME": "h", "CMAKE_ARGS": setup.CMAKE_ARGS}
    assert setup.build_environment({"CMAKE_GENERATOR": "Xcode"}, plan)["CMAKE_GENERATOR"] == "Xcode"


def test_pip_is_used_if_the_environment_has_it_else_uv():
    assert setup.install_command("py", True, "/bin/uv")[:4] == ["py", "-m", "pip", "install"]
    assert setup.install_command("py", False, "/bin/uv")[:5] == ["/bin/uv", "pip", "install", "--python", "py"]
    with pytest.raises(setup.BuildError, match="neither pip nor uv"):
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
    monkeypatch.setattr(setup.platform, "machine", lambda: machine)
    for place in ("cmake/data/bin/cmake", "bin/ninja", "bin/cmake"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    scripts = setup.tool_scripts(tmp_path, zig=True)
    assert set(scripts) == {"cmake", "ninja", "zig-cc", "zig-c++"}
    assert f"{tmp_path}/cmake/data/bin/cmake" in scripts["cmake"], "not the launcher, which needs its package"
    assert scripts["zig-c++"].splitlines()[1] == f'exec {tmp_path}/ziglang/zig c++ {flags}"$@"'
    assert set(setup.tool_scripts(tmp_path, zig=False)) == {"cmake", "ninja"}


def test_a_package_without_its_program_is_named(tmp_path: Path):
    with pytest.raises(setup.BuildError, match="has no program ninja"):
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
    with pytest.raises(setup.BuildError, match=r"line 99\n") as caught:
        setup.run([sys.executable, "-c", code], os.environ, ignore, ignore)
    assert "line 69\n" not in str(caught.value)
    assert "CMAKE_ARGS=-DGGML_NATIVE=OFF make rebuild-engine" in str(caught.value)


def test_all_output_of_a_build_is_logged():
    log: list[str] = []
    assert setup.run([sys.executable, "-c", "print('[1/20] a'); print('b')"], os.environ, log.append, ignore)
    assert log == ["[1/20] a\n", "b\n"]


def stub_builds(monkeypatch: pytest.MonkeyPatch, faults: list[str | None], compiled: bool) -> list[bool]:
    """The self-test returns these faults in turn. Collects for each build whether it skips caches."""
    builds: list[bool] = []
    monkeypatch.setattr(setup, "self_test", lambda: faults.pop(0))
    monkeypatch.setattr(setup, "build", lambda needs, fresh: builds.append(fresh) or compiled or fresh)
    return builds


def test_a_working_engine_is_not_rebuilt(monkeypatch: pytest.MonkeyPatch):
    builds = stub_builds(monkeypatch, [None], compiled=True)
    assert setup.main([]) == 0
    assert builds == []


def test_a_missing_engine_is_built_once(monkeypatch: pytest.MonkeyPatch):
    builds = stub_builds(monkeypatch, ["missing", None], compiled=True)
    assert setup.main([]) == 0
    assert builds == [False]


def test_a_cached_copy_that_does_not_work_is_rebuilt(monkeypatch: pytest.MonkeyPatch):
    builds = stub_builds(monkeypatch, ["missing", "SIGILL", None], compiled=False)
    assert setup.main([]) == 0
    assert builds == [False, True]


def test_an_engine_that_does_not_work_after_the_build_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    stub_builds(monkeypatch, ["missing", "died by SIGILL"], compiled=True)
    assert setup.main([]) == 1
    printed = capsys.readouterr().err
    assert "engine is missing" in printed
    assert "died by SIGILL" in printed


def test_a_rebuild_runs_no_self_test_first(monkeypatch: pytest.MonkeyPatch):
    builds = stub_builds(monkeypatch, [None], compiled=True)
    assert setup.main(["--rebuild"]) == 0
    assert builds == [True]


def test_a_self_test_that_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(setup, "_SELF_TEST", "raise ImportError('no msgspec')")
    with pytest.raises(setup.BuildError, match="could not be run: ImportError: no msgspec"):
        setup.self_test()


def test_the_installed_engine_passes():
    assert setup.self_test() is None


# --- make -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["serve", "test", "install"])
def test_make_builds_the_engine_first(target: str):
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "VENV=nowhere", target], cwd=ROOT, capture_output=True, text=True
    )
    lines = done.stdout.splitlines()
    assert lines.index("nowhere/bin/python setup/llama_cpp_build.py") < lines.index("touch nowhere/.engine")
