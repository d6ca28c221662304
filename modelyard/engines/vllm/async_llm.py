"""The vLLM library itself: whether it is here, how it is imported, and the few names of it that this engine uses."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from msgspec import Struct

from modelyard.core.engine import Accepted, CacheInfo, Chunk, End, IdLogprob, Media, Prompt, Tokens
from modelyard.core.errors import Internal, ModelyardError, Timeout
from modelyard.core.events import Timings, Usage
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.engines.vllm import errors
from modelyard.engines.vllm.request import PRIORITIES, Call, ControlTokens, LoraAdapter, multi_modal_data
from modelyard.plugins import MissingLibrary
from modelyard.processes.descendant_reaper import DescendantReaper

# Read by vLLM when it is imported; whatever the environment says already goes before.
ENVIRONMENT_DEFAULTS = {
    # On some new GPUs flashinfer's sampler is compiled for an architecture that an older toolkit does not know.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # A copy of a process with threads may wait for ever for a lock that one of them held.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # Nothing is told to anybody outside this machine.
    "VLLM_NO_USAGE_STATS": "1",
}
_ABSENT = (
    "vllm needs the Python package 'vllm', which is not in this environment: install it with pip install "
    "'modelyard[vllm]', or name the interpreter of an environment that has it with python = \"…/bin/python\" in the "
    "model's section"
)


class VllmLibrary(Struct, frozen=True):
    engine: Any  # AsyncLLM
    engine_arguments: Any  # AsyncEngineArgs
    sampling: Any  # SamplingParams
    deltas: Any  # RequestOutputKind.DELTA
    tokens: Any  # tokens_input: a prompt that is nothing but token ids
    prompt: Any  # TokensPrompt: one with pictures, which vLLM's processor has to look at first
    form: Any  # StructuredOutputsParams
    adapter: Any  # LoRARequest
    dead: type[Exception]  # EngineDeadError
    refused: tuple[type[Exception], ...]  # what is wrong with a request, not with vLLM


def check_installed() -> None:
    if find_spec("vllm") is None:
        raise MissingLibrary(_ABSENT)


def load_library() -> VllmLibrary:
    """Takes many seconds the first time."""
    check_installed()
    for name, value in ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    top, sampling = import_module("vllm"), import_module("vllm.sampling_params")
    return VllmLibrary(
        engine=import_module("vllm.v1.engine.async_llm").AsyncLLM,
        engine_arguments=top.AsyncEngineArgs,
        sampling=top.SamplingParams,
        deltas=sampling.RequestOutputKind.DELTA,
        tokens=import_module("vllm.inputs").tokens_input,
        prompt=top.TokensPrompt,
        form=sampling.StructuredOutputsParams,
        adapter=import_module("vllm.lora.request").LoRARequest,
        dead=import_module("vllm.v1.engine.exceptions").EngineDeadError,
        refused=(import_module("vllm.exceptions").VLLMClientError, ValueError),
    )


# The thread in which vLLM lives, with an event loop of its own: what it computes never waits for the gateway's.

T = TypeVar("T")

# Grammars are tried out in this thread, and the compiler goes as deep as their rules refer to each other. Memory that
# is never touched costs nothing.
_STACK = 1 << 28


class EventLoopThread:
    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)

    def __repr__(self) -> str:
        return f"<Home {self._thread.name}>"

    @property
    def is_open(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        usual = threading.stack_size(_STACK)
        try:
            self._thread.start()
        finally:
            threading.stack_size(usual)

    def _live(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, act: Callable[..., object], *arguments: Any) -> None:
        """From any thread, in the order of the calls."""
        self.loop.call_soon_threadsafe(act, *arguments)

    async def ask(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of work that is done there. Whoever stops waiting for it does not end it."""
        return await asyncio.shield(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop)))

    async def end(self) -> None:
        """Nothing may be running there any more."""
        if self.is_open:
            self.call(self.loop.stop)
            await asyncio.to_thread(self._thread.join)
        if not self.loop.is_closed():
            self.loop.close()


# One job in the engine's hands: how much it may say, what it has said, and vLLM's outputs as chunks.


