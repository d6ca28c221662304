"""An AsyncLLM on the fake engine: one for each salt and adapter, because vLLM keeps those apart."""

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

import modelyard_fake as fake
from modelyard.core.engine import Accepted, CacheInfo, Chunk, End, EngineSpec, Prompt, TokenRun, Tokens
from modelyard.core.request import Constraint
from modelyard.core.tokenizer import IdLogprob
from modelyard_fake.engine import FakeTextEngine

EOS = 2
FOREVER_S = 3600.0


class AsyncLLM:
    def __init__(self, engine_args: AsyncEngineArgs, stat_loggers: list[Any] | None) -> None:
        self.args, self.behaviour = engine_args, engine_args.additional_config
        if message := self.behaviour.get("fails"):
            raise RuntimeError(message)
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.loggers = [factory(None, 0) for factory in stat_loggers or ()]
        self._running: dict[str, Any] = {}
        self._models: dict[tuple[str, str], FakeTextEngine] = {}
        self._dead = asyncio.Event()
        self._process: Any = None
        self._loop = asyncio.get_running_loop()
        if folder := os.environ.get("VLLM_RPC_BASE_PATH"):
            Path(folder, "socket").touch()  # which the real library leaves behind
        if self.behaviour.get("spawns"):
            self._process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(FOREVER_S,))
            self._process.start()
            self._loop.add_reader(self._process.sentinel, self._died)
        config = json.loads((Path(engine_args.model) / "config.json").read_text())
        self.model_config = SimpleNamespace(get_vocab_size=lambda: config["vocab_size"])
        self.output_handler = self._loop.create_task(self._handle())

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs, stat_loggers: list[Any] | None = None) -> "AsyncLLM":
        return cls(engine_args, stat_loggers)

    def get_tokenizer(self) -> Any:
        special = SimpleNamespace(content="<|im_end|>", special=True)
        return SimpleNamespace(added_tokens_decoder={EOS: special})

    async def _handle(self) -> None:
        await self._dead.wait()

    def _died(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._process.join()
        self._dead.set()
        for generation in self._running.values():
            generation.cancel()

    async def generate(
        self,
        prompt: dict[str, Any],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Any]:
        if self._dead.is_set():
            raise EngineDeadError
        self.requests.append(
            {"prompt": prompt, "sampling": sampling_params, "lora": lora_request, "priority": priority}
        )
        ids = prompt["prompt_token_ids"]
        if len(ids) + 1 > self.args.max_model_len:
            raise VLLMValidationError(
                f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of "
                f"{self.args.max_model_len}."
            )
        model = await self._model(prompt.get("cache_salt") or "", lora_request)
        generation = model.generate(self._prompt(ids, sampling_params))
        self._running[request_id] = generation
        cached = 0
        try:
            async for batch in generation:
                for chunk in batch:
                    if isinstance(chunk, Accepted):
                        cached = chunk.cached_tokens // self.args.block_size * self.args.block_size
                    elif (completion := self._completion(chunk, sampling_params, lora_request)) is not None:
                        for logger in self.loggers:
                            logger.record(
                                SimpleNamespace(
                                    spec_decoding_stats=SimpleNamespace(num_draft_tokens=3, num_accepted_tokens=2)
                                ),
                                None,
                            )
                        yield _output(request_id, ids, completion, cached)
        except (asyncio.CancelledError, GeneratorExit):
            generation.cancel()
            raise
        finally:
            self._running.pop(request_id, None)

    async def _model(self, salt: str, lora: LoRARequest | None) -> FakeTextEngine:
        key = salt, lora.lora_name if lora else ""
        if key not in self._models:
            pace = {name: self.behaviour[name] for name in ("token_delay", "prefill_rate") if name in self.behaviour}
            options = fake.Options(echo=True, **{"token_delay": 0.0} | pace)
            caches = {"kv": CacheInfo(self.args.max_model_len, self.args.max_num_seqs)}
            model = fake.create(EngineSpec("fake", options, caches))
            assert isinstance(model, FakeTextEngine)
            await model.open(lambda *_: None)
            self._models.setdefault(key, model)
        return self._models[key]

    def _prompt(self, ids: list[int], sampling: SamplingParams) -> Prompt:
        return Prompt(
            parts=(TokenRun(ids),),
            max_tokens=sampling.max_tokens,
            stop_ids=tuple(sampling.stop_token_ids),
            constraint=_constraint(sampling.structured_outputs),
            logprobs=sampling.logprobs,
        )

    def _completion(self, chunk: Chunk, sampling: SamplingParams, lora: LoRARequest | None) -> Any:
        if isinstance(chunk, Tokens):
            shift = 0.0 if lora is None else -1.0
            logprobs = None if chunk.logprobs is None else [_logprob(each, shift) for each in chunk.logprobs]
            return _completion(chunk.ids, logprobs)
        if not isinstance(chunk, End):
            return None
        if self._dead.is_set():
            raise EngineDeadError
        if chunk.reason == "stop":  # the stop token is part of the output
            return _completion([*sampling.stop_token_ids, EOS][:1], [{}], "stop")
        if chunk.error is not None:
            raise VLLMValidationError(chunk.error.message)
        reason = {"length": "length", "window": "length", "cancelled": "abort"}[chunk.reason]
        return _completion([], None, reason)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if (generation := self._running.get(request_id)) is not None:
            generation.cancel()

    async def remove_lora(self, lora_id: int) -> bool:
        return True

    def shutdown(self, timeout: float | None = None) -> None:
        if self._process is not None and self._process.is_alive():
            self._loop.call_soon_threadsafe(self._loop.remove_reader, self._process.sentinel)
            if not self.behaviour.get("lingers"):
                self._process.kill()
                self._process.join()
        self._loop.call_soon_threadsafe(self.output_handler.cancel)


def _constraint(params: StructuredOutputsParams | None) -> Constraint | None:
    if params is None:
        return None
    if params.json is not None:
        return Constraint("json_schema", str(params.json))
    if params.regex is not None:
        return Constraint("regex", params.regex)
    if "nonsense" in str(params.grammar):
        raise VLLMValidationError('Grammar error: at 1(8): unknown name: "nonsense"')
    return Constraint("lark", str(params.grammar))


def _logprob(each: IdLogprob, shift: float) -> dict[int, Any]:
    ranked = {id: SimpleNamespace(logprob=value + shift, rank=at) for at, (id, value) in enumerate(each.top, 1)}
    if each.id not in ranked:
        ranked[each.id] = SimpleNamespace(logprob=each.logprob + shift, rank=len(ranked) + 1)
    return ranked


def _completion(ids: list[int], logprobs: Any, finish_reason: str | None = None) -> Any:
    return SimpleNamespace(index=0, token_ids=ids, logprobs=logprobs, finish_reason=finish_reason)


def _output(request_id: str, prompt: list[int], completion: Any, cached: int) -> Any:
    return SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=prompt,
        outputs=[completion],
        finished=completion.finish_reason is not None,
        num_cached_tokens=cached,
    )
