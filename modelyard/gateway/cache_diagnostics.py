"""Cache diagnostics: why a prompt was not found in the KV cache, by comparison with earlier prompts. Pure.

none                    everything that was cached before was reused
new_session             the first prompt of its session
not_kept                the engine keeps nothing between requests
other_session           another conversation under the same session id, or without one
evicted                 the prompt continues an earlier one, but the engine has dropped it; also if the prompt changed
                        and a model that cannot roll back had no checkpoint before the change
not_copied              another sequence holds it (a busy one, or another conversation's), and copying would not pay
billing_block           the billing line of Claude Code changed, where the protocol reader could not drop it
system_changed          a system message changed
tools_changed           the tool definitions changed
reasoning_dropped       earlier reasoning is missing, dropped by the client or by the template
arguments_reserialised  the arguments of a tool call came back with another spelling
message_changed         another message changed or is missing
template                the messages are the same, but the template renders them differently
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import eq

from msgspec import Struct

from modelyard.core.engine import Accepted
from modelyard.core.events import CacheReuse, MissCause
from modelyard.core.request import Audio, Image, Message, Text, Thinking, Tool, ToolCall
from modelyard.gateway.model import media_kinds
from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.tokenizer.shield import unshield

SLACK = 8  # tokens: the last one is always evaluated, and templates vary the line break after a reply
_CHARS_PER_TOKEN = 8  # at most, for the slack in characters
_BILLING = "x-anthropic-billing-header"
_SYSTEM_ROLES = ("system", "developer")


class PromptRecord(Struct, gc=False):
    """A rendered prompt (`text`, `tokens`) with its messages. `output` and `reply` are set when the reply is known.

    `opening` is `conversation_opening(messages)`.
    """

    trace: str
    text: str
    tokens: int
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    opening: str
    output: int = 0
    reply: Message | None = None

    @property
    def cached_tokens(self) -> int:
        """Tokens that the engine held at the end of the request."""
        return self.tokens + self.output

    @property
    def conversation(self) -> tuple[Message, ...]:
        return self.messages if self.reply is None else (*self.messages, self.reply)


def diagnose(
    earlier: Sequence[PromptRecord],
    prompt: PromptRecord,
    reused: int,
    text_length: Callable[[int], int],
    page: int = 1,
    elsewhere: int = 0,
) -> CacheReuse:
    """Compare `prompt` with the last prompts of its session (`earlier`, newest last).

    `text_length(n)` is the number of characters of the prompt's first n tokens; it is called only after a miss.
    `page` is as in `EngineInfo`, `elsewhere` as in `Accepted`.
    """

    def result(cause: MissCause, message: int | None = None) -> CacheReuse:
        token = reused if reused < prompt.tokens else None
        role = prompt.messages[message].role if message is not None and message < len(prompt.messages) else None
        return CacheReuse(reused, prompt.tokens - reused, cause, token, message, role)

    # The engine keeps full pages only, and evaluates the page of the last token.
    slack = SLACK if page <= 1 else SLACK + 2 * (page - 1)
    if reused >= prompt.tokens - slack:
        return result("none")
    if not page:
        return result("not_kept")
    if not earlier:
        return result("new_session")
    if _is_unrelated(earlier, prompt, reused + slack):
        return result("other_session")
    last = earlier[0] if len(earlier) == 1 else max(reversed(earlier), key=lambda one: _equal_messages(one, prompt))
    if reused >= last.cached_tokens - slack and last.messages[:1] == prompt.messages[:1]:
        return result("none")
    if not _is_same_conversation(last, prompt):
        return result("other_session")
    shared = common_prefix_length(last.text, prompt.text)
    # With fewer characters cached than this, the engine has lost text that both prompts share.
    expected = shared - slack * _CHARS_PER_TOKEN
    is_continued = shared == min(len(last.text), len(prompt.text)) and reused < min(last.tokens, prompt.tokens) - slack
    if is_continued or expected > text_length(reused):
        return result("not_copied" if elsewhere and text_length(elsewhere) >= expected else "evicted")
    return result(*_first_change(last, prompt))


def _is_unrelated(earlier: Sequence[PromptRecord], prompt: PromptRecord, enough: int) -> bool:
    """Whether every earlier prompt has another opening and held more than `enough` tokens, so was not all reused.

    The quick check for clients without session ids: their prompts are compared with those of all others.
    """
    opening = prompt.opening
    for one in earlier:  # noqa: SIM110  a generator would be slower, and this runs for most prompts without a session
        if one.tokens + one.output <= enough or one.opening == opening:
            return False
    return True


def _equal_messages(one: PromptRecord, prompt: PromptRecord) -> int:
    return sum(map(eq, one.conversation, prompt.messages))


def _is_same_conversation(last: PromptRecord, prompt: PromptRecord) -> bool:
    """Conversations are identified by their first message after the system prompt."""
    first, second = _first_message(last.messages), _first_message(prompt.messages)
    return first == second or (last.opening == prompt.opening and first is not None)


def _first_message(messages: Sequence[Message]) -> Message | None:
    for message in messages:
        if message.role not in _SYSTEM_ROLES:
            return message
    return None


def conversation_opening(messages: Sequence[Message]) -> str:
    """The first text of the first message that is not a system message, stripped."""
    first = _first_message(messages)
    for part in first.parts if first is not None else ():
        if type(part) is Text and (text := part.text.strip()):
            return text
    return ""


def common_prefix_length(one: str, other: str) -> int:
    """Characters that both texts share from the start, by bisection: slices are compared at memory speed."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _first_change(last: PromptRecord, prompt: PromptRecord) -> tuple[MissCause, int | None]:
    """The cause and the index of the first changed message."""
    if last.tools != prompt.tools:
        return "tools_changed", None
    for index, (before, after) in enumerate(zip(last.conversation, prompt.messages, strict=False)):
        if before != after and (cause := _message_change(before, after)) is not None:
            return cause, index
    if len(prompt.messages) < len(last.messages):
        return "message_changed", len(prompt.messages)
    for index, message in enumerate(last.conversation):  # no message changed: did the template drop reasoning?
        if any(thought not in prompt.text for thought in _thoughts(message)):
            return "reasoning_dropped", index
    return "template", None


