"""What a long conversation costs each time it grows: the gateway's own reading, rendering and tokenizing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from msgspec import Struct

from bench.subjects import configuration
from modelyard.config.load import load_config
from modelyard.prompt.render import Renderer
from modelyard.protocols import openai_chat
from modelyard.server.model_definition import define_model
from modelyard.tokenizer.shield import unshield

TOKENS, GROWTH, TURNS = 20_000, 200, 30


class Growth(Struct, frozen=True):
    """Milliseconds. `first` renders and tokenizes all of it; the others are one turn that adds `GROWTH` tokens."""

    tokens: int
    first: float
    turn_median: float
    turn_max: float
    read_median: float


def measure(tokenizer: Path) -> Growth:
    author = Author(_renderer(tokenizer))
    talk, tokens = author.conversation(TOKENS)
    renderer = _renderer(tokenizer)  # the author's own has seen the conversation already
    _, first = _turn(renderer, talk)
    reads, turns = [], []
    for _ in range(TURNS):
        talk.append(author.message(len(talk)))
        read, turn = _turn(renderer, talk)
        reads.append(read)
        turns.append(turn)
    return Growth(tokens, first, median(turns), max(turns), median(reads))


def _renderer(tokenizer: Path) -> Renderer:
    config = load_config(env={}, overrides=configuration(tokenizer, 0)).config
    return define_model(config.router().catalog.models["bench"], config.models["bench"]).model.pipeline.renderer


class Author:
    """Writes messages of about `GROWTH` tokens, words by chance but the same in every run: no tokenizer knows them."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        spelled = (renderer.vocab.token_bytes(id) for id in range(1000, 30_000))
        self._words = [word.decode() for word in spelled if word[:1] == b" " and word[1:].isalpha()]
        self._dice = random.Random(20_000)

    def conversation(self, size: int) -> tuple[list[dict[str, str]], int]:
        """User and assistant in turns until there are `size` tokens."""
        talk: list[dict[str, str]] = []
        while (tokens := self._count(talk)) < size:
            talk.append(self.message(len(talk)))
        return talk, tokens

    def message(self, number: int) -> dict[str, str]:
        role = "assistant" if number % 2 else "user"
        return {"role": role, "content": "".join(self._dice.choices(self._words, k=GROWTH - 5))}  # 5 spell the turn

    def _count(self, talk: list[dict[str, str]]) -> int:
        if not talk:
            return 0
        return len(self._renderer.tokens(self._renderer.text(openai_chat.read_request(_body(talk), {}))))


def _body(talk: list[dict[str, str]]) -> bytes:
    asked: dict[str, Any] = {"model": "bench", "messages": talk}
    if talk[-1]["role"] == "assistant":  # a reply at the end would be continued, which is another path
        asked["messages"] = [*talk, {"role": "user", "content": "Go on."}]
    return json.dumps(asked).encode()


def _turn(renderer: Renderer, talk: list[dict[str, str]]) -> tuple[float, float]:
    """Milliseconds to read the body, and to render and tokenize it, as the gateway does both."""
    body = _body(talk)
    began = perf_counter()
    request = openai_chat.read_request(body, {})
    read = perf_counter()
    text = renderer.text(request)
    renderer.fresh(text)
    ids = renderer.tokens(text)
    done = perf_counter()
    if ids != renderer.vocab.encode(unshield(text)):
        raise RuntimeError("the cached tokens differ from a full tokenization")
    return (read - began) * 1000, (done - read) * 1000
