"""A model's raw output, piece by piece, into events: reasoning, text and tool calls, and nothing else.

The machine is in one region of its format, or a reader is at work inside a call. Whatever cannot yet be decided waits,
and never more than that: the events do not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence

from modelyard.core.engine import Piece
from modelyard.core.events import Event
from modelyard.core.output_format import OutputFormat, StartReader, SwitchRegion
from modelyard.core.request import Tool
from modelyard.scanner.blocks import Blocks
from modelyard.scanner.broken import between, bracketed
from modelyard.scanner.calls import Calls
from modelyard.scanner.lexer import Steps, Tape, Unoffered, Unreadable, alphabet, one_of
from modelyard.scanner.logprobs import Spell, Trail
from modelyard.scanner.visible import Visible

_ENOUGH_PROMPT = 4096


class Scanner:
    """`tools` are the ones on offer (None: any name is a call). `specials` holds the vocabulary's special tokens by
    their text. `prefill` is the tail of the prompt, from the beginning of the turn that the model continues. `spell`
    names token ids and is needed only where pieces carry log probabilities.
    """

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
        spell: Spell | None = None,
    ) -> None:
        self._format = format
        self._alphabet = alphabet(format, frozenset(specials))  # the same object where it is one: its hash is kept
        self._tape = Tape(self._alphabet.codes, self._alphabet.special)
        self._blocks = Blocks()
        self._visible = Visible(
            self._blocks, self._alphabet.spellings, framed=format.framed, show_thinking=show_thinking
        )
        self._calls = Calls(
            self._tape,
            self._blocks,
            self._visible,
            self._alphabet.clean,
            tools=tools,
            new_id=new_id,
            stream=tool_stream,
        )
        self._reader: Generator[None, None, str | None] | None = None
        self._reading: StartReader | None = None
        self._spell = spell
        self.reasoning_tokens = 0
        self._prompt = 0  # where on the tape the prompt ends: what stands before is not repeated
        self._enter(format.start)
        if prefill:
            self._prime(prefill)
        self._visible.watch(stop)
        self._starters = one_of(self._alphabet.starters(stop))
        self._calls.parallel = parallel
        self._quick = False

    # --- what the gateway asks --------------------------------------------------------------------------------------

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the visible text."""
        return self._visible.stopped

    @property
    def called(self) -> bool:
        """A complete call was made."""
        return self._calls.count > 0

    @property
    def done(self) -> bool:
        """Nothing that may still come will be shown: the model can be stopped."""
        return self._calls.is_enough

    @property
    def is_thinking(self) -> bool:
        """Reasoning is open."""
        return self._region.kind == "thinking"

    @property
    def closing(self) -> str | None:
        """The marker that would end the open reasoning and begin visible text."""
        acts = self._region.marks.items() if self.is_thinking else ()
        ends = (
            m for m, act in acts if isinstance(act, SwitchRegion) and self._format.regions[act.region].kind == "text"
        )
        return next(ends, None)

    @property
    def warnings(self) -> list[str]:
        return self._calls.warnings

    def feed(self, pieces: Sequence[Piece]) -> list[Event]:
        search, say = self._starters.search, self._blocks.parts.append
        for at, piece in enumerate(pieces):
            if self._quick and at == 1 and self._flows(pieces[at:]):
                break
            if self._quick and not piece.special and not search(piece.text) and piece.logprob is None:
                say(piece.text)
            elif self.done:
                break
            else:
                self._step(piece)
            if self._reader is None and self._region.kind == "thinking":
                self.reasoning_tokens += 1
        return self._blocks.take()

    def _flows(self, pieces: Sequence[Piece]) -> bool:
        """Many pieces at a time, where no single one needs a look. False: nothing was done."""
        plain = [piece.text for piece in pieces if not piece.special and piece.logprob is None]
        text = "".join(plain)
        if len(plain) != len(pieces) or self._starters.search(text):
            return False
        self._blocks.parts.append(text)
        if self._region.kind == "thinking":
            self.reasoning_tokens += len(pieces)
        return True

    def finish(self, cut: bool = False) -> list[Event]:
        """The output is over: everything is settled. `cut` says that a limit ended it, not the model."""
        self._tape.ended, self._tape.cut = True, cut
        if self._reader is not None or not self._tape.is_empty:
            self._advance()
        if not self.done:
            self._visible.finish(self._region.kind)
        self._blocks.close()
        return self._blocks.take()

    # --- the machine ------------------------------------------------------------------------------------------------

    def _step(self, piece: Piece) -> None:
        text = self._spelled(piece) if piece.special else piece.text
        tape = self._tape
        if piece.special and not text and tape.is_empty:
            self._visible.seam()
        tape.push(text)
        if self._calls.is_suspicious:
            self._calls.hear(text)
        if piece.logprob is not None and self._spell:
            self._visible.trail = self._visible.trail or Trail(self._spell)
            self._visible.trail.note(tape.base + len(tape.text), piece.logprob)
        self._advance()
        self._quick = (
            self._reader is None
            and not self.done
            and tape.is_empty
            and self._visible.is_clear(self._region.kind)
            and not self._calls.is_suspicious
        )

    def _spelled(self, piece: Piece) -> str:
        """A control token that is no marker of this family is never shown."""
        return self._alphabet.codes.get(piece.text, "")

    def _advance(self) -> None:
        while not self.done and (self._scan() if self._reader is None else self._read()):
            pass

    def _scan(self) -> bool:
        """Show text up to the next marker and act on it. False: more is needed."""
        tape = self._tape
        found = self._alphabet.find(tape)
        if found is None:
            self._show(len(tape.text) if tape.ended else self._alphabet.hold(tape))
            return False
        self._show(found.start())
        if self._visible.stopped is None:
            new = found.group()[max(0, self._prompt - tape.base - found.start()) :]
            tape.at = found.end()
            self._pass_over()
            self._act(found.group(), new)
        return True

    def _show(self, end: int) -> None:
        tape, visible = self._tape, self._visible
        if tape.base + tape.at < self._prompt:
            self._recall(min(end, self._prompt - tape.base))
        if end > tape.at:
            start, text = tape.base + tape.at, tape.text[tape.at : end]
            tape.at = end
            if visible.trail:
                visible.trail.show(start, tape.base + end, visible.seen)
            visible.show(self._region.kind, text)

    def _recall(self, end: int) -> None:
        """The prompt ended in what might have become a marker, but is text."""
        self._visible.recall(self._region.kind, self._tape.text[self._tape.at : end])
        self._tape.at = end

    def _pass_over(self) -> None:
        if self._visible.trail:
            self._visible.trail.pass_over(self._tape.base + self._tape.at)

    def _act(self, marker: str, new: str) -> None:
        """`new` is what the prompt did not hold of the marker."""
        action = self._actions.get(marker)
        if marker not in self._alphabet.naked:
            self._visible.seam()
        if isinstance(action, SwitchRegion):
            self._visible.turn()
            self._enter(action.region)
        elif isinstance(action, StartReader):
            self._tape.kept = [new] if action.naked else []
            self._reading = action
            self._reader = action.reader(self._tape, self._calls)

    def _enter(self, region: str) -> None:
        self._region = self._format.regions[region]
        self._actions = self._alphabet.actions[region]
        self._calls.kind = self._region.kind

    def _read(self) -> bool:
        assert self._reader is not None  # noqa: S101
        try:
            next(self._reader)
        except StopIteration as over:
            self._leave(over.value)
        except Unreadable as error:
            self._give_up(error)
        else:
            return False
        finally:
            self._pass_over()
        return True

    def _leave(self, region: str | None) -> None:
        self._reader, self._tape.kept = None, None
        self._visible.seam()
        if region is not None:
            self._visible.turn()
            self._enter(region)

    def _give_up(self, error: Unreadable) -> None:
        """The call is no call: what was sent of it ends there (`broken.py`), else its text is given back."""
        kept, was_sent = "".join(self._tape.kept or ()), self._calls.fail()
        self._reader, self._tape.kept = None, None
        if not (was_sent and self._tape.cut and self._tape.is_empty):
            self._give_back(kept)
        if isinstance(error, Unoffered):
            self._calls.suspect(error, self._tape.text[self._tape.at :])
        if was_sent or error.further:
            self._reader = self._rest(error, was_sent)

    def _rest(self, error: Unreadable, was_sent: bool) -> Steps[str | None]:
        tape, letters, around = self._tape, self._alphabet, self._reading
        if error.further:
            if not (yield from bracketed(tape, letters, self._show, error.inner, sent=was_sent)):
                return None
            tape.kept = []
            return (yield from error.further(tape, self._calls))
        if around and (around.close or not around.naked):
            return (yield from between(tape, letters, around.close, self._show, self._visible.seam))
        if error.depth:
            yield from bracketed(tape, letters, self._show, error.depth)
        return None

    def _give_back(self, text: str) -> None:
        clean = self._alphabet.clean(text)
        if clean != text:
            self._visible.seam()
        if clean:
            self._visible.show(self._region.kind, clean)
        if clean != text:
            self._visible.seam()

    # --- the prompt's tail ------------------------------------------------------------------------------------------

    def _prime(self, prefill: str) -> None:
        """Learn what the prompt left open. The end of the input never closes anything."""
        starts = [at + len(t) for t in self._format.turn if (at := prefill.rfind(t)) >= 0]
        tail = self._alphabet.encode(prefill[max(starts, default=-_ENOUGH_PROMPT) :])
        if not tail or tail.isspace():
            return  # nearly always: the template opened the turn and nothing more
        self._tape.push(tail)
        self._advance()
        self._blocks.forget()
        self._visible.prime()
        self._calls.count = 0
        self._prompt = self._tape.base + len(self._tape.text)
        if self._reader is not None and self._tape.kept is not None:
            self._tape.kept.clear()
