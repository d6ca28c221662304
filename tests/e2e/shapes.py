"""A good body for every endpoint, and the shape that each one's refusals must have."""

from __future__ import annotations

from typing import Any

import httpx

_HI = [{"role": "user", "content": "hi"}]

VALID_BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "demo", "max_tokens": 16, "messages": _HI},
    "/v1/messages/count_tokens": {"model": "demo", "messages": _HI},
    "/v1/chat/completions": {"model": "demo", "messages": _HI},
    "/v1/responses": {"model": "demo", "input": "hi"},
    "/v1/responses/input_tokens": {"model": "demo", "input": "hi"},
    "/v1/completions": {"model": "demo", "prompt": "hi"},
    "/v1/embeddings": {"model": "demo", "input": "hi"},
    "/tokenize": {"model": "demo", "content": "hi"},
    "/detokenize": {"model": "demo", "tokens": [1, 2]},
    "/apply-template": {"model": "demo", "messages": _HI},
}


def check_error(reply: httpx.Response, path: str, status: int) -> dict[str, Any]:
    """The error of a reply that is a refusal to the letter; `code` and `param` are there on both wires."""
    assert reply.status_code == status, reply.text[:500]
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.headers["x-request-id"] == reply.headers["request-id"]
    told = reply.json()
    error = told["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    if path.startswith("/v1/messages"):
        assert told["type"] == "error"
        assert told["request_id"] == reply.headers["request-id"]
        return {"code": None, "param": None} | error
    assert set(told) == {"error"}
    assert {"message", "type", "param", "code"} <= set(error)
    return dict(error)
