"""Downloads of models by a running server: started, watched and cancelled over the admin API.

A download that was cancelled or failed keeps its parts; started again, it continues there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from msgspec import Struct

from modelyard.config.library_models import machine_budget
from modelyard.core.errors import Cancelled, Conflict, InvalidRequest, ModelyardError, NotFound
from modelyard.library import hub, models
from modelyard.library.hub import HubClient, HubModel, HubReference
from modelyard.library.model_files import LibraryEntry
from modelyard.library.models import ModelSource, RepositoryOffer
from modelyard.library.progress import OnBytes, ProgressReporter
from modelyard.server.model_library import ModelLibrary

log = logging.getLogger(__name__)

_MAX_ENDED = 20  # kept for the list
_SEARCH_LIMIT = 30


class Download(Struct):
    """`model` is the name under which the model is served, once it is here."""

    id: str
    source: str
    state: Literal["running", "finished", "failed", "cancelled"] = "running"
    title: str = ""
    done: int = 0
    total: int = 0
    bytes_per_s: float = 0.0
    note: str = ""
    error: str = ""
    model: str = ""


class Downloads:
    def __init__(self, library: ModelLibrary) -> None:
        self._library = library
        self._jobs: dict[str, _DownloadJob] = {}
        self._count = 0

    def all(self) -> list[Download]:
        """The newest first."""
        return [job.download for job in reversed(self._jobs.values())]

    async def search(self, text: str) -> list[HubModel]:
        def work() -> list[HubModel]:
            with HubClient() as client:
                return client.search(text, _SEARCH_LIMIT)

        return await asyncio.to_thread(work)

    async def offer(self, source: str) -> RepositoryOffer:
        reference = _reference(source)
        return await asyncio.to_thread(lambda: models.offer(reference, machine_budget()))

    def start(self, source: str, quant: str | None = None) -> Download:
        reference = _reference(source)
        for job in self._jobs.values():
            if job.download.state == "running" and job.download.source == _title(reference, quant):
                raise Conflict(f"{job.download.source} is being fetched already", code="already_running")
        self._count += 1
        job = _DownloadJob(Download(str(self._count), _title(reference, quant)), reference, quant)
        self._jobs[job.download.id] = job
        ended = [id for id, each in self._jobs.items() if each.download.state != "running"]
        for id in ended[: max(0, len(ended) - _MAX_ENDED)]:
            del self._jobs[id]
        job.task = asyncio.get_running_loop().create_task(self._run(job))
        return job.download

    def cancel(self, id: str) -> Download:
        job = self._jobs.get(id)
        if job is None:
            raise NotFound(f"there is no download {id!r}", code="unknown_download")
        if job.download.state == "running":
            job.is_cancelled.set()
            job.download.state = "cancelled"  # its thread ends with the next piece of data
        return job.download

    async def close(self) -> None:
        for job in self._jobs.values():
            job.is_cancelled.set()
        await asyncio.gather(*(job.task for job in self._jobs.values() if job.task is not None), return_exceptions=True)

    async def _run(self, job: _DownloadJob) -> None:
        download = job.download
        try:
            entry = await asyncio.to_thread(job.fetch)
            await self._library.apply(entry.name)  # also if it was cancelled too late
            download.model, download.state = entry.name, "finished"
            log.info("%s is in the library as %s", download.source, entry.name)
        except Cancelled:
            download.state = "cancelled"
        except ModelyardError as error:
            download.state, download.error = "failed", error.message
            log.warning("%s could not be fetched: %s", download.source, error.message)
        except Exception as error:
            download.state, download.error = "failed", f"{type(error).__name__}: {error}"
            log.exception("%s could not be fetched", download.source)


class _DownloadJob:
    """A download in a thread, which looks at `is_cancelled` with every piece of data."""

    def __init__(self, download: Download, reference: HubReference, quant: str | None) -> None:
        self.download, self._reference, self._quant = download, reference, quant
        self.is_cancelled = threading.Event()
        self.task: asyncio.Task[None] | None = None

    def fetch(self) -> LibraryEntry:
        source = ModelSource(self.download.source, hub=self._reference)
        reporter = _DownloadReporter(self.download, self.is_cancelled)
        return models.pull(source, quant=self._quant, progress=reporter, budget=machine_budget(), update=True)


class _DownloadReporter(ProgressReporter):
    def __init__(self, download: Download, is_cancelled: threading.Event) -> None:
        super().__init__(write_line=self._note)
        self._download, self._is_cancelled = download, is_cancelled

    def _note(self, line: str) -> None:
        self._download.note = line

    @contextmanager
    def track(self, name: str, verb: str = "fetching") -> Iterator[OnBytes]:  # noqa: ARG002 - the page has its own words
        download, first, started = self._download, -1, 0.0
        download.title = name

        def on_bytes(done: int, total: int) -> None:
            nonlocal first, started
            if self._is_cancelled.is_set():
                raise Cancelled("the download was cancelled")
            if first < 0:  # what was there before does not count as speed
                first, started = done, time.monotonic()
            elapsed = time.monotonic() - started
            download.done, download.total = done, total
            download.bytes_per_s = (done - first) / elapsed if elapsed > 0 else 0.0

        yield on_bytes


def _reference(source: str) -> HubReference:
    reference = hub.parse_reference(source)
    if reference is None:
        raise InvalidRequest(
            f"{source!r} is not a repository: write owner/name, owner/name:Q4_K_M or its URL", param="source"
        )
    return reference


def _title(reference: HubReference, quant: str | None) -> str:
    wanted = quant or reference.quant
    return f"{reference.repo}:{wanted}" if wanted else reference.repo
