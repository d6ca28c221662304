"""The playground page: chat with a model over any protocol, and see the request and the events on the wire."""

from __future__ import annotations

import base64
import codecs
import time
from collections.abc import Callable
from typing import Any

from nicegui import events, ui

from modelyard.core.errors import ModelyardError
from modelyard.core.events import BlockDelta, BlockStart, Event, Failed, Finished, ReplyBuilder, Started, Usage
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Image, Message, Part, Text, ToolCall, ToolResult
from modelyard.http.errors import load_protocol
from modelyard.workbench import formatting as fmt
from modelyard.workbench.api_client import ApiClient
from modelyard.workbench.components import CodePane, StreamingText, page_heading
from modelyard.workbench.conversation import (
    PROTOCOLS,
    THINKING_MODES,
    PlaygroundConversation,
    curl_snippet,
    format_body,
    python_snippet,
)
from modelyard.workbench.session import PageSession

_IMAGE_TYPES = "image/png,image/jpeg,image/webp,image/gif"
_MAX_IMAGE_BYTES = 20 * 1024**2
_FLUSH_INTERVAL_S = 0.1
_TOOLS_EXAMPLE = '[{"name": "weather", "description": "…", "parameters": {"type": "object", "properties": {…}}}]'


def page(session: PageSession, model: str = "") -> None:
    if model:
        session.conversation.settings.model = model
    page_heading("Playground", "Chat with any model over any of the three protocols, and see what goes over the wire.")
    with ui.element("div").classes("playground"):
        Playground(session)


class Playground:
    def __init__(self, session: PageSession) -> None:
        self._session, self._conversation = session, session.conversation
        self._streaming: ui.timer | None = None  # its task streams the answer
        with ui.element("section").classes("card settings"):
            SettingsForm(session)
        with ui.element("section").classes("card"):
            self._messages = ui.element("div").classes("messages").props('role=log aria-label="Conversation"')
            self._build_composer()
        with ui.element("section").classes("card inspector"):
            self._inspector = WireInspector()
        with self._messages:
            for message in self._conversation.messages:
                _show_message(message)

    # --- composing ----------------------------------------------------------------------------------------------------

    def _build_composer(self) -> None:
        self._attachments = ui.element("div").classes("line")
        self._input = ui.textarea(placeholder="Type a message. Enter sends, Shift+Enter starts a new line.")
        self._input.props('outlined autogrow autofocus aria-label="Message"').classes("w-full")
        self._input.on("keydown.enter.exact.prevent", self._send)
        with ui.element("div").classes("line"):
            self._send_button = ui.button("Send", icon="send", on_click=self._send).props("unelevated no-caps")
            self._stop_button = ui.button("Stop", icon="stop", on_click=self._stop)
            self._stop_button.props("unelevated no-caps color=negative")
            ui.button("Clear", icon="delete_sweep", on_click=self._clear).props("flat no-caps color=grey")
            ui.space()
            upload = ui.upload(
                on_upload=self._attach_image, auto_upload=True, multiple=True, max_file_size=_MAX_IMAGE_BYTES
            )
            upload.props(f'accept="{_IMAGE_TYPES}" flat label="Drop images here"').classes("image-upload")
        self._set_busy(False)

    async def _attach_image(self, event: events.UploadEventArguments) -> None:
        kind = event.file.content_type
        if kind not in _IMAGE_TYPES.split(","):
            ui.notify(f"{kind} is not a supported image format", type="negative")
            return
        data = await event.file.read()
        self._conversation.images.append(f"data:{kind};base64,{base64.b64encode(data).decode()}")
        self._show_attachments()

    def _show_attachments(self) -> None:
        self._attachments.clear()
        with self._attachments:
            for url in self._conversation.images:
                ui.image(url).style("width: 56px; height: 56px; border-radius: 8px").props('fit=cover alt="Image"')

    def _set_busy(self, busy: bool) -> None:
        self._send_button.set_visibility(not busy)
        self._stop_button.set_visibility(busy)

    def _clear(self) -> None:
        self._stop()
        self._conversation.clear()
        self._messages.clear()
        self._show_attachments()

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        text = (self._input.value or "").strip()
        if self._streaming is not None or not (text or self._conversation.images):
            return
        self._conversation.add_user_message(text)
        self._input.set_value("")
        self._show_attachments()
        self._request_answer()

    def _send_tool_results(self, results: dict[str, str]) -> None:
        if self._streaming is None:
            self._conversation.add_tool_results(results)
            self._request_answer()

    def _request_answer(self) -> None:
        """Ask for an answer to the last message. If the request is invalid, the message goes back into the input."""
        try:
            protocol = load_protocol(self._conversation.settings.protocol)
            body = protocol.write_request(self._conversation.request())
        except ModelyardError as error:
            message = self._conversation.messages.pop()
            self._input.set_value("".join(getattr(part, "text", "") for part in message.parts))
            self._session.show_error(error)
            return
        self._inspector.start(self._session.client, protocol, body)
        self._set_busy(True)
        with self._messages:  # the timers, and with them the stream, end when the page is left
            _show_message(self._conversation.messages[-1])
            answer = AnswerView(self._conversation, protocol, self._send_tool_results)
            flushing = ui.timer(_FLUSH_INTERVAL_S, lambda: self._flush(answer))
            self._streaming = ui.timer(0, lambda: self._stream(answer, protocol, body, flushing), once=True)

    async def _stream(self, answer: AnswerView, protocol: WireProtocol, body: bytes, flushing: ui.timer) -> None:
        try:
            async for data in self._session.client.stream(protocol, body):
                self._inspector.feed(data)
                answer.feed(data)
            answer.finish()
        except ModelyardError as error:
            answer.fail(error)
        finally:
            flushing.cancel()
            answer.close()
            self._streaming = None
            if not self._messages.is_deleted:
                self._flush(answer)
                self._set_busy(False)

    def _flush(self, answer: AnswerView) -> None:
        self._inspector.flush()
        if answer.flush():
            ui.run_javascript(f"const e = getHtmlElement({self._messages.id}); if (e) e.scrollTop = e.scrollHeight")

    def _stop(self) -> None:
        if self._streaming is not None:
            self._streaming.cancel(with_current_invocation=True)


