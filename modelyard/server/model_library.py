"""A running server's library of models, as clients of Ollama's API see it: pulling, removing, copying, creating.

Downloads are started, watched and cancelled over the admin API. One that was cancelled or failed keeps its parts;
started again, it continues there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace
from pydantic import ValidationError

from modelyard.config.library_models import machine_budget, read_library_models
from modelyard.core.errors import Cancelled, Conflict, InvalidRequest, ModelyardError, NotFound, Unavailable
from modelyard.http.ollama import ModelFile, OnStatus
from modelyard.library import gguf, hub, model_files, models
from modelyard.library.cache_dir import models_dir
from modelyard.library.hub import HubClient, HubModel, HubReference
from modelyard.library.model_files import LibraryEntry
from modelyard.library.models import ModelSource, RepositoryOffer
from modelyard.library.progress import OnBytes, ProgressReporter
from modelyard.protocols.ollama.models import NewModel
from modelyard.router.settings import ModelSettings
from modelyard.server.admin_service import AdminService

log = logging.getLogger(__name__)


# --- downloads --------------------------------------------------------------------------------------------------------

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
        return await asyncio.to_thread(lambda: HubClient().search(text, _SEARCH_LIMIT))

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


# --- the library ------------------------------------------------------------------------------------------------------

_RELOAD_POLL_S, _RELOAD_TIMEOUT_S = 0.05, 30.0
_OLLAMA_NAMES = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict", "n_ctx": "num_ctx"}
_OUTSIDE_PARAMETERS = {"system_prompt": "system", "chat_template": "template"}
_ADAPTER = "adapter"  # the name of a created model's only adapter


class ModelLibrary:
    def __init__(self, admin: AdminService) -> None:
        self._admin = admin

    # --- files --------------------------------------------------------------------------------------------------------

    def describe(self, model: str, *, details: bool = False) -> ModelFile:
        config = self._admin.config
        settings, held = config.models.get(model), config.library_models.get(model)
        if settings is None:
            return ModelFile()
        path = model_files.find_model_file(settings.path) if settings.path else None
        found = ModelFile() if path is None else _read_file(path, path.stat().st_mtime_ns)
        if path is None and settings.path and (folder := model_files.find_model_folder(settings.path)) is not None:
            modified = folder.path.stat().st_mtime
            found = ModelFile(size=folder.size, modified=modified, format=folder.kind, quantization=folder.quant)
        if details and path is not None:
            found = replace(found, info=_read_info(path, path.stat().st_mtime_ns))
        return replace(
            found,
            architecture=found.architecture or settings.backend or "",
            parent=held.entry.base if held is not None else "",
            system=settings.system_prompt or "",
            license=str(found.info.get("general.license", "")),
            sampling=_parameters(settings),
        )

    def blob(self, digest: str) -> Path:
        return models_dir() / "blobs" / f"{digest.replace(':', '-')}.gguf"

    # --- changes ------------------------------------------------------------------------------------------------------

    async def pull(self, source: str, on_status: OnStatus) -> None:
        """A model of the hub. Only the command line may name files of this machine."""
        reference = hub.parse_reference(source.removesuffix(":latest"))
        found = models.of_catalogue(source) if reference is None else ModelSource(source, hub=reference)
        if found is None:
            raise NotFound(
                f"there is no model {source!r} here, and it is neither in the catalogue nor a repository: pull one as "
                f"hf.co/owner/name or hf.co/owner/name:Q4_K_M{models.did_you_mean(source, [])}",
                code="unknown_model",
                param="model",
            )
        on_status("pulling manifest", None, None)
        progress = _StatusReporter(on_status)

        def work() -> LibraryEntry:
            return models.pull(found, progress=progress, budget=machine_budget(), update=True)

        entry = await asyncio.to_thread(work)
        on_status("verifying sha256 digest", None, None)
        on_status("writing manifest", None, None)
        await self.apply(entry.name)

    async def remove(self, model: str) -> None:
        config = self._admin.config
        if model not in config.library_models:
            if model in config.models:
                raise Conflict(
                    f"the configuration file defines the model {model!r}: remove it there", code="configured"
                )
            raise NotFound(f"model {model!r} not found", code="model_not_found", param="model")
        await asyncio.to_thread(models.remove_model, model)
        await self.apply(None)

    async def copy(self, source: str, destination: str) -> None:
        await self._register(replace(self._entry(source), name=destination, base=source))

    async def create(self, model: NewModel, on_status: OnStatus) -> None:
        entry = self._entry(model.base) if model.base else self._uploaded(model.file)
        for name in model.ignored:
            on_status(f"ignoring the parameter {name}, which the configuration sets here", None, None)
        on_status("using existing layer" if model.base else "parsing GGUF", None, None)
        settings = _settings(entry.settings, model)
        if model.adapter:
            settings |= {"lora": {_ADAPTER: str(self._existing_blob(model.adapter))}, "lora_adapter": _ADAPTER}
        on_status("writing manifest", None, None)
        await self._register(replace(entry, name=model.name, base=model.base, settings=settings))

    def _entry(self, model: str) -> LibraryEntry:
        """The library's entry of a model, or one for the file that the configuration names."""
        config = self._admin.config
        if (held := config.library_models.get(model)) is not None:
            return held.entry
        settings = config.models[model]
        path = model_files.find_model_file(settings.path) if settings.path else None
        if path is None:
            raise InvalidRequest(f"the model {model!r} has no file here from which another could be made", param="from")
        return LibraryEntry(model, str(path))

    def _uploaded(self, digest: str) -> LibraryEntry:
        return LibraryEntry("", str(self._existing_blob(digest)), "uploaded", owned=True)

    def _existing_blob(self, digest: str) -> Path:
        path = self.blob(digest)
        if not digest.startswith("sha256:") or "/" in digest or not path.is_file():
            raise InvalidRequest(f"the file {digest[:80]} was not uploaded: send it to /api/blobs first", param="files")
        return path

    async def _register(self, entry: LibraryEntry) -> None:
        config = self._admin.config
        if entry.name in config.models and entry.name not in config.library_models:
            raise Conflict(
                f"the configuration file defines a model {entry.name!r}: choose another name", code="configured"
            )
        await asyncio.to_thread(models.register, entry)
        await self.apply(entry.name)

    async def apply(self, name: str | None) -> None:
        """Until the server serves the changed library. A reload that runs already may have read the old one."""
        async with asyncio.timeout(_RELOAD_TIMEOUT_S):
            while True:
                try:
                    await self._admin.reload_library()
                    break
                except Conflict as error:
                    if error.code != "reload_running":
                        raise
                await asyncio.sleep(_RELOAD_POLL_S)
        if name is not None and name not in self._admin.config.models:
            why = await asyncio.to_thread(_reason, name)
            raise Unavailable(f"the model {name!r} is in the library, but cannot be served: {why}", code="model_failed")


