"""What clients of llama-server's /slots and /completion rely on: a client chooses a slot, saves its KV to a file,
restores it in another, and erases it, and nobody reaches another key's; probabilities after the samplers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.llama_cpp.tiny_models import coder
from tests.live_server import LiveServer, live_server

TEXT = "What is the capital of France? It is a city on the river Seine, and its name is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    tiny = {"path": str(coder()), "n_threads": 1, "n_ctx": 512, "parallel": 2, "kv_store": str(folder)}
    keys = [{"name": name, "key": f"sk-{name}-0123456789abcdef"} for name in ("ann", "bob")]
    models = {"tiny": tiny, "lost": tiny | {"kv_store": False}, "fake": {"backend": "fake"}}
    with live_server({"models": models, "default_model": "tiny", "keys": keys}) as running:
        yield running


def of(server: LiveServer, name: str) -> httpx.Client:
    return httpx.Client(
        base_url=server.url, timeout=60, headers={"authorization": f"Bearer sk-{name}-0123456789abcdef"}
    )


@pytest.fixture
def ann(server: LiveServer) -> Iterator[httpx.Client]:
    with of(server, "ann") as client:
        yield client


@pytest.fixture
def bob(server: LiveServer) -> Iterator[httpx.Client]:
    with of(server, "bob") as client:
        yield client


def read(client: httpx.Client, slot: int, text: str = TEXT, **more: Any) -> Any:
    body = {"prompt": text, "id_slot": slot, "n_predict": 4, "temperature": 0} | more
    return client.post("/completion", json=body).raise_for_status().json()["timings"]


def change(client: httpx.Client, slot: Any, action: str, **query: Any) -> httpx.Response:
    body = {"filename": query.pop("filename")} if "filename" in query else None
    return client.post(f"/slots/{slot}", params={"action": action} | query, json=body)


def code(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


def test_a_saved_slot_continues_in_another_one(ann: httpx.Client) -> None:
    prompt = read(ann, 1)["prompt_n"]
    saved = change(ann, 1, "save", filename="../france.bin").raise_for_status().json()
    assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (1, "../france.bin", prompt + 3)
    assert saved["n_written"] > 0
    assert saved["timings"]["save_ms"] > 0
    assert change(ann, 1, "erase").json() == {"id_slot": 1, "n_erased": prompt + 3}
    assert read(ann, 1)["prompt_n"] == prompt  # nothing is left of it
    assert change(ann, 1, "erase").status_code == change(ann, 0, "erase").status_code == 200
    restored = change(ann, 0, "restore", filename="../france.bin").raise_for_status().json()
    assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
    assert read(ann, 0)["prompt_n"] == 1  # its last token is read again for its logits
    assert change(ann, 0, "erase").json()["n_erased"] == prompt + 3


def test_chat_takes_the_slot_too(ann: httpx.Client) -> None:
    for _ in range(2):
        body = {"messages": [{"role": "user", "content": "hi"}], "id_slot": 1, "max_tokens": 2, "model": "tiny"}
        ann.post("/v1/chat/completions", json=body).raise_for_status()
    assert change(ann, 1, "erase").json()["n_erased"] > 4
    assert change(ann, 0, "erase").json()["n_erased"] == 0


def test_nobody_reaches_the_slot_or_the_file_of_another_key(ann: httpx.Client, bob: httpx.Client) -> None:
    read(ann, 1)
    change(ann, 1, "save", filename="mine").raise_for_status()
    for action in ("save", "restore", "erase"):
        name = {} if action == "erase" else {"filename": "mine"}
        reply = change(bob, 1 if action != "restore" else 0, action, **name)
        assert code(reply) == (404, "no_such_file" if action == "restore" else "slot_of_another_key")
    read(bob, 0)
    change(bob, 0, "save", filename="bobs").raise_for_status()
    assert code(change(bob, 1, "restore", filename="bobs")) == (404, "slot_of_another_key")
    assert read(ann, 1)["prompt_n"] == 1  # it is still there
    assert change(bob, 0, "erase").status_code == change(ann, 1, "erase").status_code == 200


def test_what_cannot_be_done_is_refused_with_the_reason(ann: httpx.Client) -> None:
    assert code(change(ann, 0, "save", filename="x")) == (400, "slot_empty")
    assert code(change(ann, 7, "erase")) == (404, "no_such_slot")
    assert code(change(ann, 0, "restore", filename="never saved")) == (404, "no_such_file")
    assert code(change(ann, 0, "save")) == (400, "missing_required_parameter")
    assert change(ann, "x", "save", filename="x").status_code == 400
    assert change(ann, 0, "copy", filename="x").status_code == 400
    assert code(change(ann, 0, "erase", model="fake")) == (400, "unsupported_control")
    read(ann, 0, model="lost")
    assert code(change(ann, 0, "save", filename="x", model="lost")) == (400, "kv_store_unset")


def test_a_damaged_file_is_refused_and_leaves_the_slot_as_it_is(ann: httpx.Client, folder: Path) -> None:
    read(ann, 0)
    change(ann, 0, "save", filename="kept").raise_for_status()
    newest = max(folder.glob("*/slot-*.kv"), key=lambda file: file.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:-1])
    assert code(change(ann, 0, "restore", filename="kept")) == (400, "kv_does_not_fit")
    assert read(ann, 0)["prompt_n"] == 1


def test_probabilities_after_the_samplers_are_those_of_the_draw(ann: httpx.Client) -> None:
    def ask(**more: Any) -> Any:
        body = {"prompt": TEXT, "n_predict": 3, "n_probs": 10, "seed": 1, "temperature": 0.7} | more
        reply = ann.post("/completion", json=body)
        return reply if reply.status_code != 200 else reply.json()["completion_probabilities"]

    before = ask(top_k=4)[0]["top_logprobs"]
    weights = [math.exp(each["logprob"] / 0.7) for each in before[:4]]
    for token in (shown := ask(top_k=4, post_sampling_probs=True)):
        assert len(token["top_probs"]) == 4
        assert sum(each["prob"] for each in token["top_probs"]) == pytest.approx(1)
        assert token["prob"] in [each["prob"] for each in token["top_probs"]]
    assert [each["prob"] for each in shown[0]["top_probs"]] == pytest.approx(
        [w / sum(weights) for w in weights], rel=0.01
    )
    (first, *_), penalty = ask(temperature=0, post_sampling_probs=True), {"logit_bias": {str(before[0]["id"]): -50}}
    assert (first["id"], first["prob"], len(first["top_probs"])) == (before[0]["id"], 1.0, 1)
    biased = ask(top_p=0.5, post_sampling_probs=True, **penalty)[0]
    assert before[0]["id"] not in [each["id"] for each in biased["top_probs"]]
    assert sum(each["prob"] for each in ask(post_sampling_probs=True, n_probs=20)[0]["top_probs"]) < 1
    for more in ({"mirostat": 2}, {"grammar": 'root ::= "a"'}, {"model": "fake"}):
        refused = ask(post_sampling_probs=True, **more)
        assert refused.status_code == 400
        assert "post_sampling_probs" in refused.json()["error"]["message"]
