"""vLLM's side of the engine: the library, the thread with vLLM's event loop, and the tasks that read its outputs.

`AsyncLlmRunner` and the jobs that it runs belong to vLLM's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.engine import Accepted, Chunk, End, Media, Prompt, Tokens
from modelyard.core.errors import Internal, ModelyardError, Timeout
from modelyard.core.tokenizer import IdLogprob
from modelyard.engines.generation_queue import TokenDispatch
from modelyard.engines.in_process import InProcessJob
from modelyard.plugins import MissingLibrary
from modelyard.processes.descendant_reaper import DescendantReaper
from modelyard_vllm.errors import death_error, first_token_error, load_error, request_error
from modelyard_vllm.request import PRIORITIES, ControlTokens, VllmAdapter, VllmRequest, multi_modal_data

log = logging.getLogger(__name__)

T = TypeVar("T")

# vLLM reads these when it is imported; the environment takes precedence.
ENVIRONMENT_DEFAULTS = {
    # A forked copy of a process with threads may wait forever for a lock that one of them held.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Nothing leaves this machine.
    "VLLM_NO_USAGE_STATS": "1",
}
SOCKET_FOLDER = "VLLM_RPC_BASE_PATH"  # where vLLM's processes put their sockets; unset: in the temporary folder
_SHUTDOWN_S = 5.0  # for vLLM's processes to exit; those that do not are killed
# Grammars are compiled in vLLM's thread, and the compiler recurses as deep as rules refer to each other. Untouched
# stack costs no memory.
_STACK_BYTES = 1 << 28


# --- the library ----------------------------------------------------------------------------------------------------


class VllmLibrary(Struct, frozen=True):
    """The names of vLLM that the engine uses."""

    AsyncLLM: Any
    AsyncEngineArgs: Any
    SamplingParams: Any
    StructuredOutputsParams: Any
    DELTA: Any  # of RequestOutputKind
    tokens_input: Any  # a prompt of token ids only
    TokensPrompt: Any  # a prompt with images, which vLLM's processor has to prepare
    LoRARequest: Any
    EngineDeadError: type[Exception]
    request_errors: tuple[type[Exception], ...]  # raised if the request is at fault, not vLLM


def check_installed() -> None:
    if find_spec("vllm") is None:
        raise MissingLibrary(
            "vllm needs the Python package 'vllm', which is not in this environment: install it with pip install "
            "'modelyard[vllm]', or name the interpreter of an environment that has it with python = \"…/bin/python\" "
            "in the model's section"
        )


def load_library() -> VllmLibrary:
    """The first import takes many seconds."""
    check_installed()
    for name, value in ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    client_error = find_name("vllm.exceptions:VLLMClientError", "vllm.exceptions:VLLMValidationError")
    return VllmLibrary(
        AsyncLLM=require_name("vllm.v1.engine.async_llm:AsyncLLM", "vllm:AsyncLLM"),
        AsyncEngineArgs=require_name("vllm:AsyncEngineArgs", "vllm.engine.arg_utils:AsyncEngineArgs"),
        SamplingParams=require_name("vllm:SamplingParams", "vllm.sampling_params:SamplingParams"),
        StructuredOutputsParams=require_name("vllm.sampling_params:StructuredOutputsParams"),
        DELTA=require_name("vllm.sampling_params:RequestOutputKind").DELTA,
        tokens_input=require_name("vllm.inputs:tokens_input", "vllm.inputs:token_inputs"),
        TokensPrompt=require_name("vllm:TokensPrompt", "vllm.inputs:TokensPrompt"),
        LoRARequest=require_name("vllm.lora.request:LoRARequest"),
        EngineDeadError=require_name("vllm.v1.engine.exceptions:EngineDeadError"),
        request_errors=(ValueError,) if client_error is None else (client_error, ValueError),
    )


def find_name(*places: str) -> Any | None:
    """What is at the first of these places that exists, each a `module:name`: vLLM moves and renames what it has."""
    for module, _, name in (place.partition(":") for place in places):
        try:
            found = getattr(import_module(module), name, None)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):  # a library that vLLM needs
                raise
            continue
        if found is not None:
            return found
    return None


def require_name(*places: str) -> Any:
    found = find_name(*places)
    if found is None:
        version = getattr(import_module("vllm"), "__version__", "of an unknown version")
        wanted = " or ".join(place.replace(":", ".") for place in places)
        raise MissingLibrary(f"vLLM {version} has no {wanted}, which the engine needs: 0.32 has it")
    return found


@contextmanager
def sockets_in(folder: str) -> Iterator[None]:
    """For the processes that vLLM starts meanwhile, which leave their sockets behind. Use it inside `mark_children`:
    one at a time, because the environment is process-wide."""
    if SOCKET_FOLDER in os.environ:
        yield
        return
    os.environ[SOCKET_FOLDER] = folder
    try:
        yield
    finally:
        del os.environ[SOCKET_FOLDER]


class EventLoopThread:
    """A thread with its own event loop, so that vLLM never waits for the gateway's."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def __repr__(self) -> str:
        return f"<EventLoopThread {self._thread.name}>"

    def start(self) -> None:
        default = threading.stack_size(_STACK_BYTES)
        try:
            self._thread.start()
        finally:
            threading.stack_size(default)

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """From any thread; calls run in order."""
        self.loop.call_soon_threadsafe(function, *args)

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. If the caller stops waiting, it still runs to its end."""
        return await asyncio.shield(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop)))

    async def stop(self) -> None:
        """Nothing may be running in it any more."""
        if self._thread.is_alive():
            self.call(self.loop.stop)
            await asyncio.to_thread(self._thread.join)
        if not self.loop.is_closed():
            self.loop.close()


# --- a job ----------------------------------------------------------------------------------------------------------


class VllmJob(InProcessJob):
    """Turns vLLM's outputs into chunks. `revoke_error` is why the engine, not its client, ends it early."""

    def __init__(
        self,
        id: str,
        prompt: Prompt,
        loop: asyncio.AbstractEventLoop,
        cache: str,
        window: int,
        on_cancel: Callable[[VllmJob], None],
    ) -> None:
        super().__init__(prompt, loop, cache, window)
        self.id, self._on_cancel = id, on_cancel
        self.request = VllmRequest({}, {})  # set before the job is started
        self.media = [part for part in prompt.parts if isinstance(part, Media)]
        self.task: asyncio.Task[None] | None = None
        self.revoke_error: ModelyardError | None = None
        self.accepted: bool = False

    def cancel(self) -> None:
        super().cancel()
        self._on_cancel(self)

    @property
    def may_drop_constraint(self) -> bool:
        """A grammar that the client did not ask for must not fail a request."""
        constraint = self.prompt.constraint
        return constraint is not None and bool(constraint.trigger) and not self.accepted

    def handle_output(self, output: Any) -> list[Chunk]:
        """A DELTA output as chunks; the last output has the End."""
        chunks: list[Chunk] = [] if self.accepted else [self._accept(output)]
        delta = output.outputs[0]
        ids, logprobs, top = list(delta.token_ids), delta.logprobs, self.prompt.logprobs
        if delta.finish_reason == "stop" and ids:
            ids.pop()  # the stop token is not part of the answer
        if ids:
            self.count_output(len(ids))
            if top is None or logprobs is None:
                chunks.append(Tokens(ids))
            else:
                pairs = zip(ids, logprobs, strict=False)
                chunks.append(Tokens(ids, [id_logprob(id, candidates, top) for id, candidates in pairs]))
        if output.finished:
            chunks.append(self._finish(delta.finish_reason))
        return chunks

    def _accept(self, output: Any) -> Accepted:
        """vLLM reports nothing before the first token; with it comes the number of cached tokens."""
        self.accepted, self.cached_tokens = True, output.num_cached_tokens or 0
        if self.media and output.prompt_token_ids:  # only vLLM's processor knows how many tokens an image has
            self.prompt_tokens = len(output.prompt_token_ids)
        return Accepted(self.cached_tokens, self.cached_tokens)

    def _finish(self, reason: str | None) -> End:
        if reason == "stop":
            return self.end("stop")
        if reason == "length":  # below the limit if images took more of the window than we could know
            return self.end(self.limit_reason if self.output_tokens >= self.max_output else "window")
        if reason == "abort":
            return self.end("cancelled") if self.revoke_error is None else self.end("error", self.revoke_error)
        return self.end("error", Internal(f"vLLM ended the answer: {reason}"))


