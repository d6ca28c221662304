"""Mistral's SDK against a live server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mistralai.client import Mistral
from mistralai.client.models import BaseModelCard

from tests.live_server import LiveServer


@pytest.fixture(scope="module")
def sdk(server: LiveServer) -> Iterator[Mistral]:
    with Mistral(api_key="none", server_url=server.url) as client:
        yield client


def test_models_are_listed_with_what_they_can_do(sdk: Mistral) -> None:
    (card,) = sdk.models.list().data or ()
    assert isinstance(card, BaseModelCard)
    assert (card.id, card.max_context_length) == ("demo", 4096)
    assert (card.capabilities.completion_chat, card.capabilities.function_calling) == (True, True)
    assert sdk.models.retrieve(model_id="demo") == card


def test_a_chat_is_answered_whole_and_streamed(sdk: Mistral) -> None:
    messages = [{"role": "user", "content": "text"}]
    whole = sdk.chat.complete(model="demo", messages=messages)
    assert whole.choices[0].message.content == "Hello there, friend."
    with sdk.chat.stream(model="demo", messages=messages) as events:
        pieces = [event.data.choices[0].delta.content for event in events if event.data.choices]
    assert "".join(str(piece or "") for piece in pieces) == "Hello there, friend."
