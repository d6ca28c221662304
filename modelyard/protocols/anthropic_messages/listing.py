"""Small answers of the Messages API: token counts and the list of models."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from modelyard.core.errors import InvalidRequest
from modelyard.core.protocol import ModelCard
from modelyard.protocols.common.json import encode

_MOST = 1000


def write_count(tokens: int) -> bytes:
    return encode({"input_tokens": tokens})


def write_model(card: ModelCard) -> bytes:
    return encode(_model(card))


def write_models(
    models: Sequence[ModelCard], *, limit: int | None = None, before_id: str | None = None, after_id: str | None = None
) -> bytes:
    """One page; without a limit all of them: a local pool is short, and not every client turns pages."""
    if limit is not None and not 1 <= limit <= _MOST:
        raise InvalidRequest(f"limit must lie between 1 and {_MOST}, got {limit}", param="limit")
    page, has_more = _page(models, limit or len(models), before_id, after_id)
    return encode(
        {
            "data": [_model(card) for card in page],
            "has_more": has_more,
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
        }
    )


def _page(
    models: Sequence[ModelCard], limit: int, before_id: str | None, after_id: str | None
) -> tuple[Sequence[ModelCard], bool]:
    """A page before a place is the last one that ends there, as turning back would show it."""
    start = 0 if after_id is None else _place(models, after_id, "after_id") + 1
    end = len(models) if before_id is None else _place(models, before_id, "before_id")
    found = models[start:end]
    page = found[-limit:] if before_id is not None and after_id is None else found[:limit]
    return page, len(page) < len(found)


def _place(models: Sequence[ModelCard], id: str, param: str) -> int:
    for place, card in enumerate(models):
        if card.id == id:
            return place
    raise InvalidRequest(f"{param}: no model is called {id!r}", param=param)


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "type": "model",
        "id": card.id,
        "display_name": card.display_name or card.id,
        "created_at": datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": card.context,
        "max_tokens": card.max_output or card.context,
        "lifecycle": "active",
        "state": card.state,
        "aliases": card.aliases,
        "modalities": card.modalities,
    }
