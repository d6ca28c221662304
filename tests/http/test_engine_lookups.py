"""What clients of llama-server, vLLM and LM Studio look up, and the endpoints that they share with other clients."""

from __future__ import annotations

from typing import Any

import httpx

from modelyard import __version__
from tests.http.app_client import app_client

MESSAGES = [{"role": "user", "content": "Hello"}]


async def get(path: str, *, loaded: bool = False) -> httpx.Response:
    async with app_client(loaded=loaded) as client:
        return await client.get(path)


async def test_props_show_window_template_and_defaults() -> None:
    props: dict[str, Any] = (await get("/props", loaded=True)).json()
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["default_generation_settings"]["params"]["temperature"] >= 0
    assert "<|im_start|>" in props["chat_template"]
    assert props["eos_token"] == "<|im_end|>"
    assert (props["model_alias"], props["is_sleeping"], props["total_slots"] > 0) == ("demo", False, True)
    assert props["modalities"] == {"vision": False, "video": False, "audio": False}


async def test_props_of_a_model_that_is_not_loaded_say_so() -> None:
    assert (await get("/props?model=demo")).json()["is_sleeping"] is True


async def test_slots_are_the_places_of_the_loaded_model() -> None:
    slots = (await get("/slots", loaded=True)).json()
    assert [slot["id"] for slot in slots] == list(range(len(slots)))
    assert {(slot["n_ctx"], slot["is_processing"]) for slot in slots} == {(4096, False)}
    assert (await get("/slots")).json() == []


async def test_other_lookups_answer() -> None:
    assert (await get("/lora-adapters", loaded=True)).json() == []
    assert (await get("/version")).json() == {"version": __version__}
    assert (await get("/v1/health", loaded=True)).json()["status"] == "healthy"


async def test_lm_studios_list_tells_which_models_are_loaded() -> None:
    sleeping = (await get("/api/v0/models/demo")).json()
    assert (sleeping["type"], sleeping["state"], sleeping["max_context_length"]) == ("llm", "not-loaded", 4096)
    assert "loaded_context_length" not in sleeping
    (loaded,) = (await get("/api/v0/models", loaded=True)).json()["data"]
    assert (loaded["state"], loaded["loaded_context_length"]) == ("loaded", 4096)
    assert loaded["capabilities"] == ["tool_use"]
    missing = await get("/api/v0/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "path_not_found")


async def test_lm_studios_paths_answer_as_those_of_v1() -> None:
    async with app_client(loaded=True) as client:
        reply = await client.post("/api/v0/chat/completions", json={"model": "demo", "messages": MESSAGES})
    assert reply.json()["object"] == "chat.completion"


async def test_lookups_change_nothing() -> None:
    async with app_client() as client:
        assert (await client.post("/props", json={})).status_code == 405
        assert (await client.post("/lora-adapters", json=[])).status_code == 405


async def test_input_tokens_of_a_chat_need_no_model() -> None:
    async with app_client() as client:
        counted = await client.post("/v1/chat/completions/input_tokens", json={"messages": MESSAGES})
        tokens = await client.post("/tokenize", json={"messages": MESSAGES})
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": tokens.json()["count"]}


async def test_completion_shows_the_defaults_of_the_model() -> None:
    async with app_client(loaded=True) as client:
        reply = (await client.post("/completion", json={"prompt": "Hello", "n_predict": 3, "top_k": 7})).json()
        props = (await client.get("/props")).json()["default_generation_settings"]["params"]
    settings = reply["generation_settings"]
    assert (settings["top_k"], settings["top_p"], reply["tokens_predicted"]) == (7, props["top_p"], 3)
