"""The fake engine's script: rules that say which answer a prompt gets, and the steps an answer is made of.

    [[models.demo.script]]
    when = "weather"                     # regex, searched in the last user turn; absent: always
    turn = 1                             # only the n-th time that this pattern matches in a session; absent: each time
    result = "sunny"                     # regex, searched in the tool results that came after the last user turn
    steps = [
        {prefill = 0.5, progress = 4},   # reading the prompt takes half a second, told in four steps
        {think = "A tool knows that."},
        {text = "Let me look."},
        {call = {name = "get_weather", arguments = {city = "Rome"}}},   # or a list of calls
        {raw = "<tool_call>{…"},         # output in any model's own format, special tokens included
        {tokens = 100},                  # filler words
        {delay = 0.2},
        {fail = "out of memory", kind = "unavailable"},   # as the first step: before the job is even accepted
        {die = "segmentation fault"},    # the whole engine is lost
        {repeat = 3, steps = [{text = "again "}]},
        {hang = true},                   # until somebody cancels
    ]

The first rule that fits wins. A bare rule (no when, turn or result) gives way to a request's constraint (a JSON schema,
a forced tool call), because its author cannot have meant that schema; any other rule is taken at its word.
"""

from __future__ import annotations

import re
import tomllib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator, model_validator

from modelyard.core.errors import (
    Conflict,
    Forbidden,
    Internal,
    InvalidRequest,
    Kind,
    ModelyardError,
    NotFound,
    Overloaded,
    RateLimited,
    Timeout,
    TooLarge,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from modelyard.engines.fake.conversation import ConversationView

_SESSIONS = 4096

_ERRORS: dict[str, Callable[[str], ModelyardError]] = {
    "invalid": InvalidRequest,
    "unauthenticated": Unauthenticated,
    "forbidden": Forbidden,
    "not_found": NotFound,
    "conflict": Conflict,
    "too_large": TooLarge,
    "rate_limited": lambda message: RateLimited(message, retry_after=1.0),
    "overloaded": Overloaded,
    "unavailable": Unavailable,
    "timeout": Timeout,
    "unimplemented": Unimplemented,
    "internal": lambda message: Internal(message, id="scripted"),
}


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScriptCall(_Model):
    name: str = Field(description="Name of the tool to call.")
    arguments: dict[str, Any] | str = Field(default_factory=dict, description="Arguments; a string is taken as it is.")


class ScriptStep(_Model):
    """Exactly one of the first eleven fields; the others belong to one of them."""

    text: str | None = Field(default=None, description="Visible text.")
    think: str | None = Field(default=None, description="Reasoning.")
    call: ScriptCall | tuple[ScriptCall, ...] | None = Field(
        default=None, description="One tool call, or several in parallel."
    )
    raw: str | None = Field(default=None, description="Raw model output, special tokens included.")
    tokens: int | None = Field(default=None, ge=1, description="This many filler words.")
    delay: float | None = Field(default=None, ge=0, description="Seconds to wait.")
    prefill: float | None = Field(default=None, ge=0, description="Seconds that reading the prompt takes.")
    fail: str | None = Field(default=None, description="The job fails with this message.")
    die: str | None = Field(default=None, description="The engine is lost with this message.")
    repeat: int | None = Field(default=None, ge=0, description="How often `steps` are played.")
    hang: bool | None = Field(default=None, description="Wait until cancelled.")
    progress: int = Field(default=0, ge=0, description="With prefill: how many progress reports.")
    kind: Kind = Field(default="internal", description="With fail: the kind of error.")
    steps: tuple[ScriptStep, ...] = Field(default=(), description="With repeat: what is repeated.")

    @model_validator(mode="after")
    def _is_one_thing(self) -> ScriptStep:
        named = [name for name in _DEEDS if getattr(self, name) is not None]
        if len(named) != 1:
            raise ValueError(
                f"a step has exactly one of {', '.join(_DEEDS)}; this one has {' and '.join(named) or 'none'}"
            )
        for extra, owner in _BELONGS.items():
            if extra in self.model_fields_set and named != [owner]:
                raise ValueError(f"{extra!r} belongs to a {owner!r} step")
        if self.kind not in _ERRORS:
            raise ValueError(f"kind must be one of {', '.join(_ERRORS)}")
        return self

    @property
    def calls(self) -> tuple[ScriptCall, ...]:
        if self.call is None:
            return ()
        return (self.call,) if isinstance(self.call, ScriptCall) else self.call

    @property
    def error(self) -> ModelyardError | None:
        """What a `fail` or `die` step ends in; a fresh one a job, because raising an error writes into it."""
        if self.fail is not None:
            return _ERRORS[self.kind](self.fail)
        return Unavailable(self.die) if self.die is not None else None


_DEEDS = ("text", "think", "call", "raw", "tokens", "delay", "prefill", "fail", "die", "repeat", "hang")
_BELONGS = {"progress": "prefill", "kind": "fail", "steps": "repeat"}


class ScriptRule(_Model):
    when: str | None = Field(default=None, description="Regex searched in the last user turn; absent: always.")
    turn: int | None = Field(
        default=None, ge=1, description="Only the n-th time that the pattern matches in a session."
    )
    result: str | None = Field(default=None, description="Regex searched in the tool results after the last user turn.")
    steps: tuple[ScriptStep, ...] = Field(description="The answer.")

    @field_validator("when", "result")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern

    @property
    def is_bare(self) -> bool:
        return self.when is None and self.turn is None and self.result is None

    def fits(self, talk: ConversationView) -> bool:
        if self.when is not None and not re.search(self.when, talk.user):
            return False
        return self.result is None or (talk.result is not None and bool(re.search(self.result, talk.result)))


_rules = TypeAdapter(tuple[ScriptRule, ...])


def read_script(path: Path) -> tuple[ScriptRule, ...]:
    """A TOML file with a list of tables named `script`."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the script {path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"the script {path} is not valid TOML: {error}") from None
    if set(found) != {"script"}:
        raise ValueError(f"the script {path} must hold [[script]] tables and nothing else, found: {', '.join(found)}")
    return _rules.validate_python(found["script"])


class Script:
    """The rules, and how often each pattern has matched in each session: rules of one pattern share the count."""

    def __init__(self, rules: Sequence[ScriptRule]) -> None:
        self._rules = tuple(rules)
        self._turns: OrderedDict[tuple[str, str | None, str | None], int] = OrderedDict()

    def choose(self, talk: ConversationView, session: str | None = None) -> ScriptRule | None:
        counted: dict[tuple[str | None, str | None], int] = {}
        for rule in self._rules:
            if not rule.fits(talk):
                continue
            pattern = (rule.when, rule.result)
            if rule.turn is not None and pattern not in counted:
                counted[pattern] = self._count((session or "", *pattern))
            if rule.turn is None or rule.turn == counted[pattern]:
                return rule
        return None

    def _count(self, key: tuple[str, str | None, str | None]) -> int:
        count = self._turns.pop(key, 0) + 1
        self._turns[key] = count
        if len(self._turns) > _SESSIONS:
            self._turns.popitem(last=False)
        return count
