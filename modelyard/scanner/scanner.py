"""Turn a model's raw output, piece by piece, into events: reasoning, text and tool calls.

The scanner is in one region of its format, or a reader works inside a call. Input that cannot be decided yet is held
back, and no more than that. The events do not depend on how the text is cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Sequence

from modelyard.core.events import Event
from modelyard.core.output_format import OutputFormat, Reader, StartReader, SwitchRegion
from modelyard.core.request import Tool
from modelyard.core.tokenizer import Piece
from modelyard.scanner.lexer import Incremental, ParseError, TextBuffer, UnknownTool, marker_table
from modelyard.scanner.output import BlockWriter, CallBuilder, TokenText, VisibleOutput, cut_end

_QUOTE = re.compile(r"(?:(?<=[\s(\[{=:>*])|(?<![^\n]))[`\"'“«]\Z")  # a quotation begins behind a space or bracket
_CLOSING_QUOTES = {"`": "`", '"': '"', "'": "'", "“": "”", "«": "»"}
_TAG_START = re.compile(r"<[^>]*\Z")  # a marker as <function=, which a name follows
_REST_OF_TAG = re.compile(r"[^<>\n]{0,128}>?")
_PREFILL_LIMIT = 4096  # characters, if no marker tells where the assistant turn begins


def opened_quote(before: str) -> str | None:
    """What would close the quotation that this text has just opened."""
    found = _QUOTE.search(before[-2:])
    return _CLOSING_QUOTES[found.group()] if found else None


class Scanner:
    """`tools` are the offered ones (None: every name is a call). `specials` are the control and added tokens of the
    vocabulary.

    `prefill` is the tail of the prompt, from the beginning of the turn that the model continues. `token_text` is needed
    only if pieces carry log probabilities.
    """

    __slots__ = (
        *("_actions", "_blocks", "_buffer", "_calls", "_first_char", "_format", "_last_text", "_passes_text"),
        *("_prompt_end", "_reader", "_reader_start", "_region", "_table", "_text_before", "_token_text", "_visible"),
        "reasoning_tokens",
    )

    def __init__(
        self,
        format: OutputFormat,
        *,
        tools: Sequence[Tool] | None = (),
        stop: Sequence[str] = (),
        prefill: str = "",
        new_id: Callable[[], str],
        show_thinking: bool = True,
        tool_stream: bool = True,
        parallel: bool = True,
        specials: Collection[str] = (),
        token_text: TokenText | None = None,
    ) -> None:
        self._format = format
        self._table = table = marker_table(format, frozenset(specials))  # a frozenset keeps its hash: pass one
        self._buffer = TextBuffer(table.codes, table.spelled, table.turn_ends, table.call_openings)
        self._blocks = BlockWriter()
        self._visible = VisibleOutput(
            self._blocks,
            table.spellings,
            trims_newlines=format.trims_newlines,
            has_messages=format.has_messages,
            show_thinking=show_thinking,
        )
        self._calls = CallBuilder(
            self._buffer,
            self._blocks,
            self._visible,
            table.remove_tags,
            table.write,
            tools=tools,
            new_id=new_id,
            stream=tool_stream,
        )
        self._token_text = token_text
        self._reader: Generator[None, None, str | None] | None = None
        self._reader_start: StartReader | None = None
        self._prompt_end = 0  # the position in the input where the prompt ends: text before it is not repeated
        self._text_before = self._last_text = ""  # the last two pieces of the visible text
        self._passes_text = True  # no marker is open or begun: text without a `_first_char` is shown at once
        self.reasoning_tokens = 0
        self._enter(format.start_region)
        if prefill:
            self._read_prefill(prefill)
        if format.start_reader is not None and self._reader is None and self._buffer.is_empty:
            self._start_reader(format.start_reader)
        self._first_char = table.any_first_char
        if stop:
            self.set_stop_strings(stop)
        if not parallel:
            self._calls.allow_one()

    def set_stop_strings(self, stop: Sequence[str]) -> None:
        """For the text from here on."""
        self._visible.set_stop_strings(stop)
        self._first_char = self._table.first_char(stop)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the visible text."""
        return self._visible.stop_string

    @property
    def has_complete_call(self) -> bool:
        """At least one call is complete."""
        return self._calls.count > 0

    @property
    def is_in_call(self) -> bool:
        """A call has begun and is not complete."""
        return self._calls.is_open

    @property
    def is_done(self) -> bool:
        """Nothing that may still come will be shown: generation can stop."""
        return self._calls.is_done

    @property
    def is_thinking(self) -> bool:
        """Reasoning is open."""
        return self._region.kind == "thinking"

    @property
    def reasoning_end(self) -> str | None:
        """The marker that ends the open reasoning and begins visible text."""
        actions = self._region.markers.items() if self.is_thinking else ()
        regions = self._format.regions
        ends = (m for m, a in actions if isinstance(a, SwitchRegion) and regions[a.region].kind == "text")
        return next(ends, None)

    @property
    def warnings(self) -> list[str]:
        return self._calls.warnings

    def feed(self, pieces: Sequence[Piece]) -> list[Event]:
        if not (self._passes_text and self._pass(pieces)):
            for piece in pieces:
                if self.is_done:
                    break
                if len(pieces) == 1 or not (self._passes_text and self._pass((piece,))):
                    self._step(piece)
        return self._blocks.take_events()

    def _pass(self, pieces: Sequence[Piece]) -> bool:
        """Show all pieces at once if none of them needs a closer look. False: nothing was done."""
        if len(pieces) == 1:  # the usual case
            piece = pieces[0]
            if piece.special or piece.logprob is not None:
                return False
            text = piece.text
        else:
            text = ""
            for piece in pieces:
                if piece.special or piece.logprob is not None:
                    return False
                text += piece.text
        if self._first_char.search(text):
            return False
        kind = self._region.kind
        if text:  # a token that ends in half a character has none
            self._text_before, self._last_text = self._last_text, text
            if self._visible.flowing == kind:
                self._blocks.add(text)
            else:
                self._visible.show(kind, text)
        if kind == "thinking":
            self.reasoning_tokens += len(pieces)
        return True

    def finish(self, truncated: bool = False) -> list[Event]:
        """The output is over: decide everything that was held back. `truncated`: a limit ended it, not the model."""
        open_block = self._blocks.kind
        if not self._passes_text or self._visible.flowing is None:
            self._decide_rest(truncated)
        self._blocks.close()
        events = self._blocks.take_events()
        # Else only the end of a block, without text. After a call, the beginning of a marker is that of another one.
        is_cut = (truncated or self.has_complete_call) and len(events) > 1
        return cut_end(events, open_block, self._table.without_cut_marker) if is_cut else events

    def _decide_rest(self, truncated: bool) -> None:
        self._buffer.end(truncated)
        if self._reader is not None or not self._buffer.is_empty:
            self._advance()
        if self._calls.drafts and not self.is_done:
            if truncated:
                self._show_drafts()
            else:
                self._visible.end_block()
                self._calls.send_drafts()
        if not self.is_done:
            self._visible.finish(self._region.kind)

    def _step(self, piece: Piece) -> None:
        buffer, visible = self._buffer, self._visible
        text = piece.text
        if piece.special or piece.added:
            text = self._table.codes.get(text) or self._encode_foreign(piece)
            if not text and buffer.is_empty:
                visible.mark_gap()
        buffer.push(text)
        if self._calls.expects_evidence:
            self._calls.feed_evidence(text)
        if piece.logprob is not None and self._token_text:
            visible.add_logprob(self._token_text, buffer.dropped + len(buffer.text), piece.logprob)
        self._advance()
        if self._reader is None and self._region.kind == "thinking":
            self.reasoning_tokens += 1

    def _encode_foreign(self, piece: Piece) -> str:
        """A token that is no marker of the family. A control token is text only inside of an argument."""
        if piece.added:
            return piece.text
        return self._buffer.foreign_code(piece.text) if self._reader is not None else ""

    def _advance(self) -> None:
        calls = self._calls
        while not calls.is_done and (self._scan() if self._reader is None else self._run_reader()):
            pass
        if self._reader is None and self._buffer.is_empty:
            needs_position = calls.drafts or calls.expects_evidence or self._visible.logprobs is not None
            self._passes_text = not (needs_position or calls.is_done)
        else:
            self._passes_text = False

    def _scan(self) -> bool:
        """Show text up to the next marker and act on it. False: more input is needed."""
        buffer = self._buffer
        found = self._table.find(buffer)
        if found is None:
            end = self._end_of_text() if buffer.ended else self._table.partial_start(buffer)
            if end > buffer.pos:
                self._show_to(end)
            return False
        self._show_to(found.start())
        quotable = found.group() in self._table.quotable
        if quotable and (quote := opened_quote(self._text_before + self._last_text)) is not None:
            end = found.end()
            if _TAG_START.search(found.group()) and not buffer.text.startswith(quote, end):
                end = tag.end() if (tag := _REST_OF_TAG.match(buffer.text, end)) else end
            if end == len(buffer.text) and not buffer.ended:
                return False  # what follows decides
            if buffer.text.startswith(quote, end):
                self._quote(buffer.text[found.start() : end])
                return True
        if self._visible.stop_string is None:
            from_model = found.group()[max(0, self._prompt_end - buffer.dropped - found.start()) :]
            buffer.move_to(found.end())
            self._skip_logprobs()
            self._act(found.group(), from_model)
        return True

    def _end_of_text(self) -> int:
        """Where the output ends, without the beginning of a marker that a limit cut off, or that is of another call."""
        buffer = self._buffer
        if not (buffer.truncated or self.has_complete_call):
            return len(buffer.text)
        for start in (buffer.pos, self._table.partial_start(buffer)) if self.has_complete_call else ():
            rest = buffer.text[start:].lstrip()
            if not rest[:1].isalnum() and self._calls.writes(buffer.spelled(rest)):
                return start  # the end of this call, or the beginning of another
        return buffer.pos + len(self._table.without_cut_marker(buffer.text[buffer.pos :]))

    def _show_to(self, end: int) -> None:
        buffer, visible = self._buffer, self._visible
        if buffer.dropped + buffer.pos < self._prompt_end:  # the prompt ended in a possible marker that is text
            prompt_end = min(end, self._prompt_end - buffer.dropped)
            visible.recall(self._region.kind, buffer.text[buffer.pos : prompt_end])
            buffer.move_to(prompt_end)
        if end > buffer.pos:
            start, text = buffer.dropped + buffer.pos, buffer.text[buffer.pos : end]
            if not text.isascii():
                text = buffer.without_foreign(text)
            buffer.move_to(end)
            if self._calls.drafts:
                if text.isspace():
                    self._calls.add_to_drafts(text)
                    return
                self._show_drafts()
            if visible.logprobs:
                visible.place_logprobs(start, buffer.dropped + end)
            self._text_before, self._last_text = self._last_text, text
            visible.show(self._region.kind, text)

    def _quote(self, marker: str) -> None:
        """A marker between quotes, such as `<tool_call>` in Markdown, is text."""
        buffer, visible, start = self._buffer, self._visible, self._buffer.dropped + self._buffer.pos
        buffer.move_to(buffer.pos + len(marker))
        if not self._calls.drafts:
            visible.place_logprobs(start, buffer.dropped + buffer.pos)
            self._text_before, self._last_text = self._last_text, marker
            visible.quote(self._region.kind, buffer.spelled(marker))

    def _show_drafts(self) -> None:
        """Reasoning goes on after calls: it only quotes them."""
        text = self._calls.take_drafts()
        self._visible.mark_gap()
        self._visible.show(self._region.kind, self._table.remove_tags(text))
        self._visible.mark_gap()

    def _skip_logprobs(self) -> None:
        if self._visible.logprobs:
            self._visible.logprobs.skip_to(self._buffer.dropped + self._buffer.pos)

    def _act(self, marker: str, from_model: str) -> None:
        """`from_model` is the part of the marker that is not in the prompt."""
        action = self._actions.get(marker)
        if marker not in self._table.bare:
            self._visible.mark_gap()
        self._calls.end_broken(marker)
        if isinstance(action, SwitchRegion):
            if self._calls.drafts and marker not in self._table.turn_end_codes:
                self._show_drafts()
            self._visible.end_block()
            self._enter(action.region)
            if action.reader is not None:
                self._start_reader(action.reader)
        elif isinstance(action, StartReader):
            is_quoting = self._region.kind == "thinking" and not self._format.has_messages
            is_drafting = is_quoting and not self._format.calls_in_reasoning
            self._buffer.begin_call(action.closing)
            self._calls.begin_reading(is_drafting)
            self._start_reader(
                action.reader, action, from_model if action.bare else marker, marker if is_drafting else None
            )

    def _start_reader(
        self, reader: Reader, start: StartReader | None = None, marker: str = "", recorded: str | None = None
    ) -> None:
        self._buffer.begin_reading(marker, recorded)
        self._reader_start, self._passes_text = start, False
        self._reader = reader(self._buffer, self._calls)

    def _enter(self, region: str) -> None:
        self._region = self._format.regions[region]
        self._actions = self._table.actions[region]
        self._calls.enter(self._region.kind)

    def _run_reader(self) -> bool:
        assert self._reader is not None  # noqa: S101
        try:
            next(self._reader)
        except StopIteration as over:
            self._visible.mark_gap()
            self._end_reader(is_draft=self._calls.has_new_draft)
            if over.value is not None:
                if self._calls.drafts:
                    self._show_drafts()
                self._visible.end_block()
                self._enter(over.value)
        except ParseError as error:
            self._recover(error)
        else:
            return False
        finally:
            self._skip_logprobs()
        return True

    def _end_reader(self, *, is_draft: bool) -> None:
        self._calls.end_reading(self._buffer.recorded if is_draft else None)
        self._buffer.end_reading()
        self._reader = None

    # --- broken calls -----------------------------------------------------------------------------------------------

    def _recover(self, error: ParseError) -> None:
        """The call cannot be read. Without sent arguments all of it becomes text.

        Otherwise it ends at the first character that could not be read, and the rest becomes text, except for markers.
        (A word that a limit cut off is not text. It belongs to the call.)
        """
        buffer, start = self._buffer, self._reader_start
        text, is_call = "".join(buffer.uncommitted or ()), self._calls.is_open and self._calls.is_offered
        is_cut, was_begun = start is not None and self._is_cut(text, start.bare), self._calls.is_sent
        was_sent = self._calls.abort(is_cut)
        if was_sent and not was_begun:
            text = ""  # it is in the call
        if is_cut:  # what is left of the call is not text
            buffer.move_to(len(buffer.text))
            if not was_sent:
                self._visible.end_block()
        has_drafts, follows = bool(self._calls.drafts), text.strip() != ""  # reasoning goes on after the drafts
        is_draft = has_drafts and (self._calls.has_new_draft or not follows)
        self._end_reader(is_draft=is_draft)
        if has_drafts and follows:
            self._show_drafts()
        if is_draft:
            text = ""
        if start and (is_call or not start.bare):
            self._calls.mark_broken(tuple(map(buffer.encoded, start.closing)))
        if not (is_cut or (was_sent and buffer.truncated and buffer.is_empty)):
            self._show_uncommitted(text)
        if isinstance(error, UnknownTool):
            self._calls.expect_evidence(error, buffer.text[buffer.pos :])
        if was_sent or error.read_rest:
            self._reader = self._read_broken(error, was_sent)

    def _is_cut(self, text: str, is_bare: bool) -> bool:
        """Whether the output ends inside of a call, or in a marker there. A reader fails earlier at anything else."""
        buffer = self._buffer
        if not buffer.ended:
            return False
        rest = buffer.text[buffer.pos :]
        left = (self._table.without_cut_marker(one, 0).strip() for one in (rest, self._table.remove_tags(rest)))
        if all(left):
            return not is_bare and self._calls.writes(buffer.spelled(text + rest))
        return self._calls.is_cut(buffer.spelled(text), is_bare=is_bare)

    def _show_uncommitted(self, text: str) -> None:
        if self._calls.is_broken:
            cleaned = self._table.remove_tags(text)
        else:
            cleaned = self._table.remove_markers(text)
            self._calls.open_quoted(self._table.openings(cleaned))
        if cleaned != text:
            self._visible.mark_gap()
        if cleaned:
            self._visible.show(self._region.kind, cleaned)
        if cleaned != text:
            self._visible.mark_gap()

    def _read_broken(self, error: ParseError, was_sent: bool) -> Incremental[str | None]:
        """Show the rest of a broken call. A broken member of a list does not affect the others: they are read."""
        start = self._reader_start
        if error.read_rest:
            if not (yield from self._show_to_bracket(error.member_depth, was_sent=was_sent)):
                return None
            self._buffer.commit()
            return (yield from error.read_rest(self._buffer, self._calls))
        if start and (start.closing or not start.bare):
            yield from self._show_to_closing(start.closing)
        elif error.depth:
            yield from self._show_to_bracket(error.depth, was_sent=True)
        return None

    def _show_to_closing(self, closing: tuple[str, ...]) -> Incremental[None]:
        """Up to the closing tag or the next marker. Tags that count only inside of calls are not text here."""
        buffer = self._buffer
        finder = self._table.inside_call(closing)
        while True:
            found = finder.find(buffer)
            end = len(buffer.text) if buffer.ended else finder.partial_start(buffer)
            self._show_to(found.start() if found else end)
            if found is None:
                if buffer.ended:
                    return
                yield
            elif self._table.is_at_marker(buffer):
                return
            else:
                start, text = buffer.dropped + found.start(), found.group()
                if not (yield from self._table.skip_tag(buffer, found)):
                    self._show_to(start - buffer.dropped + len(text))
                    continue
                self._visible.mark_gap()
                if self._calls.end_broken(text):
                    return

    def _show_to_bracket(self, depth: int, *, was_sent: bool) -> Incremental[bool]:
        """Up to the bracket that closes all open ones. True: it was found.

        If part of the call was sent, no other call begins inside these brackets. Otherwise they may be prose, and a
        call inside them counts.
        """
        buffer = self._buffer
        while True:
            found = self._table.find(buffer)
            is_text = found is not None and found.group() in self._table.bare and was_sent
            end = len(buffer.text) if buffer.ended else self._table.partial_start(buffer)
            if found:
                end = found.end() if is_text else found.start()
            end, depth = _find_bracket(buffer.text, buffer.pos, end, depth)
            self._show_to(end)
            if depth <= 0:
                return True
            if (found and not is_text) or (buffer.ended and not found):
                return False
            if not found:
                yield

    # --- the tail of the prompt -------------------------------------------------------------------------------------

    def _read_prefill(self, prefill: str) -> None:
        """Find out what the prompt left open. Its end closes nothing."""
        buffer = self._buffer
        starts = [pos + len(start) for start in self._format.turn_starts if (pos := prefill.rfind(start)) >= 0]
        tail = self._table.encode(prefill[max(starts, default=-_PREFILL_LIMIT) :])
        if not tail or tail.isspace():
            return  # the usual case: the template opened the turn and wrote nothing else
        buffer.push(tail)
        self._advance()
        self._blocks.discard_prompt()
        self._visible.end_prompt()
        self._calls.end_prompt()
        self._prompt_end = buffer.dropped + len(buffer.text)
        if self._reader is not None:
            buffer.begin_reading(recorded=None if buffer.recorded is None else "")  # what came before is the prompt


def _find_bracket(text: str, start: int, end: int, depth: int) -> tuple[int, int]:
    """The end of the bracket that closes `depth` open ones, or `end`, and how many are still open there."""
    for pos in range(start, end):
        depth += (text[pos] in "([{") - (text[pos] in ")]}")
        if depth <= 0:
            return pos + 1, 0
    return end, depth
