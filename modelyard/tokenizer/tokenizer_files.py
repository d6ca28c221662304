"""The files beside a tokenizer.json in a Hugging Face folder: which tokens begin and end a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.core.errors import InvalidRequest


class SpecialTokens(Struct, frozen=True):
    """The tokens that begin and end a turn, and more ids that end one. `adds_bos` None: unspecified."""

    bos_token: str = ""
    eos_token: str = ""
    eos_ids: tuple[int, ...] = ()
    adds_bos: bool | None = None


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json at or in this path."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidRequest(
            f"there is no tokenizer at {file}: point tokenizer_path to a folder with a tokenizer.json (download it "
            "from the source model's repository) or to the file itself",
            code="tokenizer_missing",
        )
    return file


def read_text(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}", code="tokenizer_broken") from error


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in this file; empty if the file is missing, an error that names the file if it is invalid."""
    if not file.is_file():
        return {}
    try:
        value = msgspec.json.decode(read_text(file))
    except msgspec.DecodeError as error:
        raise _broken(file, str(error)) from error
    if not isinstance(value, dict):
        raise _broken(file, "it does not contain an object")
    return value


def _broken(file: Path, why: str) -> InvalidRequest:
    return InvalidRequest(f"{file} is not a valid JSON file: {why}. Download it again", code="tokenizer_broken")


def read_special_tokens(folder: Path) -> SpecialTokens:
    config = read_json(folder / "special_tokens_map.json") | read_json(folder / "tokenizer_config.json")
    generation = read_json(folder / "generation_config.json")
    adds = config.get("add_bos_token")
    return SpecialTokens(
        _text(config, "bos_token"),
        _text(config, "eos_token"),
        tuple(_ids(generation.get("eos_token_id"))),
        adds if isinstance(adds, bool) else None,
    )


def _text(config: Mapping[str, Any], name: str) -> str:
    """A token is a string or an object with `content`."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _ids(value: Any) -> Iterator[int]:
    for id in value if isinstance(value, list) else [value]:
        if isinstance(id, int):
            yield id
