"""The script of the fake engine: rules that choose an answer, and the steps of an answer.

    [[models.demo.script]]
    when = "weather"                     # regex, searched in the last user message; absent: always
    turn = 1                             # only the n-th match of this pattern in a session; absent: every match
    result = "sunny"                     # regex, searched in the tool results after the last user message
    steps = [
        {prefill = 0.5, progress = 4},   # the prefill takes half a second and reports its progress four times
        {think = "A tool knows that."},
        {text = "Let me look."},
        {call = {name = "get_weather", arguments = {city = "Rome"}}},   # or a list of calls
        {raw = "<tool_call>{…"},         # output in any model's own format, special tokens included
        {tokens = 100},                  # filler words
        {delay = 0.2},
        {fail = "out of memory", kind = "unavailable"},   # as the first step: before the job is accepted
        {die = "segmentation fault"},    # the whole engine is lost
        {repeat = 3, steps = [{text = "again "}]},
        {hang = true},                   # until the client cancels
    ]

The first matching rule wins. A rule without conditions yields to the constraint of a request (a JSON schema, a forced
tool call), because its author cannot have meant that schema. A rule with a condition wins over the constraint.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator, model_validator

from modelyard.core import errors
from modelyard.core.errors import ModelyardError
from modelyard.core.request import Message, Request, Text, Thinking, ToolCall, ToolResult
from modelyard.core.tokenizer import Tokenizer

_ERRORS: dict[str, Callable[[str], ModelyardError]] = {
    "invalid": errors.InvalidRequest,
    "unauthenticated": errors.Unauthenticated,
    "forbidden": errors.Forbidden,
    "not_found": errors.NotFound,
    "conflict": errors.Conflict,
    "too_large": errors.TooLarge,
    "rate_limited": partial(errors.RateLimited, retry_after=1.0),
    "overloaded": errors.Overloaded,
    "unavailable": errors.Unavailable,
    "timeout": errors.Timeout,
    "unimplemented": errors.Unimplemented,
    "internal": partial(errors.Internal, id="scripted"),
}
_ACTIONS = ("text", "think", "call", "raw", "tokens", "delay", "prefill", "fail", "die", "repeat", "hang")
_PARAMETERS = {"progress": "prefill", "kind": "fail", "steps": "repeat"}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScriptCall(_Model):
    name: str = Field(description="Name of the tool to call.")
    arguments: dict[str, Any] | str = Field(default_factory=dict, description="Arguments; a string is sent verbatim.")

    @property
    def arguments_text(self) -> str:
        """A string is sent verbatim: scripts play broken JSON too."""
        return self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)


class ScriptStep(_Model):
    """Has exactly one of the first eleven fields; each of the others belongs to one of them."""

    text: str | None = Field(default=None, description="Visible text.")
    think: str | None = Field(default=None, description="Reasoning.")
    call: ScriptCall | tuple[ScriptCall, ...] | None = Field(default=None, description="A call, or parallel calls.")
    raw: str | None = Field(default=None, description="Raw model output, special tokens included.")
    tokens: int | None = Field(default=None, ge=1, description="Number of filler words.")
    delay: float | None = Field(default=None, ge=0, description="Seconds to wait.")
    prefill: float | None = Field(default=None, ge=0, description="Duration of the prefill in seconds.")
    fail: str | None = Field(default=None, description="The job fails with this message.")
    die: str | None = Field(default=None, description="The engine is lost with this message.")
    repeat: int | None = Field(default=None, ge=0, description="How often to play `steps`.")
    hang: bool | None = Field(default=None, description="Wait until cancelled.")
    progress: int = Field(default=0, ge=0, description="With prefill: number of progress reports.")
    kind: errors.Kind = Field(default="internal", description="With fail: the kind of error.")
    steps: tuple[ScriptStep, ...] = Field(default=(), description="With repeat: the steps to repeat.")

    @model_validator(mode="after")
    def _check_fields(self) -> ScriptStep:
        actions = [name for name in _ACTIONS if getattr(self, name) is not None]
        if len(actions) != 1:
            raise ValueError(
                f"a step has exactly one of {', '.join(_ACTIONS)}; this one has {' and '.join(actions) or 'none'}"
            )
        for parameter, action in _PARAMETERS.items():
            if parameter in self.model_fields_set and actions != [action]:
                raise ValueError(f"{parameter!r} belongs to a {action!r} step")
        if self.kind not in _ERRORS:
            raise ValueError(f"kind must be one of {', '.join(_ERRORS)}")
        return self

    @property
    def calls(self) -> tuple[ScriptCall, ...]:
        return (self.call,) if isinstance(self.call, ScriptCall) else self.call or ()

    @property
    def error(self) -> ModelyardError | None:
        """The error of a `fail` or `die` step. Each job gets its own instance, because raising modifies it."""
        if self.fail is not None:
            return _ERRORS[self.kind](self.fail)
        return errors.Unavailable(self.die) if self.die is not None else None


def unroll(steps: Iterable[ScriptStep]) -> Iterator[ScriptStep]:
    """Unrolls repeats lazily: a script may repeat a million times."""
    for step in steps:
        if step.repeat is None:
            yield step
        for _ in range(step.repeat or 0):
            yield from unroll(step.steps)


class ScriptRule(_Model):
    when: str | None = Field(default=None, description="Regex searched in the last user message; absent: always.")
    turn: int | None = Field(default=None, ge=1, description="Only the n-th match of the pattern in a session.")
    result: str | None = Field(default=None, description="Regex searched in the tool results after that message.")
    steps: tuple[ScriptStep, ...] = Field(description="The answer.")

    @field_validator("when", "result")
    @classmethod
    def _check_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern

    @property
    def is_unconditional(self) -> bool:
        return self.when is None and self.turn is None and self.result is None

    def matches(self, conversation: ConversationView) -> bool:
        """Whatever its turn."""
        if self.when is not None and not re.search(self.when, conversation.user):
            return False
        if self.result is None:
            return True
        return conversation.result is not None and re.search(self.result, conversation.result) is not None


class Script:
    """The rules, with a counter per session and pattern. Rules with the same pattern share a counter."""

    _MAX_COUNTERS = 4096

    def __init__(self, rules: Sequence[ScriptRule]) -> None:
        self._rules = rules
        self._counters: OrderedDict[tuple[str, str | None, str | None], int] = OrderedDict()

    def choose(self, conversation: ConversationView, session: str | None = None) -> ScriptRule | None:
        turns: dict[tuple[str, str | None, str | None], int] = {}
        for rule in self._rules:
            if not rule.matches(conversation):
                continue
            if rule.turn is None:
                return rule
            key = (session or "", rule.when, rule.result)
            if key not in turns:  # a conversation counts once for all rules with this pattern
                turns[key] = self._counters[key] = self._counters.pop(key, 0) + 1
                if len(self._counters) > self._MAX_COUNTERS:
                    self._counters.popitem(last=False)
            if rule.turn == turns[key]:
                return rule
        return None


# --- the fields of a model definition ---------------------------------------------------------------------------------

_SHIPPED_TOKENIZER = Path(__file__).parent / "tokenizer"
_DEMO_DELAY = 0.01  # seconds; about the speed of a good local model

# field → type with range: what the admin API may set for one load
LIVE_OVERRIDES: dict[str, Any] = {
    "n_ctx": Annotated[int, Field(ge=1, le=1 << 24)],
    "token_delay": Annotated[float, Field(ge=0, le=60)],
    "echo": bool,
    "embedding_size": Annotated[int, Field(ge=1, le=65536)],
}


class FakeOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["text", "chat"] = Field(default="text", description="Kind of engine: tokens or conversations.")
    script: tuple[ScriptRule, ...] = Field(default=(), description="Rules, inline or in a TOML file; none: a demo.")
    echo: bool = Field(default=False, description="If no rule matches, answer with the user's message.")
    token_delay: float | None = Field(default=None, ge=0, description="Seconds between tokens; default: 0, demo: 0.01.")
    prefill_rate: float | None = Field(default=None, gt=0, description="Prompt tokens per second; default: no delay.")
    format: str = Field(default="hermes", description="Format of reasoning and calls: hermes, qwen3_coder or harmony.")
    tokenizer_path: Path | None = Field(
        default=None, description="A tokenizer.json or its folder; default: the shipped one."
    )
    embedding_size: int = Field(default=64, ge=1, le=65536, description="Length of embedding vectors.")

    @field_validator("script", mode="before")
    @classmethod
    def _read_script_file(cls, script: Any) -> Any:
        return read_script(Path(script)) if isinstance(script, str | Path) else script

    @property
    def delay(self) -> float:
        if self.token_delay is not None:
            return self.token_delay
        return 0.0 if self.script or self.echo else _DEMO_DELAY


def read_script(path: Path) -> tuple[ScriptRule, ...]:
    """Reads a TOML file of [[script]] tables."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the script {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the script {path} is not valid TOML: {error}") from None
    if set(content) != {"script"}:
        raise ValueError(f"the script {path} must contain only [[script]] tables, found: {', '.join(content)}")
    return TypeAdapter(tuple[ScriptRule, ...]).validate_python(content["script"])


