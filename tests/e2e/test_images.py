"""Images on every protocol, with a real projector: one answer, one count, one cache."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engines.llama_cpp.media_files import picture, require_libmtmd, sound
from tests.engines.llama_cpp.tiny_models import seeing
from tests.live_server import LiveServer, live_server
from tests.prompt.test_pdf_pages import pdf

PNG = base64.b64encode(picture(1)).decode()
URL = f"data:image/png;base64,{PNG}"
PDF = base64.b64encode(pdf("First page", "Second page")).decode()
BEFORE, AFTER = "Look:", "What is it?"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    require_libmtmd()
    model, projector = seeing("tiles")
    eyes = {
        "backend": "llama_cpp",
        "path": str(model),
        "mmproj": str(projector),
        "n_ctx": 512,
        "n_threads": 1,
        "speculation": "off",
    }
    models = {"eyes": eyes | {"placement": "inline"}, "apart": eyes | {"placement": "process"}}
    with live_server({"models": models}) as running:
        yield running


def post(server: LiveServer, path: str, body: dict[str, Any], status: int = 200) -> Any:
    reply = httpx.post(f"{server.url}{path}", json=body, timeout=180)
    assert reply.status_code == status, reply.text
    return reply.json()


def chat(server: LiveServer, model: str = "eyes", image: str = URL) -> Any:
    parts = [{"type": "text", "text": BEFORE}, {"type": "image_url", "image_url": {"url": image}}]
    content = [*parts, {"type": "text", "text": AFTER}]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
    return post(server, "/v1/chat/completions", body)


def anthropic_body(model: str = "eyes", **more: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    content = [{"type": "text", "text": BEFORE}, {"type": "image", "source": source}, {"type": "text", "text": AFTER}]
    return {"model": model, "messages": [{"role": "user", "content": content}], **more}


def test_every_protocol_gets_the_same_answer_about_the_same_picture(server: LiveServer) -> None:
    answer = chat(server)["choices"][0]["message"]["content"]
    message = post(server, "/v1/messages", anthropic_body(max_tokens=8, temperature=0))
    items = [
        {"type": "input_text", "text": BEFORE},
        {"type": "input_image", "image_url": URL},
        {"type": "input_text", "text": AFTER},
    ]
    body = {"model": "eyes", "max_output_tokens": 8, "temperature": 0, "input": [{"role": "user", "content": items}]}
    response = post(server, "/v1/responses", body)
    parts = [{"text": BEFORE}, {"inlineData": {"mimeType": "image/png", "data": PNG}}, {"text": AFTER}]
    settings = {"temperature": 0, "maxOutputTokens": 8}
    gemini = {"contents": [{"role": "user", "parts": parts}], "generationConfig": settings}
    generated = post(server, "/v1beta/models/eyes:generateContent", gemini)
    assert message["content"][0]["text"] == answer
    assert response["output"][0]["content"][0]["text"] == answer
    assert generated["candidates"][0]["content"]["parts"][0]["text"] == answer
    other = chat(server, image=f"data:image/png;base64,{base64.b64encode(picture(2)).decode()}")
    assert other["choices"][0]["message"]["content"] != answer


def test_ollama_sends_pictures_beside_the_text(server: LiveServer) -> None:
    message = {"role": "user", "content": AFTER, "images": [PNG]}
    body = {"model": "eyes", "stream": False, "options": {"temperature": 0, "num_predict": 4}, "messages": [message]}
    reply = post(server, "/api/chat", body)
    assert reply["prompt_eval_count"] > 60
    assert reply["message"]["content"]


def test_a_picture_crosses_to_an_engine_in_another_process(server: LiveServer) -> None:
    here, there = chat(server), chat(server, "apart")
    assert there["choices"][0]["message"] == here["choices"][0]["message"]
    again = chat(server, "apart")["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1


@pytest.mark.parametrize("model", ["eyes", "apart"])
def test_pictures_are_counted_as_they_are_read(server: LiveServer, model: str) -> None:
    counted = post(server, "/v1/messages/count_tokens", anthropic_body(model))
    assert counted["input_tokens"] == chat(server, model)["usage"]["prompt_tokens"]


def test_the_pages_of_a_pdf_are_read_as_text_and_images(server: LiveServer) -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": PDF}
    content = [{"type": "document", "source": source}, {"type": "text", "text": AFTER}]
    body = {"model": "eyes", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    usage = post(server, "/v1/messages", body)["usage"]
    file = {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{PDF}"}}
    content = [file, {"type": "text", "text": AFTER}]
    body = {"model": "eyes", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    again = post(server, "/v1/chat/completions", body)["usage"]
    assert again["prompt_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1


def test_audio_and_damaged_pictures_are_refused(server: LiveServer) -> None:
    audio = {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound(1)).decode(), "format": "wav"}}
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    for part, code in ((audio, "modality_unsupported"), (broken, "invalid_image")):
        body = {"model": "eyes", "messages": [{"role": "user", "content": [part]}]}
        assert post(server, "/v1/chat/completions", body, 400)["error"]["code"] == code


def test_the_list_of_models_says_what_they_take(server: LiveServer) -> None:
    cards = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert {card["id"]: card["modalities"] for card in cards}["eyes"] == ["text", "image"]