class VllmJob:
    """Made where its answer is read; from then on all but its mailbox belongs to vLLM's thread.

    `fault` is why it ends before its time, where its reader is not the reason.
    """

    def __init__(self, id: str, prompt: Prompt, loop: asyncio.AbstractEventLoop, on_cancel: Callable[[VllmJob], None]):
        self.id, self.prompt, self.cache = id, prompt, ""
        self.queue: GenerationQueue[Chunk] = GenerationQueue(on_cancel=lambda: on_cancel(self), loop=loop)
        self.ids, self.prompt_tokens = prompt.ids, prompt.n_tokens
        self.task: asyncio.Task[None] | None = None
        self.fault: ModelyardError | None = None
        self.ended: bool = False
        self.accepted: bool = False
        self.most = self.said = self.cached = 0
        self.full: str = "length"
        self.began = time.perf_counter()
        self.first_at: float | None = None

    def __repr__(self) -> str:
        return f"<Job {self.id}: {self.prompt_tokens} tokens, {self.said}/{self.most} said>"

    @property
    def media(self) -> list[Media]:
        return [part for part in self.prompt.parts if isinstance(part, Media)]

    @property
    def is_free_to_drop_its_form(self) -> bool:
        """A grammar that nobody asked for must not fail a request."""
        constraint = self.prompt.constraint
        return constraint is not None and bool(constraint.trigger) and not self.accepted

    def fit(self, cache: CacheInfo) -> None:
        """How much it may say in this cache: vLLM knows the widest window only."""
        room = cache.window - self.prompt_tokens
        self.most = min(self.prompt.max_tokens, room)
        self.full = "window" if room < self.prompt.max_tokens else "length"

    # --- what vLLM says ---------------------------------------------------------------------------------------------

    def heard(self, output: Any) -> list[Chunk]:
        """A delta as chunks; the last one has the End."""
        chunks: list[Chunk] = [] if self.accepted else [self._accept(output)]
        said = output.outputs[0]
        ids, logprobs = list(said.token_ids), said.logprobs
        if said.finish_reason == "stop" and ids:
            ids.pop()  # what ended it is not part of it
        if ids:
            chunks.append(self._speak(ids, logprobs))
        if output.finished:
            chunks.append(self._finish(said.finish_reason))
        return chunks

    def _accept(self, output: Any) -> Accepted:
        """vLLM tells nothing before the first token, and with it how much of the prompt it had read already."""
        self.accepted, self.cached = True, output.num_cached_tokens or 0
        if self.media and output.prompt_token_ids:  # what a picture is worth only its processor knows
            self.prompt_tokens = len(output.prompt_token_ids)
        return Accepted(self.cached, self.cached)

    def _speak(self, ids: list[int], logprobs: Any) -> Tokens:
        if self.first_at is None:
            self.first_at = time.perf_counter()
        self.said += len(ids)
        if self.prompt.logprobs is None or logprobs is None:
            return Tokens(ids)
        top = self.prompt.logprobs
        return Tokens(ids, [logprob_of(id, at, top) for id, at in zip(ids, logprobs, strict=False)])

    def _finish(self, reason: str | None) -> End:
        if reason == "stop":
            return self.end("stop")
        if reason == "length":  # before its time: pictures have taken more of the window than we could know
            return self.end(self.full if self.said >= self.most else "window")
        if reason == "abort":
            return self.end("cancelled") if self.fault is None else self.end("error", self.fault)
        return self.end("error", Internal(f"vLLM ended the answer: {reason}"))

    def end(self, reason: Any, error: ModelyardError | None = None) -> End:
        self.ended = True
        return End(reason, Usage(self.prompt_tokens, self.cached, self.said), self._timings(), error)

    def _timings(self) -> Timings:
        now, first = time.perf_counter(), self.first_at
        told = first - self.began if first is not None else None
        decode = now - first if first is not None else None
        return Timings(prefill=told, first_token=told, decode=decode, total=now - self.began)


