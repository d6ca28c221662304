"""What the launcher learns from a running server, and the errors for a server that is unusable."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound, Unauthenticated, Unavailable
from modelyard.launch.plan import PLACEHOLDER_KEY, LaunchTarget
from modelyard.launch.server import BACKGROUND_MODEL, TargetServer, TemporaryServer
from tests.live_server import demo_config, live_server


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = demo_config()
    config["models"]["demo"]["aliases"] = ["team/demo"]
    with live_server(config) as served:
        yield served.url


def target(url: str, model: str | None = None, key: str | None = None) -> LaunchTarget:
    with closing(TargetServer(url, key)) as server:
        return server.launch_target(model)


def test_target_is_the_first_model_with_its_window_and_a_background_model(url: str) -> None:
    assert target(url + "/") == LaunchTarget(
        url=url, model="demo", window=4096, background=BACKGROUND_MODEL, key=PLACEHOLDER_KEY
    )


def test_target_may_be_any_name_that_the_server_resolves(url: str) -> None:
    for name in ("team/demo", "claude-anything"):
        found = target(url, name)
        assert (found.model, found.window) == (name, 4096)


def test_window_is_the_window_of_the_cache_that_the_name_is_routed_to() -> None:
    config = demo_config()
    config["routes"] = [{"match": "*", "cache": "fast"}]
    with live_server(config) as served:
        assert target(served.url, "demo").window == 2048


def test_background_model_is_the_model_itself_without_a_route() -> None:
    config = demo_config()
    config["routes"] = [{"match": "demo", "cache": "main"}]
    with live_server(config) as served:
        assert target(served.url).background == "demo"
        with pytest.raises(NotFound, match="demo"):
            target(served.url, "unknown")


def test_key_is_sent_and_a_wrong_key_is_refused() -> None:
    with live_server({**demo_config(), "keys": [{"name": "ada", "key": "sk-right"}]}) as served:
        assert target(served.url, key="sk-right").key == "sk-right"
        with pytest.raises(Unauthenticated):
            target(served.url, key="sk-wrong")


def test_model_that_fails_to_load_is_an_error() -> None:
    config = demo_config()
    config["models"]["demo"]["tokenizer_path"] = "/nowhere/tokenizer.json"
    with live_server(config) as served, pytest.raises(ModelyardError):
        target(served.url)


def test_closed_port_is_not_running_and_an_invalid_url_is_an_error() -> None:
    with closing(TargetServer(f"http://127.0.0.1:{free_port()}")) as server:
        assert not server.is_running()
    with closing(TargetServer("ftp://x")) as server, pytest.raises(InvalidRequest, match="is not a URL"):
        server.is_running()


def test_temporary_server_is_refused_for_another_machine(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"no server answers at http://10\.0\.0\.1:8000"):
        TemporaryServer("http://10.0.0.1:8000", None, tmp_path / "log", {})
