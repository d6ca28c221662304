"""The default model cut down to its first layers, with a long window: the same tokens, read many times as fast.

How many tokens of a prompt are evaluated depends on vocabulary, template and cache, never on what the weights compute.
"""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader, GGUFValueType, GGUFWriter, ReaderField

from modelyard.library import default_model
from modelyard.library.cache_dir import cache_dir

_LAYERS, _WINDOW = 1, 131072
_OWN = ("GGUF.", "llama.block_count", "llama.context_length", "general.architecture")


def shallow_model(layers: int = _LAYERS) -> Path:
    """Made once."""
    path = cache_dir() / "bench" / f"smollm2-{layers}-layer.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        cut(default_model.fetch(), draft, layers)
        draft.replace(path)
    return path


def cut(source: Path, target: Path, layers: int) -> None:
    reader = GGUFReader(str(source))
    writer = GGUFWriter(str(target), "llama")
    for name, field in reader.fields.items():
        if not name.startswith(_OWN):
            _copy(writer, name, field)
    writer.add_uint32("llama.block_count", layers)
    writer.add_uint32("llama.context_length", _WINDOW)
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy(writer: GGUFWriter, name: str, field: ReaderField) -> None:
    kind = field.types[0]
    inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
    writer.add_key_value(name, field.contents(), kind, inner)
