"""Launch an agent: find it, have a server, plan, then run it in the user's terminal and pass its exit code on."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from msgspec import Struct

from modelyard.core.errors import Unavailable
from modelyard.launch import agents, programs, shell
from modelyard.launch.plan import Facts, Plan
from modelyard.launch.server import Server, started, wait_for
from modelyard.library.cache_dir import cache_dir

Say = Callable[[str], None]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Order(Struct, frozen=True, kw_only=True):
    """What the user asked for. `own` are the arguments for the agent itself."""

    agent: str
    url: str
    model: str | None = None
    key: str | None = None
    config: Path | None = None
    own: tuple[str, ...] = ()


def launch(order: Order, env: Mapping[str, str], say: Say) -> int:
    agent, planner = agents.find(order.agent)
    program = programs.find(agent, env)
    with ExitStack() as held:
        relay = held.enter_context(Relay().installed())
        plan = planner(_facts(order, env, held, say), home(order.agent, env))
        for note in plan.notes:
            say(note)
        write(plan)
        return run([str(program), *plan.arguments, *order.own], _environment(plan, env), relay)


def printed(order: Order, env: Mapping[str, str]) -> str:
    """The same as shell lines. It starts nothing and writes nothing, so a server must be there to be asked."""
    agent, planner = agents.find(order.agent)
    with ExitStack() as held:
        server = _server(order, held)
        if not server.is_there():
            raise Unavailable(f"no server answers at {server.url}; start one with: modelyard serve")
        plan = planner(server.facts(order.model), home(order.agent, env))
    return shell.lines(plan, agent.program, order.own)


def home(name: str, env: Mapping[str, str]) -> Path:
    """The folder for an agent's settings and sessions under our launches; the user's own is not touched."""
    return cache_dir(env) / "launch" / name


def _server(order: Order, held: ExitStack) -> Server:
    server = Server(order.url, order.key)
    held.callback(server.close)
    return server


def _facts(order: Order, env: Mapping[str, str], held: ExitStack, say: Say) -> Facts:
    server = _server(order, held)
    if server.is_there():
        return server.facts(order.model)
    log = cache_dir(env) / "launch" / "server.log"
    alive = held.enter_context(started(server.url, order.config, log, env))
    say(f"starting a server at {server.url} for as long as this runs; its log is {log}")
    wait_for(server, alive)
    return server.facts(order.model, alive)


def write(plan: Plan) -> None:
    for path, text in plan.files.items():
        _put(path, text)
    for path, text in plan.initial.items():
        if not path.exists():
            _put(path, text)


def _put(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # some of them hold the API key
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Unavailable(f"{path} cannot be written: {error.strerror}") from error


def _environment(plan: Plan, env: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in env.items() if name not in plan.unset}
    return {**kept, **plan.env}


def run(command: Sequence[str], env: Mapping[str, str], relay: Relay) -> int:
    """Its exit code, as a shell counts: an end by a signal is 128 and the signal's number."""
    try:
        process = relay.start(command, env)
    except OSError as error:
        raise Unavailable(f"{command[0]} cannot be started: {error.strerror}") from error
    code = process.wait()
    return 128 - code if code < 0 else code


class Relay:
    """Signals while an agent runs are for it. Before it runs they end us in good order: the server goes, too."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._held: list[int] | None = None  # what came while the agent was being started

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        self._held = []
        process = self._process = subprocess.Popen(command, env=dict(env))  # noqa: S603  the agent that the user named
        for number in self._held:
            self(number)
        return process

    def __call__(self, number: int, _frame: FrameType | None = None) -> None:
        if self._process is not None:
            if number != signal.SIGINT:  # Ctrl-C has reached it already, being in the terminal's foreground
                self._process.send_signal(number)
        elif self._held is not None:
            self._held.append(number)
        else:
            raise SystemExit(128 + number)

    @contextmanager
    def installed(self) -> Iterator[Relay]:
        before = {number: signal.signal(number, self) for number in _SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
