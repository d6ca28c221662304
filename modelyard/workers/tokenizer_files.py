"""Tokenizer files on their way from a worker to a gateway that does not have the model: read, hashed, stored.

A GGUF file is sent without its tensors; of a folder only the files of the tokenizer and the chat template.
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
_FOLDER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
Files = Mapping[str, bytes]


def read_tokenizer_files(path: Path) -> dict[str, bytes]:
    """`path` is the engine's `tokenizer_path`: a GGUF file, a folder, or a tokenizer.json."""
    if path.suffix.lower() == ".gguf":
        return {_GGUF: without_tensors(path)}
    folder = path if path.is_dir() else path.parent
    found = {name: (folder / name).read_bytes() for name in _FOLDER_FILES if (folder / name).is_file()}
    if path.is_file():
        found["tokenizer.json"] = path.read_bytes()
    if "tokenizer.json" not in found:
        raise Unsupported(f"there is no tokenizer at {path}", code="tokenizer_missing")
    return found


def tokenizer_hash(files: Files) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()[:32]


def cached_tokenizers(folder: Path) -> tuple[str, ...]:
    """The hashes of the stored tokenizers."""
    return tuple(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ()


def store_tokenizer(folder: Path, hash_: str, files: Files) -> Path:
    """Store the files atomically and return the path to open as the tokenizer. Without files it is stored already."""
    target = folder / hash_
    if files:
        if set(files) - {_GGUF, *_FOLDER_FILES} or tokenizer_hash(files) != hash_:
            raise Unavailable("a worker sent tokenizer files that do not match their hash", code="tokenizer_broken")
        if not target.exists():
            _write(folder, target, files)
    gguf = target / _GGUF
    return gguf if gguf.is_file() else target


def _write(folder: Path, target: Path, files: Files) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="tokenizer-", ignore_cleanup_errors=True) as temporary:
        for name, data in files.items():
            (Path(temporary) / name).write_bytes(data)
        try:
            os.rename(temporary, target)
        except OSError:
            if not target.exists():  # otherwise another gateway stored the same bytes first
                raise