def tokenizer_path(options: FakeOptions) -> Path:
    return options.tokenizer_path or _SHIPPED_TOKENIZER


# --- the conversation that rules are matched against ------------------------------------------------------------------


class RequestView:
    """The conversation of a request, for the chat engine.

    `user` is the last user message, `result` the tool results after it. `tools` maps the names of the offered tools to
    their parameter schemas; a schema is empty if a prompt has none as JSON.
    """

    def __init__(self, request: Request) -> None:
        raw = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        self.user, results = "".join(raw[:1]), list[str]()
        for message in reversed(request.messages):
            if message.role == "user":
                self.user = message_text(message)
                break
            if message.role == "tool":
                results.insert(0, message_text(message))
        self.result = "\n".join(results) if results else None
        self.tools = {tool.name: tool.parameters for tool in request.tools if tool.kind == "function"}


def message_text(message: Message, *, everything: bool = False) -> str:
    """The texts and tool results of a message; with `everything` its reasoning and calls too."""
    texts: list[str] = []
    for part in message.parts:
        if isinstance(part, Text) or (everything and isinstance(part, Thinking)):
            texts.append(part.text)
        elif isinstance(part, ToolResult):
            texts += (each.text for each in part.content if isinstance(each, Text))
        elif everything and isinstance(part, ToolCall):
            texts.append(f"{part.name}{part.arguments}")
    return "\n".join(texts)


