"""The engine as a plug-in: what it says of itself, and what it says where its library is not installed."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from modelyard import plugins
from modelyard.engines import exllamav3
from modelyard.engines.exllamav3 import model
from modelyard.plugins import MissingLibrary
from tests.engines.exllamav3.stage import model_folder, spec


@pytest.mark.parametrize("missing", ["torch", "exllamav3", "llguidance"])
async def test_library_that_is_absent_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    present = {name: ModuleSpec(name, None) for name in ("torch", "exllamav3", "llguidance") if name != missing}
    monkeypatch.setattr(exllamav3, "find_spec", present.get)
    with pytest.raises(MissingLibrary, match=rf"'{missing}'.*pip install 'modelyard\[exllamav3\]'"):
        exllamav3.create(spec())


def test_library_that_cannot_be_imported_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "exllamav3.py").write_text("raise RuntimeError('Traceback\\nno CUDA device is visible')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "exllamav3", raising=False)
    with pytest.raises(MissingLibrary, match=r"does not work here: no CUDA device is visible\. It needs an NVIDIA GPU"):
        model.load_library()


def test_engine_is_a_plug_in_of_its_own_process_with_its_tokenizer_beside_the_weights() -> None:
    assert plugins.load("engines", "exllamav3") is exllamav3
    assert exllamav3.OWN_PROCESS
    assert exllamav3.HOLDS_WEIGHTS
    options = exllamav3.Options(path=str(model_folder()))
    assert exllamav3.kind(options) == "text"
    assert exllamav3.tokenizer_path(options) == model_folder()
    assert exllamav3.chat_template(options) is None
