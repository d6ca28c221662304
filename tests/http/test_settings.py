"""Settings of the HTTP server and its keys."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from modelyard.accounts.settings import KeySettings
from modelyard.http.settings import HttpSettings


def test_the_default_is_loopback_without_cors() -> None:
    http = HttpSettings()
    assert (http.host, http.port, http.cors_enabled, http.cors_origins) == ("127.0.0.1", 8000, False, [])
    assert (http.max_body_bytes, http.max_json_depth, http.keepalive_s) == (32 * 1024**2, 64, 5.0)


@pytest.mark.parametrize("raw", [{"port": 65536}, {"keepalive_s": 11}, {"workers": 0}, {"ssl_keyfile": "k"}, {"x": 1}])
def test_invalid_values_are_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        HttpSettings.model_validate(raw)


def test_a_key_hash_is_lower_cased() -> None:
    assert KeySettings(name="a", hash="SHA256:" + "AB" * 32).hash == "sha256:" + "ab" * 32


@pytest.mark.parametrize("raw", [{}, {"hash": "md5:00"}, {"hash": "sha256:00"}, {"env": "A", "key": "b"}, {"key": ""}])
def test_a_key_has_exactly_one_secret(raw: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        KeySettings.model_validate({"name": "a"} | raw)


def test_a_plain_key_is_not_shown() -> None:
    assert "hush" not in repr(KeySettings(name="a", key="hush"))
