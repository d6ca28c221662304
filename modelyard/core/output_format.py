"""The seam to a model family's raw output: its markers as data, and who reads the inside of a call.

A format is a small map. The output is always in one **region**, which shows text as visible text or as reasoning. A
**marker** met there is never shown: it moves to another region (`Go`), starts a reader (`Read`) or is just dropped. A
reader is a generator over the raw text; it yields while it wants more, and returns the name of the region that
follows (None: the one it came from).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct, field

from modelyard.core.request import Constraint, Tool, ToolChoice

# (tape, calls) → steps. The types live in `scanner/`, which core does not know.
Reader = Callable[..., Generator[None, None, str | None]]


class GrammarContext(Struct, frozen=True):
    """Where a grammar begins: which texts are tokens in this vocabulary, and whether the prompt left reasoning open."""

    specials: Mapping[str, int] = field(default_factory=dict)
    thinking: bool = False
    parallel: bool = True  # several calls may follow each other


class Grammar(Protocol):
    """The family's own call syntax for these tools. None: it cannot be said, or not without disturbing plain text."""

    def __call__(
        self, tools: Sequence[Tool], choice: ToolChoice, place: GrammarContext = ..., /
    ) -> Constraint | None: ...


class SwitchRegion(Struct, frozen=True):
    """The marker opens or closes a region."""

    region: str


class StartReader(Struct, frozen=True):
    """The marker starts a reader. After a call that broke in the middle no tag up to `close` is text.

    A `naked` marker is ordinary text, such as a bracket, that opens a call only if the reader finds one behind it. If
    not, it is shown with all the rest.
    """

    reader: Reader
    close: tuple[str, ...] = ()
    naked: bool = False


class Region(Struct, frozen=True):
    kind: Literal["text", "thinking"]
    marks: dict[str, SwitchRegion | StartReader]


class OutputFormat(Struct, frozen=True, kw_only=True, eq=False):
    """A module in `scanner/formats/` holds one as `FORMAT`.

    `hidden` are markers that no region acts on and nobody may see; `inner` ones count only inside a call, so that
    visible text may hold them. `framed` says that line breaks around markers belong to the markers.
    """

    name: str
    regions: dict[str, Region]
    start: str = "text"
    hidden: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()  # texts of the tokens that end a turn in this family
    turn: tuple[str, ...] = ()  # what opens an assistant turn in a prompt: priming begins after the last one
    framed: bool = True
    template: tuple[tuple[str, ...], ...] = ()  # chat templates that hold all strings of one group are this family's
    names: tuple[str, ...] = ()  # parts of model names, lower case, where no template says more
    grammar: Grammar | None = None

    @property
    def reads_calls(self) -> bool:
        return any(isinstance(act, StartReader) for _, act in self._acts)

    @property
    def markers(self) -> tuple[str, ...]:
        """Everything that is never shown as visible text or reasoning."""
        acted = (mark for mark, act in self._acts if not (isinstance(act, StartReader) and act.naked))
        return tuple(dict.fromkeys((*acted, *self.hidden)))

    @property
    def naked(self) -> tuple[str, ...]:
        """Ordinary text that may open a call."""
        return tuple(dict.fromkeys(mark for mark, act in self._acts if isinstance(act, StartReader) and act.naked))

    @property
    def _acts(self) -> list[tuple[str, SwitchRegion | StartReader]]:
        return [each for region in self.regions.values() for each in region.marks.items()]
