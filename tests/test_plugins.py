"""Plug-ins by file name, with a package of them made for the occasion."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import modelyard
from modelyard import plugins


@pytest.fixture
def gadgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """`modelyard.gadgets`, a package that only this test knows."""
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


def test_a_file_is_a_plugin_unless_it_opts_out(gadgets: Path):
    assert plugins.names("gadgets") == ("broken", "lamp", "warp")


def test_names_are_found_without_importing_anything(gadgets: Path):
    plugins.names("gadgets")
    assert "modelyard.gadgets.lamp" not in sys.modules


def test_a_plugin_is_loaded_by_its_name(gadgets: Path):
    assert plugins.load("gadgets", "lamp").LIGHT is True


@pytest.mark.parametrize("name", ["lanp", "shared", "_inner", "../lamp", ""])
def test_an_unknown_name_is_told_what_there_is(gadgets: Path, name: str):
    with pytest.raises(plugins.UnknownPlugin, match="is none of gadgets: broken, lamp, warp") as told:
        plugins.load("gadgets", name)
    assert ("Did you mean 'lamp'?" in told.value.message) == (name in ("lanp", "../lamp"))


def test_a_missing_library_is_one_sentence_with_the_cure(gadgets: Path):
    with pytest.raises(plugins.MissingLibrary) as told:
        plugins.load("gadgets", "warp")
    assert (
        told.value.message == "warp needs the Python package 'dilithium': install it with pip install 'modelyard[warp]'"
    )


def test_a_missing_module_of_our_own_is_not_blamed_on_a_library(gadgets: Path):
    with pytest.raises(ModuleNotFoundError, match=r"modelyard\.nowhere"):
        plugins.load("gadgets", "broken")


def test_a_plugin_without_a_native_library_has_nothing_to_verify(gadgets: Path):
    plugins.verify(plugins.load("gadgets", "lamp"))


def test_a_plugin_whose_native_library_is_broken_says_so(gadgets: Path, monkeypatch: pytest.MonkeyPatch):
    def verify() -> None:
        raise plugins.MissingLibrary("the bulb is broken")

    lamp = plugins.load("gadgets", "lamp")
    monkeypatch.setattr(lamp, "verify", verify, raising=False)
    with pytest.raises(plugins.MissingLibrary, match="bulb"):
        plugins.verify(lamp)


def test_the_shipped_packages_hold_what_their_files_say():
    assert "fake" in plugins.names("engines")
    assert {"anthropic_messages", "openai_chat", "openai_responses"} <= set(plugins.names("protocols"))
