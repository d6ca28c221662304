"""The chat page: stored chats, one or several models that answer, and the request and events on the wire."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace
from nicegui import background_tasks, events, ui

from modelyard.core.chat import Chat, ChatSummary, Turn, new_id, to_markdown
from modelyard.core.errors import ModelyardError
from modelyard.core.events import BlockDelta, BlockStart, Event, Failed, Finished, ReplyBuilder, Started, Usage
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Audio, Document, Image, Part, Text, Thinking, ToolCall, ToolResult
from modelyard.http.errors import load_protocol
from modelyard.workbench import formatting as fmt
from modelyard.workbench.api_client import ApiClient, Json
from modelyard.workbench.chat_request import (
    FILE_TYPES,
    PROTOCOLS,
    THINKING_MODES,
    attached_part,
    chat_request,
    curl_snippet,
    format_body,
    python_snippet,
    refusal,
)
from modelyard.workbench.components import CodePane, MarkdownText, StreamingText, copy_button, page_heading, show_notice
from modelyard.workbench.session import PageSession

MAX_MODELS = 4  # that answer side by side
_MAX_FILE_BYTES = 20 * 1024**2
_FLUSH_INTERVAL_S = 0.1
_COUNT_DELAY_S = 0.4  # after the last key
_TOOLS_EXAMPLE = '[{"name": "weather", "description": "…", "parameters": {"type": "object", "properties": {…}}}]'


def page(session: PageSession, model: str = "", id: str = "") -> None:
    page_heading("Chat")
    with ui.element("div").classes("chat-page"):
        ChatPage(session, model, id)


class ChatPage:
    def __init__(self, session: PageSession, model: str, id: str) -> None:
        self._session = session
        with ui.element("section").classes("card chat-list").props('aria-label="Chats"'):
            self._list = ChatList(session, self._open, self._new)
        with ui.element("section").classes("card chat-main").props('aria-label="Conversation"'):
            self._view = ChatView(session, self._list.refresh)
        with ui.element("section").classes("card chat-side").props('aria-label="Settings and wire"'):
            with ui.tabs().props("dense no-caps align=left").classes("w-full") as tabs:
                settings_tab = ui.tab("Settings")
                for name in WireInspector.PANES:
                    ui.tab(name)
            with ui.tab_panels(tabs, value=settings_tab, keep_alive=True).classes("w-full").props("animated=false"):
                with ui.tab_panel(settings_tab).classes("px-0") as self._form_box:
                    pass
                self._view.inspector = WireInspector()
        if model:
            session.chat.settings.models = [model]
        self._show()
        if id and id != session.chat.id:
            ui.timer(0, lambda: self._open(id), once=True)

    def _show(self) -> None:
        self._form_box.clear()
        with self._form_box:
            SettingsForm(self._session, self._view.count_soon)
        self._view.show()

    async def _open(self, id: str) -> None:
        try:
            chat = await self._session.client.chat(id)
        except ModelyardError as error:
            self._session.show_error(error)
            return
        self._view.stop()
        self._session.chat = chat
        self._show()
        self._list.refresh()

    def _new(self) -> None:
        self._view.stop()
        self._session.chat = Chat(settings=replace(self._session.chat.settings))
        self._show()
        _show_path("/chat")
        self._list.refresh()


def _show_path(path: str) -> None:
    """Change the address in the browser without opening another page."""
    ui.run_javascript(f"history.replaceState(null, '', location.pathname.replace(/\\/chat.*/, '{path}'))")


# --- the list of chats ------------------------------------------------------------------------------------------------


class ChatList:
    """The stored chats, newest first, with a search over their texts."""

    def __init__(self, session: PageSession, open_chat: Callable[[str], Any], new_chat: Callable[[], None]) -> None:
        self._session, self._open, self._new = session, open_chat, new_chat
        with ui.element("div").classes("line no-wrap w-full"):
            self._search = ui.input(placeholder="Search").props('outlined dense clearable debounce=300 type="search"')
            self._search.props('aria-label="Search in chats"').classes("grow").on_value_change(self.refresh)
            button = ui.button(icon="add", on_click=new_chat).props('unelevated dense aria-label="New chat"')
            button.tooltip("New chat")
        self._box = ui.element("div").classes("rows").props("role=list")
        self._empty = ui.label("").classes("muted small")
        self._rows: dict[str, ChatRow] = {}
        self.refresh()

    def refresh(self) -> None:
        background_tasks.create_or_defer(self._load(), name=f"chats {id(self)}")

    async def _load(self) -> None:
        """Rows stay the same elements: a menu may be open on one, or a finger on it."""
        try:
            found = await self._session.client.chats(self._search.value or "")
        except ModelyardError as error:
            self._session.show_error(error)
            return
        if self._box.is_deleted:
            return
        show_notice(self._empty, "" if found else "Nothing found." if self._search.value else "No chats yet.")
        for gone in self._rows.keys() - {summary.id for summary in found}:
            self._rows.pop(gone).delete()
        for place, summary in enumerate(found):
            if summary.id not in self._rows:
                with self._box:
                    self._rows[summary.id] = ChatRow(self, summary)
            self._rows[summary.id].update(summary, place, is_current=summary.id == self._session.chat.id)

    def open(self, id: str) -> Any:
        return self._open(id)

    def rename(self, chat: ChatSummary) -> None:
        with ui.dialog() as dialog, ui.card().classes("card w-96"):
            name = ui.input("Name of the chat", value=chat.title).props("outlined autofocus").classes("w-full")

            async def submit() -> None:
                dialog.close()
                await self._change(chat.id, lambda found: setattr(found, "title", (name.value or "").strip()))

            name.on("keydown.enter", submit)
            ui.button("Rename", on_click=submit).props("unelevated no-caps").classes("self-end")
        dialog.open()

    async def _change(self, id: str, change: Callable[[Chat], None]) -> None:
        try:
            chat = self._session.chat if id == self._session.chat.id else await self._session.client.chat(id)
            change(chat)
            await self._session.store(chat)
        except ModelyardError as error:
            self._session.show_error(error)
        self.refresh()

    async def export(self, id: str, kind: str) -> None:
        try:
            chat = await self._session.client.chat(id)
        except ModelyardError as error:
            self._session.show_error(error)
            return
        name = "".join(letter if letter.isalnum() else "-" for letter in chat.display_title)[:60].strip("-") or "chat"
        content = to_markdown(chat).encode() if kind == "md" else msgspec.json.format(msgspec.json.encode(chat))
        ui.download.content(content, f"{name}.{kind}")

    async def duplicate(self, id: str) -> None:
        try:
            copied = (await self._session.client.chat(id)).copy(time.time())
            await self._session.store(copied)
        except ModelyardError as error:
            self._session.show_error(error)
            return
        await self._open(copied.id)

    def delete(self, chat: ChatSummary) -> None:
        with ui.dialog() as dialog, ui.card().classes("card w-96"):
            ui.label(f"Delete “{chat.title}”?").classes("name")
            ui.label("It cannot be restored.").classes("muted small")

            async def confirm() -> None:
                dialog.close()
                if await self._session.perform(self._session.client.delete_chat(chat.id)):
                    if chat.id == self._session.chat.id:
                        self._new()
                    self.refresh()

            with ui.element("div").classes("line self-end"):
                ui.button("Cancel", on_click=dialog.close).props("flat no-caps")
                ui.button("Delete", on_click=confirm).props("unelevated no-caps color=negative")
        dialog.open()


class ChatRow:
    def __init__(self, chats: ChatList, chat: ChatSummary) -> None:
        self._chat, self._is_current = chat, False
        with ui.element("div").classes("row").props("role=listitem") as self._box:
            open_button = ui.button(on_click=lambda: chats.open(self._chat.id)).props("flat no-caps align=left")
            with open_button.classes("grow title-button"), ui.column().classes("gap-0 items-start"):
                self._title = ui.label(chat.title).classes("row-title")
                self._updated = ui.label("").classes("muted small")
            more = ui.button(icon="more_vert").props('flat round dense size=sm color=grey aria-label="More"')
            with more, ui.menu():
                ui.menu_item("Rename", lambda: chats.rename(self._chat))
                ui.menu_item("Export as Markdown", lambda: chats.export(self._chat.id, "md"))
                ui.menu_item("Export as JSON", lambda: chats.export(self._chat.id, "json"))
                ui.menu_item("Duplicate what is shown", lambda: chats.duplicate(self._chat.id))
                ui.menu_item("Delete", lambda: chats.delete(self._chat))

    def update(self, chat: ChatSummary, place: int, *, is_current: bool) -> None:
        self._chat = chat
        self._title.set_text(chat.title)
        self._updated.set_text(fmt.ago(chat.updated, time.time()))
        if is_current != self._is_current:
            self._is_current = is_current
            self._box.classes(add="current" if is_current else "", remove="" if is_current else "current")
        siblings = self._box.parent_slot.children if self._box.parent_slot is not None else []
        if siblings and siblings[place] is not self._box:
            self._box.move(target_index=place)

    def delete(self) -> None:
        self._box.delete()


# --- one chat ---------------------------------------------------------------------------------------------------------


class ChatView:
    """The turns of the session's chat, and the composer. Several answers may be streamed at a time."""

    def __init__(self, session: PageSession, on_stored: Callable[[], None]) -> None:
        self._session, self._on_stored = session, on_stored
        self.inspector: WireInspector  # set by the page
        self._streams: dict[str, ui.timer] = {}  # by the id of the answer; its task streams it
        self._attached: list[Part] = []
        with ui.element("div").classes("messages-box"):
            self._messages = ui.element("div").classes("messages")
            self._messages.props('role=log aria-label="Messages" tabindex=0')
            jump = ui.button(icon="arrow_downward", on_click=self._jump).classes("jump")
            jump.props('round unelevated dense aria-label="Jump to the end"')
        self._build_composer()

    # --- composing ----------------------------------------------------------------------------------------------------

    def _build_composer(self) -> None:
        self._attachments = ui.element("div").classes("line")
        self._refusal = ui.label("").classes("error small text").props("role=alert")
        self._refusal.set_visibility(False)
        with ui.element("div").classes("w-full composer") as composer:
            self._input = ui.textarea(placeholder="Type a message. Enter sends, Shift+Enter starts a new line.")
            self._input.props('outlined autogrow autofocus aria-label="Message"').classes("w-full")
            self._input.on("keydown.enter.exact.prevent", self._send)
            self._input.on_value_change(self.count_soon)
        with ui.element("div").classes("line no-wrap"):
            self._send_button = ui.button("Send", icon="send", on_click=self._send).props("unelevated no-caps")
            self._stop_button = ui.button("Stop", icon="stop", on_click=self.stop)
            self._stop_button.props("unelevated no-caps color=negative")
            upload = ui.upload(on_upload=self._attach, auto_upload=True, multiple=True, max_file_size=_MAX_FILE_BYTES)
            upload.props(f'accept="{",".join(FILE_TYPES)}"').classes("hidden").on("rejected", self._rejected)
            attach = ui.button(icon="attach_file", on_click=lambda: upload.run_method("pickFiles"))
            attach.props('flat dense color=grey aria-label="Attach files"')
            attach.tooltip("Images, sound and PDF; or paste or drop them")
            ui.space()
            with ui.element("div").classes("context-meter") as self._count_box:
                self._count = ui.label("").classes("muted small").props("aria-live=polite")
                self._fill = ui.linear_progress(0, show_value=False, size="3px").props('aria-label="Context in use"')
        self._fill.set_visibility(False)
        with self._count_box:
            self._count_timer = ui.timer(_COUNT_DELAY_S, self._count_tokens, once=True)
        ui.run_javascript(
            f"modelyard.follow(getHtmlElement({self._messages.id}));"
            f"modelyard.takeFiles(getHtmlElement({composer.id}), {upload.id})"
        )
        self._update_busy()

    async def _attach(self, event: events.UploadEventArguments) -> None:
        """A file that a chosen model does not take is refused, with the reason."""
        name, chosen = event.file.name, self._session.chat.settings.models
        try:
            part = attached_part(name, event.file.content_type, await event.file.read())
            records = await self._session.client.rows("models")
        except ModelyardError as error:
            show_notice(self._refusal, error.message)
            return
        taken = {record["id"]: record["capabilities"]["modalities"] for record in records if record["id"] in chosen}
        reason = refusal(part, name, taken)
        show_notice(self._refusal, reason)
        if not reason:
            self._attached.append(part)
            self._show_attachments()

    def _rejected(self) -> None:
        show_notice(
            self._refusal, f"Images, WAV, MP3, FLAC and PDF of up to {fmt.size(_MAX_FILE_BYTES)} can be attached."
        )

    def _show_attachments(self) -> None:
        self._attachments.clear()
        with self._attachments:
            for part in self._attached:
                with ui.element("div").classes("attachment"):
                    _show_part(part)
                    remove = ui.button(icon="close", on_click=lambda part=part: self._detach(part))
                    remove.props('round dense size=xs color=grey-8 aria-label="Remove"')
        self.count_soon()

    def _detach(self, part: Part) -> None:
        self._attached.remove(part)
        self._show_attachments()

    def _update_busy(self) -> None:
        self._send_button.set_visibility(not self._streams)
        self._stop_button.set_visibility(bool(self._streams))

    def _jump(self) -> None:
        ui.run_javascript(f"modelyard.jump(getHtmlElement({self._messages.id}))")

    # --- how full the window is ---------------------------------------------------------------------------------------

    def count_soon(self) -> None:
        self._count_timer.cancel()
        with self._count_box:
            self._count_timer = ui.timer(_COUNT_DELAY_S, self._count_tokens, once=True)

    async def _count_tokens(self) -> None:
        """Of the chat with the message that is being typed. Models that cannot count show nothing."""
        chat = self._session.chat
        if not chat.settings.models or self._session.locked:
            return
        draft = (*self._attached, *((Text(self._input.value),) if self._input.value else ()))
        try:
            request = chat_request(chat, chat.settings.models[0], draft=draft)
            count, window = await self._session.client.count_tokens(request)
        except ModelyardError:
            self._count.set_text("")
            self._fill.set_visibility(False)
            return
        if window:
            self._count.set_text(f"{fmt.count(count)} of {fmt.count(window)} tokens")
            self._fill.set_value(min(1.0, count / window))
            self._fill.props(f"color={'negative' if count > window else 'primary'}")
        else:
            self._count.set_text(f"{fmt.count(count)} tokens")
        self._fill.set_visibility(bool(window))

    # --- sending ------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        text = (self._input.value or "").strip()
        if self._streams or not (text or self._attached):
            return
        parts = (*self._attached, *((Text(text),) if text else ()))
        chat = self._session.chat
        turn = Turn(parent=chat.head, role="user", parts=parts, at=time.time())
        if self._ask(turn):
            self._input.set_value("")
            self._attached = []
            show_notice(self._refusal, "")
            self._show_attachments()

    def _ask(self, turn: Turn) -> bool:
        """Add a turn and request an answer from each chosen model."""
        chat = self._session.chat
        before = chat.head
        chat.add(turn)
        if not self._answer(turn.id, chat.settings.models):
            chat.remove(turn)
            chat.head = before
            return False
        return True

    def _answer(self, parent: str, models: Sequence[str]) -> bool:
        """Whether a request could be made. The answers are added as alternatives."""
        chat = self._session.chat
        try:
            protocol = load_protocol(chat.settings.protocol)
            bodies = [protocol.write_request(chat_request(chat, model, parent)) for model in models]
        except ModelyardError as error:
            self._session.show_error(error)
            return False
        if not models:
            ui.notify("Choose a model first", type="negative")
            return False
        round = new_id() if len(models) > 1 else ""
        turns = [Turn(parent=parent, role="assistant", at=time.time(), model=model, round=round) for model in models]
        for turn in turns:
            chat.turns.append(turn)
        chat.head = turns[0].id
        self.show(dict(zip((turn.id for turn in turns), bodies, strict=True)))
        self._save()
        self._jump()
        return True

    def _stream_into(self, view: AnswerView, body: bytes) -> None:
        """The timers, and with them the stream, end when the page is left."""
        protocol = load_protocol(self._session.chat.settings.protocol)
        self.inspector.start(view.turn.id, self._session.client, protocol, body)
        flushing = ui.timer(_FLUSH_INTERVAL_S, lambda: self._flush(view))
        self._streams[view.turn.id] = ui.timer(0, lambda: self._stream(view, protocol, body, flushing), once=True)
        self._update_busy()

    async def _stream(self, view: AnswerView, protocol: WireProtocol, body: bytes, flushing: ui.timer) -> None:
        try:
            async for data in self._session.client.stream(protocol, body):
                self.inspector.feed(view.turn.id, data)
                view.feed(data)
            view.finish()
        except ModelyardError as error:
            view.fail(error)
        finally:
            flushing.cancel()
            view.close()
            self._streams.pop(view.turn.id, None)
            self._save()
            if not self._messages.is_deleted:
                self._flush(view)
                view.show_end()
                self._update_busy()
                self.count_soon()
                if view.needs_attention:
                    self._jump()

    def _flush(self, view: AnswerView) -> None:
        self.inspector.flush()
        view.flush()

    def stop(self) -> None:
        for stream in list(self._streams.values()):
            stream.cancel(with_current_invocation=True)

    def _save(self) -> None:
        """In the background: a chat that cannot be stored is still shown, and the reason with it."""
        chat = self._session.chat
        chat.updated = time.time()
        chat.created = chat.created or chat.updated

        async def save() -> None:
            try:
                is_new = chat.revision == 0
                await self._session.store(chat)
            except ModelyardError as error:
                if not self._messages.is_deleted:
                    with self._messages:
                        self._session.show_error(error)
                return
            if not self._messages.is_deleted and chat is self._session.chat:
                with self._messages:
                    if is_new:
                        _show_path(f"/chat/{chat.id}")
                self._on_stored()

        self._session.saving.append(background_tasks.create(save(), name="save chat"))

    # --- showing ------------------------------------------------------------------------------------------------------

    def show(self, bodies: dict[str, bytes] | None = None) -> None:
        """Show the path of the chat. `bodies` are the requests of answers that begin now."""
        chat = self._session.chat
        results = {part.call_id: part for turn in chat.turns for part in turn.parts if isinstance(part, ToolResult)}
        self._messages.clear()
        with self._messages:
            if not chat.turns:
                ui.label("Ask anything. The chat is stored on this server.").classes("muted empty")
            for turn in chat.path():
                if turn.role == "user":
                    UserTurnView(self, turn)
                elif turn.role == "assistant":
                    answers = chat.round(turn)
                    with ui.element("div").classes("round" if len(answers) > 1 else "w-full"):
                        for answer in answers:
                            view = AnswerView(self, answer, results)
                            if bodies and answer.id in bodies:
                                self._stream_into(view, bodies[answer.id])
        self._update_busy()
        self.count_soon()

    @property
    def chat(self) -> Chat:
        return self._session.chat

    @property
    def is_streaming(self) -> bool:
        return bool(self._streams)

    def rewrite(self, turn: Turn, text: str) -> None:
        """Send another version of a message; the old one stays as an alternative."""
        chat = self._session.chat
        if not self._streams and text.strip():
            shown = chat.head
            edited = chat.rewrite(turn, text, time.time())
            if not self._answer(edited.id, chat.settings.models):
                chat.remove(edited)
                chat.head = shown

    def regenerate(self, turn: Turn) -> None:
        """Another answer to the same message, by the model that gave this one."""
        if not self._streams and turn.parent is not None:
            self._answer(turn.parent, [turn.model] if turn.model else self._session.chat.settings.models)

    def select(self, turn: Turn) -> None:
        if not self._streams:
            self._session.chat.select(turn)
            self.show()
            self._save()

    def send_results(self, turn: Turn, results: dict[str, str]) -> None:
        if not self._streams:
            parts = tuple(ToolResult(call, (Text(text),)) for call, text in results.items())
            self._session.chat.head = turn.id
            self._ask(Turn(parent=turn.id, role="tool", parts=parts, at=time.time()))


