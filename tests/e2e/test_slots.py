"""llama-server's slots: a client chooses one, saves its KV to a file, restores it in another, and erases it; nobody
reaches another key's."""

from __future__ import annotations

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
