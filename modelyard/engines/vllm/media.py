"""Pictures of a prompt as vLLM takes them: opened here, known by their hash, so that each is looked at once."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from io import BytesIO
from typing import Any

from modelyard.core.engine import Media
from modelyard.core.errors import InvalidRequest, Unsupported

_MOST_PIXELS = 1 << 26  # a small file may unpack to more than the machine has


def multi_modal(media: Sequence[Media]) -> dict[str, Any]:
    """What stands beside the token ids in a prompt."""
    if not media:
        return {}
    if any(each.kind != "image" for each in media):
        raise Unsupported("this engine reads text and images", code="modality_unsupported")
    return {
        "multi_modal_data": {"image": [_opened(each.data) for each in media]},
        "multi_modal_uuids": {"image": [each.sha256 for each in media]},
    }


def _opened(data: bytes) -> Any:
    pil = import_module("PIL.Image")
    try:
        image = pil.open(BytesIO(data))
        if image.width * image.height > _MOST_PIXELS:
            raise InvalidRequest(f"an image of {image.width}x{image.height} is too large", code="invalid_image")
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, pil.DecompressionBombError) as error:
        raise InvalidRequest(f"an image cannot be read: {error}", code="invalid_image") from error
