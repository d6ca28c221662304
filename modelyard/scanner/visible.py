"""What the client reads: text and reasoning without the line breaks around markers, up to a stop string.

On its way out text passes three gates: line breaks that a marker may own wait for it, markers that only come about
because another one was dropped go (`sieve.py`), and stop strings are looked for in what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from modelyard.scanner.blocks import Blocks
from modelyard.scanner.logprobs import Trail
from modelyard.scanner.sieve import Sieve, Spellings
from modelyard.scanner.stops import Stops

Shown = Literal["text", "thinking"]


class Visible:
    """In a framed format a run of white space that holds a line break waits: a marker may follow and own it."""

    __slots__ = (
        "_begun",
        "_blocks",
        "_framed",
        "_fresh",
        "_kind",
        "_show_thinking",
        "_sieves",
        "_space",
        "_spoke",
        "_stops",
        "seen",
        "stopped",
        "trail",
    )

    def __init__(self, blocks: Blocks, spellings: Spellings, *, framed: bool, show_thinking: bool) -> None:
        self._blocks = blocks
        self._sieves: dict[Shown, Sieve] = {"text": Sieve(spellings), "thinking": Sieve(spellings)}
        self._kind: Shown = "text"
        self._framed = framed
        self._stops: Stops | None = None
        self._show_thinking = show_thinking
        self._space: list[str] = []
        self._begun = False  # something of this block was shown
        self._fresh = False  # this block follows a marker: white space at its head is the marker's
        self._spoke = False  # clients that join all text would glue the words before and after a call
        self.seen = 0
        self.stopped: str | None = None
        self.trail: Trail | None = None

    def watch(self, stop: Sequence[str]) -> None:
        """From here on; what the prompt holds stops nothing."""
        self._stops = Stops(stop) if stop else None

    def is_clear(self, kind: Shown) -> bool:
        """Nothing waits and the right block is open: text without line breaks may pass as it is."""
        held = self._space or self.trail or (self._stops is not None and self._stops.held)
        return self._blocks.kind == kind and not held and self._sieves[kind].is_idle

    @property
    def is_blank(self) -> bool:
        """Nothing of this block was shown yet."""
        return not self._begun

    def seam(self) -> None:
        """Something that stood here on the tape is not shown: what follows does not belong to what came before."""
        for sieve in self._sieves.values():
            sieve.seam()

    def show(self, kind: Shown, text: str) -> None:
        if kind != self._kind:
            self._settle()
            self._kind = kind
        if self.stopped is not None:
            return
        self.seen += len(text)
        if self._framed:
            text = self._frame(kind, text)
        if text:
            self._pass(kind, text)

    def _frame(self, kind: Shown, text: str) -> str:
        body = text.rstrip()
        if not body:
            return self._wait(text)
        lead = "".join(self._space)
        self._space.clear()
        if self._fresh and not self._begun and not (kind == "text" and self._spoke):
            lead, text, body = "", text.lstrip(), body.lstrip()
            self._forget(self.seen - len(text))
        self._begun = True
        self._spoke = self._spoke or kind == "text"
        line = text.find("\n", len(body))
        if line >= 0:
            self._space.append(text[line:])
            text = text[:line]
        return lead + text

    def _wait(self, space: str) -> str:
        if not self._begun or self._space:
            self._space.append(space)
            return ""
        flows, line, rest = space.partition("\n")
        if line:
            self._space.append(line + rest)
        return flows

    def _pass(self, kind: Shown, text: str) -> None:
        if kind == "thinking" and not self._show_thinking:
            self._forget(self.seen)
            return
        sieve = self._sieves[kind]
        shown = sieve.feed(text)
        if self.trail and sieve.cuts:
            start = self.seen - sum(map(len, self._space)) - len(text)
            self.trail.drop([(start + one, start + other) for one, other in sieve.cuts])
        self._say(kind, shown)

    def _say(self, kind: Shown, text: str) -> None:
        if kind == "text" and self._stops:
            text, self.stopped = self._stops.feed(text)
            if self.stopped is not None:
                self._space.clear()
        self._emit(kind, text)

    def _emit(self, kind: Shown, text: str) -> None:
        logprobs = self.trail.take(self.seen - self._waiting()) if self.trail else ()
        if text:
            self._blocks.say(kind, text, logprobs)

    def _settle(self) -> None:
        """No more text can follow in this block: what waited for it is shown."""
        if (rest := self._sieves[self._kind].flush()) and self.stopped is None:
            self._say(self._kind, rest)
        if self.stopped is None and self._stops and (rest := self._stops.flush()):
            self._emit("text", rest)

    def _waiting(self) -> int:
        held = len(self._stops.held) if self._stops else 0
        return held + self._sieves[self._kind].waiting + sum(map(len, self._space))

    def _forget(self, seen: int) -> None:
        """These first characters will never be shown, nor their log probabilities."""
        if self.trail:
            self.trail.take(seen)

    def turn(self) -> None:
        """A marker came that ends this run of text: the white space before it goes, what follows is a new block."""
        self._settle()
        self.seam()
        self._space.clear()
        self._forget(self.seen)
        self._blocks.close()
        self._begun, self._fresh = False, True

    def recall(self, kind: Shown, text: str) -> None:
        """The prompt's last words, which are not repeated either, though what follows may go on from them."""
        self._sieves[kind].feed(text)
        self._sieves[kind].flush()

    def prime(self) -> None:
        """The prompt's own text is not repeated."""
        self._space.clear()
        self._sieves[self._kind].flush()
        self._begun, self._fresh = False, self._fresh and not self._begun
        self._spoke = False

    def finish(self, kind: Shown) -> None:
        if kind == "text" and self._space and (self._begun or not self._fresh):
            space = "".join(self._space)
            self._space.clear()
            self._pass(kind, space)
        self._settle()