def _message_change(before: Message, after: Message) -> MissCause | None:
    """None if both mean the same; a signature, for example, may come back in another form."""
    if before.role != after.role:
        return "message_changed"
    if before.role in _SYSTEM_ROLES:
        has_billing = any(_BILLING in text for message in (before, after) for text in _texts(message))
        return "billing_block" if has_billing else "system_changed"
    if before.role != "assistant":
        return "message_changed"
    if (thoughts := _thoughts(before)) and thoughts != _thoughts(after):
        return "reasoning_dropped"
    old, new = _tool_calls(before), _tool_calls(after)
    if _texts(before) != _texts(after) or [(c.id, c.name) for c in old] != [(c.id, c.name) for c in new]:
        return "message_changed"
    return "arguments_reserialised" if [c.arguments for c in old] != [c.arguments for c in new] else None


def _texts(message: Message) -> list[str]:
    return [text for part in message.parts if isinstance(part, Text) and (text := part.text.strip())]


def _thoughts(message: Message) -> list[str]:
    return [text for part in message.parts if isinstance(part, Thinking) and (text := part.text.strip())]


def _tool_calls(message: Message) -> list[ToolCall]:
    return [part for part in message.parts if isinstance(part, ToolCall)]


# --- earlier prompts --------------------------------------------------------------------------------------------------

_PROMPTS_PER_SESSION = 4  # clients send side requests (titles, summaries) under the id of the conversation
_MAX_SESSIONS = 1024
_MAX_CHARACTERS = 16 << 20  # of rendered prompts; their messages take about as much again

SessionKey = tuple[str, ...]  # cache, API key, session id


class PromptHistory:
    """The last prompts of each session, bounded in number and characters."""

    def __init__(self, characters: int = _MAX_CHARACTERS, sessions: int = _MAX_SESSIONS) -> None:
        self._prompts: OrderedDict[SessionKey, list[PromptRecord]] = OrderedDict()
        self._max_characters, self._max_sessions, self._characters = characters, sessions, 0

    def __len__(self) -> int:
        return len(self._prompts)

    def diagnose(
        self,
        key: SessionKey,
        prompt: PromptRecord,
        reused: int,
        text_length: Callable[[int], int],
        page: int = 1,
        elsewhere: int = 0,
    ) -> CacheReuse:
        """Diagnose `prompt` and keep it as the session's last. The caller adds the reply to `prompt` later."""
        earlier = self._prompts.get(key)
        if earlier is None:
            earlier = self._prompts[key] = []
        else:
            self._prompts.move_to_end(key)
        if earlier and earlier[-1].trace == prompt.trace:  # a retry is not compared with its first attempt
            self._characters -= len(earlier.pop().text)
        reuse = diagnose(earlier, prompt, reused, text_length, page, elsewhere)
        earlier.append(prompt)
        self._characters += len(prompt.text)
        if len(earlier) > _PROMPTS_PER_SESSION:
            self._characters -= len(earlier.pop(0).text)
        while len(self._prompts) > self._max_sessions or (
            self._characters > self._max_characters and len(self._prompts) > 1
        ):
            _, oldest = self._prompts.popitem(last=False)
            self._characters -= sum(len(one.text) for one in oldest)
        return reuse


