"""What both kinds of the fake engine share: its script, its running jobs, and its death."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Protocol

from msgspec.structs import replace

from modelyard.core.engine import Capabilities, EngineInfo, EngineSpec, OnProgress
from modelyard.core.errors import Internal, ModelyardError, Unavailable
from modelyard.core.request import Constraint, Sampling
from modelyard.core.tokenizer import Tokenizer
from modelyard.engines.fake.answers import Steps, constrained, demo
from modelyard.engines.fake.conversation import ConversationView
from modelyard.engines.fake.options import Options, tokenizer_path
from modelyard.engines.fake.script import Script, ScriptRule, ScriptStep
from modelyard.tokenizer.hf import HuggingFaceTokenizer

log = logging.getLogger(__name__)

CAPABILITIES = Capabilities(
    modalities=("text", "image"),
    structured=True,
    logprobs=True,
    lora=True,
    embeddings=True,
    ignored=Sampling.__struct_fields__,
)


class Job(Protocol):
    def fail(self, error: ModelyardError) -> None: ...


class Base:
    """Made on the loop that it will run on."""

    def __init__(self, spec: EngineSpec, *, embeddings: bool) -> None:
        self.options: Options = spec.options
        self.loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[ModelyardError] = self.loop.create_future()
        self.script = Script(self.options.script)
        self.jobs: set[Job] = set()
        self.info = EngineInfo("fake", dict(spec.caches), _capabilities(spec, embeddings))
        self._vocab: Tokenizer | None = None
        self._thread = threading.get_ident()
        self._dead: ModelyardError | None = None

    @property
    def vocab(self) -> Tokenizer:
        if self._vocab is None:
            raise RuntimeError("the engine was asked to work before it was opened")
        return self._vocab

    @property
    def dead(self) -> ModelyardError | None:
        """Why nothing can run here any more."""
        return self._dead

    async def open(self, progress: OnProgress) -> None:
        progress(0.0, "reading the tokenizer")
        self._vocab = await asyncio.to_thread(HuggingFaceTokenizer.load, tokenizer_path(self.options))
        progress(1.0, "ready")

    async def close(self) -> None:
        self.end_all(Unavailable("the engine was closed"))

    def die(self, error: ModelyardError) -> None:
        self.end_all(error)
        if not self.lost.done():
            self.lost.set_result(error)

    def end_all(self, error: ModelyardError) -> None:
        self._dead = error
        for job in tuple(self.jobs):
            job.fail(error)

    def soon(self, deed: Callable[[], None]) -> None:
        """At once on the engine's own thread, else on it as soon as it can."""
        if threading.get_ident() == self._thread:
            deed()
        else:
            self.loop.call_soon_threadsafe(deed)

    def answer(self, talk: ConversationView, constraint: Constraint | None, session: str | None) -> ScriptRule | Steps:
        rule = self.script.choose(talk, session)
        if rule is not None and (constraint is None or not rule.is_bare):
            return rule
        if constraint is not None and (steps := constrained(constraint, talk)):
            return steps
        if rule is not None:
            return rule
        return (ScriptStep(text=talk.user),) if self.options.echo else demo(talk)


def crash(error: Exception) -> ModelyardError:
    """What a job ends with when something broke: its own words, or an id under which the log has the rest."""
    if isinstance(error, ModelyardError):
        return error
    internal = Internal("the fake engine failed")
    log.exception("job failed (id %s)", internal.id, exc_info=error)
    return internal


def _capabilities(spec: EngineSpec, embeddings: bool) -> Capabilities:
    """`embeddings`: it takes tokens, and not conversations."""
    return replace(
        CAPABILITIES, modalities=spec.modalities, logprobs=embeddings, lora=embeddings, embeddings=embeddings
    )
