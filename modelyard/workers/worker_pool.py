"""The workers of a scheduler, and the engines that are open in them.

A worker either registers itself or is started by the scheduler. A worker that the scheduler starts does not die with
it: it keeps its model, and the next scheduler finds it through the address files in the scheduler's folder. It exits
when no scheduler has connected for a while, or when the process that started the scheduler is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import platform
import signal
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Protocol, cast
from uuid import uuid4

from msgspec import Struct

from modelyard.core.engine import Engine, EngineInfo, EngineSpec, EngineStats, Node, OnProgress
from modelyard.core.errors import ENGINE_DIED, ModelyardError, Timeout, Unavailable
from modelyard.processes.child_process import describe_exit, last_words
from modelyard.processes.ports import reserve_port
from modelyard.workers.client import RemoteEngine, WorkerSession, remote_engine, result_unless_exited
from modelyard.workers.definitions import define, message_spec, write_definition
from modelyard.workers.interpreter import check_interpreter, worker_command, worker_environment
from modelyard.workers.messages import DropClient, EngineLocation, HostedEngineInfo, OpenEngine, ShutdownWorker
from modelyard.workers.transport import ClusterKeys, HeartbeatConfig, is_listening

_START_S = 120.0  # starting Python on a machine that is busy with loading a model
_CONNECT_S = 3.0  # for a running worker to answer
_RETRY_S = 1.0  # before registered workers that did not answer are tried again
_STOP_S = 5.0  # for a worker without engines to exit
_CLOSE_S = 60.0  # an engine may have a lot to save
_ABORT_S = 5.0  # an engine that was never open has not
_ERROR_LINES = 5  # of its log that explain an exit
_MAX_LOG = 64 << 10

UNKNOWN_NODE = "?"  # a worker did not name its machine, or the cluster chooses it


def machine_name() -> str:
    """The same for all processes that share this machine's memory: the host name and the boot id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:  # not on Linux
        boot = ""
    return f"{platform.node()}/{boot[:8]}"


def workers_folder(endpoint: str, home: Path) -> Path:
    """The folder for the workers of the scheduler at this address: beside its socket, or one with a short name, because
    the path of a socket is limited."""
    if endpoint.startswith("ipc://"):
        return Path(endpoint.removeprefix("ipc://")).parent / "workers"
    return home / hashlib.sha256(endpoint.encode()).hexdigest()[:8]


# --- one worker -----------------------------------------------------------------------------------------------------


class RegisteredWorker(Struct):
    """A worker that registered itself; `used` counts the engines that it was given, `models` are those of its
    configuration."""

    name: str
    endpoint: str
    engines: list[HostedEngineInfo]
    used: int = 0
    node: Node = Node(UNKNOWN_NODE)
    models: tuple[str, ...] = ()


class WorkerHandle:
    """A worker that is used for one engine. `engine` is the id of the engine if it is open already. `is_owned`: it was
    started for this engine and exits with it. `ended` is its exit code if it is a child of this process. `release`
    gives it back to a cluster; its argument tells whether it died."""

    def __init__(self, session: WorkerSession, process: Process | None = None, log: Path | None = None) -> None:
        self.session, self._process, self._log = session, process, log
        self.is_owned = process is not None
        self.ended = None if process is None else asyncio.get_running_loop().create_task(process.wait())
        self.engine: str | None = None
        self.registered: RegisteredWorker | None = None
        self.release: Callable[[bool], None] | None = None

    @property
    def node(self) -> str:
        if self.release is not None:
            return UNKNOWN_NODE
        return "" if self.registered is None else self.registered.node.name

    def log_lines(self) -> list[str]:
        if self._log is None or not self._log.exists():
            return []
        return self._log.read_bytes()[-_MAX_LOG:].decode("utf-8", "replace").splitlines()

    def exit_error(self) -> Unavailable:
        message = f"the worker {describe_exit(self.ended.result() if self.ended is not None else 0)}"
        lines = last_words(self.log_lines(), _ERROR_LINES)
        return Unavailable(f"{message}: {lines}" if lines else message, code=ENGINE_DIED)

    async def close(self, *, kill: bool = False) -> None:
        """Detach from it; an owned worker exits."""
        if self.is_owned and not self.session.is_lost:
            self.session.send(ShutdownWorker())
        if self.release is not None:
            self.release(kill)
        try:
            await self.session.close()
        finally:
            if self.is_owned and self._process is not None and self.ended is not None:
                try:
                    await asyncio.wait({self.ended}, timeout=0.0 if kill else _STOP_S)
                finally:
                    if not self.ended.done():
                        with contextlib.suppress(ProcessLookupError):
                            self._process.send_signal(signal.SIGKILL)
                await asyncio.shield(self.ended)