# --- system prompts ---------------------------------------------------------------------------------------------------


class SystemPromptChange(Struct, frozen=True):
    """Fingerprints of a cache's previous and its new system prompt."""

    before: str
    after: str


class SystemPromptTracker:
    """Detects clients that change their system prompt between requests (a date, a counter, a list in another order).

    Everything after the change is evaluated again each time. An unchanged prompt costs one comparison; only changed
    ones are hashed.
    """

    def __init__(self) -> None:
        self._last: dict[str, Message] = {}

    def update(self, cache: str, system: Message) -> SystemPromptChange | None:
        """None for a cache's first system prompt and for an unchanged one."""
        last = self._last.get(cache)
        if last == system:
            return None
        self._last[cache] = system
        return SystemPromptChange(fingerprint(last), fingerprint(system)) if last is not None else None


def fingerprint(message: Message) -> str:
    text = "\0".join(part.text for part in message.parts if isinstance(part, Text))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def leading_system(messages: Sequence[Message]) -> Message | None:
    return messages[0] if messages and messages[0].role in _SYSTEM_ROLES else None


def message_at(prompt: str, position: int, messages: Sequence[Message]) -> int:
    """The index of the message at a character of the rendered prompt: the last one whose text begins at or before it.

    Template text between two messages belongs to the earlier one; text before the first belongs to the first.
    """
    found = cursor = 0
    for index, message in enumerate(messages):
        text = next((part.text for part in message.parts if isinstance(part, Text) and part.text), None)
        start = prompt.find(text, cursor) if text else -1
        if start < 0:
            continue  # a template may trim, move or drop a message
        if start > position:
            break
        found, cursor = index, start + len(text or "")
    return found


# --- the prompts of requests ------------------------------------------------------------------------------------------


class CacheDiagnostics:
    def __init__(self) -> None:
        self._system_prompts = SystemPromptTracker()
        self._sessions = PromptHistory()

    def reuse(
        self, prepared: PreparedRequest, accepted: Accepted, page: int = 1
    ) -> tuple[CacheReuse, PromptRecord] | None:
        """What the cache had of this prompt, and the record in which the reply is noted later.

        None if the prompt was not rendered here. `page` is as in `EngineInfo`.
        """
        if not prepared.prompts:
            return None
        prompt, request, model = prepared.prompts[0], prepared.request, prepared.model
        tools = tuple(tool for tool in request.tools if not tool.deferred) if request.tools else ()
        messages = request.messages
        if len(model.modalities) > 1 and media_kinds(request):
            messages = tuple(map(_with_image_hashes, messages))
        record = PromptRecord(
            prepared.caller.trace,
            unshield(prompt.text),
            len(prompt.ids),
            messages,
            tools,
            conversation_opening(messages),
        )
        # Sessions are scoped by API key; prompts without a session are compared among themselves.
        key = (prepared.target.cache, prepared.caller.key, request.session or "")
        found = self._sessions.diagnose(
            key, record, accepted.cached_tokens, prepared.text_length, page, accepted.elsewhere
        )
        return found, record

    def system_prompt_change(self, prepared: PreparedRequest, accepted: Accepted) -> str | None:
        """A message about a changed system prompt. None if it did not change, or if another sequence had it."""
        messages = prepared.request.messages
        system = leading_system(messages)
        if system is None:
            return None
        change = self._system_prompts.update(prepared.target.cache, system)
        token = accepted.divergence
        if change is None or token is None or not prepared.prompts:
            return None
        prompt, position = prepared.prompts[0], prepared.text_length(token)
        at = message_at(unshield(prompt.text), position, messages)
        if at > 0:
            return None
        return (
            f"the system prompt in cache {prepared.target.cache!r} changed from {change.before} to {change.after}: "
            f"token {token} of {len(prompt.ids)} at character {position} of the rendered prompt, in message {at} "
            f"({messages[at].role}), is the first that was not cached"
        )


def _with_image_hashes(message: Message) -> Message:
    """Images are large, and only whether they changed matters."""
    parts = tuple(Image(str(hash(part.url))) if isinstance(part, Image | Audio) else part for part in message.parts)
    return Message(message.role, parts, message.name)
