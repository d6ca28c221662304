"""Google's Gemini API for clients: `POST /v1beta/models/{model}:generateContent` and `:streamGenerateContent`.

    data: {"candidates": [{"content": {"parts": [{"text": "Hi"}], "role": "model"}, "index": 0}], …}
    data: {"candidates": [{"content": {"parts": [{"functionCall": {"name": …, "args": {…}}}], "role": "model"}, …}], …}
    data: {"candidates": [{…, "finishReason": "STOP"}], "usageMetadata": {…}, "modelVersion": "m", "responseId": …}

With `?alt=sse` a stream is server-sent events, else one JSON array of the same objects. The path names the model and
the method: `read_request` finds it under the pseudo-headers `:path` and `:query`. Names may also be in snake case.
"""

from __future__ import annotations

from modelyard.core.request import Request
from modelyard.protocols.gemini.errors import write_error
from modelyard.protocols.gemini.reply import GeminiStreamWriter, write_count, write_model, write_models, write_reply
from modelyard.protocols.gemini.request import read_count_request, read_request

NAME = "gemini"
PREFIXES = ("/v1beta/models", "/v1/models", "/v1alpha/models", "/models")
PATHS: tuple[str, ...] = tuple(
    f"{prefix}/{{id:path}}:{method}" for prefix in PREFIXES for method in ("generateContent", "streamGenerateContent")
)

__all__ = [
    "NAME",
    "PATHS",
    "PREFIXES",
    "read_count_request",
    "read_request",
    "write_count",
    "write_error",
    "write_model",
    "write_models",
    "write_reply",
    "writer",
]


def writer(request: Request, trace: str) -> GeminiStreamWriter:
    return GeminiStreamWriter(request, trace)
