"""Check whether an agent runs on this machine: `python -m tests.clients.canned_server claude` gives it a canned reply.

The reply does not come from Modelyard, so an agent that fails here fails with any server.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from modelyard.launch.plan import LaunchTarget
from tests.clients.agent_bench import AgentBench

REPLY = "CANNED-ANSWER"
PROMPT: dict[str, tuple[str, ...]] = {
    "claude": ("-p", "say it"),
    "codex": ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "say it"),
    "cline": ("say it",),
    "gemini": ("--skip-trust", "--prompt", "say it"),
    "goose": ("run", "--quiet", "--text", "say it"),
    "opencode": ("run", "say it"),
    "qwen": ("--prompt", "say it"),
    "continue": ("-p", "say it"),
    "aider": ("--yes-always", "--no-git", "--no-pretty", "--message", "say it"),
}

_PART = {"type": "output_text", "text": REPLY, "annotations": []}
_ITEM = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [_PART]}
_COUNTS = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
_RESPONSE = {"id": "r", "object": "response", "model": "demo", "status": "completed", "output": [_ITEM]}
_MESSAGE = {"id": "m", "type": "message", "role": "assistant", "model": "demo", "usage": _COUNTS}


def messages() -> Iterator[dict[str, Any]]:
    yield {"type": "message_start", "message": _MESSAGE | {"content": [], "stop_reason": None, "stop_sequence": None}}
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": REPLY}}
    yield {"type": "content_block_stop", "index": 0}
    yield {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": _COUNTS}
    yield {"type": "message_stop"}


def chat() -> Iterator[dict[str, Any]]:
    for delta, reason in (({"role": "assistant", "content": REPLY}, None), ({}, "stop")):
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        yield {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "demo", "choices": [choice]}


def responses() -> Iterator[dict[str, Any]]:
    yield {"type": "response.created", "response": _RESPONSE | {"status": "in_progress", "output": []}}
    yield {"type": "response.output_item.added", "output_index": 0, "item": _ITEM | {"content": []}}
    yield {"type": "response.output_item.done", "output_index": 0, "item": _ITEM}
    yield {"type": "response.completed", "response": _RESPONSE | {"usage": _COUNTS}}


def contents() -> Iterator[dict[str, Any]]:
    candidate = {"content": {"parts": [{"text": REPLY}], "role": "model"}, "finishReason": "STOP", "index": 0}
    yield {"candidates": [candidate], "usageMetadata": {"promptTokenCount": 1, "totalTokenCount": 2}}


def _frame(event: dict[str, Any]) -> str:
    named = f"event: {event['type']}\n" if "type" in event else ""
    return f"{named}data: {json.dumps(event)}\n\n"


class CannedReplyHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send(b'{"object": "list", "data": [{"id": "demo", "object": "model"}]}', "application/json")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path.partition("?")[0]
        protocols = {"/messages": messages, "/completions": chat, "/responses": responses, "Content": contents}
        protocol = next((protocol for end, protocol in protocols.items() if path.endswith(end)), messages)
        events = [_frame(event) for event in protocol()]
        self._send("".join([*events, "data: [DONE]\n\n"] if protocol is chat else events).encode(), "text/event-stream")

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@contextmanager
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), CannedReplyHandler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_port}"
        finally:
            made.shutdown()
            thread.join()


def runs_here(name: str, folder: Path) -> str:
    """Nothing, or what is wrong."""
    with server() as url:
        try:
            done = AgentBench(name, folder).run(
                *PROMPT[name], target=LaunchTarget(url=url, model="demo", window=131072)
            )
        except (AssertionError, OSError) as fault:
            return str(fault)
    return "" if REPLY in done.out else repr(done)


def main() -> int:
    for name in sys.argv[1:] or PROMPT:
        with TemporaryDirectory() as folder:
            wrong = runs_here(name, Path(folder))
        print(f"{name}: {wrong or 'runs here'}", flush=True)
        if wrong:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
