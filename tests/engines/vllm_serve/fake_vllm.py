"""A fake `vllm serve`: run as a script, it serves words instead of tokens.

FAKE_VLLM in its environment chooses its behaviour: `fails_to_start`, `slow`, `dies_at_request`,
`engine_dies_at_request`, `cannot_sleep`, `cannot_read`, `forks`. It writes its arguments and requests to the file that
FAKE_VLLM_NOTES names.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from typing import Any

BEHAVIOUR = os.environ.get("FAKE_VLLM", "")
CAN_SLEEP = BEHAVIOUR != "cannot_sleep" and bool(os.environ.get("VLLM_SERVER_DEV_MODE"))
NOTES = os.environ.get("FAKE_VLLM_NOTES")
FILLER = "one two three four five six seven eight nine ten"
CRASH = "(EngineCore pid=7) ERROR 11-15 09:51:02 [core.py:1101] ValueError: this machine has no such instruction"


def note(**what: Any) -> None:
    if NOTES:
        with open(NOTES, "a") as file:
            file.write(json.dumps(what) + "\n")


def value(flag: str, argv: list[str]) -> str | None:
    return argv[argv.index(flag) + 1] if flag in argv else None


def words(body: dict[str, Any]) -> list[str]:
    texts = [message.get("content") or "" for message in body["messages"]]
    return " ".join(text if isinstance(text, str) else str(text) for text in texts).split()


def counted(body: dict[str, Any]) -> int:
    return len(words(body)) + 4 * len(body["messages"])


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await route(reader, writer)
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def route(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    path = head.split(" ", 2)[1]
    length = next((int(line[15:]) for line in head.lower().splitlines() if line.startswith("content-length:")), 0)
    body = json.loads(await reader.readexactly(length)) if length else {}
    key = os.environ.get("VLLM_API_KEY")
    if key and path.startswith("/v1") and f"authorization: bearer {key}".lower() not in head.lower():
        reply(writer, 401, {"error": {"message": "Unauthorized", "type": "x", "code": 401}})
    elif path == "/v1/models":
        reply(writer, 200, {"object": "list", "data": [{"id": NAME, "object": "model"}]})
    elif path == "/tokenize":
        reply(writer, 200, {"count": counted(body), "max_model_len": WINDOW, "tokens": []})
    elif path == "/v1/chat/completions":
        note(request=body)
        await chat(reader, writer, body)
    elif path == "/v1/completions":
        note(text=body)
        read(writer, body)
    elif (
        path.startswith(("/sleep", "/wake_up"))
        and BEHAVIOUR != "cannot_sleep"
        and os.environ.get("VLLM_SERVER_DEV_MODE")
    ):
        note(control=path)
        reply(writer, 200, {"status": "done"})
    else:
        reply(writer, 404, {"detail": "Not Found"})


def read(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    """The probability of each token of a prompt: a half, and less with a quantized cache."""
    if BEHAVIOUR == "cannot_read":
        reply(writer, 400, {"error": {"message": "no log probabilities today", "type": "x", "code": 400}})
        return
    share = 0.4 if "fp8" in sys.argv else 0.5
    rows = [{str(id): {"logprob": math.log(share), "rank": 1, "decoded_token": "x"}} for id in body["prompt"][1:]]
    reply(writer, 200, {"choices": [{"index": 0, "text": "x", "prompt_logprobs": [None, *rows]}]})


def reply(writer: asyncio.StreamWriter, status: int, body: dict[str, Any], kind: str = "application/json") -> None:
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} x\r\ncontent-type: {kind}\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode() + text)


async def chat(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    if BEHAVIOUR == "dies_at_request":
        print(CRASH, flush=True)
        os.kill(os.getpid(), signal.SIGILL)
    if BEHAVIOUR == "engine_dies_at_request":
        print(CRASH, flush=True)
        message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        reply(writer, 500, {"error": {"message": message, "type": "InternalServerError", "param": None, "code": 500}})
        await writer.drain()
        writer.close()
        ENDED.set()
        return
    prompt = counted(body)
    if prompt > WINDOW:
        message = f"This model's maximum context length is {WINDOW} tokens."
        message += f" However, your prompt contains {prompt} input tokens, which exceeds this limit"
        reply(
            writer,
            400,
            {"error": {"message": message, "type": "BadRequestError", "param": "input_tokens", "code": 400}},
        )
        return
    if not body.get("stream"):
        reply(writer, 200, {"choices": [{"message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}]})
        return
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n")
    prompt_words, limit = words(body), body.get("max_tokens") or 100
    if prompt_words[0] == "Endless":
        chunk(writer, {"role": "assistant", "content": "so far"})
        await writer.drain()
        await reader.read()  # until the client leaves
        return
    output = (prompt_words + FILLER.split())[:limit]
    for at, word in enumerate(output):
        chunk(writer, {"role": "assistant", "content": word + " "} if at == 0 else {"content": word + " "})
        await writer.drain()
    chunk(writer, {}, "length" if len(output) == limit else "stop")
    usage = {"prompt_tokens": prompt, "completion_tokens": len(output), "total_tokens": prompt + len(output)}
    event(writer, {"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 3}}})
    writer.write(b"data: [DONE]\n\n")


def chunk(writer: asyncio.StreamWriter, delta: dict[str, Any], finish: str | None = None) -> None:
    event(writer, {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def event(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    about = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": NAME}
    writer.write(b"data: " + json.dumps(about | body).encode() + b"\n\n")


async def main(argv: list[str]) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ENDED.set)
    if BEHAVIOUR == "forks":
        child = subprocess.Popen(["sleep", "600"])  # noqa: ASYNC220
        note(child=child.pid)
    print("INFO 11-15 09:50:00 [core.py:10] Initializing a V1 LLM engine", flush=True)
    print("Loading safetensors checkpoint shards: 100% Completed | 1/1", flush=True)
    if path := value("--uds", argv):
        server = await asyncio.start_unix_server(answer, path)
    else:
        server = await asyncio.start_server(answer, value("--host", argv), int(value("--port", argv) or 0))
    print("INFO 11-15 09:50:09 [api.py:10] Starting vLLM server", flush=True)
    async with server:
        await ENDED.wait()


if __name__ == "__main__":
    note(argv=sys.argv[1:], pid=os.getpid())
    if sys.argv[1] != "serve" or "--nonsense" in sys.argv:
        sys.exit("vllm: error: unrecognized arguments: --nonsense")
    if BEHAVIOUR == "fails_to_start":
        print(CRASH)
        print("RuntimeError: Engine core initialization failed. See root cause above.")
        sys.exit(1)
    NAME = value("--served-model-name", sys.argv) or ""
    WINDOW = int(value("--max-model-len", sys.argv) or 0)
    ENDED = asyncio.Event()
    if BEHAVIOUR == "slow":
        signal.pause()
    asyncio.run(main(sys.argv))
