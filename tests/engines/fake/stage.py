"""What the fake engine's tests share: opened engines, ChatML prompts, and reading a job to its end."""

from functools import cache
from typing import Any

from modelyard.core.engine import CacheInfo, Chunk, End, EngineSpec, Generation, Prompt, TokenRun, Tokens
from modelyard.core.tokenizer import Tokenizer
from modelyard.engines import fake
from modelyard.engines.fake.chat import FakeChatEngine
from modelyard.engines.fake.text import FakeTextEngine
from modelyard.tokenizer.hf import HuggingFaceTokenizer

WEATHER = (
    '{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", '
    '"properties": {"city": {"type": "string"}}, "required": ["city"]}}}'
)


@cache
def vocabulary() -> Tokenizer:
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
    told = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return f"{told}<|im_start|>assistant\n{opening}"


def prompt(text: str = "hello", **fields: Any) -> Prompt:
    """`text` is the user's turn, or a whole prompt where it has markers."""
    whole = text if "<|" in text else chatml(("user", text))
    return Prompt(parts=(TokenRun(vocabulary().encode(whole)),), **{"max_tokens": 1000, "cache": "main"} | fields)


async def read(generation: Generation[Chunk]) -> list[Chunk]:
    return [chunk async for batch in generation for chunk in batch]


def ids(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks if isinstance(chunk, Tokens) for token in chunk.ids]


def said(chunks: list[Chunk]) -> str:
    return vocabulary().decode(ids(chunks))


def end(chunks: list[Chunk]) -> End:
    last = chunks[-1]
    assert isinstance(last, End)
    assert sum(isinstance(chunk, End) for chunk in chunks) == 1
    return last


async def answer(text: str = "hello", *, fields: dict[str, Any] | None = None, **options: Any) -> str:
    engine = await text_engine(**options)
    return said(await read(engine.generate(prompt(text, **fields or {}))))
