"""A worker from its first breath to its last: it listens, offers itself, works, and drains when it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from typing import Any

from modelyard.workers.messages import VERSION, ConnectionRefused, Heartbeat, RegisterWorker, encode, read_for_gateway
from modelyard.workers.packing import MalformedMessage
from modelyard.workers.transport import ClusterKeys, DealerSocket, HeartbeatConfig
from modelyard.workers.worker import Worker
from modelyard.workers.worker_pool import machine_name

log = logging.getLogger(__name__)

PARENT_VARIABLE = "MODELYARD_WORKER_PARENT"  # pid of whoever started the scheduler: when it has gone, all end
_GRACE_S = 30.0
_ORPHAN_S = 60.0  # a worker that a scheduler started lives so long without one
_LOOK_S = 1.0
_BEATS = 5  # between two looks at what is free on this machine


def worker_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is: a hop costs a fifth less."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if find_spec("uvloop") is None:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def run_worker(
    endpoint: str,
    *,
    keys: ClusterKeys | None = None,
    pace: HeartbeatConfig = HeartbeatConfig(),
    scheduler: str | None = None,
    hired: bool = False,
    grace_s: float = _GRACE_S,
) -> None:
    """Until SIGTERM: then it takes nothing new and ends when what runs has ended, at a second one at once."""
    told, hurried = _signals()
    worker = Worker(endpoint, keys=keys, pace=pace)
    works: list[Coroutine[Any, Any, object]] = [told.wait(), worker.dismissed.wait()]
    if hired:
        works += [_orphaned(worker), _parent_gone()]
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(work) for work in works]
    offering = asyncio.create_task(_offer(worker, scheduler, keys, pace)) if scheduler is not None else None
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if offering is not None:
            offering.cancel()
        if told.is_set():
            await _drain(worker, hurried, grace_s)
    finally:
        tasks += [] if offering is None else [offering]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await worker.close()


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    told, hurried = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (hurried if told.is_set() else told).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return told, hurried


async def _drain(worker: Worker, hurried: asyncio.Event, grace_s: float) -> None:
    ending: set[asyncio.Task[Any]] = {
        asyncio.create_task(worker.drain(grace_s)),
        asyncio.create_task(hurried.wait()),
    }
    await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
    for task in ending:
        task.cancel()


async def _orphaned(worker: Worker) -> None:
    """Done when no scheduler has been a client for too long."""
    silent = 0.0
    while silent < _ORPHAN_S:
        await asyncio.sleep(_LOOK_S)
        served = any(name.startswith("scheduler-") for name in worker.clients)
        silent = 0.0 if served else silent + _LOOK_S
    log.warning("no scheduler has come for %g s: the worker ends", _ORPHAN_S)


async def _parent_gone() -> None:
    """Done when the process named in the environment has ended; never where none is named."""
    gone = asyncio.Event()
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None or not hasattr(os, "pidfd_open"):
        await gone.wait()
        return
    try:
        watched = os.pidfd_open(int(parent))
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(watched, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(watched)
        os.close(watched)


async def _offer(worker: Worker, scheduler: str, keys: ClusterKeys | None, pace: HeartbeatConfig) -> None:
    """Tells the scheduler again and again that this worker is here: one that was started anew learns of it so."""
    from modelyard.telemetry.system import (
        free_memory,  # an interpreter that only an engine runs in need not have psutil
    )

    refused, place = asyncio.Event(), machine_name()

    def heard(data: bytes) -> None:
        try:
            message = read_for_gateway(data)
        except MalformedMessage:
            return
        if isinstance(message, ConnectionRefused):
            log.error("the scheduler refused this worker: %s", message.reason)
            refused.set()

    dialer = DealerSocket(scheduler, heard, lambda why: log.warning("%s", why), keys)
    try:
        while not refused.is_set():
            here = await asyncio.to_thread(free_memory, with_gpus=True)
            for _ in range(_BEATS):
                held = tuple(hosted.held() for hosted in worker.engines)
                told = RegisterWorker(
                    VERSION, worker.name, worker.endpoint, held, place, here.ram_free, dict(here.gpus)
                )
                dialer.send(encode(told))
                dialer.send(encode(Heartbeat(0)))
                await asyncio.sleep(pace.beat_s)
    finally:
        await dialer.close()
