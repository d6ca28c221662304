"""vLLM's side of the engine, all of it on vLLM's own loop: the AsyncLLM, and the tasks that read its answers."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import time
from collections.abc import Callable, Iterable
from multiprocessing import resource_tracker
from typing import Any

from msgspec import Struct

from modelyard.core.engine import Chunk
from modelyard.core.errors import Internal, ModelyardError, Timeout
from modelyard.engines.vllm import faults
from modelyard.engines.vllm.adapters import Adapter
from modelyard.engines.vllm.call import PRIORITIES, Call
from modelyard.engines.vllm.form import Markers
from modelyard.engines.vllm.job import Job
from modelyard.engines.vllm.library import Library
from modelyard.engines.vllm.media import multi_modal
from modelyard.processes.descendant_reaper import DescendantReaper

log = logging.getLogger(__name__)

_SHUT_S = 5.0  # for vLLM's own processes to end; those that do not are ended

Parcel = tuple[Job, list[Chunk]]
Post = Callable[..., object]  # (act, *arguments): has the reader's loop do something


class Asked(Struct, frozen=True):
    """A job in vLLM's words: a prompt, `SamplingParams` and `StructuredOutputsParams` as their arguments."""

    prompt: dict[str, Any]
    call: Call
    form: dict[str, Any] | None = None
    adapter: Adapter | None = None


class Core:
    """`hand_out` gets what jobs have said, `lost` why vLLM has died; both are called on the reader's loop."""

    def __init__(
        self,
        library: Library,
        post: Post,
        hand_out: Callable[[list[Parcel]], None],
        lost: Callable[[ModelyardError], None],
    ) -> None:
        self._library, self._post, self._hand_out, self._lost = library, post, hand_out, lost
        self._brood = DescendantReaper()
        self._llm: Any = None
        self._children: list[Any] = []  # what vLLM has started, as multiprocessing knows it
        self._tasks: dict[asyncio.Task[None], Job] = {}
        self._parcels: list[Parcel] = []
        self._death: ModelyardError | None = None
        self._closing = False
        self.n_vocab, self.markers = 0, Markers()

    def __repr__(self) -> str:
        return f"<Core {len(self._tasks)} running>"

    # --- life -------------------------------------------------------------------------------------------------------

    async def make(self, arguments: dict[str, Any], loggers: list[Any]) -> None:
        """vLLM ties itself to the loop that it is made on, and holds it for as long as that takes."""
        resource_tracker.ensure_running()  # it is this process's own, and must not bear the mark
        before = multiprocessing.active_children()
        try:
            with self._brood.hatching():
                asked = self._library.engine_arguments(**arguments)
                self._llm = self._library.engine.from_engine_args(asked, stat_loggers=loggers or None)
        except Exception as error:
            log.exception("vLLM could not be started")
            raise faults.of_loading(error, str(arguments["model"])) from error
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
            raise faults.of_the_first_token([child.exitcode for child in self._children]) from error

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
        await asyncio.to_thread(self._brood.end)
        if self._parcels:
            self._send()

    def _died(self) -> None:
        """Nothing reads from vLLM's process any more; told before the ends of the jobs that die with it."""
        if self._death is None and not self._closing:
            self._death = faults.death([child.exitcode for child in self._children])
            self._post(self._lost, self._death)

    # --- jobs -------------------------------------------------------------------------------------------------------

    def start(self, job: Job, asked: Asked) -> None:
        loop = asyncio.get_running_loop()
        job.task = task = loop.create_task(self._run(job, asked))
        self._tasks[task] = job
        task.add_done_callback(self._finished)
        if job.prompt.deadline is not None:
            late = Timeout("the job's deadline passed")
            timer = loop.call_later(max(0.0, job.prompt.deadline - time.time()), self._revoked, task, job, late)
            task.add_done_callback(lambda _: timer.cancel())

    def cancel(self, job: Job) -> None:
        if job.task is not None:
            self._revoked(job.task, job)

    def _revoked(self, task: asyncio.Task[None], job: Job, why: ModelyardError | None = None) -> bool:
        """False: it has ended by itself."""
        if task.done():
            return False
        job.fault = job.fault or why
        return task.cancel()

    async def _run(self, job: Job, asked: Asked) -> None:
        prompt = asked.prompt
        if job.media:
            prompt = prompt | await asyncio.to_thread(multi_modal, job.media)
        try:
            await self._read(job, prompt, asked)
        except self._library.refused as error:
            if asked.form is None or not job.is_free_to_drop_its_form:
                raise
            log.warning("the calls of a request stay free: %s", error)
            await self._read(job, prompt, Asked(prompt, asked.call, None, asked.adapter))
        except asyncio.CancelledError:
            if self._llm is not None:  # by name: vLLM forgets to end one that is cancelled on its way in
                await self._llm.abort(job.id)
            raise

    async def _read(self, job: Job, prompt: dict[str, Any], asked: Asked) -> None:
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

    def _fault(self, job: Job, error: BaseException | None) -> ModelyardError:
        if isinstance(error, self._library.dead):
            self._died()
            return self._death or Internal("vLLM ended while it was being closed")
        if isinstance(error, Exception):
            return faults.of_a_request(error, self._library.refused, job.prompt.constraint)
        return Internal("vLLM ended an answer without a word")

    async def forget(self, adapter: Adapter) -> None:
        if self._llm is not None:
            await self._llm.remove_lora(adapter.number)

    # --- what they say ----------------------------------------------------------------------------------------------

    def _emit(self, job: Job, chunks: list[Chunk]) -> None:
        """All jobs that one step has moved are woken in the same round of this loop: what they say goes out together,
        and wakes the reader's loop once."""
        if not self._parcels:
            asyncio.get_running_loop().call_soon(self._send)
        self._parcels.append((job, chunks))

    def _send(self) -> None:
        parcels, self._parcels = self._parcels, []
        self._post(self._hand_out, parcels)


def _markers(tokenizer: Any) -> Markers:
    """The tokens that a grammar's text never matches: those that the tokenizer calls special."""
    added: Iterable[tuple[Any, Any]] = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return Markers({token.content: int(id) for id, token in added if token.special})
