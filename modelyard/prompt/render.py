"""Renders a request to the prompt that a model reads: tools and messages → chat template → token ids.

Needs no loaded engine: prompts are counted and checked before anything is leased. Client text is shielded on the way,
so that a control token that it spells stays text. Assistant text is shielded too (a model may quote a control token),
except for reasoning tags, which templates search for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Literal

import msgspec
from msgspec import Struct

from modelyard.core.engine import Media, TokenRun
from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.output_format import RESULTS
from modelyard.core.request import (
    MEDIA_MARK,
    Audio,
    Image,
    Message,
    Part,
    Request,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolReference,
    ToolResult,
)
from modelyard.core.tokenizer import Tokenizer
from modelyard.prompt.media import joined, mark, media_parts, require_all_marks, split_at_marks
from modelyard.prompt.template import (
    AdaptedTemplate,
    ChatTemplate,
    TemplateFailed,
    TemplateMessage,
    TemplateTooCostly,
    WriteCalls,
    calls_as_text,
    hermes_calls,
    results_as_text,
    tojson,
    used_tool,
    with_json,
)
from modelyard.prompt.template_budget import INLINE_SECONDS, Frozen, max_seconds
from modelyard.prompt.translation import SOURCE, TARGET, translated
from modelyard.tokenizer.prefix_cache import SplittableTokenizer, TokenCache
from modelyard.tokenizer.shield import Shield, unshield
from modelyard.tokenizer.slices import OnProgress

_MAX_CACHED_TOOLS = 4 << 20  # bytes of JSON; an agent sends the same list with each request
_encode = msgspec.json.Encoder().encode
_FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def qualified_names(tools: Iterable[Tool]) -> dict[tuple[str | None, str], str]:
    """Of tools in namespaces whose names others have, too: how the model reads and calls them."""
    counts = Counter(tool.name for tool in tools)
    return {(t.namespace, t.name): f"{t.namespace}__{t.name}" for t in tools if t.namespace and counts[t.name] > 1}


def definition(tool: Tool, shield: Shield, name: str | None = None) -> Frozen:
    """OpenAI's function shape. A custom tool is a function with one string, `input`."""
    parameters = _FREE_TEXT if tool.kind == "custom" else tool.parameters or {"type": "object", "properties": {}}
    function: dict[str, Any] = {
        "name": shield(name or tool.name),
        "description": shield(_description(tool)),
        "parameters": shield.deep(parameters),
    }
    return Frozen(type="function", function=Frozen(function))


def _description(tool: Tool) -> str:
    """A custom tool's description includes its grammar: a model that is only constrained does not know the format."""
    rules = tool.grammar.get("definition") if tool.kind == "custom" and tool.grammar else None
    if not isinstance(rules, str) or not rules:
        return tool.description
    syntax = tool.grammar.get("syntax", "lark") if tool.grammar else ""
    return f"{tool.description}\nThe input is text of this form ({syntax}):\n{rules.strip()}".lstrip()


class ToolDefinitions:
    """The tool definitions of a prompt: all tools that are neither deferred nor run by a provider."""

    def __init__(self, shield: Shield) -> None:
        self._shield = shield
        self._known: dict[bytes, list[Frozen]] = {}
        self._cached_bytes = 0

    def offered(self, tools: Sequence[Tool]) -> list[Frozen]:
        shown = [tool for tool in tools if not tool.deferred and tool.kind != "server"]
        if not shown:
            return []
        key = _encode(shown)
        found = self._known.get(key)
        if found is None:
            self._cached_bytes += len(key)
            if self._cached_bytes > _MAX_CACHED_TOOLS:
                self._known, self._cached_bytes = {}, len(key)
            names = qualified_names(shown)
            found = [definition(tool, self._shield, names.get((tool.namespace, tool.name))) for tool in shown]
            self._known[key] = found
        return found

    def announce(self, name: str, tools: Iterable[Tool]) -> str:
        """The text at the point where a deferred tool was discovered."""
        for tool in tools:
            if tool.name == name:
                return f"From here on this tool can be called too:\n{tojson(definition(tool, self._shield))}"
        return f"[the tool {self._shield(name)} was found here]"


