"""A request to the prompt that a model reads: template, shield and token cache of one model, held together.

Needs no running engine: prompts are counted, checked and cut off before anything is leased.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Request
from modelyard.core.tokenizer import Tokenizer
from modelyard.prompt.conversation import Conversation, Entry
from modelyard.prompt.sandbox import Frozen
from modelyard.prompt.steps import tools_as_text
from modelyard.prompt.taming import TamedTemplate, used_tool
from modelyard.prompt.template import ChatTemplate, TemplateFailed
from modelyard.prompt.tools import Toolbox, instructions
from modelyard.prompt.translation import SOURCE, TARGET, translated
from modelyard.tokenizer.prefix import Cuttable, PrefixTokens
from modelyard.tokenizer.shield import Shield, unshield

_HERE = "\ufdd1"  # marks where a prefilled reply ends; a noncharacter like the shield's own
# Switches by which templates keep the reasoning of earlier turns: one that drops it changes the prompt from the first
# answer on, with every new question. A model's own settings and a request's win over them.
_KEEPS = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "keep_past_thinking": True,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}
_OURS = frozenset({"messages", "range", "raise_exception", "strftime_now"})


class Rendered(Struct, frozen=True):
    """`text` as people may read it. `tail` is what the assistant's turn already holds: see `Renderer.tail`."""

    text: str
    ids: list[int]
    tail: str


