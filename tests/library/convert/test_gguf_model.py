from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard_convert.gguf_model import GgufModel
from tests.library.convert import tiny_models


def test_the_shape_is_read_from_the_metadata(tmp_path: Path):
    shape = GgufModel(tiny_models.write_model(tmp_path / "tiny.gguf")).shape
    assert (shape.layers, shape.hidden_size, shape.heads, shape.kv_heads) == (2, 64, 4, 2)
    assert (shape.head_dim, shape.intermediate_size, shape.context_length) == (16, 96, 256)
    assert shape.vocab_size == len(tiny_models.tokens())
    assert not shape.tied_embeddings


def test_every_tensor_is_converted_once(tmp_path: Path):
    model = GgufModel(tiny_models.write_model(tmp_path / "tiny.gguf"))
    tensors = dict(model)
    assert len(tensors) == len(tiny_models.random_weights("llama"))
    assert {name: weights.shape for name, weights in tensors.items()} == model.shapes


@pytest.mark.parametrize("architecture", ["gemma2", "mamba"])
def test_other_architectures_are_refused(architecture: str, tmp_path: Path):
    with pytest.raises(Unsupported, match=architecture):
        GgufModel(tiny_models.write_model(tmp_path / "tiny.gguf", architecture))


@pytest.mark.parametrize(
    ("tensor", "message"), [("rope_freqs.weight", "RoPE scaling"), ("blk.0.attn_sinks.weight", "attn_sinks")]
)
def test_an_unknown_tensor_is_refused(tensor: str, message: str, tmp_path: Path):
    file = tiny_models.write_model(tmp_path / "tiny.gguf", extra={tensor: np.ones(8)})
    with pytest.raises(Unsupported, match=message):
        GgufModel(file)


def test_an_invalid_file_is_an_error(tmp_path: Path):
    (tmp_path / "bad.gguf").write_bytes(b"nothing")
    with pytest.raises(InvalidRequest, match=r"bad\.gguf"):
        GgufModel(tmp_path / "bad.gguf")
