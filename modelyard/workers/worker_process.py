"""The life of a worker process: it listens, registers with a scheduler, serves, and drains on SIGTERM.

Gateways and schedulers start it for one engine, whose definition is in a file:
`python -m modelyard.workers.worker_process ENDPOINT DEFINITION [--exit-when-orphaned]`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from modelyard.workers.definitions import Definitions, FixedDefinitions, read_definition
from modelyard.workers.messages import (
    VERSION,
    ConnectionRefused,
    Heartbeat,
    MalformedMessage,
    RegisterWorker,
    decode_for_gateway,
    encode,
)
from modelyard.workers.transport import ClusterKeys, DealerSocket, HeartbeatConfig, read_keys
from modelyard.workers.worker import LogForwarder, Worker
from modelyard.workers.worker_pool import machine_name

log = logging.getLogger(__name__)

KEYS_VARIABLE = "MODELYARD_WORKER_KEYS"
PARENT_VARIABLE = "MODELYARD_WORKER_PARENT"  # pid of the process that started the scheduler: all exit with it
_GRACE_S = 30.0
_ORPHAN_S = 60.0  # a worker started by a scheduler lives this long without one
_POLL_S = 1.0
_REFUSED_S = 5.0  # before a refused worker tries to register again
_MEMORY_INTERVAL = 5  # heartbeats between two measurements of the free memory


def worker_loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Set up logging, and use uvloop if it is installed: it makes a hop cheaper by a fifth."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if find_spec("uvloop") is None:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def run_worker(
    endpoint: str,
    definitions: Definitions,
    *,
    keys: ClusterKeys | None = None,
    heartbeat: HeartbeatConfig = HeartbeatConfig(),
    scheduler: str | None = None,
    exit_when_orphaned: bool = False,
    grace_s: float = _GRACE_S,
) -> None:
    """Run until SIGTERM; then take nothing new and exit when the running requests have ended. A second signal exits at
    once."""
    stopping, killing = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (killing if stopping.is_set() else stopping).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    worker = Worker(endpoint, definitions, keys=keys, heartbeat=heartbeat)
    forwarder = LogForwarder(worker.forward_log)
    logging.getLogger().addHandler(forwarder)
    reasons: list[Coroutine[Any, Any, object]] = [stopping.wait(), worker.shutdown_requested.wait()]
    if exit_when_orphaned:
        reasons += [_wait_orphaned(worker), _wait_parent_exit()]
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(reason) for reason in reasons]
    registering = None
    if scheduler is not None:
        registering = asyncio.create_task(_register(worker, definitions, scheduler, keys, heartbeat))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if registering is not None:
            registering.cancel()
        if stopping.is_set():
            tasks += [asyncio.create_task(worker.drain(grace_s)), asyncio.create_task(killing.wait())]
            await asyncio.wait(tasks[-2:], return_when=asyncio.FIRST_COMPLETED)
    finally:
        tasks += [] if registering is None else [registering]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await worker.close()
        logging.getLogger().removeHandler(forwarder)


async def _wait_orphaned(worker: Worker) -> None:
    """Done when no scheduler has been connected for too long."""
    alone_s = 0.0
    while alone_s < _ORPHAN_S:
        await asyncio.sleep(_POLL_S)
        has_scheduler = any(name.startswith("scheduler-") for name in worker.clients)
        alone_s = 0.0 if has_scheduler else alone_s + _POLL_S
    log.warning("no scheduler has connected for %g s: the worker exits", _ORPHAN_S)


async def _wait_parent_exit() -> None:
    """Done when the process named in the environment has exited; never if none is named."""
    exited = asyncio.Event()
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None or not hasattr(os, "pidfd_open"):
        await exited.wait()
        return
    try:
        pidfd = os.pidfd_open(int(parent))
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def _register(
    worker: Worker, definitions: Definitions, scheduler: str, keys: ClusterKeys | None, heartbeat: HeartbeatConfig
) -> None:
    """Register again and again, so that a restarted scheduler learns of this worker. A refusal is not final: the
    scheduler may be replaced by one that accepts us."""
    # Imported here: the environment of an engine's own interpreter need not have psutil.
    from modelyard.telemetry.system import free_memory

    node = machine_name()

    def on_message(data: bytes) -> None:
        try:
            message = decode_for_gateway(data)
        except MalformedMessage:
            return
        if isinstance(message, ConnectionRefused):
            log.error("the scheduler refused this worker: %s", message.reason)
            refused.set()

    while True:
        refused = asyncio.Event()
        socket = DealerSocket(scheduler, on_message, lambda reason: log.warning("%s", reason), keys)
        try:
            while not refused.is_set():
                free, models = await asyncio.to_thread(lambda: (free_memory(with_gpus=True), definitions.models()))
                for _ in range(_MEMORY_INTERVAL):
                    engines = tuple(hosted.info() for hosted in worker.engines)
                    memory = (free.ram_free, dict(free.gpus), models)
                    socket.send(encode(RegisterWorker(VERSION, worker.name, worker.endpoint, engines, node, *memory)))
                    socket.send(encode(Heartbeat(0)))
                    await asyncio.sleep(heartbeat.interval_s)
        finally:
            await socket.close()
        await asyncio.sleep(_REFUSED_S)


def main() -> None:
    endpoint, definition, *options = sys.argv[1:]
    definitions = FixedDefinitions(read_definition(Path(definition)))
    file = os.environ.get(KEYS_VARIABLE)
    keys = read_keys(Path(file)) if file else None
    with asyncio.Runner(loop_factory=worker_loop_factory()) as runner:
        orphaned = "--exit-when-orphaned" in options
        runner.run(run_worker(endpoint, definitions, keys=keys, exit_when_orphaned=orphaned))


if __name__ == "__main__":
    main()