# --- a cluster ------------------------------------------------------------------------------------------------------


class Cluster(Protocol):
    """Places workers on machines: an entry point `modelyard.clusters`, such as `plugins/modelyard_ray`. `actor` is its
    own handle of a worker."""

    async def open(self) -> None: ...

    async def start(self, definition: EngineSpec) -> tuple[Any, str]:
        """A worker for this engine: its handle and its endpoint."""

    def give_back(self, actor: Any, *, restart: bool) -> None:
        """A worker without an engine. With `restart` it hangs, and the next engine like its own may open there."""

    def on_lost(self, actor: Any) -> None:
        """It died."""

    async def close(self) -> None: ...


# --- all workers ----------------------------------------------------------------------------------------------------


class WorkerPool:
    """`folder` belongs to this scheduler: addresses and logs of the workers that it starts. `host` is this machine's
    address if gateways run on others. Without `launch` it starts none and waits for workers to register."""

    def __init__(
        self,
        folder: Path,
        *,
        keys: ClusterKeys | None = None,
        heartbeat: HeartbeatConfig = HeartbeatConfig(),
        host: str | None = None,
        launch: bool = True,
        cluster: Cluster | None = None,
    ) -> None:
        self._folder, self._keys, self._heartbeat, self._host = folder, keys, heartbeat, host
        self._launch, self._cluster = launch, cluster
        self._machine = machine_name()
        self.name = f"scheduler-{uuid4().hex[:12]}"
        self._registered: dict[str, RegisteredWorker] = {}
        self._registration = asyncio.Event()
        self._files: dict[str, Path] = {}  # endpoint of a started worker → its address file
        self._found: dict[str, list[str]] = {}  # engine identity → endpoints of running workers that have it open

    async def find_running(self) -> int:
        """Find the workers of a previous scheduler; returns how many engines they have open."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        files = sorted(await asyncio.to_thread(lambda: list(self._folder.glob("*.address"))))
        found = await asyncio.gather(*(self._probe(file) for file in files))
        for endpoint, engines in found:
            for engine in engines:
                self._found.setdefault(engine.identity, []).append(endpoint)
        return sum(len(engines) for _, engines in found)

    async def _probe(self, file: Path) -> tuple[str, list[HostedEngineInfo]]:
        endpoint = await asyncio.to_thread(file.read_text, "utf-8")
        is_dead = endpoint.startswith("ipc://") and not is_listening(endpoint)  # do not wait for its answer
        worker = None if is_dead else await self._connect(endpoint)
        if worker is None:
            self._remove_files(file)
            return endpoint, []
        engines = [] if worker.session.welcome is None else worker.session.welcome.engines
        self._files[endpoint] = file
        worker.is_owned = not engines  # it was still loading, or has lost its engine: shut it down
        await worker.close()
        return endpoint, engines

    def forget(self, endpoint: str) -> None:
        """A worker that this pool or a previous one has started is gone: the next scheduler must not wait for it."""
        if (file := self._files.pop(endpoint, None)) is not None:
            for path in (file, file.with_suffix(".sock"), file.with_suffix(".engine")):  # its log may be of interest
                path.unlink(missing_ok=True)

    @staticmethod
    def _remove_files(file: Path) -> None:
        for path in (file, file.with_suffix(".log"), file.with_suffix(".sock"), file.with_suffix(".engine")):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def register(
        self,
        name: str,
        endpoint: str,
        engines: list[HostedEngineInfo],
        node: Node = Node(UNKNOWN_NODE),
        models: tuple[str, ...] = (),
    ) -> bool:
        """Returns whether it is new."""
        known, node = self._registered.get(name), Node() if node.name == self._machine else node
        if known is not None and known.endpoint == endpoint:
            known.engines, known.node = engines, node
            if known.models != models:
                known.models = models
                self._registration.set()
            return False
        self._registered[name] = RegisteredWorker(name, endpoint, engines, node=node, models=models)
        self._registration.set()
        return True

    def unregister(self, name: str) -> None:
        self._registered.pop(name, None)

    def nodes(self) -> tuple[Node, ...]:
        """The machines that may get the next engine: those of registered workers, the least used first, then this one.
        A cluster chooses by itself."""
        if self._cluster is not None:
            return (Node(UNKNOWN_NODE),)
        found: dict[str, Node] = {}
        for worker in sorted(self._registered.values(), key=lambda each: each.used):
            found.setdefault(worker.node.name, worker.node)
        if self._launch:
            found.setdefault("", Node())
        return tuple(found.values()) or (Node(UNKNOWN_NODE),)

    # --- choosing a worker ------------------------------------------------------------------------------------------

    async def acquire(self, spec: EngineSpec, node: str = UNKNOWN_NODE) -> WorkerHandle:
        """1. a worker that has this engine open  2. a registered worker whose configuration has the model, the chosen
        node first, then the least used  3. a new one. An engine with its own interpreter gets a new worker if possible,
        because the environment of a registered one is unknown."""
        needs_new = spec.python is not None and self._launch and self._cluster is None
        while True:
            self._registration.clear()
            if (worker := await self._with_engine(spec.identity)) is not None:
                return worker
            if not needs_new and (worker := await self._least_used(spec.model, node)) is not None:
                return worker
            if self._cluster is not None:
                return await self._start_actor(self._cluster, define(spec))
            if self._launch:
                return await self._start_process(define(spec), spec.python)
            # Wait for a registration, as long as a load may take; registered workers may just have been too busy.
            waiting = asyncio.get_running_loop().create_task(self._registration.wait())
            try:
                await asyncio.wait({waiting}, timeout=_RETRY_S if self._registered else None)
            finally:
                waiting.cancel()

    async def _with_engine(self, identity: str) -> WorkerHandle | None:
        while endpoints := self._found.get(identity):
            if (worker := await self._connect(endpoints.pop(0), identity)) is not None:
                worker.is_owned = True
                return worker
        for registered in list(self._registered.values()):
            is_free = not registered.used and any(engine.identity == identity for engine in registered.engines)
            if is_free and (worker := await self._connect(registered.endpoint, identity)) is not None:
                return _use(worker, registered)
        return None

    async def _least_used(self, model: str, node: str) -> WorkerHandle | None:
        """If this machine was chosen and a worker can be started here, workers on other machines are not used."""
        only_here = not node and self._launch
        able = [each for each in self._registered.values() if model in each.models]
        candidates = [each for each in able if not (only_here and each.node.name)]
        for registered in sorted(candidates, key=lambda each: (each.node.name != node, each.used)):
            if (worker := await self._connect(registered.endpoint)) is not None:
                return _use(worker, registered)
        return None

    async def _connect(self, endpoint: str, identity: str | None = None) -> WorkerHandle | None:
        """None if it does not answer, or does not have the engine `identity` open."""
        worker = WorkerHandle(self._session(endpoint))
        try:
            async with asyncio.timeout(_CONNECT_S):
                welcome = await worker.session.connect()
        except (TimeoutError, ModelyardError):
            await worker.close()
            return None
        except BaseException:  # cancelled: do not leave the session open
            await worker.close()
            raise
        worker.engine = next((each.engine for each in welcome.engines if each.identity == identity), None)
        if identity is not None and worker.engine is None:
            await worker.close()
            return None
        return worker

    def _session(self, endpoint: str) -> WorkerSession:
        return WorkerSession(endpoint, self.name, keys=self._keys, heartbeat=self._heartbeat, wants_log=True)

    async def _start_actor(self, cluster: Cluster, definition: EngineSpec) -> WorkerHandle:
        actor, endpoint = await cluster.start(definition)
        try:
            worker = await self._connect(endpoint)
        except BaseException:  # cancelled: free its resources
            cluster.give_back(actor, restart=False)
            raise
        if worker is None:
            cluster.give_back(actor, restart=True)
            raise Unavailable(f"the worker that the cluster started at {endpoint} does not answer")
        worker.release = lambda died: cluster.on_lost(actor) if died else cluster.give_back(actor, restart=False)
        return worker

    async def _start_process(self, definition: EngineSpec, python: str | None) -> WorkerHandle:
        if python is not None:
            await check_interpreter(python)
        file = self._folder / f"{uuid4().hex[:12]}.address"
        try:
            worker = await self._launch_process(file, definition, python)
        except OSError as error:  # the disk is full, or there are too many processes
            self._remove_files(file)
            raise Unavailable(f"a worker cannot be started: {error.strerror}", code="load_failed") from error
        try:
            async with asyncio.timeout(_START_S):
                await result_unless_exited(worker.session.connect(), worker.ended, worker.exit_error)
        except BaseException as error:
            await worker.close(kill=True)
            self._remove_files(file)
            if isinstance(error, TimeoutError):
                raise Timeout(f"a worker did not answer within {_START_S:g} s", code="load_timeout") from None
            raise
        return worker

    async def _launch_process(self, file: Path, definition: EngineSpec, python: str | None) -> WorkerHandle:
        endpoint, log = self._write_files(file, definition), file.with_suffix(".log")
        argv = [*worker_command(endpoint, file.with_suffix(".engine"), python), "--exit-when-orphaned"]
        env = worker_environment(python, self._folder, os.environ)
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                *argv, env=env, stdin=DEVNULL, stdout=out, stderr=STDOUT, start_new_session=True
            )
        return WorkerHandle(self._session(endpoint), process, log)

    def _write_files(self, file: Path, definition: EngineSpec) -> str:
        """The files of a new worker; returns its address."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._host is None:
            endpoint = f"ipc://{file.with_suffix('.sock')}"
        else:
            with reserve_port(self._host, 0) as held:
                endpoint = f"tcp://{self._host}:{held.getsockname()[1]}"
        file.write_text(endpoint, "utf-8")
        self._files[endpoint] = file
        write_definition(file.with_suffix(".engine"), definition)
        return endpoint

    def remove_files(self) -> None:
        """The addresses of workers that have exited, when the scheduler stops."""
        for file in self._folder.glob("*.address"):
            self._remove_files(file)


