"""A worker whose vLLM outlives its engines: `python -m tests.engines.vllm.persistent_worker ENDPOINT FOLDER`, run in
vLLM's environment. The definition of the next engine of a model is the file of its name in the folder.

vLLM takes most of a minute to start, and the conformance suite opens an engine for every test. Here each engine is new,
with its own caches and windows, but all use the vLLM of the first one. Its prefix cache is reset in between.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from modelyard.workers.definitions import EngineDefinition, read_definition
from modelyard.workers.worker_process import run_worker
from modelyard_vllm import async_llm, engine

WINDOW, MAX_SEQS = 2048, 8


class FolderDefinitions:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, model: str) -> EngineDefinition:
        return read_definition(self._folder / model)

    def models(self) -> tuple[str, ...]:
        return tuple(each.name for each in self._folder.iterdir())


class PersistentThread(async_llm.EventLoopThread):
    """One thread for all engines."""

    _shared: async_llm.EventLoopThread | None = None

    def __init__(self, name: str) -> None:
        if PersistentThread._shared is None:
            PersistentThread._shared = async_llm.EventLoopThread(name)
            PersistentThread._shared.start()
        self.loop, self._thread = PersistentThread._shared.loop, PersistentThread._shared._thread

    def start(self) -> None: ...

    async def stop(self) -> None: ...


class PersistentLlm:
    """The AsyncLLM without its shutdown."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.output_handler = asyncio.get_running_loop().create_future()
        self.output_handler.set_result(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def shutdown(self, timeout: float | None = None) -> None: ...


class PersistentRunner(async_llm.AsyncLlmRunner):
    _first: PersistentRunner | None = None

    async def start(self, arguments: dict[str, Any], stat_loggers: list[Any]) -> None:
        if PersistentRunner._first is None:
            first = PersistentRunner(self._library, self._dispatch, self._counters, self._on_lost)
            wide = arguments | {"max_model_len": WINDOW, "max_num_seqs": MAX_SEQS}
            await async_llm.AsyncLlmRunner.start(first, wide, stat_loggers)
            PersistentRunner._first = first
        first = PersistentRunner._first
        self._llm = PersistentLlm(first._llm)
        self.n_vocab, self.control_tokens = first.n_vocab, first.control_tokens
        if not await first._llm.reset_prefix_cache():
            raise RuntimeError("a request of the previous engine is still running")


if __name__ == "__main__":
    engine.EventLoopThread, engine.AsyncLlmRunner = PersistentThread, PersistentRunner  # type: ignore[misc,attr-defined]
    asyncio.run(run_worker(sys.argv[1], FolderDefinitions(Path(sys.argv[2]))))