class Renderer:
    """`template_kwargs` are the model's own settings for its template; a request's win over them.

    `tools_template` is the variant that some models bring for requests with tools. `tools_prompt` says when the tools
    are told in words instead: where the template has no place for them (auto), always or never.
    """

    def __init__(
        self,
        template: ChatTemplate,
        vocab: Tokenizer,
        *,
        thinking_default: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tools_template: ChatTemplate | None = None,
        tools_prompt: Literal["auto", "always", "never"] = "auto",
        cache_bytes: int = 32 << 20,
    ) -> None:
        self.vocab = vocab
        self._plain = TamedTemplate(template)
        self._with_tools = TamedTemplate(tools_template) if tools_template is not None else self._plain
        knows_tools = self._with_tools.template.mentions("tools")
        self._keeps = {tamed.template: _kept(tamed.template) for tamed in (self._plain, self._with_tools)}
        self._overrules = tools_prompt == "always"
        self.tells_tools = self._overrules or (tools_prompt == "auto" and not knows_tools)
        self._thinking, self._kwargs = thinking_default, dict(template_kwargs or {})
        self.thinking_modes = _thinking_modes(self._plain)
        self.translates = template.mentions(SOURCE)
        self._shield = Shield(vocab.specials)
        self._toolbox = Toolbox(self._shield)
        self.shows_images = any(template.mentions(word) for word in ("image", "image_url"))
        specials = tuple(vocab.specials)
        self._conversation = Conversation(specials, self._toolbox, self._shield, images=self.shows_images)
        sources = template.source + (tools_template.source if tools_template else "")
        self._tokens = PrefixTokens(vocab, _cuts(vocab, sources), limit_bytes=cache_bytes)
        self._opening, self._bare = self._find_opening(template)
        self.separator = self._find_separator()

    def __repr__(self) -> str:
        return f"<Renderer {self._plain!r}>"

    def text(self, request: Request) -> str:
        """The prompt, with the shield's marks: for `tokens` and `fresh`. People get `unshield(text)`."""
        if self.translates:
            return self._translation(translated(request))
        tools = self._toolbox.offered(request.tools) if request.tools else []
        tamed = self._with_tools if tools else self._plain
        entries = self._conversation.entries(request)
        if self._overrules:
            entries = tools_as_text(entries)
        if tools and self.tells_tools:
            entries, tools = [{"role": "system", "content": instructions(tools)}, *entries], []
        variables = self._variables(request, tamed.template, tools)
        if entries and _is_prefill(entries[-1]):
            return _continued(tamed, entries, variables)
        if entries and _is_empty_reply(entries[-1]):
            entries = entries[:-1]
        return tamed.render(entries, variables)

    def _translation(self, request: Request) -> str:
        """One turn whose content is one item. Such a template takes nothing else, so there is nothing to tame."""
        (entry,) = self._conversation.entries(request)
        codes = {name: request.chat_template_kwargs[name] for name in (SOURCE, TARGET)}
        content = [{"type": "text", **codes, "text": entry["content"]}]
        template = self._plain.template
        return template.render(self._variables(request, template, []) | {"messages": [entry | {"content": content}]})

    def _variables(self, request: Request, template: ChatTemplate, tools: list[Frozen]) -> dict[str, Any]:
        out: dict[str, Any] = {"tools": list(tools) or None, "documents": None, "add_generation_prompt": True}
        reasoning = request.reasoning
        enabled = reasoning.enabled if reasoning.enabled is not None else self._thinking
        if reasoning.effort is not None and template.mentions("reasoning_effort"):
            out["reasoning_effort"] = reasoning.effort
        if reasoning.budget is not None and template.mentions("thinking_budget"):
            out["thinking_budget"] = reasoning.budget
        if enabled is not None:
            out |= _switched(template, enabled)
        out |= self._keeps[template]
        if request.documents:
            out["documents"] = self._shield.deep(request.documents)
        if self._kwargs or request.chat_template_kwargs:
            out |= self._kwargs | self._checked(request.chat_template_kwargs)
        return out

    def _checked(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if taken := _OURS & kwargs.keys():
            name = min(taken)
            raise InvalidRequest(f"chat_template_kwargs may not set {name!r}", param=f"chat_template_kwargs.{name}")
        return {name: self._shield.deep(value) for name, value in kwargs.items()}

    def tokens(self, text: str) -> list[int]:
        """The token ids of a text that `text` returned."""
        return self._tokens.encode(text)

    def learn(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """What the model said behind a prompt, in its own tokens: the next prompt that tells it is made of these."""
        self._tokens.learn(prompt, output)

    def fresh(self, text: str) -> int:
        """How many characters of it were never tokenized: the caller sends long ones to a thread."""
        return self._tokens.fresh(text)

    def raw(self, prompt: str) -> list[int]:
        """A prompt without a template, as legacy completions send it. Control tokens in it are meant."""
        ids = self._tokens.encode(unshield(prompt))
        bos = self.vocab.bos
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def apply(self, request: Request) -> Rendered:
        text = self.text(request)
        return Rendered(unshield(text), self.tokens(text), self.tail(text))

    def tail(self, text: str) -> str:
        """The end of the prompt from where the assistant's turn opens: whether reasoning is open is read from it."""
        if self._bare and text.endswith(self._bare):
            return ""  # a turn with nothing in it: the usual case, and nothing to read
        at = text.rfind(self._opening) if self._opening else -1
        return unshield(text[at:]) if at >= 0 else ""

    def _find_separator(self) -> str:
        """The white space that the template writes between an answer's text and its first call."""
        probe = used_tool("call_0123456789")
        probe[1] = probe[1] | {"content": "probe text"}
        variables = {"tools": None, "add_generation_prompt": True}
        try:
            rest = self._with_tools.render(probe, variables).partition("probe text")[2]
        except TemplateFailed:
            return ""
        return rest[: len(rest) - len(rest.lstrip())]

    def _find_opening(self, template: ChatTemplate) -> tuple[str, str]:
        """What opens an assistant's turn, from a small prompt with and without it: the token that begins it, and all
        of it where it is no more than that token, a role and a line break."""
        entries: list[Entry] = [{"role": "user", "content": "probe one"}]
        try:
            with_it = template.render({"messages": entries, "tools": None, "add_generation_prompt": True})
            without = template.render({"messages": entries, "tools": None, "add_generation_prompt": False})
        except TemplateFailed:
            return "", ""
        opening = with_it[len(without) :] if with_it.startswith(without) else ""
        opening = opening or with_it.rpartition("probe one")[2]
        found = [text for text in self.vocab.specials if opening.startswith(text)]
        token = max(found, key=len) if found else opening.partition("\n")[0]
        bare = opening.endswith("\n") and opening.removeprefix(token).strip().isalpha()
        return token, opening if bare and found else ""


def _cuts(vocab: Tokenizer, sources: str) -> list[str]:
    """Only control tokens that the template writes: others are rare in prompts, and each one costs a little."""
    if not isinstance(vocab, Cuttable):
        return []
    named = (getattr(vocab, "bos_token", ""), getattr(vocab, "eos_token", ""))
    return [cut for cut in sorted(vocab.cuts) if cut in sources or cut in named]


def _kept(template: ChatTemplate) -> dict[str, Any]:
    """The switches of `_KEEPS` that this template has."""
    return {name: value for name, value in _KEEPS.items() if template.mentions(name)}


def _switched(template: ChatTemplate, enabled: bool) -> dict[str, Any]:
    return {name: enabled for name in ("enable_thinking", "thinking") if template.mentions(name)}


def _thinking_modes(tamed: TamedTemplate) -> tuple[str, ...]:
    """The template has a switch where a small prompt comes out differently with it on and off."""
    entries: list[Entry] = [{"role": "user", "content": "probe one"}]
    variables: dict[str, Any] = {"tools": None, "add_generation_prompt": True}
    if not _switched(tamed.template, True):
        return ("default",)
    try:
        on, off = (tamed.render(entries, variables | _switched(tamed.template, is_on)) for is_on in (True, False))
    except TemplateFailed:
        return ("default",)
    return ("default",) if on == off else ("default", "enabled", "disabled")


def _is_prefill(entry: Entry) -> bool:
    return entry["role"] == "assistant" and "tool_calls" not in entry and bool(entry["content"])


def _is_empty_reply(entry: Entry) -> bool:
    return entry["role"] == "assistant" and len(entry) == 2 and not entry["content"]


def _continued(tamed: TamedTemplate, entries: list[Entry], variables: dict[str, Any]) -> str:
    """The prompt cut after the last message's text, so that the model goes on where it ends."""
    reply = entries[-1]["content"]
    marked = entries[-1] | {"content": reply + _HERE, "prefix": True}
    try:
        text = tamed.render([*entries[:-1], marked], variables | {"add_generation_prompt": False})
    except TemplateFailed:
        text = ""  # the template wants no reply at the end: it is put there by hand
    head, found, _ = text.rpartition(_HERE)
    return head if found else str(tamed.render(entries[:-1], variables)) + reply