def id_logprob(id: int, candidates: Mapping[int, Any], top: int) -> IdLogprob:
    """vLLM gives the chosen token beside the best ones, even if it is not among them."""
    ranked = sorted((each.rank, other, each.logprob) for other, each in candidates.items() if each.rank <= top)
    best = tuple((other, min(0.0, logprob)) for _, other, logprob in ranked[:top])
    return IdLogprob(id, min(0.0, candidates[id].logprob), best)


# --- running jobs ---------------------------------------------------------------------------------------------------


class CacheCounters:
    """Prompt tokens of one named cache since the engine was opened."""

    def __init__(self) -> None:
        self.reused = self.evaluated = 0


class AsyncLlmRunner:
    """The AsyncLLM, and one task per job that reads its outputs. `on_lost` is called on vLLM's loop.

    The gateway's loop adds jobs to `running` and reads it and the counters.
    """

    def __init__(
        self,
        library: VllmLibrary,
        dispatch: TokenDispatch,
        counters: Mapping[str, CacheCounters],
        on_lost: Callable[[ModelyardError], None],
    ) -> None:
        self._library, self._dispatch, self._counters, self._on_lost = library, dispatch, counters, on_lost
        self.running: set[VllmJob] = set()
        self._reaper = DescendantReaper()
        self._sockets: tempfile.TemporaryDirectory[str] | None = None
        self._llm: Any = None
        self._children: list[Any] = []  # processes that vLLM started through multiprocessing
        self._tasks: dict[asyncio.Task[None], VllmJob] = {}
        self._flush_scheduled = False
        self._death: ModelyardError | None = None
        self._closing = False
        self.n_vocab = 0
        self.control_tokens: ControlTokens = {}

    def __repr__(self) -> str:
        return f"<AsyncLlmRunner {len(self._tasks)} running>"

    async def start(self, arguments: dict[str, Any], stat_loggers: list[Any]) -> None:
        """vLLM binds itself to the loop that it is created on, and blocks it while it loads."""
        resource_tracker.ensure_running()  # it belongs to this process and must not be marked as vLLM's child
        before = multiprocessing.active_children()
        self._sockets = tempfile.TemporaryDirectory(prefix="modelyard-vllm-", ignore_cleanup_errors=True)
        try:
            with self._reaper.mark_children(), sockets_in(self._sockets.name):
                engine_args = self._library.AsyncEngineArgs(**arguments)
                self._llm = self._library.AsyncLLM.from_engine_args(engine_args, stat_loggers=stat_loggers or None)
        except Exception as error:
            log.exception("vLLM could not be started")
            raise load_error(error, str(arguments["model"])) from error
        self._children = [child for child in multiprocessing.active_children() if child not in before]
        self.n_vocab = int(self._llm.model_config.get_vocab_size())
        added: Mapping[int, Any] = getattr(self._llm.get_tokenizer(), "added_tokens_decoder", {})
        self.control_tokens = {token.content: int(id) for id, token in added.items() if token.special}
        await self._generate_first_token()
        self._llm.output_handler.add_done_callback(lambda _: self._report_death())

    async def _generate_first_token(self) -> None:
        """The first step compiles kernels, and shows if the processor lacks an instruction that they use."""
        library = self._library
        params = library.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        try:
            async for _ in self._llm.generate(library.tokens_input([0]), params, "first"):
                pass
        except Exception as error:
            log.exception("vLLM failed at the first token")
            raise first_token_error(self._exit_codes()) from error

    async def shut_down(self, error: ModelyardError) -> None:
        """Ends the jobs, then vLLM, then the processes that it leaves behind."""
        self._closing = True
        if running := [task for task, job in self._tasks.items() if self._revoke(task, job, error)]:
            await asyncio.wait(running)
            await asyncio.sleep(0)  # their ends are emitted by done callbacks
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, timeout=_SHUTDOWN_S)
            await asyncio.wait({llm.output_handler}, timeout=_SHUTDOWN_S)
        await asyncio.to_thread(self._reaper.kill_all)
        if self._sockets is not None:
            self._sockets.cleanup()
        self._dispatch.flush()

    def _report_death(self) -> None:
        """vLLM's process is gone. This is reported before the ends of the jobs that die with it."""
        if self._death is None and not self._closing:
            self._death = death_error(self._exit_codes())
            self._on_lost(self._death)

    def _exit_codes(self) -> list[int | None]:
        return [child.exitcode for child in self._children]

    def start_job(self, job: VllmJob) -> None:
        loop = asyncio.get_running_loop()
        job.task = task = loop.create_task(self._run(job))
        self._tasks[task] = job
        task.add_done_callback(self._on_task_done)
        if job.prompt.deadline is not None:
            delay, late = max(0.0, job.prompt.deadline - time.monotonic()), Timeout("the job's deadline passed")
            timer = loop.call_later(delay, self._revoke, task, job, late)
            task.add_done_callback(lambda _: timer.cancel())

    def cancel_job(self, job: VllmJob) -> None:
        if job.task is not None:
            self._revoke(job.task, job)

    def _revoke(self, task: asyncio.Task[None], job: VllmJob, error: ModelyardError | None = None) -> bool:
        """False if the job has ended by itself."""
        if task.done():
            return False
        job.revoke_error = job.revoke_error or error
        return task.cancel()

    async def _run(self, job: VllmJob) -> None:
        request = job.request
        if job.media:
            images = await asyncio.to_thread(multi_modal_data, job.media)
            request = replace(request, prompt=request.prompt | images)
        try:
            await self._read_outputs(job, request)
        except self._library.request_errors as error:
            if request.structured_outputs is None or not job.may_drop_constraint:
                raise
            log.warning("the tool calls of a request are unconstrained: %s", error)
            await self._read_outputs(job, replace(request, structured_outputs=None))
        except asyncio.CancelledError:
            if self._llm is not None:  # vLLM does not abort a request that is cancelled while it is added
                await self._llm.abort(job.id)
            raise

    async def _read_outputs(self, job: VllmJob, request: VllmRequest) -> None:
        library, constraint, adapter = self._library, request.structured_outputs, request.adapter
        structured = None if constraint is None else library.StructuredOutputsParams(**constraint)
        lora = None if adapter is None else library.LoRARequest(adapter.unique_name, adapter.id, adapter.path)
        outputs = self._llm.generate(
            (library.TokensPrompt if job.media else library.tokens_input)(**request.prompt),
            library.SamplingParams(**request.sampling, structured_outputs=structured, output_kind=library.DELTA),
            job.id,
            lora_request=lora,
            priority=PRIORITIES[job.prompt.priority],
        )
        async for output in outputs:
            chunks = job.handle_output(output)
            if not chunks:
                continue
            if isinstance(chunks[0], Accepted):
                self._counters[job.cache].reused += job.cached_tokens
                self._counters[job.cache].evaluated += job.prompt_tokens - job.cached_tokens
            self._emit(job, chunks)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Every job ends with an End, however its task ended."""
        job = self._tasks.pop(task)
        error = None if task.cancelled() else task.exception()
        if job.ended:
            return
        if task.cancelled() and job.revoke_error is None:
            self._emit(job, [job.end("cancelled")])
        else:
            self._emit(job, [job.end("error", job.revoke_error or self._job_error(job, error))])

    def _job_error(self, job: VllmJob, error: BaseException | None) -> ModelyardError:
        if isinstance(error, self._library.EngineDeadError):
            self._report_death()
            return self._death or Internal("vLLM ended while it was being closed")
        if isinstance(error, Exception):
            return request_error(error, self._library.request_errors, job.prompt.constraint)
        return Internal("vLLM ended an answer without a finish reason")

    async def remove_adapter(self, adapter: VllmAdapter) -> None:
        if self._llm is not None:
            await self._llm.remove_lora(adapter.id)

    def _emit(self, job: VllmJob, chunks: list[Chunk]) -> None:
        """One step wakes the tasks of all its jobs in the same iteration of this loop. Their chunks are flushed
        together, so that they wake the gateway's loop once."""
        if last := isinstance(chunks[-1], End):
            self.running.discard(job)
        self._dispatch.put(job, chunks, last)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self._dispatch.flush()
