"""Launches an agent: find its program, find or start a server, make the plan, run the agent in the user's terminal."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType

from msgspec import Struct

from modelyard.core.errors import Unavailable
from modelyard.launch.agents import get_agent
from modelyard.launch.plan import LaunchPlan, LaunchTarget, shell_script
from modelyard.launch.server import TargetServer, TemporaryServer
from modelyard.library.cache_dir import cache_dir

_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LaunchOptions(Struct, frozen=True, kw_only=True):
    """The options of `modelyard launch`. `arguments` are passed to the agent."""

    agent: str
    url: str
    model: str | None = None
    key: str | None = None
    config: Path | None = None
    arguments: tuple[str, ...] = ()


def launch_agent(options: LaunchOptions, env: Mapping[str, str], notify: Callable[[str], None]) -> int:
    """Run the agent and return its exit code. `notify` shows a message to the user."""
    agent = get_agent(options.agent)
    program = agent.find_program(env)
    with ExitStack() as stack:
        forwarder = stack.enter_context(SignalForwarder().installed())
        plan = agent.plan(_target(options, env, stack, notify), _home(options.agent, env))
        for note in plan.notes:
            notify(note)
        write_files(plan)
        variables = {name: value for name, value in env.items() if name not in plan.unset} | dict(plan.env)
        return _run([str(program), *plan.arguments, *options.arguments], variables, forwarder)


def launch_script(options: LaunchOptions, env: Mapping[str, str]) -> str:
    """The equivalent shell commands. Starts nothing and writes nothing, so the server must be running."""
    agent = get_agent(options.agent)
    with closing(TargetServer(options.url, options.key)) as server:
        if not server.is_running():
            raise Unavailable(f"no server answers at {server.url}; start one with: modelyard serve")
        plan = agent.plan(server.launch_target(options.model), _home(options.agent, env))
    return shell_script(plan, agent.program, options.arguments)


def _home(agent: str, env: Mapping[str, str]) -> Path:
    """The folder for an agent's settings and sessions under our launches, separate from the user's own."""
    return cache_dir(env) / "launch" / agent


def _target(
    options: LaunchOptions, env: Mapping[str, str], stack: ExitStack, notify: Callable[[str], None]
) -> LaunchTarget:
    server = stack.enter_context(closing(TargetServer(options.url, options.key)))
    if server.is_running():
        return server.launch_target(options.model)
    log = cache_dir(env) / "launch" / "server.log"
    temporary = stack.enter_context(TemporaryServer(server.url, options.config, log, env))
    notify(f"starting a server at {server.url} that runs as long as the agent; its log is {log}")
    server.wait_until_running(temporary.check_alive)
    return server.launch_target(options.model, temporary.check_alive)


def write_files(plan: LaunchPlan) -> None:
    missing = {path: text for path, text in plan.initial_files.items() if not path.exists()}
    for path, text in {**plan.files, **missing}.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)  # some files hold the API key
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise Unavailable(f"cannot write {path}: {error.strerror}") from error


def _run(command: Sequence[str], env: Mapping[str, str], forwarder: SignalForwarder) -> int:
    """The exit code as a shell reports it: 128 plus the signal's number if a signal ended the process."""
    try:
        process = forwarder.start(command, env)
    except OSError as error:
        raise Unavailable(f"cannot start {command[0]}: {error.strerror}") from error
    code = process.wait()
    return 128 - code if code < 0 else code


class SignalForwarder:
    """Forwards signals to the agent. Before the agent runs, a signal exits this process, which also stops a temporary
    server."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: list[int] | None = None  # signals that arrive while the agent is being started

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        self._pending = []
        process = self._process = subprocess.Popen(command, env=dict(env))  # noqa: S603  the agent that the user named
        for number in self._pending:
            self(number)
        return process

    def __call__(self, number: int, _frame: FrameType | None = None) -> None:
        if self._process is not None:
            if number != signal.SIGINT:  # the terminal sends Ctrl-C to the whole foreground group, the agent included
                self._process.send_signal(number)
        elif self._pending is not None:
            self._pending.append(number)
        else:
            raise SystemExit(128 + number)

    @contextmanager
    def installed(self) -> Iterator[SignalForwarder]:
        previous = {number: signal.signal(number, self) for number in _FORWARDED_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
