"""The default model without most of its layers: the same words and template, an eighth of the work, no sense.

For tests of what surrounds a model: what it says does not matter to them.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import gguf

from modelyard.library.cache_dir import cache_dir, file_lock
from modelyard.library.default_model import fetch

LAYERS = 2


@cache
def short_model_file() -> Path:
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    path = cache_dir() / "test-models" / f"short-{version}.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_suffix(".lock")):
        if not path.is_file():
            for old in path.parent.glob("short-[0-9a-f]*.gguf"):
                old.unlink()
            _write(partial := path.with_suffix(".partial"))
            partial.rename(path)
    return path


def _write(path: Path) -> None:
    source = gguf.GGUFReader(fetch())
    writer = gguf.GGUFWriter(path, architecture := source.fields["general.architecture"].contents())
    for field in source.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):
            continue
        value = LAYERS if field.name == f"{architecture}.block_count" else field.contents()
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(field.name, value, field.types[0], field.types[-1] if is_array else None)
    for tensor in source.tensors:
        if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < LAYERS:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