# --- messages ---------------------------------------------------------------------------------------------------------


def _show_message(message: Message) -> None:
    with ui.element("div").classes(f"turn {'assistant' if message.role == 'assistant' else 'user'}"):
        for part in message.parts:
            _show_part(part)


def _show_part(part: Part) -> None:
    if isinstance(part, Image):
        ui.image(part.url).style("max-width: 240px; border-radius: 8px").props('alt="Image"')
    elif isinstance(part, Text):
        ui.label(part.text).classes("text")
    elif isinstance(part, ToolCall):
        ui.label(f"{part.name}({part.arguments})").classes("call mono text")
    elif isinstance(part, ToolResult):
        text = "".join(content.text for content in part.content if isinstance(content, Text))
        ui.label(text).classes("mono text")


class AnswerView:
    """An answer while it is streamed, with reasoning, text and tool calls in separate boxes. However it ends, the
    conversation can go on."""

    def __init__(
        self,
        conversation: PlaygroundConversation,
        protocol: WireProtocol,
        send_results: Callable[[dict[str, str]], None],
    ) -> None:
        self._conversation, self._send_results = conversation, send_results
        self._reader, self._builder, self._speed = protocol.reader(), ReplyBuilder(), SpeedMeter()
        self._text, self._request_id, self._ended = "", "", False
        self._boxes: list[StreamingText] = []
        self._in_text = False  # whether the present block is text
        with ui.element("div").classes("turn assistant") as self._turn:
            self._placeholder = ui.label("…").classes("muted")
            self._body = ui.element("div").classes("w-full")
            with ui.element("div").classes("line muted small") as self._footer:
                self._summary = ui.label("")

    def feed(self, data: bytes) -> None:
        self._handle(self._reader.feed(data))

    def finish(self) -> None:
        self._handle(self._reader.finish())

    def flush(self) -> bool:
        """Whether anything new is shown."""
        return sum(box.flush() for box in self._boxes) > 0

    def _handle(self, new_events: list[Event]) -> None:
        for event in new_events:
            if isinstance(event, Failed):
                raise event.error
            self._builder.feed([event])
            if isinstance(event, Started):
                self._request_id = event.id
            elif isinstance(event, BlockStart):
                self._start_block(event)
            elif isinstance(event, BlockDelta):
                self._speed.delta()
                self._boxes[-1].append(event.text)
                if self._in_text:
                    self._text += event.text
            elif isinstance(event, Finished):
                self._finish(event)

    def _start_block(self, event: BlockStart) -> None:
        self._placeholder.set_visibility(False)
        self._in_text = event.kind == "text"
        with self._body:
            if event.kind == "thinking":
                with ui.expansion("Thinking", value=True).classes("w-full muted small thinking").props("dense"):
                    box = StreamingText("text reasoning")
            elif event.kind == "tool_call":
                with ui.element("div").classes("call"):
                    ui.label(f"calls {event.name}").classes("small muted")
                    box = StreamingText("mono text")
            else:
                box = StreamingText("text answer")
        self._boxes.append(box)

    def _finish(self, event: Finished) -> None:
        self._ended = True
        reply = self._builder.reply()
        self._conversation.add_reply(reply)
        self._show_summary(f"{self._speed.summary(event.usage)} · {event.reason}")
        if reply.calls:
            self._ask_for_results(reply.calls)

    def fail(self, error: ModelyardError) -> None:
        if not self._ended:
            with self._body:
                ui.label(error.message).classes("error small text")
            self._cut_off("failed")

    def close(self) -> None:
        """An answer that has not ended by now was stopped, by the button or by leaving the page."""
        if not self._ended:
            self._cut_off("stopped")

    def _cut_off(self, reason: str) -> None:
        self._ended = True
        self._conversation.add_partial_reply(self._text)
        if not self._turn.is_deleted:
            self._show_summary(reason)

    def _show_summary(self, text: str) -> None:
        self._placeholder.set_visibility(False)
        self._summary.set_text(text)
        if self._request_id:
            id = "".join(letter for letter in self._request_id if letter.isalnum())  # it becomes part of a URL
            with self._footer:
                ui.link("view request", f"/requests/req_{id}")

    def _ask_for_results(self, calls: tuple[ToolCall, ...]) -> None:
        with self._body:
            fields = {call.id: ui.input(f"Result of {call.name}").props("outlined dense") for call in calls}
            for field in fields.values():
                field.classes("w-full mt-2")

            def send() -> None:
                button.set_enabled(False)
                self._send_results({call: field.value or "" for call, field in fields.items()})

            button = ui.button("Send results", icon="reply", on_click=send).props("outline no-caps size=sm")