def _use(worker: WorkerHandle, registered: RegisteredWorker) -> WorkerHandle:
    worker.registered = registered
    registered.used += 1
    return worker


# --- engines --------------------------------------------------------------------------------------------------------


class WorkerEngine:
    """An engine in a worker, as the scheduler sees it. Not a full Engine: it opens, closes, and reports its stats and
    its loss; gateways send their requests directly to the worker. `node` is the chosen machine, and the actual one once
    it is open."""

    def __init__(self, workers: WorkerPool, spec: EngineSpec, node: str = UNKNOWN_NODE) -> None:
        self._workers, self._spec = workers, spec
        self.node = node
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self.info = EngineInfo(spec.backend, dict(spec.caches))
        self.kind: Literal["text", "chat"] = "text"
        self.embeds = False
        self.id = ""
        self._worker: WorkerHandle | None = None
        self._engine: RemoteEngine | None = None
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<WorkerEngine {self._spec.model} {self.id}>"

    @property
    def pid(self) -> int | None:
        welcome = self._worker.session.welcome if self._worker is not None else None
        return None if welcome is None else welcome.pid

    @property
    def endpoint(self) -> str:
        return "" if self._worker is None else self._worker.session.endpoint

    def log_tail(self) -> list[str]:
        return [] if self._worker is None else self._worker.log_lines()

    async def open(self, progress: OnProgress) -> None:
        progress(0.0, "looking for a worker")
        worker = await self._workers.acquire(self._spec, self.node)
        self._worker, self.node = worker, worker.node
        self.id = worker.engine or uuid4().hex[:16]
        opening = worker.session.open(OpenEngine(self.id, message_spec(self._spec)), progress)
        opened = await result_unless_exited(opening, worker.ended, worker.exit_error)
        self.info, self.kind, self.embeds = opened.info, opened.kind, opened.embeds
        self._engine = remote_engine(worker.session, opened, self.lost)
        if worker.ended is not None:
            self._watching = asyncio.get_running_loop().create_task(self._watch(worker, worker.ended))

    async def _watch(self, worker: WorkerHandle, ended: asyncio.Task[int]) -> None:
        await asyncio.shield(ended)
        worker.session.end(worker.exit_error())

    def location(self) -> EngineLocation:
        return EngineLocation(self._spec.model, self.endpoint, self.id, self.kind, self.info, self.embeds)

    def liveness_check(self) -> Callable[[], bool]:
        """The result tells whether the worker has answered a heartbeat that was sent after this call. It would have
        reported an engine's death before."""
        worker = self._worker
        sent = 0 if worker is None else worker.session.heartbeats_sent
        return lambda: worker is not None and worker.session.last_reply > sent

    async def drop_client(self, gateway: str) -> None:
        """A gateway is gone: done when none of its requests runs here any more, or the worker is gone too."""
        if self._worker is not None and not self._worker.session.is_lost:
            await self._worker.session.call(lambda id: DropClient(id, gateway))

    async def has_client(self, gateway: str) -> bool:
        """Whether a gateway is connected to the worker. If not, its requests have ended there."""
        if self._worker is None or self._worker.session.is_lost:
            return False
        try:
            await self._worker.session.call(lambda id: DropClient(id, gateway, unless_connected=True))
        except ModelyardError as error:
            return error.code == "client_connected"
        return False

    def stats(self) -> EngineStats:
        return EngineStats() if self._engine is None else self._engine.stats()

    async def close(self) -> None:
        """Idempotent. A worker that is draining is not killed."""
        if self._watching is not None:
            self._watching.cancel()
        worker, self._worker = self._worker, None
        if worker is None:
            return
        session, is_dead = worker.session, self.lost.done()
        if worker.registered is not None and session.is_lost:  # the worker is gone, not only this engine
            self._workers.unregister(worker.registered.name)
        is_open = self._engine is not None
        # An engine whose opening was aborted goes with its worker, unless that worker is shared.
        if not is_dead and not session.is_lost and (is_open or (self.id and worker.registered is not None)):
            try:
                async with asyncio.timeout(_CLOSE_S if is_open else _ABORT_S):
                    await session.close_engine(self.id)
            except TimeoutError:
                is_dead = True
        if worker.registered is not None:
            worker.registered.used -= 1
        await worker.close(kill=is_dead and not session.is_draining)
        if worker.is_owned:
            self._workers.forget(session.endpoint)


def create_worker_engine(workers: WorkerPool, spec: EngineSpec, node: str = UNKNOWN_NODE) -> Engine:
    """For a scheduler: the scheduler uses nothing of an engine that `WorkerEngine` lacks."""
    return cast(Engine, WorkerEngine(workers, spec, node))
