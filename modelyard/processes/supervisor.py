"""`serve --workers N`: N children that run the same command on one port; a dead one is replaced, none is orphaned.

start ─→ alive ─→ dies ─→ wait (0.5 s, doubled while it dies young, at most 10 s) ─→ start …
                   └─ every child has died young three times in a row: give up, exit code 1
SIGTERM or SIGINT ─→ SIGTERM to all ─→ grace ─→ SIGKILL.  A second signal skips the grace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from modelyard.processes.parent_death import die_with_parent

_log = logging.getLogger(__name__)

INDEX_VARIABLE = "MODELYARD_WORKER_INDEX"
SOCKET_VARIABLE = "MODELYARD_WORKER_SOCKET"
_NEVER_STARTED = 127


class SupervisorHub(Protocol):
    """Where the children meet: `path` is the socket each of them is told of."""

    path: str

    async def open(self) -> None: ...
    async def close(self) -> None: ...


class RestartPolicy(Struct, frozen=True):
    """Seconds. A child that lives less than `young` has not really started."""

    first_wait: float = 0.5
    last_wait: float = 10.0
    young: float = 10.0
    grace: float = 30.0
    tries: int = 3


class SupervisedChild:
    """One place in the fleet, whoever fills it at the moment."""

    def __init__(self, index: int, argv: Sequence[str] = (), name: str = "gateway process") -> None:
        self.index, self.argv, self.name = index, die_with_parent(list(argv)), name
        self.process: Process | None = None
        self.early_deaths = 0

    def died(self, lived: float, pace: RestartPolicy) -> None:
        self.early_deaths = self.early_deaths + 1 if lived < pace.young else 0

    def wait(self, pace: RestartPolicy) -> float:
        """How long to wait before the next start: the first replacement of a child that lived well comes soon."""
        return min(pace.last_wait, pace.first_wait * (1 << max(0, self.early_deaths - 1)))

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


def should_give_up(children: list[SupervisedChild], pace: RestartPolicy) -> bool:
    return all(child.early_deaths >= pace.tries for child in children)


class Supervisor:
    def __init__(
        self,
        argv: list[str],
        workers: int,
        environment: Mapping[str, str],
        pace: RestartPolicy,
        beside: Sequence[list[str]] = (),
    ) -> None:
        self._environment, self._pace, self._workers = environment, pace, workers
        self.children = [SupervisedChild(index, argv) for index in range(workers)]
        self.children += [SupervisedChild(workers + more, other, "helper process") for more, other in enumerate(beside)]
        self._stopping = asyncio.Event()
        self._hurried = asyncio.Event()
        self._hopeless = False

    async def run(self) -> int:
        with self._signals():
            keepers = [asyncio.create_task(self._keep(child)) for child in self.children]
            try:
                await self._stopping.wait()
                in_time = await self._wind_down(keepers)
            finally:
                self._stopping.set()
                for child in self.children:
                    child.signal(signal.SIGKILL)
                await asyncio.gather(*keepers)
        return 0 if in_time and not self._hopeless else 1

    def stop(self) -> None:
        """Ask once to end in peace, twice to end now."""
        (self._hurried if self._stopping.is_set() else self._stopping).set()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def _keep(self, child: SupervisedChild) -> None:
        while not self._stopping.is_set():
            started = time.monotonic()
            code = await self._live(child)
            if self._stopping.is_set():
                return
            child.died(time.monotonic() - started, self._pace)
            if should_give_up(self.children[: self._workers], self._pace):
                _log.error("every gateway process ends right after its start (last exit code %s): giving up", code)
                self._hopeless = True
                self._stopping.set()
                return
            wait = child.wait(self._pace)
            _log.warning("%s %d ended with code %s: starting it again in %.1f s", child.name, child.index, code, wait)
            await _until(self._stopping, wait)

    async def _live(self, child: SupervisedChild) -> int:
        environment = {**os.environ, **self._environment, INDEX_VARIABLE: str(child.index)}
        # A session of its own: Ctrl-C reaches the parent only, which passes it on once. uvicorn takes two for "now!".
        try:
            child.process = await asyncio.create_subprocess_exec(*child.argv, env=environment, start_new_session=True)
        except OSError as error:  # no memory or no process left for it: as good as dead at birth
            _log.error("%s %d cannot start: %s", child.name, child.index, error)
            return _NEVER_STARTED
        if self._stopping.is_set():
            child.signal(signal.SIGTERM)
        return await child.process.wait()

    async def _wind_down(self, keepers: list[asyncio.Task[None]]) -> bool:
        """True when every child ended in peace."""
        for child in self.children:
            child.signal(signal.SIGTERM)
        ended = asyncio.create_task(_all(keepers))
        hurried = asyncio.create_task(_set(self._hurried))
        try:
            await asyncio.wait({ended, hurried}, timeout=self._pace.grace, return_when=asyncio.FIRST_COMPLETED)
            return ended.done()
        finally:
            ended.cancel()
            hurried.cancel()


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)  # unlike gather, it leaves them alone when it is cancelled


async def _set(event: asyncio.Event) -> None:
    await event.wait()


async def _until(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


async def run_supervised(
    argv: list[str],
    workers: int,
    hub: SupervisorHub,
    pace: RestartPolicy = RestartPolicy(),
    beside: Sequence[list[str]] = (),
) -> int:
    """Run until a signal comes or nothing helps; the exit code for the parent. `argv` is one child's command; `beside`
    are the commands of others that are kept alive with them."""
    await hub.open()
    try:
        return await Supervisor(argv, workers, {SOCKET_VARIABLE: hub.path}, pace, beside).run()
    finally:
        await hub.close()