def logprob_of(id: int, at: Mapping[int, Any], top: int) -> IdLogprob:
    """vLLM gives the chosen token beside the best ones, even where it is none of them."""
    ranked = sorted((each.rank, other, each.logprob) for other, each in at.items() if each.rank <= top)
    return IdLogprob(id, min(0.0, at[id].logprob), _best(ranked, top))


def _best(ranked: Sequence[tuple[int, int, float]], top: int) -> tuple[tuple[int, float], ...]:
    return tuple((id, min(0.0, logprob)) for _, id, logprob in ranked[:top])


# vLLM's side of the engine, all of it on vLLM's own loop: the AsyncLLM, and the tasks that read its answers.

log = logging.getLogger(__name__)

_SHUT_S = 5.0  # for vLLM's own processes to end; those that do not are ended

Parcel = tuple[VllmJob, list[Chunk]]
Post = Callable[..., object]  # (act, *arguments): has the reader's loop do something


class VllmRequest(Struct, frozen=True):
    """A job in vLLM's words: a prompt, `SamplingParams` and `StructuredOutputsParams` as their arguments."""

    prompt: dict[str, Any]
    call: Call
    form: dict[str, Any] | None = None
    adapter: LoraAdapter | None = None


class AsyncLlmRunner:
    """`hand_out` gets what jobs have said, `lost` why vLLM has died; both are called on the reader's loop."""

    def __init__(
        self,
        library: VllmLibrary,
        post: Post,
        hand_out: Callable[[list[Parcel]], None],
        lost: Callable[[ModelyardError], None],
    ) -> None:
        self._library, self._post, self._hand_out, self._lost = library, post, hand_out, lost
        self._reaper = DescendantReaper()
        self._llm: Any = None
        self._children: list[Any] = []  # what vLLM has started, as multiprocessing knows it
        self._tasks: dict[asyncio.Task[None], VllmJob] = {}
        self._parcels: list[Parcel] = []
        self._death: ModelyardError | None = None
        self._closing = False
        self.n_vocab, self.markers = 0, ControlTokens()

    def __repr__(self) -> str:
        return f"<Core {len(self._tasks)} running>"

    # --- life -------------------------------------------------------------------------------------------------------

    async def make(self, arguments: dict[str, Any], loggers: list[Any]) -> None:
        """vLLM ties itself to the loop that it is made on, and holds it for as long as that takes."""
        resource_tracker.ensure_running()  # it is this process's own, and must not bear the mark
        before = multiprocessing.active_children()
        try:
            with self._reaper.mark_children():
                asked = self._library.engine_arguments(**arguments)
                self._llm = self._library.engine.from_engine_args(asked, stat_loggers=loggers or None)
        except Exception as error:
            log.exception("vLLM could not be started")
            raise errors.load_error(error, str(arguments["model"])) from error
        self._children = [child for child in multiprocessing.active_children() if child not in before]
        self.n_vocab = int(self._llm.model_config.get_vocab_size())
        self.markers = _markers(self._llm.get_tokenizer())
        await self._try()
        self._llm.output_handler.add_done_callback(lambda _: self._died())

    async def _try(self) -> None:
        """One token: much is compiled at the first step, and a processor that lacks an instruction shows here."""
        lib = self._library
        call = lib.sampling(max_tokens=1, temperature=0.0, detokenize=False)
        try:
            async for _ in self._llm.generate(lib.tokens([0]), call, "first"):
                pass
        except Exception as error:
            log.exception("vLLM failed at the first token")
            raise errors.first_token_error([child.exitcode for child in self._children]) from error

    async def shut(self, why: ModelyardError) -> None:
        """What runs ends first; then vLLM, and whatever it leaves behind."""
        self._closing = True
        if running := [task for task, job in self._tasks.items() if self._revoked(task, job, why)]:
            await asyncio.wait(running)
            await asyncio.sleep(0)  # their ends are told in the next round
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, timeout=_SHUT_S)
            await asyncio.wait({llm.output_handler}, timeout=_SHUT_S)
        await asyncio.to_thread(self._reaper.kill_all)
        if self._parcels:
            self._send()

    def _died(self) -> None:
        """Nothing reads from vLLM's process any more; told before the ends of the jobs that die with it."""
        if self._death is None and not self._closing:
            self._death = errors.death_error([child.exitcode for child in self._children])
            self._post(self._lost, self._death)

    # --- jobs -------------------------------------------------------------------------------------------------------

    def start(self, job: VllmJob, asked: VllmRequest) -> None:
        loop = asyncio.get_running_loop()
        job.task = task = loop.create_task(self._run(job, asked))
        self._tasks[task] = job
        task.add_done_callback(self._finished)
        if job.prompt.deadline is not None:
            late = Timeout("the job's deadline passed")
            timer = loop.call_later(max(0.0, job.prompt.deadline - time.time()), self._revoked, task, job, late)
            task.add_done_callback(lambda _: timer.cancel())

    def cancel(self, job: VllmJob) -> None:
        if job.task is not None:
            self._revoked(job.task, job)

    def _revoked(self, task: asyncio.Task[None], job: VllmJob, why: ModelyardError | None = None) -> bool:
        """False: it has ended by itself."""
        if task.done():
            return False
        job.fault = job.fault or why
        return task.cancel()

    async def _run(self, job: VllmJob, asked: VllmRequest) -> None:
        prompt = asked.prompt
        if job.media:
            prompt = prompt | await asyncio.to_thread(multi_modal_data, job.media)
        try:
            await self._read(job, prompt, asked)
        except self._library.refused as error:
            if asked.form is None or not job.is_free_to_drop_its_form:
                raise
            log.warning("the calls of a request stay free: %s", error)
            await self._read(job, prompt, VllmRequest(prompt, asked.call, None, asked.adapter))
        except asyncio.CancelledError:
            if self._llm is not None:  # by name: vLLM forgets to end one that is cancelled on its way in
                await self._llm.abort(job.id)
            raise

    async def _read(self, job: VllmJob, prompt: dict[str, Any], asked: VllmRequest) -> None:
        lib, adapter = self._library, asked.adapter
        form = None if asked.form is None else lib.form(**asked.form)
        answers = self._llm.generate(
            (lib.prompt if job.media else lib.tokens)(**prompt),
            lib.sampling(**asked.call, structured_outputs=form, output_kind=lib.deltas),
            job.id,
            lora_request=None if adapter is None else lib.adapter(adapter.known_as, adapter.number, adapter.path),
            priority=PRIORITIES[job.prompt.priority],
        )
        async for output in answers:
            self._emit(job, job.heard(output))

    def _finished(self, task: asyncio.Task[None]) -> None:
        """Whatever way its task has gone, a job ends."""
        job = self._tasks.pop(task)
        error = None if task.cancelled() else task.exception()
        if job.ended:
            return
        if task.cancelled() and job.fault is None:
            self._emit(job, [job.end("cancelled")])
        else:
            self._emit(job, [job.end("error", job.fault or self._fault(job, error))])

    def _fault(self, job: VllmJob, error: BaseException | None) -> ModelyardError:
        if isinstance(error, self._library.dead):
            self._died()
            return self._death or Internal("vLLM ended while it was being closed")
        if isinstance(error, Exception):
            return errors.request_error(error, self._library.refused, job.prompt.constraint)
        return Internal("vLLM ended an answer without a word")

    async def forget(self, adapter: LoraAdapter) -> None:
        if self._llm is not None:
            await self._llm.remove_lora(adapter.number)

    # --- what they say ----------------------------------------------------------------------------------------------

    def _emit(self, job: VllmJob, chunks: list[Chunk]) -> None:
        """All jobs that one step has moved are woken in the same round of this loop: what they say goes out together,
        and wakes the reader's loop once."""
        if not self._parcels:
            asyncio.get_running_loop().call_soon(self._send)
        self._parcels.append((job, chunks))

    def _send(self) -> None:
        parcels, self._parcels = self._parcels, []
        self._post(self._hand_out, parcels)


def _markers(tokenizer: Any) -> ControlTokens:
    """The tokens that a grammar's text never matches: those that the tokenizer calls special."""
    added: Iterable[tuple[Any, Any]] = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return ControlTokens({token.content: int(id) for id, token in added if token.special})
