"""OpenAI's list of models, with the context length and the state that OpenAI's own list lacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from modelyard.core.protocol import ModelCard
from modelyard.protocols.common.json import encode


def write_models(cards: Iterable[ModelCard]) -> bytes:
    return encode({"object": "list", "data": [_model(card) for card in cards]})


def write_model(card: ModelCard) -> bytes:
    return encode(_model(card))


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": card.owned_by,
        "name": card.display_name or card.id,
        "context_length": card.context,
        "max_model_len": card.context,
        "max_output_tokens": card.max_output,
        "state": card.state,
        "aliases": card.aliases,
        "modalities": card.modalities,
    }
