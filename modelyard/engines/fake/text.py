"""The fake as a TextEngine: token ids in, token ids out, with caches, logprobs, embeddings, failure and death."""

from __future__ import annotations

from collections.abc import Sequence

from modelyard.core.engine import (
    CacheInfo,
    Chunk,
    Control,
    Embeddings,
    EngineSpec,
    EngineStats,
    Generation,
    OnProgress,
    Prompt,
)
from modelyard.core.errors import NotFound
from modelyard.engines.fake.base import Base
from modelyard.engines.fake.burst import Bursts
from modelyard.engines.fake.conversation import THINK, PromptView
from modelyard.engines.fake.dialects import format_writer
from modelyard.engines.fake.job import TextJob
from modelyard.engines.fake.memory import Sequences
from modelyard.engines.fake.numbers import unit_vector
from modelyard.engines.fake.plan import Compiler, Deed
from modelyard.engines.fake.script import ScriptRule


class FakeTextEngine(Base):
    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec, embeddings=True)
        self.reused = self.evaluated = 0
        self.opener: int | None = None
        self._caches = {name: (info, Sequences(info.parallel)) for name, info in spec.caches.items()}
        self._saved: dict[str, dict[str, Sequences]] = {}
        self._adapters: set[str] = set()
        self._compiled: dict[tuple[int, bool], tuple[Deed, ...]] = {}
        self._bursts = Bursts(self)

    def __repr__(self) -> str:
        return f"<FakeTextEngine {len(self.jobs)} running>"

    async def open(self, progress: OnProgress) -> None:
        await super().open(progress)
        self._compiler = Compiler(self.vocab)
        self.opener = self.vocab.specials.get(THINK)

    def generate(self, prompt: Prompt) -> Generation[Chunk]:
        if self._dead is None and (done := self._bursts.take(prompt)) is not None:
            return done
        return TextJob(self, prompt).start()

    def plan(self, prompt: Prompt) -> tuple[Deed, ...]:
        talk = PromptView(prompt.ids, self.vocab)
        answer = self.answer(talk, prompt.constraint, prompt.session)
        if not isinstance(answer, ScriptRule):
            return self._compiler.compile(answer, format_writer(self.options.format, inside=talk.thinks_already))
        key = (id(answer), talk.thinks_already)  # rules live as long as their engine, so an id names one for good
        if key not in self._compiled:
            self._compiled[key] = self._compiler.compile(
                answer.steps, format_writer(self.options.format, inside=key[1])
            )
        return self._compiled[key]

    def cache(self, name: str) -> tuple[CacheInfo, Sequences]:
        """A prompt that names none goes to the first."""
        found = self._caches.get(name or next(iter(self._caches), ""))
        if found is None:
            raise NotFound(f"the engine has no cache {name!r}; it has {', '.join(self._caches)}")
        return found

    def stats(self) -> EngineStats:
        held = [sequences for _, sequences in self._caches.values()]
        return EngineStats(
            running=len(self.jobs),
            sequences=sum(s.count for s in held),
            occupied_tokens=sum(s.tokens for s in held),
            reused_tokens=self.reused,
            evaluated_tokens=self.evaluated,
        )

    async def control(self, op: Control) -> None:
        names = [op.cache] if op.cache is not None else list(self._caches)
        argument = op.argument or ""
        if op.op == "evict":
            for name in names:
                self.cache(name)[1].clear()
        elif op.op == "save":
            self._saved[argument] = {name: self.cache(name)[1].copy() for name in names}
        elif op.op == "restore":
            self._restore(argument)
        elif op.op == "load_adapter":
            self._adapters.add(argument)
        else:
            self._adapters.discard(argument)

    def _restore(self, name: str) -> None:
        if name not in self._saved:
            raise NotFound(f"nothing was saved under the name {name!r}")
        for cache, sequences in self._saved[name].items():
            self._caches[cache] = (self._caches[cache][0], sequences.copy())

    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings:
        size = self.options.embedding_size
        return Embeddings([unit_vector(ids, size) for ids in batch], sum(map(len, batch)))
