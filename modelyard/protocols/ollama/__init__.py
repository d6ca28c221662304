"""Ollama's API for clients: `POST /api/chat` here, `POST /api/generate` in `generate`, everything else in `models`.

    {"model": "m", "created_at": …, "message": {"role": "assistant", "content": "Hi"}, "done": false}
    {…, "message": {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": …, "arguments": {…}}}]}, …}
    {…, "message": {…, "content": ""}, "done": true, "done_reason": "stop", "total_duration": 4883583458, …}

One JSON object per line. A reply is streamed unless the client sends `"stream": false`; durations are in nanoseconds.
"""

from __future__ import annotations

from modelyard.core.request import Request
from modelyard.protocols.ollama.errors import write_error
from modelyard.protocols.ollama.reply import ChatLineWriter, write_reply
from modelyard.protocols.ollama.request import read_request

NAME = "ollama"
PATHS: tuple[str, ...] = ("/api/chat",)

__all__ = [
    "NAME",
    "PATHS",
    "read_request",
    "write_error",
    "write_reply",
    "writer",
]


def writer(request: Request, trace: str) -> ChatLineWriter:
    return ChatLineWriter(request, trace)
