"""Why a prompt was not found in the cache: this prompt held against the last one of its session. Pure.

none                    all that was there before was reused
new_session             the first prompt of its session
not_kept                the engine keeps nothing between requests
other_session           another conversation under the same session, or without any
evicted                 the prompt goes on as before, and the engine no longer had it; also where the prompt changed
                        and a model that cannot go back had nothing to take up before the change
not_copied              another sequence has it (a busy one, or another conversation's), and copying would not pay
billing_block           a line that Claude Code writes for its maker's billing, where our reader could not drop it
system_changed          a system message has other words
tools_changed           other tools stand at the head
reasoning_dropped       reasoning that was said is no longer told, by the client or by the template
arguments_reserialised  the arguments of a call came back in other words
message_changed         any other message has changed or is gone
template                nothing that was sent has changed, yet the template tells it in other words
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from msgspec import Struct

from modelyard.core.request import Message, Text, Thinking, Tool, ToolCall

MissCause = Literal[
    "none",
    "new_session",
    "not_kept",
    "other_session",
    "evicted",
    "not_copied",
    "billing_block",
    "system_changed",
    "tools_changed",
    "reasoning_dropped",
    "arguments_reserialised",
    "message_changed",
    "template",
]

SLACK = 8  # tokens: the last one is always read anew, and templates write an answer's last line break as they like
_BILLING = "x-anthropic-billing-header"
_SYSTEM = ("system", "developer")


class PromptRecord(Struct, gc=False):
    """A prompt as it was asked, and what came of it. `text` is the rendered prompt, `opened` as in `opening`; `reply`
    what was answered, where it was written down."""

    trace: str
    text: str
    tokens: int
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    opened: str
    output: int = 0
    reply: Message | None = None

    @property
    def held(self) -> int:
        """Tokens that the engine had of it in the end."""
        return self.tokens + self.output

    @property
    def history(self) -> tuple[Message, ...]:
        return self.messages if self.reply is None else (*self.messages, self.reply)


class CacheReuse(Struct, frozen=True, gc=False):
    """What a cache did for one prompt. `token` is the first that was not cached, `message` the one at fault."""

    reused: int
    evaluated: int
    cause: MissCause
    token: int | None = None
    message: int | None = None
    role: str | None = None

    @property
    def header(self) -> str:
        return f"reused={self.reused}; evaluated={self.evaluated}; cause={self.cause}"

    def __str__(self) -> str:
        place = f", in message {self.message} ({self.role})" if self.message is not None else ""
        return f"{self.cause}: token {self.token} of {self.reused + self.evaluated} is the first not cached{place}"


def diagnose(
    earlier: Sequence[PromptRecord],
    now: PromptRecord,
    reused: int,
    characters: Callable[[int], int],
    page: int = 1,
    elsewhere: int = 0,
) -> CacheReuse:
    """`earlier` are the session's last prompts, the newest last. `characters` tells how long the text of so many of
    this prompt's tokens is; it is asked only where something is amiss. `page` is as in `EngineInfo`, `elsewhere` as in
    `Accepted`."""
    # A page that is not full is not kept, nor one whose last token is read anew.
    slack = SLACK if page <= 1 else SLACK + 2 * (page - 1)
    if reused >= now.tokens - slack:
        return _reuse(now, reused, "none")
    if not page:
        return _reuse(now, reused, "not_kept")
    if not earlier:
        return _reuse(now, reused, "new_session")
    if _are_strangers(earlier, now, reused + slack):
        return _reuse(now, reused, "other_session")
    last = earlier[0] if len(earlier) == 1 else max(reversed(earlier), key=lambda one: _likeness(one, now))
    if reused >= last.held - slack and last.messages[:1] == now.messages[:1]:
        return _reuse(now, reused, "none")
    if not _is_same_talk(last, now):
        return _reuse(now, reused, "other_session")
    if (missed := _missed(last, now, slack)) > characters(reused):
        return _reuse(now, reused, "not_copied" if characters(elsewhere) >= missed else "evicted")
    cause, at = _fault(last, now)
    return _reuse(now, reused, cause, at)


def _reuse(now: PromptRecord, reused: int, cause: MissCause, at: int | None = None) -> CacheReuse:
    token = reused if reused < now.tokens else None
    role = now.messages[at].role if at is not None and at < len(now.messages) else None
    return CacheReuse(reused, now.tokens - reused, cause, token, at, role)


def _are_strangers(earlier: Sequence[PromptRecord], now: PromptRecord, enough: int) -> bool:
    """None of these opened with the same words or could have given as much: the quick answer where clients name no
    session, and every prompt is held against those of everybody."""
    opened = now.opened
    for one in earlier:  # noqa: SIM110  no generator: this is asked of most prompts without a session
        if one.tokens + one.output <= enough or one.opened == opened:
            return False
    return True


def _likeness(one: PromptRecord, now: PromptRecord) -> int:
    return sum(a == b for a, b in zip(one.history, now.messages, strict=False))


def _is_same_talk(last: PromptRecord, now: PromptRecord) -> bool:
    """A conversation is what was said first in it, whatever became of its rules."""
    first, second = _opening(last.messages), _opening(now.messages)
    return first == second or (last.opened == now.opened and first is not None)


def _opening(messages: Sequence[Message]) -> Message | None:
    for message in messages:
        if message.role not in _SYSTEM:
            return message
    return None


def conversation_opening(messages: Sequence[Message]) -> str:
    """The first words of a conversation, whatever its rules are, without the white space around them."""
    first = _opening(messages)
    for part in first.parts if first is not None else ():
        if type(part) is Text and (told := part.text.strip()):
            return told
    return ""


def _missed(last: PromptRecord, now: PromptRecord, slack: int) -> int:
    """Whoever has fewer characters of the prompt than these has lost some that it shares with the last one."""
    return common_prefix_length(last.text, now.text) - slack * _TOKEN


def _fault(last: PromptRecord, now: PromptRecord) -> tuple[MissCause, int | None]:
    if last.tools != now.tools:
        return "tools_changed", None
    for at, (before, after) in enumerate(zip(last.history, now.messages, strict=False)):
        if before != after and (cause := _changed(before, after)) is not None:
            return cause, at
    if len(now.messages) < len(last.messages):
        return "message_changed", len(now.messages)
    return _untold(last, now)


_TOKEN = 8  # characters that one may have


def common_prefix_length(one: str, other: str) -> int:
    """How many characters two texts share from the start, by halves: comparing is done at memory speed."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _changed(before: Message, after: Message) -> MissCause | None:
    """None where the two mean the same: a signature has come back in another form, say."""
    if before.role != after.role:
        return "message_changed"
    if before.role in _SYSTEM:
        return "billing_block" if any(map(_bills, (before, after))) else "system_changed"
    if before.role != "assistant":
        return "message_changed"
    if (thought := _thoughts(before)) and thought != _thoughts(after):
        return "reasoning_dropped"
    if _texts(before) != _texts(after) or _calls(before) != _calls(after):
        return "message_changed"
    return "arguments_reserialised" if _arguments(before) != _arguments(after) else None


