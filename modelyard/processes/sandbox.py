"""One pool of child processes for work on data that nobody vouches for: documents, images, grammars, model files.

    call, run ──job──▶ zygote ──fork──▶ child: limits, then the function ──result──▶

The zygote is one process that never sees a job's data. It imports what a function needs and forks a child for each job,
which takes 3 ms; a child works for one client and is gone afterwards. The kernel limits its CPU time, wall time and
memory. A child can open nothing, no file and no socket, unless it checks a model file; where the kernel allows it the
zygote has no network at all. Its environment holds no secrets. The zygote reports how a child ended, kills it when
nobody waits any more, and all of them die with the server.

As many children run as there are cores, at most four; the clients that wait take turns.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import importlib
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from itertools import count
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from modelyard.core.errors import InvalidRequest, ModelyardError, Overloaded, Unavailable
from modelyard.library import cores
from modelyard.processes.parent_death import die_with_parent

log = logging.getLogger(__name__)

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

MAX_CHILDREN = max(2, min(4, cores.logical()))
_MAX_WAITING = 64  # jobs of one client
_MAX_REPLY = 512 << 20
_POLL_S = 0.25
_CAN_FORK = hasattr(os, "fork") and hasattr(socket, "send_fds")  # not on Windows: there a job runs in this process
_ORDER = struct.Struct("=cQ119s")  # to the zygote: start or kill, the job's number, its function
_OUT_OF_MEMORY = 77  # exit code of a child
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")
_KEPT_PREFIXES = ("LC_", "PYTHON", "XDG_", "LD_", "LLAMA_CPP_", "GGML_", "CUDA_", "NVIDIA_", "OMP_", "COVERAGE_")
_CLONE_NEWUSER, _CLONE_NEWNET, _PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 0x10000000, 0x40000000, 1, 38

# Whose work it is: set by the gateway, so that one client's documents do not hold up another's.
current_client: ContextVar[str] = ContextVar("current_client", default="")


class Limits(Struct, frozen=True):
    """`memory` is in bytes, beyond what a child has when it starts. `opens_files`: a model file, with the libraries
    that read it; what is mapped of it does not count as memory."""

    cpu_s: int = 10
    wall_s: float = 60.0
    memory: int = 512 << 20
    opens_files: bool = False


class Stopped(Exception):
    """A child gave no result. `why`: it exceeded a limit, it died, or nobody waits for it (`cancelled`). `code` is its
    exit code, minus the signal that killed it, and None if its time was over; `output` is what it printed."""

    def __init__(self, why: str, code: int | None, output: str = "") -> None:
        super().__init__(why)
        self.why, self.code, self.output = why, code, output


def sandboxed(limits: Limits, preload: Callable[[], object] = lambda: None) -> Callable[[F], F]:
    """A function that the pool runs. Its arguments and its result are MessagePack. `preload` imports what it needs,
    once and in the zygote: a child cannot open files."""

    def mark(function: F) -> F:
        function.limits, function.preload = limits, preload  # type: ignore[attr-defined]
        return function

    return mark


# --- the server -------------------------------------------------------------------------------------------------------


class Job(Struct, eq=False):
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    limits: Limits
    future: Future[Any]
    is_cancelled: bool = False


class Sandbox:
    """Thread-safe. `most` children at a time."""

    def __init__(self, most: int = MAX_CHILDREN) -> None:
        self._most, self._running, self._numbers = most, 0, count(1)
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()
        self._lock, self._threads = threading.Lock(), ThreadPoolExecutor(most, "sandbox")
        self._zygote: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._is_closed = False

    def call(self, function: Callable[..., T], *args: object) -> T:
        """Blocks. Raises Stopped if the child gave no result, and InvalidRequest if the function did."""
        return self.submit(function, args).future.result()  # type: ignore[no-any-return]

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """As `call`. A child that nobody waits for is killed."""
        job = self.submit(function, args)
        try:
            return await asyncio.wrap_future(job.future)
        finally:
            job.is_cancelled = True

    def submit(self, function: Any, arguments: tuple[Any, ...], limits: Limits | None = None) -> Job:
        job, client = Job(function, arguments, limits or function.limits, Future()), current_client.get()
        with self._lock:
            queue = self._waiting.setdefault(client, deque())
            if len(queue) >= _MAX_WAITING:
                waiting = f"{_MAX_WAITING} documents, images or grammars of this key are waiting to be read"
                raise Overloaded(f"{waiting}; send fewer at a time", retry_after=5.0)
            queue.append(job)
            self._start_next()
        return job

    def _start_next(self) -> None:
        """The clients take turns. The lock is held."""
        while self._running < self._most and self._waiting:
            client, queue = self._waiting.popitem(last=False)
            job = queue.popleft()
            if queue:
                self._waiting[client] = queue
            if not job.is_cancelled and job.future.set_running_or_notify_cancel():
                self._running += 1
                self._threads.submit(self._work, job)

    def _work(self, job: Job) -> None:
        try:
            job.future.set_result(self._perform(job))
        except BaseException as error:
            job.future.set_exception(error)
        finally:
            with self._lock:
                self._running -= 1
                self._start_next()

    def _perform(self, job: Job) -> Any:
        if not _CAN_FORK:
            return job.function(*job.arguments)
        name = f"{job.function.__module__}:{job.function.__qualname__}"
        data, number = msgspec.msgpack.encode((job.limits, job.arguments)), next(self._numbers)
        deadline = time.monotonic() + job.limits.wall_s
        (ours, theirs), (status, told) = socket.socketpair(), os.pipe()
        with ours, open(status, "rb") as ended, tempfile.TemporaryFile() as output:
            try:
                self._order(b"s", number, name, [theirs.fileno(), told, output.fileno()])
            finally:
                theirs.close()
                os.close(told)
            reply, why = _exchange(job, ours, len(data).to_bytes(8, "little") + data, deadline)
            if why:
                self._order(b"k", number)
            code = ended.read()  # the zygote tells it, or is gone
            output.seek(0)
            printed = output.read(1 << 16).decode("utf-8", "replace")
        return _result(reply, why, int(code) if code else None, job.limits, printed)

    def _order(self, kind: bytes, number: int, name: str = "", descriptors: Sequence[int] = ()) -> None:
        with self._lock:
            if self._zygote is not None and self._zygote[0].poll() is not None:
                self._end()
            if self._zygote is None and kind == b"s":
                if self._is_closed:
                    raise Unavailable("the server is stopping")
                self._zygote = _start_zygote()
            if self._zygote is not None:
                with contextlib.suppress(BrokenPipeError):  # it has just died: the pipe of the job's end tells it
                    socket.send_fds(self._zygote[1], [_ORDER.pack(kind, number, name.encode())], descriptors)

    def close(self) -> None:
        """For good: jobs that wait fail."""
        with self._lock:
            self._is_closed = True
            self._end()

    def _end(self) -> None:
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote[1].close()  # its sign to end, with all of its children
            zygote[0].wait()


def _start_zygote() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    kept = {n: v for n, v in os.environ.items() if n in _KEPT_VARIABLES or n.startswith(_KEPT_PREFIXES)}
    command = die_with_parent([sys.executable, "-P", "-m", __name__])
    null = subprocess.DEVNULL
    with theirs:  # in a new session: a Ctrl-C in the terminal is for the server
        return subprocess.Popen(command, stdin=theirs.fileno(), stdout=null, env=kept, start_new_session=True), ours  # noqa: S603


def _exchange(job: Job, child: socket.socket, data: bytes, deadline: float) -> tuple[bytearray, str]:
    """All that the child writes, and why that is not everything."""
    reply, left = bytearray(), memoryview(data)
    child.setblocking(False)
    poll = select.poll()  # `select` takes no descriptor above 1023, and a server has one for each client
    poll.register(child)
    while len(reply) <= _MAX_REPLY:
        if job.is_cancelled:
            return reply, "cancelled"
        if (wait := min(_POLL_S, deadline - time.monotonic())) <= 0:
            return reply, _too_long(job.limits)
        poll.modify(child, select.POLLIN | (select.POLLOUT if left else 0))
        events = sum(found for _, found in poll.poll(wait * 1000))
        try:
            if events & select.POLLOUT:
                left = left[child.send(left) :]
            if events & ~select.POLLOUT:
                if not (piece := child.recv(1 << 20)):
                    return reply, ""
                reply += piece
        except BlockingIOError:
            continue
        except OSError:  # it died before it had read everything
            return reply, ""
    return reply, "its result is too large"


def _result(reply: bytearray, why: str, code: int | None, limits: Limits, output: str) -> Any:
    if not why and code == 0:
        value, error = msgspec.msgpack.decode(reply)
        if error is None:
            return value
        raise InvalidRequest(error[0], code=error[1], param=error[2])
    if not why and code is None:
        raise Unavailable("the processes that read documents, grammars and model files were ended; try again")
    reasons = {
        -signal.SIGXCPU: f"it takes more than {limits.cpu_s} s of CPU time",
        -signal.SIGALRM: _too_long(limits),
        _OUT_OF_MEMORY: f"it needs more than {limits.memory >> 20} MiB of memory",
    }
    why = why or reasons.get(code or 0, "the process that read it died")
    log.debug("a child of the pool ended with %s: %s; %s", code, why, output)
    raise Stopped(why, None if why == _too_long(limits) else code, output)


def _too_long(limits: Limits) -> str:
    return f"it takes longer than {limits.wall_s:g} s"


pool = Sandbox()
atexit.register(pool.close)


# --- the zygote -------------------------------------------------------------------------------------------------------


def _serve(orders: socket.socket) -> None:
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, tuple[int, int]] = {}  # pid → number of the job, where its end is told
    while True:
        ready, _, _ = select.select([orders.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            for pid in list(children):
                if (found := os.waitpid(pid, os.WNOHANG))[0]:
                    with os.fdopen(children.pop(pid)[1], "wb") as ended:
                        ended.write(b"%d" % os.waitstatus_to_exitcode(found[1]))
        if orders.fileno() not in ready:
            continue
        order, descriptors, _, _ = socket.recv_fds(orders, _ORDER.size, 3)
        if not order:
            break
        kind, number, name = _ORDER.unpack(order)
        if kind == b"k":
            for pid in [pid for pid, (job, _) in children.items() if job == number]:
                os.kill(pid, signal.SIGKILL)
            continue
        data, told, output = descriptors
        module, _, function = name.rstrip(b"\0").decode().partition(":")
        work: Any = getattr(importlib.import_module(module), function)
        work.preload()
        if (pid := os.fork()) == 0:
            _be_child(work, data, output)
        children[pid] = number, told
        os.close(data)
        os.close(output)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _leave_network() -> None:
    """Containers may forbid it: then a child still has no free descriptor for a socket."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if libc.unshare(_CLONE_NEWNET) and os.geteuid():
            libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)


