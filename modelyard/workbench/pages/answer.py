"""One turn of a conversation on the page; of the assistant's, reasoning, text and calls apart, while they come."""

from __future__ import annotations

import time
from collections.abc import Callable

from nicegui import ui

from modelyard.core.errors import ModelyardError
from modelyard.core.events import BlockDelta, BlockStart, Event, Failed, Finished, ReplyBuilder, Started, Usage
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Image, Message, Part, Text, ToolCall, ToolResult
from modelyard.workbench import words
from modelyard.workbench.parts import Flow
from modelyard.workbench.talk import Talk

Question = ui.element


def show_turn(message: Message) -> Question:
    with ui.element("div").classes(f"turn {'assistant' if message.role == 'assistant' else 'user'}") as turn:
        for part in message.parts:
            _show_part(part)
    return turn


def _show_part(part: Part) -> None:
    if isinstance(part, Image):
        ui.image(part.url).style("max-width: 240px; border-radius: 8px").props('alt="Picture"')
    elif isinstance(part, Text):
        ui.label(part.text).classes("text")
    elif isinstance(part, ToolCall):
        ui.label(f"{part.name}({part.arguments})").classes("call mono text")
    elif isinstance(part, ToolResult):
        said = "".join(one.text for one in part.content if isinstance(one, Text))
        ui.label(said).classes("mono text")


class Pace:
    """When things happened, as the client saw them."""

    def __init__(self) -> None:
        self._sent = time.perf_counter()
        self._first: float | None = None

    def delta(self) -> None:
        if self._first is None:
            self._first = time.perf_counter()

    def told(self, usage: Usage) -> str:
        now = time.perf_counter()
        first = self._first if self._first is not None else now
        rate = (usage.output - 1) / (now - first) if usage.output > 1 and now > first else None
        cached = f", {words.count(usage.cached)} cached" if usage.cached else ""
        return (
            f"first token {words.seconds(first - self._sent)} · {words.rate(rate)} tok/s · "
            f"{words.count(usage.prompt)} prompt{cached} · {words.count(usage.output)} output"
        )


class Answer:
    """Fed with bytes of the stream. Every way it can end leaves the conversation in a state to go on from."""

    def __init__(
        self, talk: Talk, wire: WireProtocol, question: Question, resume: Callable[[dict[str, str]], None]
    ) -> None:
        self.wire = wire
        self.on_end: Callable[[], None] = lambda: None
        self._talk, self._question, self._resume = talk, question, resume
        self._reader, self._fold, self._pace = wire.reader(), ReplyBuilder(), Pace()
        self._said, self._trace, self._over = "", "", False
        self._flows: list[Flow] = []
        self._open: Flow | None = None
        self._visible = False
        with ui.element("div").classes("turn assistant") as self._box:
            self._waiting = ui.label("…").classes("faint")
            self._body = ui.element("div").classes("w-full")
            with ui.element("div").classes("line faint small") as self._foot:
                self._line = ui.label("")

    # --- while it comes -----------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        self._see(self._reader.feed(data))

    def finish(self) -> None:
        self._see(self._reader.finish())

    def _see(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Failed):
                raise event.error
            self._fold.feed([event])
            if isinstance(event, Started):
                self._trace = event.id
            elif isinstance(event, BlockStart):
                self._begin(event)
            elif isinstance(event, BlockDelta):
                self._delta(event)
            elif isinstance(event, Finished):
                self._finished(event)

    def _begin(self, event: BlockStart) -> None:
        self._waiting.set_visibility(False)
        self._visible = event.kind == "text"
        with self._body:
            if event.kind == "thinking":
                with ui.expansion("Thinking", value=True).classes("w-full faint small thinking").props("dense"):
                    self._open = Flow("text thought")
            elif event.kind == "tool_call":
                with ui.element("div").classes("call"):
                    ui.label(f"calls {event.name}").classes("small faint")
                    self._open = Flow("mono text")
            else:
                self._open = Flow("text said")
        self._flows.append(self._open)

    def _delta(self, event: BlockDelta) -> None:
        self._pace.delta()
        if self._open is not None:
            self._open.add(event.text)
        if self._visible:
            self._said += event.text

    def flush(self) -> bool:
        return sum(flow.flush() for flow in self._flows) > 0

    # --- how it ends --------------------------------------------------------------------------------------------------

    def _finished(self, event: Finished) -> None:
        self._over = True
        reply = self._fold.reply()
        self._talk.answered(reply)
        self._tell(f"{self._pace.told(event.usage)} · {event.reason}")
        if reply.calls:
            self._ask_for_results(reply.calls)

    def fail(self, error: ModelyardError) -> None:
        if self._over:
            return
        self._over = True
        self._talk.broke_off(self._said)
        with self._body:
            ui.label(error.message).classes("trouble small text")
        self._tell("failed")

    def close(self) -> None:
        """What has not ended by now was stopped, by a button or by leaving the page."""
        self.on_end()
        if self._over:
            return
        self._over = True
        self._talk.broke_off(self._said)
        if not self._box.is_deleted:
            self._tell("stopped")

    def _tell(self, line: str) -> None:
        self._waiting.set_visibility(False)
        self._line.set_text(line)
        if self._trace:
            with self._foot:
                ui.link("see the request", f"/requests/req_{_plain(self._trace)}")

    def _ask_for_results(self, calls: tuple[ToolCall, ...]) -> None:
        with self._body:
            fields = {call.id: ui.input(f"What {call.name} says").props("outlined dense") for call in calls}
            for field in fields.values():
                field.classes("w-full mt-2")

            def hand_over() -> None:
                button.set_enabled(False)
                self._resume({call: field.value or "" for call, field in fields.items()})

            button = ui.button("Send results", icon="reply", on_click=hand_over).props("outline no-caps size=sm")


def _plain(trace: str) -> str:
    return "".join(letter for letter in trace if letter.isalnum())
