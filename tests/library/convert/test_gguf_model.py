from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.library.convert.gguf_model import GgufModel
from tests.library.convert import tiny


def test_shape_is_read_from_the_file(tmp_path: Path):
    shape = GgufModel(tiny.write_model(tmp_path / "tiny.gguf")).shape
    assert (shape.layers, shape.width, shape.heads, shape.kv_heads) == (2, 64, 4, 2)
    assert (shape.head_width, shape.inner, shape.vocab, shape.context) == (16, 96, len(tiny.tokens()), 256)
    assert not shape.tied


def test_every_tensor_comes_once_under_its_new_name(tmp_path: Path):
    source = GgufModel(tiny.write_model(tmp_path / "tiny.gguf"))
    got = dict(source)
    assert len(got) == len(tiny._weights("llama"))
    assert {name: weights.shape for name, weights in got.items()} == source.sizes


@pytest.mark.parametrize("architecture", ["gemma2", "mamba"])
def test_other_architectures_are_refused_by_name(architecture: str, tmp_path: Path):
    with pytest.raises(Unsupported, match=architecture):
        GgufModel(tiny.write_model(tmp_path / "tiny.gguf", architecture))


@pytest.mark.parametrize(
    ("tensor", "why"), [("rope_freqs.weight", "positions are scaled"), ("blk.0.attn_sinks.weight", "attn_sinks")]
)
def test_what_nobody_would_read_is_not_left_out(tensor: str, why: str, tmp_path: Path):
    file = tiny.write_model(tmp_path / "tiny.gguf", extra={tensor: np.ones(8)})
    with pytest.raises(Unsupported, match=why):
        GgufModel(file)


def test_file_that_is_no_gguf_is_named(tmp_path: Path):
    (tmp_path / "bad.gguf").write_bytes(b"nothing")
    with pytest.raises(InvalidRequest, match=r"bad\.gguf"):
        GgufModel(tmp_path / "bad.gguf")
