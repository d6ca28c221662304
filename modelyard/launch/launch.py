"""Launches an agent: find its program, find or start a server, make the plan, run the agent in the user's terminal."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from modelyard.core.errors import NotFound, Unavailable
from modelyard.launch.agents import PLACEHOLDER_KEY, LaunchPlan, LaunchTarget, get_agent, shell_script
from modelyard.library.cache_dir import cache_dir
from modelyard.server.client import ServerClient, no_server
from modelyard.server.temporary_server import TemporaryServer, log_path

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
            raise no_server(server.url)
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
    log = log_path(env)
    temporary = stack.enter_context(TemporaryServer(server.url, options.config, log, env))
    notify(f"starting a server at {server.url} that runs as long as the agent; its log is {log}")
    while not server.is_running():
        temporary.check_alive()
        time.sleep(_POLL_S)
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


# --- the server that the agent uses -----------------------------------------------------------------------------------

BACKGROUND_MODEL = "local-haiku"  # routes for `*haiku*` match it, and no agent takes it for a model it knows
_NO_MODEL = "local-no-such-model"
_POLL_S = 0.1


class TargetServer(ServerClient):
    """The server as an agent's target."""

    def launch_target(self, model: str | None, check_alive: Callable[[], None] = lambda: None) -> LaunchTarget:
        """The target for `model`, or for the first usable model. Waits while the model is loading; `check_alive` raises
        if the server process has exited."""
        name = model or self._first_model()
        while (card := self._model(name))["state"] == "loading":
            check_alive()
            time.sleep(_POLL_S)
        if card["state"] == "failed":
            raise Unavailable(f"the model {name!r} failed to load; see {self.url}/health for the reason")
        background = BACKGROUND_MODEL if self._routes_background() else name
        key = self.key or PLACEHOLDER_KEY
        return LaunchTarget(url=self.url, model=name, window=card.get("context_length"), background=background, key=key)

    def _routes_background(self) -> bool:
        """Whether a route takes the background model. A server whose default model answers to every name has none:
        another model would be loaded for it."""
        try:
            routed = self._model(BACKGROUND_MODEL)
        except NotFound:
            return False
        try:
            other = self._model(_NO_MODEL)
        except NotFound:
            return True
        return bool(routed.get("context_length") != other.get("context_length"))

    def _first_model(self) -> str:
        cards = self.get("/v1/models")["data"]
        if not cards:
            raise NotFound(f"{self.url} lists no models; name one with --model")
        usable = [card for card in cards if card["state"] in ("ready", "loading")]
        return str((usable or cards)[0]["id"])

    def _model(self, name: str) -> dict[str, Any]:
        return self.get(f"/v1/models/{quote(name)}")