def instructions(tools: Sequence[Frozen], write: WriteCalls = hermes_calls) -> str:
    """For templates without tool support: the tools as text, and how to call one."""
    listed = "\n".join(tojson(tool) for tool in tools)
    return (
        f"You can call these tools. Each line defines one as JSON:\n<tools>\n{listed}\n</tools>\n"
        "To call a tool, write its name and arguments exactly like this, and nothing after it:\n"
        f"{write([('tool_name', {'parameter': 'value'})], tojson)}"
    )


RAW = "__raw"  # key for arguments that are not a JSON object: every template can print a dictionary
_decode = msgspec.json.Decoder().decode


class MessageConverter:
    """Messages to the dictionaries that templates read. `images`: the template supports them; else they become text:
    `marks` (`prompt/media.py`), or the `placeholder` of the model's own template."""

    def __init__(
        self,
        specials: Sequence[str],
        tools: ToolDefinitions,
        shield: Shield,
        *,
        images: bool,
        marks: bool = False,
        placeholder: str | None = None,
    ) -> None:
        self._shield = shield
        self._shield_reply = Shield(text for text in specials if not _is_reasoning_tag(text))
        self._tools = tools
        self._images, self._marks, self._placeholder = images, marks, placeholder

    def convert(self, request: Request) -> list[TemplateMessage]:
        out: list[TemplateMessage] = []
        names: dict[str, str] = {}
        numbers = count(1)  # of images and audio
        qualified = qualified_names(request.tools) if request.tools else {}
        for message in request.messages:
            if message.role == "assistant":
                out.append(self._assistant(message, names, qualified))
            elif message.role == "tool":
                out.extend(self._results(message, names, request.tools, numbers))
            else:
                out.append({"role": message.role, "content": self._content(message.parts, request.tools, numbers)})
                if message.name:
                    out[-1]["name"] = self._shield(message.name)
        return out

    def _content(
        self, parts: Sequence[Part], tools: Sequence[Tool], numbers: Iterator[int]
    ) -> str | list[TemplateMessage]:
        if len(parts) == 1 and isinstance(part := parts[0], Text):
            return self._shield(part.text)
        if (self._marks or self._placeholder) and any(isinstance(part, Image | Audio) for part in parts):
            return joined(list(self._marked(parts, tools, numbers)))
        items = list(self._items(parts, tools))
        if self._images and any(item["type"] == "image" for item in items):
            return items
        return self._shield("\n".join(item.get("text", "[image]") for item in items))

    def _items(self, parts: Sequence[Part], tools: Sequence[Tool]) -> Iterator[TemplateMessage]:
        for part in parts:
            if isinstance(part, Text):
                yield {"type": "text", "text": self._shield(part.text)}
            elif isinstance(part, Image):
                yield {"type": "image"}
            elif isinstance(part, ToolReference):
                yield {"type": "text", "text": self._tools.announce(part.name, tools)}

    def _marked(
        self, parts: Sequence[Part], tools: Sequence[Tool], numbers: Iterator[int]
    ) -> Iterator[tuple[str, bool]]:
        for part in parts:
            if isinstance(part, Image | Audio):
                yield mark(part, next(numbers)) if self._marks else self._placeholder or "", True
            else:
                yield from ((item["text"], False) for item in self._items((part,), tools))

    def _results(
        self, message: Message, names: dict[str, str], tools: Sequence[Tool], numbers: Iterator[int]
    ) -> Iterator[TemplateMessage]:
        for part in message.parts:
            if isinstance(part, ToolResult):
                yield {
                    "role": "tool",
                    "name": names.get(part.call_id, ""),
                    "tool_call_id": self._shield(part.call_id),
                    "content": self._content(part.content, tools, numbers),
                }
            else:
                content = self._content((part,), tools, numbers)
                yield {"role": "tool", "name": "", "tool_call_id": "", "content": content}

    def _assistant(
        self, message: Message, names: dict[str, str], qualified: Mapping[tuple[str | None, str], str]
    ) -> TemplateMessage:
        shield = self._shield_reply
        entry: TemplateMessage = {"role": "assistant", "content": ""}
        texts = [part.text for part in message.parts if isinstance(part, Text)]
        if texts:
            entry["content"] = shield(texts[0] if len(texts) == 1 else "".join(texts))
        thinking = [part.text for part in message.parts if isinstance(part, Thinking) and part.text]
        if thinking:
            entry["reasoning_content"] = shield("\n".join(thinking))
        calls = [part for part in message.parts if isinstance(part, ToolCall)]
        if calls:
            for call in calls:
                names[call.id] = self._shield(qualified.get((call.namespace, call.name), call.name))
            entry["tool_calls"] = [self._call(call, names[call.id]) for call in calls]
        return entry

    def _call(self, call: ToolCall, name: str) -> TemplateMessage:
        function = {"name": name, "arguments": self._arguments(call)}
        return {"id": self._shield(call.id), "type": "function", "function": function}

    def _arguments(self, call: ToolCall) -> TemplateMessage:
        text = call.arguments
        if call.custom:
            return {"input": self._shield(text)}
        try:
            value = _decode(text or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            value = None
        if not isinstance(value, dict):
            return {RAW: self._shield(text)}
        if call.verbatim:
            return with_json(self._shield.deep(value), self._shield(text))
        escaped = "\\u" in text or "\\/" in text  # JSON escapes may hide a control token's spelling
        return self._shield.deep(value) if escaped or self._shield(text) is not text else value


def _is_reasoning_tag(text: str) -> bool:
    return "think" in text.lower() or "reasoning" in text.lower()


_PREFILL_END = "\ufdd1"  # marks the end of a prefilled reply; a noncharacter, like the shield's mark
# Template switches that keep the reasoning of earlier turns. Dropping it changes the prompt from the first reply on,
# with every new question, and loses the KV cache. The model's settings and the request override them.
_KEEP_REASONING = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "keep_past_thinking": True,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}
# Variables of templates that turn thinking on and off.
_SWITCHES: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "thinking_mode": ("enabled", "disabled"),
    "reasoning": (True, False),
}
_TEMPLATE_CODE = re.compile(r"\{[%{].*?[%}]\}", re.DOTALL)
_SWITCH_IN_CODE = re.compile(rf"(?<![\w.'\"\[])(?:{'|'.join(_SWITCHES)})\b")  # not an attribute, key or string
_PLACES = re.compile(r"\{query\}|\{document\}")
_OPEN_REASONING = re.compile(r"<think(ing)?>\s*\Z")
_RESERVED = frozenset({"messages", "range", "raise_exception", "strftime_now"})