def _untold(last: PromptRecord, now: PromptRecord) -> tuple[MissCause, int | None]:
    """Nothing was sent in other words: has the template left reasoning out?"""
    for at, message in enumerate(last.history):
        if any(thought not in now.text for thought in _thoughts(message)):
            return "reasoning_dropped", at
    return "template", None


def _bills(message: Message) -> bool:
    return any(_BILLING in text for text in _texts(message))


def _texts(message: Message) -> list[str]:
    return [told for part in message.parts if isinstance(part, Text) and (told := part.text.strip())]


def _thoughts(message: Message) -> list[str]:
    return [part.text.strip() for part in message.parts if isinstance(part, Thinking) and part.text.strip()]


def _called(message: Message) -> Iterator[ToolCall]:
    return (part for part in message.parts if isinstance(part, ToolCall))


def _calls(message: Message) -> list[tuple[str, str]]:
    return [(call.id, call.name) for call in _called(message)]


def _arguments(message: Message) -> list[str]:
    return [call.arguments for call in _called(message)]


# The last prompts of each session, bounded in number and characters: what the next one is held against. Pure.

_EACH = 4  # of one session: side requests come under the same name as the conversation
_SESSIONS = 1024
_CHARACTERS = 16 << 20  # of rendered prompts; the messages that they were made of are as many again