class SpeedMeter:
    """Time to first token and tokens per second, as the client sees them."""

    def __init__(self) -> None:
        self._sent = time.perf_counter()
        self._first: float | None = None

    def delta(self) -> None:
        if self._first is None:
            self._first = time.perf_counter()

    def summary(self, usage: Usage) -> str:
        now = time.perf_counter()
        first = self._first if self._first is not None else now
        rate = (usage.output - 1) / (now - first) if usage.output > 1 and now > first else None
        cached = f", {fmt.count(usage.cached)} cached" if usage.cached else ""
        return (
            f"first token {fmt.duration(first - self._sent)} · {fmt.rate(rate)} tok/s · "
            f"{fmt.count(usage.prompt)} prompt{cached} · {fmt.count(usage.output)} output"
        )


# --- beside the conversation ------------------------------------------------------------------------------------------


class SettingsForm:
    """Model, protocol, system prompt, sampling and tools. Each field writes to the conversation's settings, which are
    kept when the page is left."""

    def __init__(self, session: PageSession) -> None:
        self._session, self._settings = session, session.conversation.settings
        self._model = ui.select([], label="Model", with_input=True, new_value_mode="add-unique")
        self._model.props("outlined dense").classes("w-full model").on_value_change(self._setter("model"))
        protocol = ui.select(PROTOCOLS, value=self._settings.protocol, label="Protocol").props("outlined dense")
        protocol.classes("w-full protocol").on_value_change(self._setter("protocol"))
        self._text("system", "System prompt")
        with ui.element("div").classes("fields w-full").style("grid-template-columns: 1fr 1fr"):
            self._number("temperature", "Temperature", 0.1, integer=False)
            self._number("top_p", "Top p", 0.05, integer=False)
            self._number("top_k", "Top k", 1)
            self._number("max_tokens", "Max tokens", 1)
            self._number("seed", "Seed", 1)
            thinking = ui.select(list(THINKING_MODES), value=self._settings.thinking, label="Thinking")
            thinking.props("outlined dense").on_value_change(self._setter("thinking"))
        with ui.expansion("Stop strings").classes("w-full").props("dense"):
            self._text("stop", "One per line")
        with ui.expansion("Tools").classes("w-full").props("dense"):
            self._text("tools", "JSON", _TOOLS_EXAMPLE)
        ui.timer(0, lambda: session.perform(self._list_models()), once=True)

    async def _list_models(self) -> None:
        records = await self._session.client.models()
        names = [record["id"] for record in sorted(records, key=lambda record: not record["loaded"])]
        chosen = self._settings.model or (names[0] if names else "")
        self._model.set_options([*names, *([chosen] if chosen and chosen not in names else [])], value=chosen)

    def _setter(self, name: str, integer: bool = False) -> Any:
        def changed(event: Any) -> None:
            value = event.value
            if integer and value is not None:
                value = int(value)
            setattr(self._settings, name, value)

        return changed

    def _number(self, name: str, label: str, step: float, *, integer: bool = True) -> None:
        field = ui.number(label, value=getattr(self._settings, name), step=step, placeholder="default")
        field.props("outlined dense").on_value_change(self._setter(name, integer))

    def _text(self, name: str, label: str, hint: str = "") -> None:
        field = ui.textarea(label, value=getattr(self._settings, name), placeholder=hint)
        field.props("outlined dense autogrow").classes(f"w-full {name}").on_value_change(self._setter(name))