class Rendered(Struct, frozen=True):
    """`text` is without the shield's marks. `tail`: see `Renderer.tail`."""

    text: str
    ids: list[int]
    tail: str


class Renderer:
    """`template_kwargs` are the model's template settings; a request's override them.

    `tools_template` is the variant that some models have for requests with tools. `tools_prompt` selects when tools are
    described as text: if the template does not support them (auto), always or never. With `marks_media` images and
    audio are marked and `parts` splits the prompt; with an `image_placeholder` they are written like that.
    `write_calls` is how calls are written that the template cannot write. `missing` says why the model has no template:
    then `template` is empty, and only bare prompts are encoded.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        *,
        thinking_default: bool | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tools_template: ChatTemplate | None = None,
        tools_prompt: Literal["auto", "always", "never"] = "auto",
        cache_bytes: int = 32 << 20,
        marks_media: bool = False,
        image_placeholder: str | None = None,
        write_calls: WriteCalls = hermes_calls,
        results: tuple[str, str] = RESULTS,
        missing: str | None = None,
    ) -> None:
        self.tokenizer, self.missing = tokenizer, missing
        self._write_calls, self._results = write_calls, results
        self._plain = self._with_tools = AdaptedTemplate(template, write_calls, results)
        if tools_template is not None:
            self._with_tools = AdaptedTemplate(tools_template, write_calls, results)
        self._keep_reasoning = {
            adapted.template: _keep_reasoning(adapted.template) for adapted in (self._plain, self._with_tools)
        }
        self.template_source = template.source
        self._always_as_text, self._never_as_text = tools_prompt == "always", tools_prompt == "never"
        self.describes_tools = self._always_as_text or not (self._never_as_text or self._with_tools.shows_tools)
        self._thinking, self._kwargs = thinking_default, dict(template_kwargs or {})
        self.thinking_modes = _thinking_modes(self._plain)
        self.translates = template.mentions(SOURCE)
        self._shield = Shield(tokenizer.specials)
        # A file may require the token although its template does not write it.
        self._begin = getattr(tokenizer, "bos_token", "") if getattr(tokenizer, "begins_prompts", False) else ""
        self._tools = ToolDefinitions(self._shield)
        self.marks_media = marks_media
        self.shows_images = any(template.mentions(word) for word in ("image", "image_url")) or bool(image_placeholder)
        self._converter = MessageConverter(
            tuple(tokenizer.specials),
            self._tools,
            self._shield,
            images=self.shows_images,
            marks=marks_media,
            placeholder=image_placeholder,
        )
        sources = template.source + (tools_template.source if tools_template else "")
        self._tokens = TokenCache(tokenizer, _cuts(tokenizer, sources), limit_bytes=cache_bytes)
        self._opening, self._bare = self._find_opening(template)
        self._closing = self._find_closing(template)
        self.separator = self._find_separator()

    def __repr__(self) -> str:
        return f"<Renderer {self._plain!r}>"

    @property
    def template_text(self) -> str:
        return self._plain.template.source

    def require_template(self) -> None:
        if self.missing is not None:
            raise Unsupported(self.missing, code="template_missing", param="model")

    def quick_text(self, request: Request) -> str | None:
        """`text` for a caller that cannot wait. None if the template takes long, now or in an earlier render: then call
        `text` in a thread."""
        if self._plain.template.is_costly or self._with_tools.template.is_costly:
            return None
        before = max_seconds.set(INLINE_SECONDS)
        try:
            return self.text(request)
        except TemplateTooCostly:
            return None
        finally:
            max_seconds.reset(before)

    def text(self, request: Request) -> str:
        """The prompt with the shield's marks, for `tokens` and `fresh`. Use `unshield(text)` to show it."""
        if self.missing is not None:
            self.require_template()
        text = self._text(request)
        if self.marks_media and (media := sum(1 for _ in media_parts(request))):
            require_all_marks(text, media)
        return text if text.startswith(self._begin) else self._begin + text

    def _text(self, request: Request) -> str:
        if self.translates:
            return self._translation(translated(request))
        tools = self._tools.offered(request.tools) if request.tools else []
        entries = self._converter.convert(request)
        if self._always_as_text:
            entries = results_as_text(calls_as_text(entries, self._write_calls), self._results)
        try:
            return self._conversation(request, entries, tools, self.describes_tools)
        except TemplateFailed:  # some fail on definitions that lack a description, or have an unusual type
            if not tools or self.describes_tools or self._never_as_text:
                raise
            return self._conversation(request, entries, tools, True)

    def _conversation(
        self, request: Request, entries: list[TemplateMessage], tools: list[Frozen], as_text: bool
    ) -> str:
        adapted = self._with_tools if tools and not as_text else self._plain
        if tools and as_text:
            told = instructions(tools, self._write_calls)
            entries, tools = [{"role": "system", "content": told}, *entries], []
        variables = self._variables(request, adapted.template, tools)
        if entries and (last := entries[-1])["role"] == "assistant":
            if _is_continued(request, last):
                return _render_prefill(adapted, entries, variables, _continued_part(request, last))
            is_empty = len(last) == 2 and not last["content"]
            if is_empty and request.add_generation_prompt is not False:
                entries = entries[:-1]
        return adapted.render(entries, variables)

    def _translation(self, request: Request) -> str:
        """One turn with one content item; such a template takes nothing else."""
        (entry,) = self._converter.convert(request)
        codes = {name: request.chat_template_kwargs[name] for name in (SOURCE, TARGET)}
        content = [{"type": "text", **codes, "text": entry["content"]}]
        template = self._plain.template
        return template.render(self._variables(request, template, []) | {"messages": [entry | {"content": content}]})

    def _variables(self, request: Request, template: ChatTemplate, tools: list[Frozen]) -> dict[str, Any]:
        out: dict[str, Any] = {"tools": list(tools) or None, "documents": None}
        out["add_generation_prompt"] = request.add_generation_prompt is not False
        reasoning = request.reasoning
        enabled = reasoning.enabled if reasoning.enabled is not None else self._thinking
        if reasoning.effort is not None and template.mentions("reasoning_effort"):
            out["reasoning_effort"] = reasoning.effort
        if reasoning.budget is not None and template.mentions("thinking_budget"):
            out["thinking_budget"] = reasoning.budget
        if enabled is not None:
            out |= _thinking_switches(template, enabled)
        out |= self._keep_reasoning[template]
        if request.documents:
            out["documents"] = self._shield.deep(request.documents)
        if self._kwargs or request.chat_template_kwargs:
            out |= self._kwargs | self._checked(request.chat_template_kwargs)
        return out

    def _checked(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if taken := _RESERVED & kwargs.keys():
            name = min(taken)
            raise InvalidRequest(f"chat_template_kwargs may not set {name!r}", param=f"chat_template_kwargs.{name}")
        return {name: self._shield.deep(value) for name, value in kwargs.items()}

    def tokens(self, text: str, on_progress: OnProgress | None = None) -> list[int]:
        """The token ids of a text that `text` returned; images and audio have none."""
        if self.marks_media and len(texts := split_at_marks(text)[0]) > 1:
            return [id for piece in texts for id in self._tokens.encode(piece, on_progress)]
        return self._tokens.encode(text, on_progress)

    def parts(self, text: str, media: Sequence[Media]) -> tuple[TokenRun | Media, ...]:
        """The prompt of a text that `text` returned, with the media of the request at their marks."""
        texts, numbers = split_at_marks(text)
        parts: list[TokenRun | Media] = [TokenRun(self._tokens.encode(texts[0]))]
        for number, piece in zip(numbers, texts[1:], strict=True):
            parts += [media[number - 1], TokenRun(self._tokens.encode(piece))]
        return tuple(part for part in parts if isinstance(part, Media) or part.ids)

    def learn(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Cache the generated tokens: the next prompt that contains this reply uses them."""
        self._tokens.learn(prompt, output)

    def fresh(self, text: str) -> int:
        """How many characters are not cached; the caller tokenizes long ones in a thread."""
        return self._tokens.fresh(text)

    def raw(self, prompt: str, on_progress: OnProgress | None = None) -> list[int]:
        """A prompt without a template (legacy completions). Control tokens in it are intended."""
        ids = self._tokens.encode(unshield(prompt), on_progress)
        bos = self.tokenizer.bos
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def raw_with_media(self, prompt: str, media: Iterable[Image | Audio]) -> str:
        """The text of a prompt without a template, for `tokens` and `parts`; its marks stand for the media in order."""
        if not self.marks_media:
            raise InvalidRequest("this model takes images and audio in messages only", param="prompt")
        first, *others = unshield(prompt).split(MEDIA_MARK)
        marks = (mark(part, number) for number, part in enumerate(media, 1))
        text = first + "".join(each + other for each, other in zip(marks, others, strict=True))
        return text if text.startswith(self._begin) else self._begin + text

    def pair(self, query: str, document: str, template: str | None = None) -> list[int]:
        """The input of a model that ranks. `template` has places for {query} and {document}; without one the tokenizer
        joins the two."""
        if template is None:
            return self.tokenizer.encode_pair(query, document)
        texts = {"{query}": self._shield(query), "{document}": self._shield(document)}
        return self._tokens.encode(_PLACES.sub(lambda found: texts[found[0]], template))

    def apply(self, request: Request) -> Rendered:
        text = self.text(request)
        return Rendered(unshield(text), self.tokens(text), self.tail(text))

    def tail(self, text: str) -> str:
        """The prompt from the start of the assistant's turn on: it shows whether reasoning is open."""
        if self._bare and text.endswith(self._bare):
            return ""  # the usual case: an empty turn
        at = text.rfind(self._opening) if self._opening else -1
        if at < 0:
            return ""
        tail = text[at:]
        if self._closing and self._closing in tail:  # the turn has ended; what follows is not the assistant's
            tail = tail.rpartition(self._closing)[2]
        return unshield(tail)

    def _find_separator(self) -> str:
        """The white space that the template writes between a reply's text and its first call."""
        probe = used_tool("probe text")
        variables = {"tools": None, "add_generation_prompt": True}
        try:
            rest = self._with_tools.render(probe, variables).partition("probe text")[2]
        except TemplateFailed:
            return ""
        return rest[: len(rest) - len(rest.lstrip())]

    def _find_closing(self, template: ChatTemplate) -> str:
        """The control token that ends an assistant's turn."""
        entries: list[TemplateMessage] = [
            {"role": "user", "content": "probe one"},
            {"role": "assistant", "content": "probe two"},
        ]
        try:
            text = template.render({"messages": entries, "tools": None, "add_generation_prompt": False})
        except TemplateFailed:
            return ""
        rest = text.rpartition("probe two")[2].lstrip()
        found = [token for token in self.tokenizer.specials if rest.startswith(token)]
        return max(found, key=len) if found else ""

    def _find_opening(self, template: ChatTemplate) -> tuple[str, str]:
        """What opens an assistant's turn: its first token, and the whole opening if it is only that token, a role and
        a line break. Found by rendering a small prompt with and without it."""
        entries: list[TemplateMessage] = [{"role": "user", "content": "probe one"}]
        try:
            with_it = template.render({"messages": entries, "tools": None, "add_generation_prompt": True})
            without = template.render({"messages": entries, "tools": None, "add_generation_prompt": False})
        except TemplateFailed:
            return "", ""
        opening = with_it[len(without) :] if with_it.startswith(without) else ""
        opening = opening or with_it.rpartition("probe one")[2]
        found = [text for text in self.tokenizer.specials if opening.startswith(text)]
        token = max(found, key=len) if found else opening.partition("\n")[0]
        bare = opening.endswith("\n") and opening.removeprefix(token).strip().isalpha()
        return token, opening if bare and found else ""


def _cuts(tokenizer: Tokenizer, sources: str) -> list[str]:
    """Control tokens that the template writes; others are rare in prompts, and each has a cost."""
    if not isinstance(tokenizer, SplittableTokenizer):
        return []
    named = (getattr(tokenizer, "bos_token", ""), getattr(tokenizer, "eos_token", ""))
    return [cut for cut in sorted(tokenizer.cuts) if cut in sources or cut in named]


def _keep_reasoning(template: ChatTemplate) -> dict[str, Any]:
    """The switches of `_KEEP_REASONING` that this template has."""
    return {name: value for name, value in _KEEP_REASONING.items() if template.mentions(name)}


def mentions_thinking_switch(template: str) -> bool:
    """Whether the code of a template uses a variable that switches thinking: a good guess without rendering it."""
    return any(_SWITCH_IN_CODE.search(code) for code in _TEMPLATE_CODE.findall(template))


def _thinking_switches(template: ChatTemplate, enabled: bool) -> dict[str, Any]:
    return {name: values[not enabled] for name, values in _SWITCHES.items() if template.mentions(name)}


def _thinking_modes(adapted: AdaptedTemplate) -> tuple[str, ...]:
    """The template has a thinking switch if a small prompt renders differently with it on and off."""
    entries: list[TemplateMessage] = [{"role": "user", "content": "probe one"}]
    variables: dict[str, Any] = {"tools": None, "add_generation_prompt": True}
    if not _thinking_switches(adapted.template, True):
        return ("default",)
    try:
        on, off = (
            adapted.render(entries, variables | _thinking_switches(adapted.template, is_on)) for is_on in (True, False)
        )
    except TemplateFailed:
        return ("default",)
    return ("default",) if on == off else ("default", "enabled", "disabled")


def _is_continued(request: Request, last: TemplateMessage) -> bool:
    """A reply at the end is continued if the client asks for it, or says nothing about the end of the prompt."""
    if "tool_calls" in last:
        return False
    if request.continue_final_message is None:
        return request.add_generation_prompt is None and bool(last["content"])
    return request.continue_final_message is not False and len(last.get("reasoning_content", "") + last["content"]) > 0


def _continued_part(request: Request, last: TemplateMessage) -> str:
    asked = request.continue_final_message
    return asked if isinstance(asked, str) else "content" if last["content"] else "reasoning_content"


def _render_prefill(
    adapted: AdaptedTemplate, entries: list[TemplateMessage], variables: dict[str, Any], part: str
) -> str:
    """The prompt, cut after a part of the last message, so that the model continues it."""
    last, variables = entries[-1], variables | {"add_generation_prompt": True}
    reply: str = last.get(part, "")
    marked = last | {part: reply + _PREFILL_END, "prefix": True}
    if part == "reasoning_content":
        marked["content"] = ""
    try:
        text = adapted.render([*entries[:-1], marked], variables | {"add_generation_prompt": False})
    except TemplateFailed:
        text = ""  # the template accepts no reply at the end; append it
    head, found, _ = text.rpartition(_PREFILL_END)
    if found:
        return head
    text = str(adapted.render(entries[:-1], variables))
    if part == "reasoning_content" and not _OPEN_REASONING.search(text):
        reason = "the chat template writes no reasoning into the last message, so it cannot be continued"
        raise InvalidRequest(reason, param="continue_final_message")
    return text + reply
