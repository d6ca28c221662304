"""The scheduler's workers: those that it starts itself, those that have come by themselves, and what is open in them.

A worker that the scheduler starts is not tied to it: it goes on when the scheduler dies, keeps its model, and is found
again by the next one, through the addresses that lie in the scheduler's folder. It ends when no scheduler has spoken
to it for a while, or when the process that started the scheduler has gone.
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
from typing import Any, Literal, cast
from uuid import uuid4

from msgspec import Struct

from modelyard.core.engine import Engine, EngineInfo, EngineSpec, EngineStats, Node, OnProgress
from modelyard.core.errors import ModelyardError, Timeout, Unavailable
from modelyard.processes.child_process import describe_exit
from modelyard.processes.ports import reserve_port
from modelyard.workers import interpreter
from modelyard.workers.client import RemoteEngine, WorkerSession, remote_engine
from modelyard.workers.messages import DropClient, EngineLocation, HostedEngineInfo, ShutdownWorker, Welcome
from modelyard.workers.ray import RayCluster
from modelyard.workers.transport import ClusterKeys, HeartbeatConfig
from modelyard.workers.worker import open_engine_message

_START_S = 120.0  # Python, on a machine that is busy with loading something else
_FIND_S = 3.0  # for a worker of the last scheduler to answer
_AGAIN_S = 1.0  # before those are asked again who did not answer
_STOP_S = 5.0  # a worker without engines has nothing left to do
_WORDS = 5  # lines of its output that explain a death
_MOST_WORDS = 64 << 10

UNKNOWN_NODE = "?"  # the name of a machine that nobody has told, or that is not ours to choose


class RegisteredWorker(Struct):
    """A worker that came by itself; `used` counts the engines that it was given."""

    name: str
    endpoint: str
    engines: list[HostedEngineInfo]
    used: int = 0
    site: Node = Node(UNKNOWN_NODE)


class WorkerHandle:
    """A worker for one engine. `held` names the engine where it is open already; `ours`: it was started for this engine
    alone and goes with it; `ended` gives its exit code where it is a child of this process."""

    def __init__(self, session: WorkerSession, *, ours: bool = False, log: Path | None = None) -> None:
        self.session, self.ours, self._log = session, ours, log
        self.held: str | None = None
        self.enlisted: RegisteredWorker | None = None
        self.process: Process | None = None
        self.ended: asyncio.Task[int] | None = None
        self.release: Callable[[bool], None] | None = None  # to a cluster; told whether it died

    @property
    def site(self) -> str:
        """The name of the machine on which it is."""
        if self.release is not None:
            return UNKNOWN_NODE
        return "" if self.enlisted is None else self.enlisted.site.name

    def born(self, process: Process) -> None:
        self.process = process
        self.ended = asyncio.get_running_loop().create_task(process.wait())

    def words(self) -> list[str]:
        if self._log is None or not self._log.exists():
            return []
        return self._log.read_bytes()[-_MOST_WORDS:].decode("utf-8", "replace").splitlines()

    def death(self) -> Unavailable:
        code = self.ended.result() if self.ended is not None else 0
        words = "\n".join(self.words()[-_WORDS:])
        return Unavailable(
            f"the worker {describe_exit(code)}: {words}" if words else f"the worker {describe_exit(code)}"
        )

    async def end(self, *, kill: bool = False) -> None:
        """Let go of it; one that exists for us alone ends."""
        if self.ours and not self.session.over:
            self.session.tell(ShutdownWorker())
        if self.release is not None:
            self.release(kill)
        try:
            await self.session.close()
        finally:
            if self.ours and self.process is not None and self.ended is not None:
                await self._bury(self.process, self.ended, 0.0 if kill else _STOP_S)

    @staticmethod
    async def _bury(process: Process, ended: asyncio.Task[int], grace_s: float) -> None:
        try:
            await asyncio.wait({ended}, timeout=grace_s)
        finally:
            if not ended.done():
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
        await asyncio.shield(ended)


class WorkerPool:
    """`folder` is this scheduler's own: addresses and logs of the workers that it starts. `host` is this machine's
    address, where gateways are on others. Without `launch` it starts none, and waits for those that come."""

    def __init__(
        self,
        folder: Path,
        *,
        keys: ClusterKeys | None = None,
        pace: HeartbeatConfig = HeartbeatConfig(),
        host: str | None = None,
        launch: bool = True,
        cluster: RayCluster | None = None,
    ) -> None:
        self._cluster = cluster
        self._folder, self._keys, self._pace, self._host, self._launch = folder, keys, pace, host, launch
        self._came, self._machine = asyncio.Event(), machine_name()
        self.name = f"scheduler-{uuid4().hex[:12]}"
        self._enlisted: dict[str, RegisteredWorker] = {}
        self._found: dict[str, list[str]] = {}  # identity → addresses of workers that hold such an engine

    # --- who is there -----------------------------------------------------------------------------------------------

    async def find(self) -> int:
        """Workers of a scheduler before this one; how many engines they hold."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        files = sorted(await asyncio.to_thread(lambda: list(self._folder.glob("*.address"))))
        asked = await asyncio.gather(*(self._ask(file) for file in files))
        for endpoint, engines in asked:
            for engine in engines:
                self._found.setdefault(engine.identity, []).append(endpoint)
        return sum(len(engines) for _, engines in asked)

    async def _ask(self, file: Path) -> tuple[str, list[HostedEngineInfo]]:
        endpoint = await asyncio.to_thread(file.read_text, "utf-8")
        hire = await self._meet(endpoint)
        if hire is None:
            self._forget(file)
            return endpoint, []
        held = [] if hire.session.welcome is None else hire.session.welcome.engines
        hire.ours = not held  # it was still loading, or had lost its engine: of no use to anybody
        await hire.end()
        return endpoint, held

    @staticmethod
    def _forget(file: Path) -> None:
        for path in (file, file.with_suffix(".log"), file.with_suffix(".sock")):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def enlist(
        self, name: str, endpoint: str, engines: list[HostedEngineInfo], site: Node = Node(UNKNOWN_NODE)
    ) -> bool:
        """True: it is new here."""
        known, site = self._enlisted.get(name), Node() if site.name == self._machine else site
        if known is not None and known.endpoint == endpoint:
            known.engines, known.site = engines, site
            return False
        self._enlisted[name] = RegisteredWorker(name, endpoint, engines, site=site)
        self._came.set()
        return True

    def gone(self, name: str) -> None:
        self._enlisted.pop(name, None)

    def sites(self) -> tuple[Node, ...]:
        """The machines on which the next engine may go: where those are who came by themselves and have least to do,
        then this one. In a cluster that is not ours to choose."""
        if self._cluster is not None:
            return (Node(UNKNOWN_NODE),)
        found: dict[str, Node] = {}
        for one in sorted(self._enlisted.values(), key=lambda each: each.used):
            found.setdefault(one.site.name, one.site)
        if self._launch:
            found.setdefault("", Node())
        return tuple(found.values()) or (Node(UNKNOWN_NODE),)

    # --- who does it ------------------------------------------------------------------------------------------------

    async def hire(
        self, identity: str, model: str = "", python: str | None = None, site: str = UNKNOWN_NODE
    ) -> WorkerHandle:
        """1. a worker that holds this very engine  2. one that came by itself and has least to do, on the machine that
        was chosen before others  3. a new one. An engine with an interpreter of its own goes to a new one at once: what
        others have in theirs nobody knows."""
        may_recruit = self._launch and self._cluster is None
        while True:
            self._came.clear()
            if (hire := await self._holder(identity)) is not None:
                return hire
            if (python is None or not may_recruit) and (hire := await self._volunteer(site)) is not None:
                return hire
            if self._cluster is not None:
                return await self._requisition(self._cluster, model)
            if self._launch:
                return await self._recruit(python)
            await self._somebody()

    async def _somebody(self) -> None:
        """Waits for one who comes, as long as a load may take; those who are here may only have been too busy."""
        coming = asyncio.get_running_loop().create_task(self._came.wait())
        try:
            await asyncio.wait({coming}, timeout=_AGAIN_S if self._enlisted else None)
        finally:
            coming.cancel()

    async def _holder(self, identity: str) -> WorkerHandle | None:
        while endpoints := self._found.get(identity):
            if (hire := await self._meet(endpoints.pop(0), identity)) is not None:
                hire.ours = True
                return hire
        for one in list(self._enlisted.values()):
            free = not one.used and any(held.identity == identity for held in one.engines)
            if free and (hire := await self._meet(one.endpoint, identity)) is not None:
                return _employed(hire, one)
        return None

    async def _volunteer(self, site: str) -> WorkerHandle | None:
        """Where this machine was chosen, and a new one can be had, nobody on another is asked."""
        alone = not site and self._launch
        fit = [one for one in self._enlisted.values() if not (alone and one.site.name)]
        for one in sorted(fit, key=lambda each: (each.site.name != site, each.used)):
            if (hire := await self._meet(one.endpoint)) is not None:
                return _employed(hire, one)
        return None

    async def _meet(self, endpoint: str, identity: str | None = None) -> WorkerHandle | None:
        """None: it does not answer, or has no such engine."""
        hire = WorkerHandle(WorkerSession(endpoint, self.name, keys=self._keys, pace=self._pace))
        try:
            async with asyncio.timeout(_FIND_S):
                welcome = await hire.session.meet()
        except (TimeoutError, ModelyardError):
            await hire.end()
            return None
        except BaseException:  # nobody wants it any more: the link must not stay behind
            await hire.end()
            raise
        hire.held = next((one.engine for one in welcome.engines if one.identity == identity), None)
        if identity is not None and hire.held is None:
            await hire.end()
            return None
        return hire

    async def _requisition(self, cluster: RayCluster, model: str) -> WorkerHandle:
        """Where it runs, and that it runs at all, is the cluster's business."""
        posting, endpoint = await cluster.start(model)
        try:
            hire = await self._meet(endpoint)
        except BaseException:  # nobody wants it any more: its place on a node is for others
            cluster.give_back(model, posting, kill=False)
            raise
        if hire is None:
            cluster.give_back(model, posting, kill=True)
            raise Unavailable(f"the worker that Ray has put at {endpoint} does not answer")
        hire.release = lambda dead: (
            cluster.lost(model, posting) if dead else cluster.give_back(model, posting, kill=False)
        )
        return hire

    async def _recruit(self, python: str | None) -> WorkerHandle:
        if python is not None:
            await interpreter.check_interpreter(python)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = self._folder / f"{uuid4().hex[:12]}.address"
        endpoint = self._endpoint(file)
        file.write_text(endpoint, "utf-8")
        process = await self._spawn(endpoint, file.with_suffix(".log"), python)
        session = WorkerSession(endpoint, self.name, keys=self._keys, pace=self._pace)
        hire = WorkerHandle(session, ours=True, log=file.with_suffix(".log"))
        hire.born(process)
        try:
            await self._first_word(hire)
        except BaseException:
            await hire.end(kill=True)
            self._forget(file)
            raise
        return hire

    def _endpoint(self, file: Path) -> str:
        if self._host is None:
            return f"ipc://{file.with_suffix('.sock')}"
        with reserve_port(self._host, 0) as held:
            return f"tcp://{self._host}:{held.getsockname()[1]}"

    async def _spawn(self, endpoint: str, log: Path, python: str | None) -> Process:
        argv = [interpreter.interpreter_path(python), "-m", "modelyard.workers", endpoint, "--hired"]
        env = interpreter.worker_environment(python, self._folder, os.environ)
        with log.open("wb") as out:
            return await asyncio.create_subprocess_exec(
                *argv, env=env, stdin=DEVNULL, stdout=out, stderr=STDOUT, start_new_session=True
            )

    @staticmethod
    async def _first_word(hire: WorkerHandle) -> Welcome:
        assert hire.ended is not None  # noqa: S101  it was just born
        meeting = asyncio.get_running_loop().create_task(hire.session.meet())
        try:
            waiting: set[asyncio.Task[object]] = {meeting, hire.ended}
            await asyncio.wait(waiting, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
            if hire.ended.done():
                raise hire.death()
            if not meeting.done():
                raise Timeout(f"a worker did not answer within {_START_S:g} s", code="load_timeout")
            return meeting.result()
        finally:
            meeting.cancel()
            await asyncio.gather(meeting, return_exceptions=True)

    def clear(self) -> None:
        """Addresses of workers that have gone, when the scheduler ends in peace."""
        for file in self._folder.glob("*.address"):
            self._forget(file)


def _employed(hire: WorkerHandle, one: RegisteredWorker) -> WorkerHandle:
    hire.enlisted = one
    one.used += 1
    return hire


def machine_name() -> str:
    """The same for all who share this machine's memory: its boot, and the container's own name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:  # not on Linux
        boot = ""
    return f"{platform.node()}/{boot[:8]}"


def workers_folder(endpoint: str, home: Path) -> Path:
    """Where the workers of the scheduler at this address leave theirs: beside its socket, or in a folder of their own
    with a short name, since a socket's path may not be long."""
    if endpoint.startswith("ipc://"):
        return Path(endpoint.removeprefix("ipc://")).parent / "workers"
    return home / hashlib.sha256(endpoint.encode()).hexdigest()[:8]


# An engine as the scheduler sees it: open in some worker, granted to gateways, never asked anything itself.

_CLOSE_S = 60.0  # an engine may have much to save
_GIVE_UP_S = 5.0  # one that was never open has nothing


class WorkerEngine:
    """Not quite an Engine: it opens, closes, tells its figures and its death; gateways ask it, through its worker."""

    def __init__(
        self, crew: WorkerPool, backend: str, spec: EngineSpec, identity: str, site: str = UNKNOWN_NODE
    ) -> None:
        self._crew, self._backend, self._spec, self._identity = crew, backend, spec, identity
        self.node = site  # the machine that it is to go to, and once it is open the one on which it is
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self.info = EngineInfo(backend, dict(spec.caches))
        self.kind: Literal["text", "chat"] = "text"
        self.embeds = False
        self.id = ""
        self._hire: WorkerHandle | None = None
        self._engine: RemoteEngine | None = None
        self._watching: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Placed {self._spec.model} {self.id}>"

    @property
    def pid(self) -> int | None:
        welcome = self._hire.session.welcome if self._hire is not None else None
        return None if welcome is None else welcome.pid

    @property
    def endpoint(self) -> str:
        return "" if self._hire is None else self._hire.session.endpoint

    def log_tail(self) -> list[str]:
        return [] if self._hire is None else self._hire.words()

    async def open(self, progress: OnProgress) -> None:
        progress(0.0, "looking for a worker")
        self._hire = hire = await self._crew.hire(self._identity, self._spec.model, self._spec.python, self.node)
        self.node = hire.site
        order = open_engine_message(hire.held or uuid4().hex[:16], self._backend, self._spec, self._identity)
        self.id = order.engine
        opening = asyncio.get_running_loop().create_task(hire.session.open(order, progress))
        try:
            waiting: set[Any] = {opening} if hire.ended is None else {opening, hire.ended}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if hire.ended is not None and hire.ended.done():
                raise hire.death()
            opened = opening.result()
        finally:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        self.info, self.kind, self.embeds = opened.info, opened.kind, opened.embeds
        self._engine = remote_engine(hire.session, opened, self.lost)
        if hire.ended is not None:
            self._watching = asyncio.get_running_loop().create_task(self._watch(hire, hire.ended))

    async def _watch(self, hire: WorkerHandle, ended: asyncio.Task[int]) -> None:
        await asyncio.shield(ended)
        hire.session.end(hire.death())

    def at(self) -> EngineLocation:
        return EngineLocation(self._spec.model, self.endpoint, self.id, self.kind, self.info, self.embeds)

    def sign(self) -> Callable[[], bool]:
        """Tells whether the worker has shown since this call that it lives, by answering a beat that was sent after
        it. What it says of an engine's death comes before that."""
        hire = self._hire
        sent = 0 if hire is None else hire.session.beats
        return lambda: hire is not None and hire.session.answered > sent

    async def forget(self, gateway: str) -> None:
        """A gateway is gone: done when nothing runs here for it any more, or this engine is gone, too."""
        if self._hire is not None and not self._hire.session.over:
            await self._hire.session.ask(lambda id: DropClient(id, gateway))

    def stats(self) -> EngineStats:
        return EngineStats() if self._engine is None else self._engine.stats()

    async def close(self) -> None:
        """Idempotent. A worker that leaves by itself is not hurried."""
        if self._watching is not None:
            self._watching.cancel()
        hire, self._hire = self._hire, None
        if hire is None:
            return
        session, dead = hire.session, self.lost.done()
        if hire.enlisted is not None and session.over:  # the worker itself, not this engine alone: none goes there now
            self._crew.gone(hire.enlisted.name)
        opened = self._engine is not None
        # One that was given up while it opened goes with its worker, unless others have that one.
        if not dead and not session.over and (opened or (self.id and hire.enlisted is not None)):
            try:
                async with asyncio.timeout(_CLOSE_S if opened else _GIVE_UP_S):
                    await session.close_engine(self.id)
            except TimeoutError:
                dead = True
        if hire.enlisted is not None:
            hire.enlisted.used -= 1
        await hire.end(kill=dead and not session.leaving)


def create_worker_engine(
    crew: WorkerPool, backend: str, spec: EngineSpec, identity: str, site: str = UNKNOWN_NODE
) -> Engine:
    """For a Blueprint's `make`: the scheduler itself uses nothing of an engine that this one lacks."""
    return cast(Engine, WorkerEngine(crew, backend, spec, identity, site))