class WireInspector:
    """The request as it was sent, the events as they arrive, and the request as code."""

    def __init__(self) -> None:
        with ui.tabs().props("dense no-caps align=left").classes("w-full") as tabs:
            for name in ("Request", "Events", "curl", "Python"):
                ui.tab(name)
        with ui.tab_panels(tabs, value="Request", keep_alive=True).classes("w-full").props("animated=false"):
            with ui.tab_panel("Request").classes("px-0"):
                self._request = CodePane("No request was sent yet.")
            with ui.tab_panel("Events").classes("px-0"), ui.element("div").classes("code-block mono sse"):
                self._events = StreamingText()
            with ui.tab_panel("curl").classes("px-0"):
                self._curl = CodePane()
            with ui.tab_panel("Python").classes("px-0"):
                self._python = CodePane()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def start(self, client: ApiClient, protocol: WireProtocol, body: bytes) -> None:
        path, needs_key = protocol.PATHS[0], bool(client.key)
        self._request.set(f"POST {path}\n\n{format_body(body)}")
        self._curl.set(curl_snippet(client.url, path, body, needs_key))
        self._python.set(python_snippet(client.url, path, body, needs_key))
        self._events.clear()
        self._decoder.reset()

    def feed(self, data: bytes) -> None:
        self._events.append(self._decoder.decode(data))

    def flush(self) -> None:
        self._events.flush()
