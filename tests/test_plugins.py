from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import modelyard
from modelyard import plugins


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
    plugins.names.cache_clear()
    yield folder
    plugins.names.cache_clear()
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


def test_a_plugin_without_verify_is_accepted(gadgets: Path):
    plugins.verify(plugins.load("gadgets", "lamp"))


def test_verify_raises_the_error_of_the_plugin(gadgets: Path, monkeypatch: pytest.MonkeyPatch):
    def verify() -> None:
        raise plugins.MissingLibrary("the bulb is broken")

    lamp = plugins.load("gadgets", "lamp")
    monkeypatch.setattr(lamp, "verify", verify, raising=False)
    with pytest.raises(plugins.MissingLibrary, match="bulb"):
        plugins.verify(lamp)


def test_shipped_engines_and_protocols_are_found():
    assert "fake" in plugins.names("engines")
    assert {"anthropic_messages", "openai_chat", "openai_responses"} <= set(plugins.names("protocols"))