SessionKey = tuple[str, ...]  # a cache, who asks, and the session


class PromptHistory:
    def __init__(self, characters: int = _CHARACTERS, sessions: int = _SESSIONS) -> None:
        self._asked: OrderedDict[SessionKey, list[PromptRecord]] = OrderedDict()
        self._most, self._sessions, self._held = characters, sessions, 0

    def __len__(self) -> int:
        return len(self._asked)

    def look(
        self,
        key: SessionKey,
        now: PromptRecord,
        reused: int,
        characters: Callable[[int], int],
        page: int = 1,
        elsewhere: int = 0,
    ) -> CacheReuse:
        """What was reused of this prompt and why not more; it is remembered as its session's last, and whoever hears
        its answer notes it there."""
        earlier = self._asked.get(key)
        if earlier is None:
            earlier = self._asked[key] = []
        else:
            self._asked.move_to_end(key)
        if earlier and earlier[-1].trace == now.trace:
            self._drop(earlier)  # a second try: its own first one is no earlier prompt
        found = diagnose(earlier, now, reused, characters, page, elsewhere)
        earlier.append(now)
        held = self._held + len(now.text)
        if len(earlier) > _EACH:
            held -= len(earlier.pop(0).text)
        self._held = held
        if held > self._most or len(self._asked) > self._sessions:
            self._shrink()
        return found

    def _drop(self, earlier: list[PromptRecord]) -> None:
        self._held -= len(earlier.pop().text)

    def _shrink(self) -> None:
        while len(self._asked) > self._sessions or (self._held > self._most and len(self._asked) > 1):
            _, gone = self._asked.popitem(last=False)
            self._held -= sum(len(one.text) for one in gone)


# Why a cache missed: the system prompt of each cache by its fingerprint, and where a changed one leaves the old. Pure.
#
# A client that changes its system prompt from request to request (a date, a counter, a list in another order) has
# everything after the change read anew each time. Nobody sees that but the cache.


class SystemPromptChange(Struct, frozen=True):
    """The fingerprints of the system prompt that a cache saw last and of the one that came."""

    before: str
    after: str


class SystemPromptTracker:
    """What each cache saw last. A prompt that stays costs a look-up and a comparison; only a change is hashed."""

    def __init__(self) -> None:
        self._last: dict[str, Message] = {}

    def look(self, cache: str, system: Message) -> SystemPromptChange | None:
        """None for the first one and for one that stayed."""
        last = self._last.get(cache)
        if last == system:
            return None
        self._last[cache] = system
        return SystemPromptChange(fingerprint(last), fingerprint(system)) if last is not None else None


def fingerprint(message: Message) -> str:
    text = "\0".join(_raw_texts(message))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def leading_system(messages: Sequence[Message]) -> Message | None:
    return messages[0] if messages and messages[0].role in ("system", "developer") else None


def message_at(prompt: str, position: int, messages: Sequence[Message]) -> int:
    """The index of the message that a character of the rendered prompt lies in: the last one whose own text begins at
    or before it. What a template writes around a message counts for the one before; at the head, for the first."""
    found = cursor = 0
    for index, message in enumerate(messages):
        text = next((text for text in _raw_texts(message) if text), None)
        start = prompt.find(text, cursor) if text else -1
        if start < 0:
            continue  # a template may trim, move or leave out what it likes
        if start > position:
            break
        found, cursor = index, start + len(text or "")
    return found


def _raw_texts(message: Message) -> list[str]:
    return [part.text for part in message.parts if isinstance(part, Text)]
