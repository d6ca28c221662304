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
from msgspec.structs import replace

from modelyard.config.load import EMBEDDED_DEFAULTS
from modelyard.core.errors import NotFound, Unavailable
from modelyard.launch.agents import Agent, get_agent
from modelyard.launch.plan import PLACEHOLDER_KEY, LaunchPlan, LaunchTarget, shell_script, write_files
from modelyard.library.cache_dir import cache_dir
from modelyard.library.default_model import DEMO_NOTICE
from modelyard.server.client import ServerClient, is_local, no_server
from modelyard.server.running_servers import KEEP_ALIVE_S, BackgroundServer, find_server, kept_alive, stays_notice

_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LaunchOptions(Struct, frozen=True, kw_only=True):
    """The options of `modelyard launch`. `arguments` are passed to the agent."""

    agent: str
    url: str
    model: str | None = None
    key: str | None = None
    config: Path | None = None
    arguments: tuple[str, ...] = ()
    keep_alive_s: float | None = KEEP_ALIVE_S  # of a server that is started for it
    keep_config: bool = False  # the user's own settings of the agent, in place of a private folder


def launch_agent(options: LaunchOptions, env: Mapping[str, str], notify: Callable[[str], None]) -> int:
    """Run the agent and return its exit code. `notify` shows a message to the user."""
    agent = get_agent(options.agent)
    program = agent.find_program(env)
    with ExitStack() as stack:
        forwarder = stack.enter_context(SignalForwarder().installed())
        plan = _plan(agent, options, env, _target(agent, options, env, stack, notify))
        for note in (*plan.notes, *write_files(plan)):
            notify(note)
        variables = {name: value for name, value in env.items() if name not in plan.unset} | dict(plan.env)
        server = stack.enter_context(closing(TargetServer(options.url, options.key)))
        stack.enter_context(kept_alive(find_server(options.url, env), server.is_running))
        return _run([str(program), *plan.arguments, *options.arguments], variables, forwarder)


def launch_script(options: LaunchOptions, env: Mapping[str, str]) -> str:
    """The equivalent shell commands. Starts nothing and writes nothing, so the server must be running."""
    agent = get_agent(options.agent)
    with closing(TargetServer(options.url, options.key)) as server:
        if not server.is_running():
            raise no_server(server.url)
        plan = _plan(agent, options, env, server.launch_target(options.model, agent=agent))
    return shell_script(plan, agent.program, options.arguments)


def _plan(agent: Agent, options: LaunchOptions, env: Mapping[str, str], target: LaunchTarget) -> LaunchPlan:
    """The agent's plan, with the command that fetches a model if this one does not suit the agent."""
    plan = agent.plan(target, _home(options.agent, env))
    plan = agent.with_own_config(plan) if options.keep_config else plan
    notes = [*([DEMO_NOTICE + " --for code"] if target.model in EMBEDDED_DEFAULTS["models"] else []), *plan.notes]
    own = len(notes)
    if agent.tools and "tools" not in target.capabilities:
        notes.append(f"{target.model} cannot call tools, and {agent.title} does nothing without them.")
    elif _CHATS.isdisjoint(target.capabilities):
        notes.append(f"{target.model} has no chat template, so it refuses what {agent.title} sends.")
    if target.is_smaller_than(agent.window) or len(notes) > own:
        notes.append(f"A model that suits {agent.title}: {pull_command(target.url)}")
    return replace(plan, notes=tuple(notes))


def _home(agent: str, env: Mapping[str, str]) -> Path:
    """The folder for an agent's settings and sessions under our launches, separate from the user's own."""
    return cache_dir(env) / "launch" / agent