_RESULT = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
_JSON_TOOLS = re.compile(r"<tools>(.*?)</tools>", re.DOTALL)
_XML_TOOL = re.compile(r"<name>([\w.-]+)</name>")
_HARMONY_TOOL = re.compile(r"^type ([\w.-]+) = \(", re.MULTILINE)
_TAIL = 2000  # tokens to read if the prompt has no turn markers
_THINK_TAIL = 4  # a template that opens the reasoning does so within the last tokens of the prompt
_TURNS = {  # opening token of a turn → (end of its role, end of its text)
    "<|im_start|>": ("\n", "<|im_end|>"),
    "<|start|>": ("<|message|>", "<|end|>"),
}


class PromptView:
    """The same of a rendered prompt, for the text engine.

    It decodes lazily and from the end: only `tools` decodes a long prompt completely.
    """

    def __init__(self, ids: list[int], tokenizer: Tokenizer) -> None:
        self._ids, self._tokenizer = ids, tokenizer

    @property
    def user(self) -> str:
        return self._last_turns[0]

    @property
    def result(self) -> str | None:
        return self._last_turns[1]

    @cached_property
    def tools(self) -> dict[str, dict[str, Any]]:
        return find_tools(self._tokenizer.decode(self._ids))

    @property
    def starts_in_reasoning(self) -> bool:
        """Some templates open the reasoning themselves; the answer then begins inside it."""
        tail, specials = self._ids[-_THINK_TAIL:], self._tokenizer.specials
        return specials.get("<think>", -1) in tail and specials.get("</think>", -1) not in tail

    @cached_property
    def _last_turns(self) -> tuple[str, str | None]:
        results: list[str] = []
        for role, text in self._turns_backwards():
            found = _RESULT.findall(text) if role == "user" else [text] if role == "tool" else []
            results[:0] = found
            if role == "user" and not found:
                return text, "\n".join(results) if results else None
        return "", "\n".join(results) if results else None

    def _turns_backwards(self) -> Iterator[tuple[str, str]]:
        for opener, (end_of_role, end_of_text) in _TURNS.items():
            marker, backwards = self._tokenizer.specials.get(opener, -1), self._ids[::-1]
            while marker in backwards:
                start = backwards.index(marker)
                head, _, text = self._tokenizer.decode(backwards[:start][::-1]).partition(end_of_role)
                role = head.split("<|")[0].split(" ")[0]  # harmony: functions.NAME to=assistant<|channel|>commentary
                yield "tool" if role.startswith("functions.") else role, text.split(end_of_text)[0].strip("\n")
                del backwards[: start + 1]
            if len(backwards) < len(self._ids):
                return
        yield "user", self._tokenizer.decode(self._ids[-_TAIL:], specials=False).strip()


def find_tools(text: str) -> dict[str, dict[str, Any]]:
    """Finds the tools that a template lists as JSON, XML or a harmony namespace."""
    listed, tools = _JSON_TOOLS.search(text), dict[str, dict[str, Any]]()
    for line in listed[1].splitlines() if listed else ():
        try:
            tool = json.loads(line)
        except ValueError:
            continue
        tool = tool.get("function", tool) if isinstance(tool, dict) else {}
        if "name" in tool:
            tools[tool["name"]] = tool.get("parameters") or {}
    return tools or {name: {} for name in _XML_TOOL.findall(text) + _HARMONY_TOOL.findall(text)}


ConversationView = RequestView | PromptView
