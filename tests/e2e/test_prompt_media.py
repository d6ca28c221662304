"""llama-server's `multimodal_data`: a prompt without a template whose marks stand for images, on a real projector."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engines.llama_cpp import tiny_models
from tests.engines.llama_cpp.media_files import picture, require_libmtmd
from tests.live_server import live_server

CHAT = {"backend": "fake", "kind": "chat", "modalities": ["text", "image"]}
MARK = "<__media__>"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    require_libmtmd()
    model, projector = tiny_models.seeing("tiles")
    eyes = {"backend": "llama_cpp", "path": str(model), "mmproj": str(projector), "n_threads": 1, "n_ctx": 512}
    blind = {"backend": "llama_cpp", "path": str(tiny_models.coder()), "n_threads": 1, "n_ctx": 512}
    models = {
        "eyes": eyes,
        "blind": blind,
        "chat": {"backend": "fake", "kind": "chat", "modalities": ["text", "image"]},
    }
    with (
        live_server({"models": models, "default_model": "eyes"}) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def file(seed: int) -> str:
    return base64.b64encode(picture(seed)).decode()


def ask(client: httpx.Client, text: str, *files: str, **more: Any) -> httpx.Response:
    prompt = {"prompt_string": text, "multimodal_data": list(files)}
    return client.post("/completion", json={"prompt": prompt, "n_predict": 4, "temperature": 0, "n_probs": 1} | more)


def test_the_model_reads_the_files_at_their_marks(client: httpx.Client) -> None:
    plain = ask(client, "A picture:  What is it?").raise_for_status().json()
    seen = [ask(client, f"A picture: {MARK} What is it?", file(seed)).raise_for_status().json() for seed in (1, 2, 1)]
    assert all(each["tokens_evaluated"] > plain["tokens_evaluated"] + 3 for each in seen)
    first, other, again = (each["completion_probabilities"][0]["logprob"] for each in seen)
    assert first == pytest.approx(again, abs=1e-4)
    assert first != pytest.approx(other, abs=1e-6)
    two = ask(client, f"{MARK} and {MARK}.", file(1), file(2)).raise_for_status().json()
    swapped = ask(client, f"{MARK} and {MARK}.", file(2), file(1)).raise_for_status().json()
    assert two["tokens_evaluated"] == swapped["tokens_evaluated"]
    assert two["completion_probabilities"] != swapped["completion_probabilities"]
    assert client.get("/props").json()["media_marker"] == MARK


@pytest.mark.parametrize(
    ("text", "files", "model", "part"),
    [
        ("no mark", [""], "eyes", "0 times"),
        (f"{MARK}{MARK}", ["x"], "eyes", "2 times"),
        (MARK, ["no base64!"], "eyes", "base64"),
        (MARK, [7], "eyes", "list of files"),
        (MARK, ["iVBORw0KGgo="], "blind", "image"),
        (MARK, ["iVBORw0KGgo="], "chat", "messages of /v1/chat/completions"),
    ],
)
def test_files_that_cannot_be_read_are_refused(
    client: httpx.Client, text: str, files: list[Any], model: str, part: str
) -> None:
    reply = ask(client, text, *files, model=model)
    assert reply.status_code == 400, reply.text
    assert part in reply.json()["error"]["message"]