def _target(
    agent: Agent, options: LaunchOptions, env: Mapping[str, str], stack: ExitStack, notify: Callable[[str], None]
) -> LaunchTarget:
    server = stack.enter_context(closing(TargetServer(options.url, options.key)))
    if server.is_running():
        return server.launch_target(options.model, agent=agent)
    if agent.stays_open:
        raise Unavailable(
            f"{agent.title} stays open after its command has ended: start the server first, with modelyard start or "
            "modelyard serve"
        )
    started = stack.enter_context(BackgroundServer(server.url, options.config, env, options.keep_alive_s))
    notify(f"starting a server at {server.url}; its log is {started.log}")
    started.wait_until(server.is_running)
    if options.keep_alive_s != 0:
        notify(stays_notice(options.keep_alive_s))
    return server.launch_target(options.model, started.check_alive, agent=agent)


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

    def launch_target(
        self, model: str | None, check_alive: Callable[[], None] = lambda: None, *, agent: Agent | None = None
    ) -> LaunchTarget:
        """The target for `model`, or for the first model that suits the agent. Waits while the model is loading;
        `check_alive` raises if the server process has exited."""
        name = model or self._suitable_model(agent)
        while (card := self._model(name))["state"] == "loading":
            check_alive()
            time.sleep(_POLL_S)
        if card["state"] == "failed":
            raise Unavailable(f"the model {name!r} failed to load; see {self.url}/health for the reason")
        return LaunchTarget(
            url=self.url,
            model=name,
            window=card.get("context_length"),
            background=BACKGROUND_MODEL if self._routes_background() else name,
            key=self.key or PLACEHOLDER_KEY,
            capabilities=_capabilities(card),
        )

    def _routes_background(self) -> bool:
        """Whether a route of its own takes the background model, not one for every name."""
        try:
            routed = self._model(BACKGROUND_MODEL)
        except NotFound:
            return False
        try:
            other = self._model(_NO_MODEL)
        except NotFound:
            return True
        return bool(routed.get("route") != other.get("route"))

    def _suitable_model(self, agent: Agent | None) -> str:
        cards = self.get("/v1/models")["data"]
        if not cards:
            raise NotFound(f"{self.url} lists no models; fetch one: {pull_command(self.url)}")
        name = choose_model(cards, agent)
        if name is None:
            what = "calls tools" if agent and agent.tools else "chats"
            title = f", which {agent.title} needs" if agent else ""
            raise NotFound(f"no model of {self.url} {what}{title}; fetch one: {pull_command(self.url)}")
        return name

    def _model(self, name: str) -> dict[str, Any]:
        return self.get(f"/v1/models/{quote(name)}")


# --- the model --------------------------------------------------------------------------------------------------------

_USABLE = ("ready", "loading")
_CHATS = {"chat", "tools"}  # either; a server of an earlier version does not report the first


def choose_model(cards: Sequence[Mapping[str, Any]], agent: Agent | None) -> str | None:
    """The best of the models that do what the agent needs: one with a window in which it works well, else one in which
    it works at all, else the largest; rather no demo, rather one that is loaded, rather the first."""
    needed = {"tools"} if agent is not None and agent.tools else _CHATS
    able = [card for card in cards if not needed.isdisjoint(_capabilities(card))]
    least, good = (agent.window, max(agent.good, agent.window)) if agent is not None else (0, 0)

    def rank(card: Mapping[str, Any]) -> tuple[bool, bool, int, bool, bool]:
        window = card.get("context_length") or good  # of a remote model it is unknown, and mostly large
        is_demo, is_loaded = card["id"] in EMBEDDED_DEFAULTS["models"], card["state"] in _USABLE
        return window >= good, window >= least, 0 if window >= good else window, not is_demo, is_loaded

    return str(max(able, key=rank)["id"]) if able else None


def _capabilities(card: Mapping[str, Any]) -> tuple[str, ...]:
    """A server of an earlier version does not report them."""
    return tuple(card.get("capabilities", ("completion", "tools")))


def pull_command(url: str) -> str:
    """The command that fetches a model for an agent."""
    from modelyard.config.library_models import machine_budget
    from modelyard.library import catalogue

    local = is_local(url)
    suited = catalogue.suggest("code", machine_budget()) if local else None
    name = suited.name if suited is not None else "qwen3:4b"
    return f"modelyard pull {name}{'' if local else ' (on the machine of the server)'}"
