"""A tokenizer's files on their way to a gateway that does not have them: gathered, named by their hash, laid down.

A GGUF file travels without its weights; of a folder only what a tokenizer and a chat template are read from.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from modelyard.core.errors import Unavailable, Unsupported
from modelyard.library.gguf import without_tensors

_GGUF = "tokenizer.gguf"
_FOLDER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
Files = Mapping[str, bytes]


def read_tokenizer_files(path: Path) -> dict[str, bytes]:
    """`path` is what the engine's module calls its tokenizer: a GGUF file, a folder, or a tokenizer.json."""
    if path.suffix.lower() == ".gguf":
        return {_GGUF: without_tensors(path)}
    folder = path if path.is_dir() else path.parent
    found = {name: (folder / name).read_bytes() for name in _FOLDER if (folder / name).is_file()}
    if path.is_file():
        found["tokenizer.json"] = path.read_bytes()
    if "tokenizer.json" not in found:
        raise Unsupported(f"there is no tokenizer at {path}", code="tokenizer_missing")
    return found


def tokenizer_hash(files: Files) -> str:
    """The hash by which both sides know them."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()[:32]


def cached_tokenizers(shelf: Path) -> tuple[str, ...]:
    """The hashes of what has been laid down here."""
    return tuple(sorted(each.name for each in shelf.iterdir())) if shelf.is_dir() else ()


def store_tokenizer(shelf: Path, name: str, files: Files) -> Path:
    """What to open as the tokenizer. It appears as a whole or not at all; without files it is there already."""
    place = shelf / name
    if files:
        _check(name, files)
        if not place.exists():
            _write(shelf, place, files)
    gguf = place / _GGUF
    return gguf if gguf.is_file() else place


def _check(name: str, files: Files) -> None:
    if set(files) - {_GGUF, *_FOLDER} or tokenizer_hash(files) != name:
        raise Unavailable("a worker sent a tokenizer that is not what it says", code="tokenizer_broken")


def _write(shelf: Path, place: Path, files: Files) -> None:
    shelf.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=shelf.parent, prefix="tokenizer-", ignore_cleanup_errors=True) as folder:
        for each, data in files.items():
            (Path(folder) / each).write_bytes(data)
        try:
            os.rename(folder, place)
        except OSError:
            if not place.exists():  # else another gateway was faster, with the same bytes
                raise
