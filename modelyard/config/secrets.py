"""Secrets in the configuration: which settings hold them, and the settings without them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from modelyard.config.settings import Config
from modelyard.router.settings import ModelSettings
from modelyard.telemetry.masking import MASK, header_secrets, is_secret_name, url_secrets, without_credentials

# Variables that libraries read by themselves.
_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def public_settings(settings: ModelSettings) -> dict[str, Any]:
    """The model's settings as configured, without secrets: keys, headers, environment values, credentials in URLs."""
    written: dict[str, Any] = settings.model_dump(mode="json", exclude_unset=True)
    return {name: redacted(name, value) for name, value in (written | written.pop("options", {})).items()}


def redacted(name: str, value: Any) -> Any:
    """The value of the setting `name` without its secrets."""
    return _redacted(name, value, [])


def config_secrets(config: Config, env: Mapping[str, str]) -> Iterator[str]:
    """The secrets themselves, to be masked wherever they appear."""
    for key in config.keys:
        yield from filter(None, (key.key, env.get(key.env or "")))
    for settings in config.models.values():
        found: list[str] = []
        for name, value in settings.options.items():
            if name.endswith("_env") and isinstance(value, str):
                found.append(env.get(value, ""))
            _redacted(name, value, found)
        yield from found
    for server in config.mcp.servers.values():
        own: list[str] = []
        _redacted("server_env", server.env, own)
        _redacted("headers", server.headers, own)
        yield from (*own, *(env.get(name, "") for name in (*server.env_from, server.token_env or "")))
    for variable in _VARIABLES:
        for value in (env.get(variable, ""), env.get(variable.lower(), "")):
            yield from url_secrets(value) if "://" in value else (value,)


def config_paths(config: Config) -> Iterator[str]:
    """The files and folders of the models, as they are configured and as they are found."""
    for settings in config.models.values():
        texts = (settings.path, settings.tokenizer_path, settings.chat_template, settings.python)
        options = (value for value in settings.options.values() if isinstance(value, str))
        for text in filter(None, (*texts, *options)):
            if text.startswith(("/", "~")) and "\n" not in text:
                yield from (text, os.path.expanduser(text))


def _redacted(name: str, value: Any, found: list[str]) -> Any:
    """The value without its secrets, which are added to `found`."""
    if isinstance(value, dict):
        if name.endswith("_env"):
            found.extend(str(text) for key, text in value.items() if is_secret_name(key))
            return dict.fromkeys(value, MASK)
        if name.endswith("headers"):
            found.extend(header_secrets({key: str(text) for key, text in value.items()}))
            return dict.fromkeys(value, MASK)
        return {key: _redacted(str(key), item, found) for key, item in value.items()}
    if isinstance(value, list):
        return list(_redacted_list(name, value, found))
    if not isinstance(value, str):
        return value
    if is_secret_name(name) and not name.endswith("_env"):
        found.append(value)
        return MASK
    found.extend(url_secrets(value))
    return without_credentials(value)


def _redacted_list(name: str, values: list[Any], found: list[str]) -> Iterator[Any]:
    """In a command line, `--api-key VALUE` and `--api-key=VALUE` name their secrets."""
    flag = ""
    for value in values:
        text = value if isinstance(value, str) else ""
        option, is_pair, secret = text.partition("=")
        if text.startswith("-") and is_pair and is_secret_name(option):
            found.append(secret)
            yield f"{option}={MASK}"
        else:
            yield _redacted(flag or name, value, found)
        flag = text.lstrip("-") if text.startswith("-") and not is_pair else ""
