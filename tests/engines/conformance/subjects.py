"""The engines under the conformance suite, each told how to be made and how to be brought to say something."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from modelyard.core.engine import CacheInfo, EngineSpec, Prompt, TextEngine, TokenRun
from modelyard.core.request import Sampling
from modelyard.core.vocab import Vocabulary
from modelyard.engines import fake, llama_cpp
from tests.engines.fake import stage as fake_stage
from tests.engines.llama_cpp import stage as llama_stage
from tests.engines.reading import ROUNDED, TOLERANCE

GREEDY = Sampling(temperature=0)
TOPICS = ("Tell me about the city of Paris and its river.", "Why is the sky blue on a clear day in summer?")


class Subject(Protocol):
    """`slow` asks for an engine that one can catch in the middle of reading and of speaking."""

    tolerance: float  # how far two runs of a job may be apart

    @property
    def vocabulary(self) -> Vocabulary: ...
    @property
    def file(self) -> Path:
        """What the engine reads; a broken copy must keep it from opening."""
        ...

    def make(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> TextEngine: ...
    def repeating(self, pattern: str) -> str:
        """The user's or the whole text that brings the engine to say the pattern."""
        ...


class Fake:
    tolerance = TOLERANCE
    vocabulary = property(lambda self: fake_stage.vocabulary())
    file = property(lambda self: fake.tokenizer_path(fake.Options()) / "tokenizer.json")

    def make(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> TextEngine:
        pace: dict[str, Any] = {"token_delay": 0.001, "prefill_rate": 5000.0} if slow else {"token_delay": 0}
        options = fake.Options(echo=True, tokenizer_path=file, **pace)
        return cast(TextEngine, fake.create(EngineSpec("demo", options, caches)))

    def repeating(self, pattern: str) -> str:
        return fake_stage.chatml(("user", pattern))


class LlamaCpp:
    tolerance = ROUNDED
    vocabulary = property(lambda self: llama_stage.vocabulary())
    file = property(lambda self: llama_stage.model_file())

    def make(self, caches: Mapping[str, CacheInfo], *, slow: bool = False, file: Path | None = None) -> TextEngine:
        options = {"path": str(file)} if file is not None else {}
        return cast(TextEngine, llama_cpp.create(llama_stage.spec(caches, **options)))

    def repeating(self, pattern: str) -> str:
        return pattern * 5


SUBJECTS: dict[str, Subject] = {"fake": Fake(), "llama_cpp": LlamaCpp()}


def prompt(subject: Subject, text: str = TOPICS[0], *, raw: bool = False, **fields: Any) -> Prompt:
    """`raw` text is the whole prompt, else it is the user's turn."""
    whole = text if raw else fake_stage.chatml(("user", text))
    chosen = {"sampling": GREEDY, "max_tokens": 6, "cache": "main", "logprobs": 2} | fields
    return Prompt(parts=(TokenRun(subject.vocabulary.encode(whole)),), **chosen)
