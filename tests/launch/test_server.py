"""What the launcher asks of a running server, and how it says that something is wrong with one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound, Unauthenticated, Unavailable
from modelyard.launch.plan import ANY_KEY, Facts
from modelyard.launch.server import BACKGROUND, Server, started
from tests.serving import demo, serving


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture
def nobody() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = demo()
    config["models"]["demo"]["aliases"] = ["team/demo"]
    with serving(config) as served:
        yield served.url


def facts(url: str, model: str | None = None, key: str | None = None) -> Facts:
    with closing(Server(url, key)) as server:
        return server.facts(model)


def test_the_first_model_with_its_window_and_a_name_for_side_requests(url: str) -> None:
    assert facts(url + "/") == Facts(url=url, model="demo", window=4096, background=BACKGROUND, key=ANY_KEY)


@pytest.mark.parametrize("name", ["team/demo", "claude-anything"])
def test_any_name_that_the_server_resolves_may_be_asked_for(url: str, name: str) -> None:
    assert (facts(url, name).model, facts(url, name).window) == (name, 4096)


def test_the_window_is_that_of_the_cache_to_which_requests_by_that_name_go() -> None:
    config = demo()
    config["routes"] = [{"match": "*", "cache": "fast"}]
    with serving(config) as served:
        assert facts(served.url, "demo").window == 2048


def test_without_a_route_for_them_side_requests_go_to_the_model_itself() -> None:
    config = demo()
    config["routes"] = [{"match": "demo", "cache": "main"}]
    with serving(config) as served:
        assert facts(served.url).background == "demo"
        with pytest.raises(NotFound, match="demo"):
            facts(served.url, "nobody")


def test_a_key_that_the_server_wants_is_passed_on_and_a_wrong_one_is_told() -> None:
    with serving({**demo(), "keys": [{"name": "ada", "key": "sk-right"}]}) as served:
        assert facts(served.url, key="sk-right").key == "sk-right"
        with pytest.raises(Unauthenticated):
            facts(served.url, key="sk-wrong")


def test_a_model_that_cannot_be_loaded_is_told() -> None:
    config = demo()
    config["models"]["demo"]["tokenizer_path"] = "/nowhere/tokenizer.json"
    with serving(config) as served, pytest.raises(ModelyardError):
        facts(served.url)


def test_nobody_there_is_no_error_and_somebody_else_is(nobody: str) -> None:
    with closing(Server(nobody)) as server:
        assert not server.is_there()
    with closing(Server("ftp://x")) as server, pytest.raises(InvalidRequest, match="is not a URL"):
        server.is_there()


def test_a_server_elsewhere_is_not_started(tmp_path: Path) -> None:
    with (
        pytest.raises(Unavailable, match=r"no server answers at http://10\.0\.0\.1:8000"),
        started("http://10.0.0.1:8000", None, tmp_path / "log", {}),
    ):
        pass
