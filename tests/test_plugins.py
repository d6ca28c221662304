from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import modelyard
import modelyard_fake
from modelyard import plugins


def _forget() -> None:
    for cached in (plugins.names, plugins.in_tree, plugins.outside):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    _forget()


@pytest.fixture
def gadgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`modelyard.gadgets`, a package for these tests."""
    folder = tmp_path / "gadgets"
    folder.mkdir()
    (folder / "__init__.py").write_text('NOT_PLUGINS = frozenset({"shared"})\n')
    for name, text in {
        "lamp": "LIGHT = True\n",
        "shared": "",
        "_inner": "",
        "warp": "import dilithium\n",
        "broken": "import modelyard.nowhere\n",
    }.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(modelyard, "__path__", [*modelyard.__path__, str(tmp_path)])
    _forget()
    yield folder
    _forget()
    for name in [name for name in sys.modules if name.startswith("modelyard.gadgets")]:
        del sys.modules[name]


def test_a_module_is_a_plugin_unless_excluded(gadgets: Path):
    assert plugins.names("gadgets") == ("broken", "lamp", "warp")


def test_names_does_not_import_plugins(gadgets: Path):
    plugins.names("gadgets")
    assert "modelyard.gadgets.lamp" not in sys.modules


def test_load_imports_a_plugin_by_name(gadgets: Path):
    assert plugins.load("gadgets", "lamp").LIGHT is True


def test_an_unknown_name_is_an_error_with_all_names_and_a_suggestion(gadgets: Path):
    for name in ("lanp", "shared", "_inner", "../lamp", ""):
        with pytest.raises(plugins.UnknownPlugin, match="is not one of the gadgets: broken, lamp, warp") as error:
            plugins.load("gadgets", name)
        assert ("Did you mean 'lamp'?" in error.value.message) == (name in ("lanp", "../lamp"))


def test_a_missing_library_is_an_error_that_names_the_extra(gadgets: Path):
    with pytest.raises(plugins.MissingLibrary) as error:
        plugins.load("gadgets", "warp")
    assert (
        error.value.message
        == "warp needs the Python package 'dilithium': install it with pip install 'modelyard[warp]'"
    )


def test_a_missing_module_of_modelyard_is_not_reported_as_a_library(gadgets: Path):
    with pytest.raises(ModuleNotFoundError, match=r"modelyard\.nowhere"):
        plugins.load("gadgets", "broken")


def test_shipped_engines_and_protocols_are_found():
    assert {"llama_cpp", "fake"} <= set(plugins.names("engines"))
    assert {"anthropic_messages", "openai_chat", "openai_responses"} <= set(plugins.names("protocols"))


# --- of other packages ------------------------------------------------------------------------------------------------


def outside(monkeypatch: pytest.MonkeyPatch, name: str, *values: str) -> None:
    points = [EntryPoint(name, value, "modelyard.engines") for value in values]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points if group == "modelyard.engines" else [])
    _forget()


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        (
            "llama_server",
            ["mine:ENGINE"],
            "'llama_server' is defined by modelyard and by mine:ENGINE: uninstall one of them",
        ),
        ("new", ["mine:ENGINE", "yours:ENGINE"], "'new' is defined by mine:ENGINE and by yours:ENGINE"),
        (
            "new",
            ["nowhere.to_be_found:ENGINE"],
            "of nowhere.to_be_found:ENGINE cannot be imported: ModuleNotFound",
        ),
        ("new", ["json:nothing"], "cannot be imported: AttributeError"),
        ("new", ["json:dumps"], "is not an EnginePlugin: json:dumps"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_reported_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, values: list[str], reason: str
):
    outside(monkeypatch, name, *values)
    assert name in plugins.names("engines")
    with pytest.raises(plugins.BrokenPlugin, match=re.escape(reason)):
        plugins.engine(name)
    assert plugins.engine("openai_remote").remote, "the others work"


def test_an_engine_of_another_package_is_loaded_like_those_of_the_tree(monkeypatch: pytest.MonkeyPatch):
    outside(monkeypatch, "new", "modelyard_fake:ENGINE")
    assert plugins.engine("new") is modelyard_fake.ENGINE