def _reason(name: str) -> str:
    """Why a model of the library is not served."""
    held = next((model for model in read_library_models() if model.entry.name == name), None)
    if held is not None and held.table is None:
        return held.reason
    return "the configuration has library = false, or a route or alias that takes its name"


def _settings(before: Mapping[str, Any], model: NewModel) -> dict[str, Any]:
    """Its section of the configuration, with what it keeps of the model that it is made from."""
    given: dict[str, Any] = {"system_prompt": model.system, "chat_template": model.template, "n_ctx": model.window}
    given = {name: value for name, value in given.items() if value is not None}
    if model.sampling:
        given["decoding"] = dict(model.sampling)
    try:
        ModelSettings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(next((part for part in first["loc"] if part != "decoding"), "parameters"))
        shown = _OUTSIDE_PARAMETERS.get(name) or f"parameters.{_OLLAMA_NAMES.get(name, name)}"
        raise InvalidRequest(f"{shown}: {first['msg']}", param=shown) from None
    decoding = before.get("decoding", {}) | given.get("decoding", {})
    return {**before, **given} | ({"decoding": decoding} if decoding else {})


def _parameters(settings: ModelSettings) -> dict[str, Any]:
    """Under Ollama's names."""
    values = settings.decoding.model_dump(exclude_none=True, exclude_defaults=True)
    return {_OLLAMA_NAMES.get(name, name): value for name, value in values.items() if name != "logit_bias"}


@lru_cache(maxsize=1024)
def _read_file(path: Path, _modified: int) -> ModelFile:
    """`_modified` tells a changed file apart."""
    stat = path.stat()
    plain = ModelFile(size=stat.st_size, modified=stat.st_mtime, format=path.suffix.lower().lstrip("."))
    try:
        summary = gguf.read_summary(path)
    except (ModelyardError, ValueError, OSError):
        return plain
    return replace(
        plain,
        size=summary.size,
        architecture=summary.architecture,
        parameters=summary.parameters,
        quantization=summary.quant,
    )


@lru_cache(maxsize=64)
def _read_info(path: Path, _modified: int) -> Mapping[str, Any]:
    """Single values only: vocabularies have hundreds of thousands."""
    try:
        with path.open("rb") as file:
            metadata = gguf.read_first_metadata(file)
    except (OSError, ModelyardError):
        return {}
    return {name: value if not isinstance(value, list) else None for name, value in metadata.items()}


class _StatusReporter(ProgressReporter):
    """Passes progress on instead of drawing it."""

    def __init__(self, on_status: OnStatus) -> None:
        super().__init__(write_line=lambda line: on_status(line, None, None))
        self._on_status = on_status

    @contextmanager
    def track(self, name: str, verb: str = "pulling") -> Iterator[OnBytes]:  # noqa: ARG002 - Ollama says "pulling"
        report: Callable[[str, int | None, int | None], None] = self._on_status

        def on_bytes(done: int, total: int) -> None:
            report(f"pulling {name}", done, total)

        yield on_bytes