def _small_button(icon: str, label: str, on_click: Callable[[], Any]) -> ui.button:
    button = ui.button(icon=icon, on_click=on_click).props(f'flat round dense size=sm color=grey aria-label="{label}"')
    button.tooltip(label)
    return button


def _alternatives(view: ChatView, turn: Turn) -> None:
    """Which version of a turn is shown, with buttons to the others."""
    versions = view.chat.alternatives(turn)
    if len(versions) < 2:
        return
    at = next(index for index, version in enumerate(versions) if version.id == turn.id)
    with ui.element("div").classes("line versions"):
        back = _small_button("chevron_left", "Previous version", lambda: view.select(versions[at - 1]))
        back.set_enabled(at > 0)
        ui.label(f"{at + 1} / {len(versions)}").classes("muted small")
        onward = _small_button("chevron_right", "Next version", lambda: view.select(versions[at + 1]))
        onward.set_enabled(at < len(versions) - 1)


def _show_part(part: Part) -> None:
    if isinstance(part, Image):
        ui.image(part.url).classes("picture").props('alt="Attached image"')
    elif isinstance(part, Audio):
        ui.audio(part.url).classes("sound").props('aria-label="Attached sound"')
    elif isinstance(part, Document):
        with ui.element("div").classes("file-chip line no-wrap"):
            ui.icon("picture_as_pdf").classes("text-lg").props("aria-hidden=true")
            ui.label(part.name or "document.pdf").classes("text small")
            ui.label(fmt.size(len(part.url) * 3 // 4)).classes("muted small")
    elif isinstance(part, Text):
        ui.label(part.text).classes("text")


class UserTurnView:
    def __init__(self, view: ChatView, turn: Turn) -> None:
        self._view, self._turn = view, turn
        with ui.element("div").classes("turn user") as self._box:
            self._show()

    def _show(self) -> None:
        for part in self._turn.parts:
            _show_part(part)
        with ui.element("div").classes("line actions"):
            _alternatives(self._view, self._turn)
            copy_button(lambda: self._turn.text, "Copy the message")
            _small_button("edit", "Edit and send again", self._edit)

    def _edit(self) -> None:
        if self._view.is_streaming:
            return
        self._box.clear()
        with self._box:
            field = ui.textarea(value=self._turn.text).props('outlined autogrow autofocus aria-label="Edited message"')
            field.classes("w-full edit-field")

            def send() -> None:
                self._view.rewrite(self._turn, field.value or "")

            field.on("keydown.enter.exact.prevent", send)
            field.on("keydown.escape", self._view.show)
            with ui.element("div").classes("line"):
                ui.button("Send", on_click=send).props("unelevated no-caps size=sm")
                ui.button("Cancel", on_click=self._view.show).props("flat no-caps size=sm")


class AnswerView:
    """An answer, stored or while it is streamed: reasoning folded away, text as Markdown, tool calls as cards. However
    it ends, the chat can go on."""

    def __init__(self, view: ChatView, turn: Turn, results: dict[str, ToolResult]) -> None:
        self._view, self.turn, self._results = view, turn, results
        self._builder, self._speed = ReplyBuilder(), SpeedMeter()
        self._reader = load_protocol(view.chat.settings.protocol).reader()
        self._boxes: list[StreamingText | MarkdownText] = []
        self._texts: list[tuple[str, str]] = []  # kind and text of each block, for an answer that is cut off
        self._thinking: ui.expansion | None = None
        with ui.element("div").classes("turn assistant"):
            ui.label(turn.model).classes("muted small")
            self._placeholder = ui.label("…").classes("muted")
            self._body = ui.element("div").classes("w-full")
            self._footer = ui.element("div").classes("line muted small actions")
        if turn.end:
            self._show_stored()

    def _show_stored(self) -> None:
        with self._body:
            for part in self.turn.parts:
                if isinstance(part, Thinking):
                    self._start_thinking("Thoughts").append(part.text)
                elif isinstance(part, ToolCall):
                    ToolCallCard(part, self._results.get(part.id))
                elif isinstance(part, Text):
                    box = MarkdownText()
                    box.append(part.text)
                    self._boxes.append(box)
        self.flush()
        self.show_end()

    # --- streaming ----------------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        self._handle(self._reader.feed(data))

    def finish(self) -> None:
        self._handle(self._reader.finish())

    def flush(self) -> None:
        for box in self._boxes:
            box.flush(at_end=bool(self.turn.end))

    def _handle(self, new_events: list[Event]) -> None:
        for event in new_events:
            if isinstance(event, Failed):
                raise event.error
            self._builder.feed([event])
            if isinstance(event, Started):
                self._change(request="".join(letter for letter in event.id if letter.isalnum()))
            elif isinstance(event, BlockStart):
                self._start_block(event)
            elif isinstance(event, BlockDelta):
                self._speed.delta()
                self._boxes[-1].append(event.text)
                kind, text = self._texts[-1]
                self._texts[-1] = kind, text + event.text
            elif isinstance(event, Finished):
                reply = self._builder.reply()
                parts = tuple(block.part for block in reply.blocks)
                summary = f"{self._speed.summary(event.usage)} · {event.reason}"
                self._change(parts=parts or (Text(""),), end="finished", summary=summary)

    def _start_block(self, event: BlockStart) -> None:
        self._placeholder.set_visibility(False)
        self._texts.append((event.kind, ""))
        if self._thinking is not None:
            self._thinking.set_text("Thoughts")
        with self._body:
            if event.kind == "thinking":
                self._start_thinking("Thinking…")
            elif event.kind == "tool_call":
                with ui.element("div").classes("call"):
                    ui.label(event.name).classes("mono call-name")
                    self._boxes.append(StreamingText("mono text"))
            else:
                self._boxes.append(MarkdownText())

    def _start_thinking(self, title: str) -> StreamingText:
        self._thinking = ui.expansion(title).classes("w-full muted small thinking").props("dense")
        with self._thinking:
            box = StreamingText("text reasoning")
        self._boxes.append(box)
        return box

    def fail(self, error: ModelyardError) -> None:
        if not self.turn.end:
            self._cut_off("failed", error.message)

    def close(self) -> None:
        """An answer that has not ended by now was stopped, by the button or by leaving the page."""
        if not self.turn.end:
            self._cut_off("stopped", "")

    def _cut_off(self, end: Any, error: str) -> None:
        """Keep the text and the reasoning; a call that is not complete is dropped."""
        parts: list[Part] = []
        for kind, text in self._texts:
            if kind == "thinking":
                parts.append(Thinking(text))
            elif kind == "text" and text:
                parts.append(Text(text))
        self._change(parts=tuple(parts), end=end, error=error, summary=end)

    def _change(self, **changes: Any) -> None:
        self.turn = replace(self.turn, **changes)
        self._view.chat.put(self.turn)

    # --- after the end ------------------------------------------------------------------------------------------------

    @property
    def needs_attention(self) -> bool:
        """Whether the user must see its end: an error, or calls that wait for results."""
        return bool(self.turn.error or self.turn.calls)

    def show_end(self) -> None:
        self._placeholder.set_visibility(False)
        turn = self.turn
        if self._thinking is not None:
            self._thinking.set_text("Thoughts")
        with self._body:
            if turn.error:
                ui.label(turn.error).classes("error small text").props("role=alert")
            waiting = [call for call in turn.calls if call.id not in self._results]
            if waiting and turn.end == "finished":
                self._ask_for_results(waiting)
        self._footer.clear()
        with self._footer:
            self._show_footer()

    def _show_footer(self) -> None:
        turn, view = self.turn, self._view
        _alternatives(view, turn)
        copy_button(lambda: self.turn.text, "Copy the answer")
        _small_button("refresh", "Answer again", lambda: view.regenerate(self.turn))
        if len(view.chat.round(turn)) > 1 and view.chat.head != turn.id:
            button = ui.button("Continue with this", on_click=lambda: view.select(self.turn))
            button.props("outline no-caps size=sm dense")
        ui.label(turn.summary)
        if turn.request:
            ui.link("view request", f"/requests/req_{turn.request}")

    def _ask_for_results(self, calls: Sequence[ToolCall]) -> None:
        fields = {call.id: ui.textarea(f"Result of {call.name}").props("outlined dense autogrow") for call in calls}
        for field in fields.values():
            field.classes("w-full mt-2 tool-result")

        def send() -> None:
            self._view.send_results(self.turn, {call: field.value or "" for call, field in fields.items()})

        ui.button("Send results", icon="reply", on_click=send).props("outline no-caps size=sm")


class ToolCallCard:
    """A call with its arguments and, once it is known, its result."""

    def __init__(self, call: ToolCall, result: ToolResult | None) -> None:
        with ui.element("div").classes("call"):
            ui.label(call.name).classes("mono call-name")
            ui.label(_indented(call.arguments)).classes("mono text")
            if result is not None:
                text = "".join(content.text for content in result.content if isinstance(content, Text))
                ui.label("Result").classes("caption")
                ui.label(text).classes("mono text")


def _indented(arguments: str) -> str:
    try:
        return msgspec.json.format(arguments, indent=2)
    except msgspec.DecodeError:
        return arguments


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


# --- beside the chat --------------------------------------------------------------------------------------------------


class SettingsForm:
    """Models, protocol, system prompt, sampling and tools. Each field writes to the chat's settings."""

    def __init__(self, session: PageSession, on_change: Callable[[], None]) -> None:
        self._session, self._settings, self._on_change = session, session.chat.settings, on_change
        self._models = ui.select([], label="Models", multiple=True, with_input=True, new_value_mode="add-unique")
        self._models.props(f"outlined dense use-chips max-values={MAX_MODELS}").classes("w-full model")
        self._models.props(f'hint="Up to {MAX_MODELS} answer side by side"')
        protocol = ui.select(PROTOCOLS, value=self._settings.protocol, label="Protocol").props("outlined dense")
        protocol.classes("w-full protocol mt-4").on_value_change(self._setter("protocol"))
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
        """Models that chat and are loaded come first. Without a choice, the first that can chat is chosen."""
        records = await self._session.client.rows("models")
        records = sorted(records, key=lambda record: (not record["capabilities"]["chat"], not record["loaded"]))
        names = [str(record["id"]) for record in records]
        chosen = self._settings.models or [name for name in names[:1] if _can_chat(records[0])]
        self._settings.models = chosen
        self._models.set_options(list(dict.fromkeys([*names, *chosen])), value=chosen)
        self._models.on_value_change(self._setter("models"))
        self._on_change()

    def _setter(self, name: str, integer: bool = False) -> Any:
        def changed(event: Any) -> None:
            value = event.value
            if integer and value is not None:
                value = int(value)
            setattr(self._settings, name, (value or []) if name == "models" else value)
            self._on_change()

        return changed

    def _number(self, name: str, label: str, step: float, *, integer: bool = True) -> None:
        field = ui.number(label, value=getattr(self._settings, name), step=step, placeholder="default")
        field.props("outlined dense").on_value_change(self._setter(name, integer))

    def _text(self, name: str, label: str, hint: str = "") -> None:
        field = ui.textarea(label, value=getattr(self._settings, name), placeholder=hint)
        field.props("outlined dense autogrow").classes(f"w-full {name}").on_value_change(self._setter(name))


def _can_chat(record: Json) -> bool:
    return bool(record["capabilities"]["chat"] and (record["loaded"] or record["loads_on_request"]))


class WireInspector:
    """The request as it was sent, the events as they arrive, and the request as code. Of several answers that are
    streamed at once, the last one that began is shown."""

    PANES = ("Request", "Events", "curl", "Python")

    def __init__(self) -> None:
        with ui.tab_panel("Request").classes("px-0"):
            self._request = CodePane("No request was sent yet.")
        with (
            ui.tab_panel("Events").classes("px-0"),
            ui.element("div").classes("code-block mono sse").props("tabindex=0"),
        ):
            self._events = StreamingText()
        with ui.tab_panel("curl").classes("px-0"):
            self._curl = CodePane()
        with ui.tab_panel("Python").classes("px-0"):
            self._python = CodePane()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._answer = ""  # the id of the answer that is shown

    def start(self, answer: str, client: ApiClient, protocol: WireProtocol, body: bytes) -> None:
        self._answer = answer
        path, needs_key = protocol.PATHS[0], bool(client.key)
        self._request.set(f"POST {path}\n\n{format_body(body)}")
        self._curl.set(curl_snippet(client.url, path, body, needs_key))
        self._python.set(python_snippet(client.url, path, body, needs_key))
        self._events.clear()
        self._decoder.reset()

    def feed(self, answer: str, data: bytes) -> None:
        if answer == self._answer:
            self._events.append(self._decoder.decode(data))

    def flush(self) -> None:
        self._events.flush()
