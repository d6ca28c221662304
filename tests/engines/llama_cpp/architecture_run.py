"""Runs tiny models of many architectures through the engine, and compares each answer with that of a fresh context.

    python -m tests.engines.llama_cpp.architecture_run NAME …

An assertion of llama.cpp ends the process, so the tests start this program. It prints one line of JSON per model:
`{"begin": name}`, then an `ArchitectureResult`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from modelyard.core.engine import CacheInfo, Control, EngineSpec, Prompt, TokenRun, Tokens
from modelyard.core.errors import ContextOverflow, ModelyardError
from modelyard.core.request import Sampling
from tests import real_models
from tests.engines.llama_cpp import architectures
from tests.engines.reading import accepted, end, ids, read, until

GEMMA = "gemma3, the real one"  # reads English: a trained model rounds far more on tokens that it never saw together
_WINDOW, _UBATCH = 512, 16
_TIE = 2e-2  # two best logits that are closer may change places: a batch adds in another order
_PROCESSES = 2
_MAX_S = 20  # for one model, on a busy machine; usually it takes half a second


class ArchitectureResult(Struct, frozen=True):
    """`refused`: the error of loading or of the first answer. `faults`: what differed from a fresh context."""

    name: str
    task: str = "chat"
    refused: str | None = None
    window: int = 0
    memory: str = ""
    rewinds: bool = False
    drafts: int = 0
    speculates: bool = False
    embeds: bool = False
    reused: int = 0
    faults: list[str] = []


# --- the parent -------------------------------------------------------------------------------------------------------


def run_all(names: Sequence[str]) -> dict[str, ArchitectureResult]:
    """The result of each; a model that ends its process has the assertion as its fault."""
    architectures.write_missing()
    parts = [names[at::_PROCESSES] for at in range(_PROCESSES)]
    running = [(list(part), _start(part)) for part in parts if part]
    results: dict[str, ArchitectureResult] = {}
    while running:
        left, process = running.pop()
        output, errors = process.communicate(timeout=max(300, _MAX_S * len(left)))
        begun = ""
        for line in output.splitlines():
            data = json.loads(line)
            if "begin" in data:
                begun = data["begin"]
            else:
                results[begun] = msgspec.convert(data, ArchitectureResult)
        if process.returncode != 0:
            reason = (errors.strip().splitlines() or ["no output"])[-1]
            results[begun] = ArchitectureResult(
                begun, faults=[f"the process ended with {process.returncode}: {reason}"]
            )
            if rest := left[left.index(begun) + 1 :]:
                running.append((rest, _start(rest)))
    return results


def _start(names: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__, *names], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


# --- the child --------------------------------------------------------------------------------------------------------


def main(names: Sequence[str]) -> int:
    from modelyard.engines.llama_cpp import file_check, sequences, speculation

    file_check.check_weights = lambda *_: None  # this process is the child already
    sequences.is_copy_worthwhile = lambda saved, moved, costs: saved > 0  # type: ignore[assignment]
    speculation.DraftCost.per_row = lambda *_: 0.0  # type: ignore[method-assign]  # draft whatever it costs
    for name in names:
        print(json.dumps({"begin": name}), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            result = asyncio.run(_run(name, Path(folder)))
        print(msgspec.json.encode(result).decode(), flush=True)
    return 0


async def _run(name: str, folder: Path) -> ArchitectureResult:
    from modelyard.engines import llama_cpp
    from modelyard.engines.llama_cpp.engine import LlamaCppEngine

    is_real, (target, _, drafts) = name == GEMMA, name.partition("+")
    path = real_models.gemma() if is_real else architectures.model(target)
    usual: dict[str, Any] = {
        "n_threads": 1,
        "n_ubatch": 4 * _UBATCH if is_real else _UBATCH,
        "n_batch": 4 * _UBATCH if is_real else _UBATCH,
        "flash_attn": "on",
        "speculation": "mtp" if name in architectures.WITH_HEADS else "ngram",
        "draft_p_min": 0.0,
    }
    if drafts:
        usual["speculation"] = "auto"
        usual["draft_model_path"] = str(architectures.draft_file(target, folder / "draft.gguf"))
    options = llama_cpp.Options(path=str(path), kv_store=str(folder), embeddings=not is_real, **usual)
    engine = LlamaCppEngine(EngineSpec(name, options, {"main": CacheInfo(_WINDOW, 3)}))
    try:
        await engine.open(lambda *_: None)
    except ModelyardError as error:
        await engine.close()
        return ArchitectureResult(name, refused=str(error))
    try:
        return await _Scenario(name, engine).run()
    finally:
        await engine.close()


class _Scenario:
    """The life of a few conversations on one engine."""

    def __init__(self, name: str, engine: Any) -> None:
        self.name, self.engine = name, engine
        self._random = Random(1)
        self._faults: list[str] = []
        self._reference = _Reference(engine._model)
        self._source = real_models.gemma_vocabulary().encode(real_models.ENGLISH) if name == GEMMA else []
        self._tie = real_models.GEMMA_ROUNDS if name == GEMMA else _TIE

    def _text(self, count: int) -> list[int]:
        if self._source:
            start = self._random.randrange(len(self._source) - count)
            return self._source[start : start + count]
        return [self._random.randrange(3, 250) for _ in range(count)]

    async def run(self) -> ArchitectureResult:
        from modelyard.engines.llama_cpp.binding import lib

        info, model = self.engine.info, self.engine._model
        embeds = info.capabilities.embeddings
        if embeds:
            await self._embed()
        if not info.capabilities.generates:
            task = "embedding" if embeds else "diffusion"
            refused = await self._refusal()
            return ArchitectureResult(self.name, task, refused, embeds=embeds, faults=self._faults)
        await self._converse()
        stats, cache = self.engine.stats(), self.engine._caches["main"]
        recurrent, hybrid = lib.llama_model_is_recurrent(model), lib.llama_model_is_hybrid(model)
        sliding = lib.llama_model_n_swa(model) > 0
        return ArchitectureResult(
            self.name,
            window=info.caches["main"].window,
            memory="recurrent" if recurrent else "hybrid" if hybrid else "sliding window" if sliding else "attention",
            rewinds=cache.kv.can_rewind,
            drafts=stats.guessed_tokens,
            speculates=any(context.speculator is not None for context in self.engine._contexts),
            embeds=embeds,
            reused=stats.reused_tokens + stats.copied_tokens + stats.restored_tokens,
            faults=self._faults,
        )

    async def _refusal(self) -> str:
        error = end(await read(self.engine.generate(_prompt(self._text(4))))).error
        if error is None:
            self._faults.append("a model that does not generate has answered")
        return str(error)

    async def _converse(self) -> None:
        first = self._text(70)
        answer = await self._answer("first", first)
        follow = first + answer + self._text(10)
        answer = await self._answer("reuse", follow, reused=True)
        edited = follow[:50] + self._text(20)
        await self._answer("edit", edited)
        await self._answer("edit at the end", [*edited[:-2], *self._text(2)])
        cancelled = edited + self._text(30)
        generation = self.engine.generate(_prompt(cancelled))
        await until(generation, Tokens)
        generation.cancel()
        await read(generation)
        await self._answer("cancel", cancelled)
        await self._together([first + self._text(9), follow + self._text(5), self._text(40)])
        await self._answer("repetition", (self._text(6) * 12)[:70], count=16)
        await self.engine.control(Control("evict"))
        await self._answer("eviction", follow)
        await self.engine.control(Control("save"))
        await self.engine.control(Control("evict"))
        await self.engine.control(Control("restore"))
        await self._answer("restore", follow + self._text(7))
        await self._read_too_much()

    async def _answer(self, step: str, text: list[int], *, count: int = 6, reused: bool = False) -> list[int]:
        chunks = await read(self.engine.generate(_prompt(text, count)))
        if reused and not accepted(chunks).cached_tokens:
            self._faults.append(f"{step}: nothing was reused")
        self._compare(step, text, ids(chunks), count)
        return ids(chunks)

    async def _together(self, texts: list[list[int]]) -> None:
        jobs = [self.engine.generate(_prompt(text)) for text in texts]
        answers = await asyncio.gather(*(read(job) for job in jobs))
        for text, chunks in zip(texts, answers, strict=True):
            self._compare("together", text, ids(chunks), 6)

    def _compare(self, step: str, text: list[int], answer: list[int], count: int) -> None:
        if not answer:
            self._faults.append(f"{step}: no tokens")
        for at, (token, (best, margin)) in enumerate(zip(answer, self._reference.greedy(text, count), strict=False)):
            if token != best:
                if margin > self._tie:
                    self._faults.append(f"{step}: token {at} is {token}, and {best} by {margin:.3f} in a fresh context")
                return

    async def _read_too_much(self) -> None:
        """More than the trained length: an answer or an error."""
        error = end(await read(self.engine.generate(_prompt(self._text(300), 2)))).error
        if (error is not None) != (self.engine.info.caches["main"].window < 300):
            self._faults.append(f"a text of 300 tokens: {error}")

    async def _embed(self) -> None:
        texts = [self._text(count) for count in (1, 20, 90)]
        together = (await self.engine.embed(texts)).vectors
        for text, vector in zip(texts, together, strict=True):
            alone = (await self.engine.embed([text])).vectors[0]
            if not np.dot(alone, vector) > 0.999:
                self._faults.append(f"the vector of {len(text)} tokens is another in a batch")
        with suppress(ContextOverflow):
            await self.engine.embed([self._text(300)])


def _prompt(text: list[int], count: int = 6) -> Prompt:
    return Prompt(parts=(TokenRun(text),), sampling=Sampling(temperature=0), max_tokens=count, cache="main")


class _Reference:
    """A fresh context per text, through the C API."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def greedy(self, text: list[int], count: int) -> Iterator[tuple[int, float]]:
        """Each token, with its distance to the next best."""
        from modelyard.engines.llama_cpp.binding import lib

        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = _WINDOW, _WINDOW, _UBATCH
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = 1
        context, ids = lib.llama_init_from_model(self._model, params), text
        size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        try:
            for _ in range(count):
                tokens = (lib.llama_token * len(ids))(*ids)
                assert lib.llama_decode(context, lib.llama_batch_get_one(tokens, len(ids))) == 0
                logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), shape=(size,))
                second, best = np.argpartition(logits, -2)[-2:]
                yield int(best), float(logits[best] - logits[second])
                ids = [int(best)]
        finally:
            lib.llama_free(context)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
