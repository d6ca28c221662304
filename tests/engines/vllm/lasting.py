"""A worker whose vLLM outlives its engines: `python -m tests.engines.vllm.lasting ENDPOINT`, in vLLM's environment.

vLLM takes most of a minute to start, and the conformance suite opens an engine for every test. Here each is a new one
of ours, with its own caches and windows, on the vLLM of the first, which is made to forget every prompt in between.
"""

from __future__ import annotations

import asyncio
from typing import Any

from modelyard.engines.vllm import async_llm, engine
from modelyard.processes.descendant_reaper import DescendantReaper
from modelyard.workers.__main__ import main

WINDOW, PLACES = 2048, 8


class LastingHome(async_llm.EventLoopThread):
    """One thread for all."""

    _one: async_llm.EventLoopThread | None = None

    def __init__(self, name: str) -> None:
        if LastingHome._one is None:
            LastingHome._one = async_llm.EventLoopThread(name)
            LastingHome._one.start()
        self.loop, self._thread = LastingHome._one.loop, LastingHome._one._thread

    def start(self) -> None: ...

    async def end(self) -> None: ...


class Lasting:
    """vLLM's engine, but for its end."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.output_handler = asyncio.get_running_loop().create_future()
        self.output_handler.set_result(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def shutdown(self, timeout: float | None = None) -> None: ...


class LastingCore(async_llm.AsyncLlmRunner):
    _first: LastingCore | None = None

    async def make(self, arguments: dict[str, Any], loggers: list[Any]) -> None:
        if LastingCore._first is None:
            maker = LastingCore(self._library, self._post, self._hand_out, self._lost)
            await async_llm.AsyncLlmRunner.make(
                maker, arguments | {"max_model_len": WINDOW, "max_num_seqs": PLACES}, loggers
            )
            LastingCore._first = maker
        first = LastingCore._first
        self._llm, self._reaper = Lasting(first._llm), DescendantReaper()
        self.n_vocab, self.markers = first.n_vocab, first.markers
        if not await first._llm.reset_prefix_cache():
            raise RuntimeError("a request of the engine before this one still runs")


if __name__ == "__main__":
    engine.EventLoopThread, engine.AsyncLlmRunner = LastingHome, LastingCore  # type: ignore[misc,attr-defined]
    main()
