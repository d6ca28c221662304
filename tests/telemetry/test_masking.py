"""Secrets are masked by value in every spelling, and server paths are reduced to file names."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from modelyard.telemetry.masking import (
    PathMask,
    SecretMask,
    header_secrets,
    is_secret_name,
    url_secrets,
    without_credentials,
)

SECRET = 'sk-"quoted"/and+more'


def mask(*values: str) -> SecretMask:
    made = SecretMask()
    made.add(values)
    return made


@pytest.mark.parametrize(
    "text",
    [
        f"the key {SECRET} is wrong",
        f"the key {json.dumps(SECRET)} is wrong",
        "the key sk-%22quoted%22%2Fand%2Bmore is wrong",
        f"the key {SECRET}{SECRET} is wrong",
    ],
)
@pytest.mark.parametrize("added", [SECRET, f"Bearer {SECRET}", f" {SECRET}\n"])
def test_a_secret_is_masked_in_every_spelling(text: str, added: str) -> None:
    for masked in (mask(added).text(text), mask(added).bytes(text.encode()).decode()):
        assert "quoted" not in masked
        assert masked.startswith("the key ")
        assert masked.endswith(" is wrong")


def test_the_longest_secret_is_masked_first() -> None:
    assert mask("secret-one", "secret-one-and-two").text("secret-one-and-two, secret-one") == "***, ***"


def test_short_values_and_no_values_mask_nothing() -> None:
    assert mask("", "abc", "Bearer x").text("abc x") == "abc x"
    assert mask().bytes(b"data") == b"data"
    assert mask().values({"a": 1}) == {"a": 1}


def test_texts_inside_values_are_masked_and_keys_are_not() -> None:
    seen: dict[str, Any] = {"a-secret-word": ["a-secret-word", {"b": "x a-secret-word"}, 5, None], "c": ("d",)}
    masked = {"a-secret-word": ["***", {"b": "x ***"}, 5, None], "c": ["d"]}
    assert mask("a-secret-word").values(seen) == masked


def test_credentials_of_a_url_are_found_and_removed() -> None:
    url = "https://ann:p%40ssword@example.com/v1?a=b@c"
    assert list(url_secrets(url)) == ["p@ssword", base64.b64encode(b"ann:p@ssword").decode()]
    assert without_credentials(url) == "https://***@example.com/v1?a=b@c"
    assert list(url_secrets("https://a-long-token@example.com")) == ["a-long-token"]
    assert list(url_secrets("https://example.com/a@b")) == list(url_secrets("http://[")) == []
    assert without_credentials("mail ann@example.com or http://example.com/a@b") == (
        "mail ann@example.com or http://example.com/a@b"
    )


def test_headers_are_secret_by_their_name_or_their_look() -> None:
    headers = {
        "authorization": "Bearer abc",
        "X-Org-Token": "o",
        "helicone-auth": "h",
        "x-trace": "f81d4fae7dec11d0a76500a0",
        "accept": "application/json",
        "anthropic-version": "2023-06-01",
    }
    assert list(header_secrets(headers)) == ["Bearer abc", "o", "h", "f81d4fae7dec11d0a76500a0"]


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("api_key --api-key apikey HF_TOKEN aws_secret_access_key Set-Cookie", True),
        ("max_tokens tokenizer_path n_ctx monkey author keys", False),
    ],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert {is_secret_name(word) for word in name.split()} == {secret}


def test_a_path_is_reduced_to_its_file_name(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "model.gguf"
    hide = PathMask().hide_folders
    assert hide(f"{file} is missing") == "model.gguf is missing"
    assert hide(f"cannot open '{file}': no such file; see {tmp_path}/") == (
        f"cannot open 'model.gguf': no such file; see {tmp_path.name}"
    )
    assert hide(f"file://{file} (and file={file})") == "model.gguf (and file=model.gguf)"
    assert hide("C:\\Users\\ann\\model.gguf is missing") == "model.gguf is missing"


@pytest.mark.parametrize(
    "text",
    [
        "load it with POST /v1/admin/models/a/load",
        "there is no /v1/messages/usr/x here; /docs lists the paths",
        "use https://example.com/usr/bin/x, or and/or, 3/usr/4, ./usr/x",
    ],
)
def test_other_texts_with_slashes_stay(text: str) -> None:
    assert PathMask().hide_folders(text) == text


def test_a_configured_path_is_hidden_whatever_it_contains() -> None:
    paths = PathMask()
    paths.add(["/no such folder/my models", "relative/path"])
    text = "/no such folder/my models/a.gguf and relative/path"
    assert paths.hide_folders(text) == "a.gguf and relative/path"
