"""Which settings hold secrets, and the settings without them."""

from __future__ import annotations

from typing import Any

from modelyard.config.load import load_config
from modelyard.config.secrets import config_paths, config_secrets, public_settings
from modelyard.config.settings import Config

ENV = {"EXAMPLE_API_KEY": "key-of-the-upstream", "A_KEY": "key-of-a-client", "HTTPS_PROXY": "http://u:proxy-pass@p:1"}


def config_of(models: dict[str, Any], **more: Any) -> Config:
    return load_config(env=ENV, overrides={"models": models, **more}).config


MODELS: dict[str, Any] = {
    "m": {
        "backend": "llama_server",
        "path": "/models/m.gguf",
        "llama_server_env": {"HF_TOKEN": "token-of-hf", "CUDA_VISIBLE_DEVICES": "0"},
        "llama_server_args": ["--api-key", "first-secret", "--ssl-key-file=second-secret", "--threads", "4"],
    },
    "far": {
        "backend": "openai_remote",
        "remote_base_url": "https://ann:url-password@api.example.com/v1",
        "remote_api_key_env": "EXAMPLE_API_KEY",
        "remote_model": "large",
        "remote_headers": {"x-org-token": "header-secret", "x-title": "My program"},
    },
    "lite": {
        "backend": "litellm",
        "litellm_model": "bedrock/m",
        "litellm_params": {"aws_secret_access_key": "nested-secret", "aws_region_name": "eu", "max_tokens": 5},
    },
}


def test_settings_are_shown_without_secrets() -> None:
    models = config_of(MODELS).models
    local, far, lite = (public_settings(models[name]) for name in MODELS)
    assert local["llama_server_env"] == {"HF_TOKEN": "***", "CUDA_VISIBLE_DEVICES": "***"}
    assert local["llama_server_args"] == ["--api-key", "***", "--ssl-key-file=***", "--threads", "4"]
    assert local["path"] == "/models/m.gguf"
    assert far["remote_base_url"] == "https://***@api.example.com/v1"
    assert far["remote_headers"] == {"x-org-token": "***", "x-title": "***"}
    assert far["remote_api_key_env"] == "EXAMPLE_API_KEY"
    assert lite["litellm_params"] == {"aws_secret_access_key": "***", "aws_region_name": "eu", "max_tokens": 5}


def test_every_secret_of_the_configuration_is_known() -> None:
    keys = [{"name": "env", "env": "A_KEY"}, {"name": "plain", "key": "plain-client-key"}]
    found = set(config_secrets(config_of(MODELS, keys=keys), ENV))
    assert found >= {
        "key-of-a-client",
        "plain-client-key",
        "key-of-the-upstream",
        "url-password",
        "header-secret",
        "nested-secret",
        "first-secret",
        "second-secret",
        "token-of-hf",
        "proxy-pass",
    }
    assert not found & {"0", "4", "eu", "My program", "large"}


def test_the_paths_of_models_are_known() -> None:
    found = set(config_paths(config_of({"a": {"backend": "fake", "tokenizer_path": "~/t.json"}, **MODELS})))
    assert "/models/m.gguf" in found
    assert any(path.endswith("/t.json") and path.startswith("/") for path in found)
