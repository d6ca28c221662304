from __future__ import annotations

import msgspec

from modelyard.core.protocol import ModelCard
from modelyard.protocols import openai_chat

CARD = ModelCard("tiny", 17, 4096, state="loading", aliases=("gpt-small",))


def test_a_model_tells_its_window_and_state() -> None:
    told = msgspec.json.decode(openai_chat.write_model(CARD))
    assert told["object"] == "model"
    assert (told["id"], told["name"], told["created"], told["owned_by"]) == ("tiny", "tiny", 17, "modelyard")
    assert (told["context_length"], told["max_model_len"], told["state"]) == (4096, 4096, "loading")
    assert told["aliases"] == ["gpt-small"]


def test_the_list_holds_every_model_in_order() -> None:
    told = msgspec.json.decode(openai_chat.write_models([CARD, ModelCard("other", 1, None)]))
    assert told["object"] == "list"
    assert [model["id"] for model in told["data"]] == ["tiny", "other"]
