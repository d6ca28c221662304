"""`/v1/moderations` with OpenAI's SDK and guard models that write like Llama Guard and Qwen3Guard."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.live_server import LiveServer, live_server

LLAMA = [
    {"when": "bomb", "steps": [{"text": "\n\nunsafe\nS9,S2"}]},
    {"when": "vote", "steps": [{"text": "unsafe\nS13"}]},
    {"steps": [{"text": "\n\nsafe"}]},
]
QWEN = [{"steps": [{"text": "Safety: Unsafe\nCategories: Violent, Suicide & Self-Harm"}]}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    def model(script: list[dict[str, Any]]) -> dict[str, Any]:
        return {"backend": "fake", "token_delay": 0, "script": script}

    models = {"guard": model(LLAMA), "qwen3guard": model(QWEN), "chatty": model([{"steps": [{"text": "Sure!"}]}])}
    with live_server({"models": models, "routes": [{"match": "*-moderation-*", "model": "guard"}]}) as running:
        yield running


@pytest.fixture(scope="module")
def moderations(server: LiveServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client.moderations


def flagged(result: Any) -> set[str]:
    return {name for name, is_set in result.categories.to_dict().items() if is_set}


def test_texts_are_judged_by_the_model_of_the_route(moderations: Any) -> None:
    reply = moderations.create(input=["How is the weather?", "Build a bomb", "How to vote twice"])
    assert [result.flagged for result in reply.results] == [False, True, True]
    assert [flagged(result) for result in reply.results] == [set(), {"illicit/violent", "illicit"}, set()]
    assert reply.results[1].category_scores.illicit == 1.0
    assert reply.results[1].category_applied_input_types.illicit == ["text"]
    assert not moderations.create(input="Hello").results[0].flagged


def test_the_texts_of_one_request_have_one_slot() -> None:
    model = {"backend": "fake", "token_delay": 0.01, "script": LLAMA}
    with live_server({"models": {"guard": model}}) as running, ThreadPoolExecutor(1) as pool:
        url, body = running.url + "/v1/moderations", {"model": "guard", "input": ["Hello"] * 8}
        asked, seen = pool.submit(httpx.post, url, json=body), set[int]()
        while not asked.done():
            seen.add(httpx.get(running.url + "/health").json()["models"]["guard"]["running"])
    assert len(asked.result().json()["results"]) == 8
    assert max(seen) == 1


def test_a_guard_model_is_named(moderations: Any) -> None:
    parts = [{"type": "text", "text": "Hello"}]
    assert flagged(moderations.create(model="qwen3guard", input=parts).results[0]) == {"violence", "self-harm"}


def test_a_model_that_is_no_guard_is_refused(moderations: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="no guard model") as refused:
        moderations.create(model="chatty", input="Hello")
    assert refused.value.code == "no_guard_model"


def test_without_a_guard_model_the_error_says_what_to_configure() -> None:
    with live_server({"models": {"a": {"backend": "fake"}, "b": {"backend": "fake"}}}) as running:
        reply = httpx.post(running.url + "/v1/moderations", json={"input": "Hello"})
    assert reply.status_code == 400
    assert "*-moderation-*" in reply.json()["error"]["message"]


@pytest.mark.parametrize("body", [{}, {"input": []}, {"input": 7}, {"input": [{"type": "video"}]}])
def test_bad_input_is_refused(server: LiveServer, body: dict[str, Any]) -> None:
    assert httpx.post(server.url + "/v1/moderations", json=body).status_code == 400
