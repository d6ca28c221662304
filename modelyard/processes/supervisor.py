"""`serve --workers N`: N children that run the same command on one port. A dead child is replaced, none is orphaned.

start ─→ alive ─→ exit ─→ wait (0.5 s, doubled while it exits early, at most 10 s) ─→ start …
            │      └─ every child has exited early three times in a row: give up, exit code 1
            └─ it has written nothing for 15 s (stopped, or its event loop stands still) ─→ SIGKILL ─→ exit
SIGTERM or SIGINT ─→ SIGTERM to the workers, then to the helpers ─→ grace ─→ SIGKILL.  A second signal is passed on, and
shortens the grace to 5 s; a third one skips it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from modelyard.processes.parent_death import die_with_parent

_log = logging.getLogger(__name__)

INDEX_VARIABLE = "MODELYARD_WORKER_INDEX"
FOLDER_VARIABLE = "MODELYARD_WORKER_FOLDER"  # where the processes meet
_START_FAILED = 127
_LOOKS = 3  # at the heartbeat of a worker, within the longest silence
_MAX_SOCKET_PATH = 100  # the kernel's limit is 108 bytes on Linux, 104 on macOS


class RestartPolicy(Struct, frozen=True):
    """Seconds. A child that exits within `min_uptime` has exited early."""

    first_delay: float = 0.5
    max_delay: float = 10.0
    min_uptime: float = 10.0
    grace: float = 30.0
    short_grace: float = 5.0
    max_silence: float = 15.0
    max_early_exits: int = 3


class SupervisedChild:
    """One slot of the supervisor; `process` is its current process."""

    def __init__(self, index: int, argv: Sequence[str] = (), name: str = "gateway process") -> None:
        self.index, self.argv, self.name = index, die_with_parent(list(argv)), name
        self.process: Process | None = None
        self.early_exits = 0
        self.first_heartbeat: object = None  # when the process was started
        self._heard: tuple[int, object] = (0, None)  # process id and heartbeat at the last look
        self._silent_looks = 0

    def silent_looks(self, heartbeat: object) -> int:
        """How many looks in a row have found the same heartbeat; 0 until the process has changed it once. In looks,
        not seconds: a supervisor that was stopped itself must not count that time."""
        pid = self.process.pid if self.process is not None and self.process.returncode is None else 0
        before, self._heard = self._heard, (pid, heartbeat)
        is_silent = heartbeat != self.first_heartbeat and self._heard == before
        self._silent_looks = self._silent_looks + 1 if is_silent else 0
        return self._silent_looks

    def record_exit(self, uptime: float, policy: RestartPolicy) -> None:
        self.early_exits = self.early_exits + 1 if uptime < policy.min_uptime else 0

    def restart_delay(self, policy: RestartPolicy) -> float:
        return min(policy.max_delay, policy.first_delay * (1 << max(0, self.early_exits - 1)))

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)


def should_give_up(children: list[SupervisedChild], policy: RestartPolicy) -> bool:
    return all(child.early_exits >= policy.max_early_exits for child in children)


class Supervisor:
    """`extra` are commands of helper processes that are kept alive beside the workers."""

    def __init__(
        self,
        argv: list[str],
        workers: int,
        environment: Mapping[str, str],
        policy: RestartPolicy,
        extra: Sequence[list[str]] = (),
        heartbeat: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._environment, self._policy, self._workers, self._heartbeat = environment, policy, workers, heartbeat
        self.children = [SupervisedChild(index, argv) for index in range(workers)]
        self.children += [SupervisedChild(workers + n, other, "helper process") for n, other in enumerate(extra)]
        self._stopping = asyncio.Event()
        self._hurrying, self._killing = asyncio.Event(), asyncio.Event()
        self._gave_up = False

    async def run(self) -> int:
        with self._signal_handlers():
            tasks = [asyncio.create_task(self._keep_alive(child)) for child in self.children]
            watching = asyncio.create_task(self._watch())
            try:
                await self._stopping.wait()
                stopped_in_time = await self._stop_all(tasks)
            finally:
                self._stopping.set()
                watching.cancel()
                for child in self.children:
                    child.signal(signal.SIGKILL)
                await asyncio.gather(*tasks)
        return 0 if stopped_in_time and not self._gave_up else 1

    def stop(self) -> None:
        """The first call lets requests finish, the second ends them, the third kills."""
        steps = (self._stopping, self._hurrying, self._killing)
        next((step for step in steps if not step.is_set()), self._killing).set()

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    async def _watch(self) -> None:
        """Replace a worker that is alive and silent: the kernel still gives it connections, which would hang."""
        while True:
            await asyncio.sleep(self._policy.max_silence / _LOOKS)
            for child in self.children[: self._workers]:
                if child.silent_looks(self._heartbeat(child.index)) >= _LOOKS:
                    _log.error("%s %d is silent: replacing it", child.name, child.index)
                    child.signal(signal.SIGKILL)

    async def _keep_alive(self, child: SupervisedChild) -> None:
        while not self._stopping.is_set():
            started = time.monotonic()
            code = await self._run_once(child)
            if self._stopping.is_set():
                return
            child.record_exit(time.monotonic() - started, self._policy)
            if should_give_up(self.children[: self._workers], self._policy):
                _log.error("every gateway process exits right after its start (last exit code %s): giving up", code)
                self._gave_up = True
                self._stopping.set()
                return
            delay = child.restart_delay(self._policy)
            _log.warning("%s %d exited with code %s: restarting in %.1f s", child.name, child.index, code, delay)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    async def _run_once(self, child: SupervisedChild) -> int:
        environment = {**os.environ, **self._environment, INDEX_VARIABLE: str(child.index)}
        child.first_heartbeat = self._heartbeat(child.index)
        # A new session: Ctrl-C reaches the parent only, which passes it on once. uvicorn takes two signals for "now".
        try:
            child.process = await asyncio.create_subprocess_exec(*child.argv, env=environment, start_new_session=True)
        except OSError as error:  # out of memory or processes: counts as an early exit
            _log.error("%s %d cannot start: %s", child.name, child.index, error)
            return _START_FAILED
        if self._stopping.is_set():
            child.signal(signal.SIGTERM)
        return await child.process.wait()

    async def _stop_all(self, tasks: list[asyncio.Task[None]]) -> bool:
        """Returns whether every child exited within the grace period. The helpers are last: the requests that the
        workers finish need them."""
        workers, helpers = slice(0, self._workers), slice(self._workers, None)
        in_time = await self._stop_some(self.children[workers], tasks[workers])
        return await self._stop_some(self.children[helpers], tasks[helpers]) and in_time

    async def _stop_some(self, children: list[SupervisedChild], tasks: list[asyncio.Task[None]]) -> bool:
        if not tasks:
            return True
        # asyncio.wait, unlike gather, does not cancel the tasks when it is cancelled itself.
        ended: asyncio.Task[Any] = asyncio.create_task(asyncio.wait(tasks))
        for signalled, grace in ((self._hurrying, self._policy.grace), (self._killing, self._policy.short_grace)):
            for child in children:
                child.signal(signal.SIGTERM)
            sooner: asyncio.Task[Any] = asyncio.create_task(signalled.wait())
            try:
                await asyncio.wait({ended, sooner}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
            finally:
                sooner.cancel()
            if ended.done():
                return True
        ended.cancel()
        for child in children:
            child.signal(signal.SIGKILL)
        return False


async def run_supervised(
    argv: list[str],
    workers: int,
    folder: Path,
    policy: RestartPolicy = RestartPolicy(),
    extra: Sequence[list[str]] = (),
    heartbeat: Callable[[int], object] = lambda _: None,
) -> int:
    """Run until a signal comes or every worker keeps failing; returns the exit code. `argv` is a worker's command,
    `folder` is for their sockets and files. `heartbeat` of a worker's index changes as long as it works."""
    return await Supervisor(argv, workers, {FOLDER_VARIABLE: str(folder)}, policy, extra, heartbeat).run()


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that only this user can enter, with a path that is short enough for sockets in it."""
    short = None if len(tempfile.gettempdir()) < _MAX_SOCKET_PATH - 40 else "/tmp"  # noqa: S108 - mkdtemp makes it private
    with tempfile.TemporaryDirectory(prefix="modelyard-", dir=short) as made:
        yield Path(made)
