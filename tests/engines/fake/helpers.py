"""Helpers for tests with the fake engine: opened engines, ChatML prompts, and reading a job to its end."""

from functools import cache
from typing import Any

import modelyard_fake as fake
from modelyard.core.engine import CacheInfo, Chunk, EngineSpec, Prompt, TokenRun
from modelyard.core.tokenizer import Tokenizer
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from modelyard_fake.engine import FakeChatEngine, FakeTextEngine
from tests.engines.reading import ids, read

WEATHER = (
    '{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", '
    '"properties": {"city": {"type": "string"}}, "required": ["city"]}}}'
)


@cache
def tokenizer() -> Tokenizer:
    return HuggingFaceTokenizer.load(fake.tokenizer_path(fake.Options()))


def spec(window: int = 4096, parallel: int = 4, **options: Any) -> EngineSpec:
    caches = {"main": CacheInfo(window, parallel), "fast": CacheInfo(window, parallel)}
    return EngineSpec("demo", fake.Options(**{"token_delay": 0} | options), caches)


async def text_engine(**options: Any) -> FakeTextEngine:
    engine = fake.create(spec(**options))
    assert isinstance(engine, FakeTextEngine)
    await engine.open(lambda *_: None)
    return engine


async def chat_engine(**options: Any) -> FakeChatEngine:
    engine = fake.create(spec(kind="chat", **options))
    assert isinstance(engine, FakeChatEngine)
    await engine.open(lambda *_: None)
    return engine


def chatml(*turns: tuple[str, str], opening: str = "") -> str:
    text = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return f"{text}<|im_start|>assistant\n{opening}"


def prompt(text: str = "hello", **fields: Any) -> Prompt:
    """`text` is the user message, or a whole prompt if it has markers."""
    whole = text if "<|" in text else chatml(("user", text))
    return Prompt(parts=(TokenRun(tokenizer().encode(whole)),), **{"max_tokens": 1000, "cache": "main"} | fields)


def output_text(chunks: list[Chunk]) -> str:
    return tokenizer().decode(ids(chunks))


async def answer(text: str = "hello", *, fields: dict[str, Any] | None = None, **options: Any) -> str:
    engine = await text_engine(**options)
    return output_text(await read(engine.generate(prompt(text, **fields or {}))))