# --- a child ----------------------------------------------------------------------------------------------------------


def _be_child(function: Callable[..., Any], data: int, output: int) -> None:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for stream, source in ((3, data), (1, output), (2, output), (0, os.open(os.devnull, os.O_RDONLY))):
            os.dup2(source, stream)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        with socket.socket(fileno=3) as server:
            _work(function, server)
        code = 0
    except MemoryError:
        code = _OUT_OF_MEMORY
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _work(function: Callable[..., Any], server: socket.socket) -> None:
    size = int.from_bytes(server.recv(8, socket.MSG_WAITALL), "little")
    limits, arguments = msgspec.msgpack.decode(
        server.recv(size, socket.MSG_WAITALL), type=tuple[Limits, tuple[Any, ...]]
    )
    _apply(limits)
    try:
        reply = msgspec.msgpack.encode((function(*arguments), None))
    except ModelyardError as error:
        reply = msgspec.msgpack.encode((None, (error.message, error.code, error.param)))
    server.sendall(reply)


def _apply(limits: Limits) -> None:
    import resource

    def limit(kind: int, most: int, more: int = 0) -> None:
        _, hard = resource.getrlimit(kind)
        top = most + more if hard == resource.RLIM_INFINITY else min(most + more, hard)
        resource.setrlimit(kind, (min(most, top), top))

    signal.setitimer(signal.ITIMER_REAL, limits.wall_s)  # nothing handles the signal: it ends the process
    limit(resource.RLIMIT_CPU, limits.cpu_s, 1)  # SIGXCPU, then SIGKILL
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_FSIZE, 1 << 16)  # of what it prints
    if limits.opens_files or sys.platform != "linux":
        limit(resource.RLIMIT_DATA, limits.memory)
    else:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limit(resource.RLIMIT_AS, used + limits.memory)
    if not limits.opens_files:
        limit(resource.RLIMIT_NOFILE, 4)


if __name__ == "__main__":
    with socket.socket(fileno=os.dup(0)) as given:
        _leave_network()
        _serve(given)
