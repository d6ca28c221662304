"""Which library reads which file, and the error if it is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from modelyard.plugins import MissingLibrary
from modelyard.tokenizer import open_tokenizer


def test_a_gguf_file_without_llama_cpp_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch):
    for name in [
        name
        for name in sys.modules
        if name.startswith(("llama_cpp", "modelyard.tokenizer.gguf", "modelyard.tokenizer.llama"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(MissingLibrary, match="run make install"):
        open_tokenizer(Path("x.GGUF"))
