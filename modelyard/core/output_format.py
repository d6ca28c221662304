"""The raw output of a model family as data: its markers, and the readers that parse what follows them.

The output is always in one **region**, whose text is visible text or reasoning. A **marker** is never shown. It
switches the region (`SwitchRegion`), starts a reader (`StartReader`), or is dropped. A reader is a generator over the
raw text: it yields when it needs more input and returns the name of the next region (None: the region stays).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct, field

from modelyard.core.request import Constraint

# (TextBuffer, CallBuilder) → generator. Both types are in `scanner/`, which core does not import.
Reader = Callable[..., Generator[None, None, str | None]]
NamedCalls = Sequence[tuple[str, Mapping[str, Any]]]  # names and arguments
Dumps = Callable[[Any], str]  # writes JSON
RESULTS = ("<tool_response>\n", "\n</tool_response>")  # as most families write them


class GrammarContext(Struct, frozen=True):
    """Where a grammar begins: the special tokens of the vocabulary, and whether the prompt left reasoning open.

    With a `schema` the output is either calls or a text that matches it. A grammar adds to `not_enforced` what
    it leaves out of the schemas of tools: `tool/path`.
    """

    specials: Mapping[str, int] = field(default_factory=dict)
    thinking: bool = False
    parallel: bool = True  # several calls may follow each other
    schema: Mapping[str, Any] | None = None
    not_enforced: list[str] = field(default_factory=list)


# (tools, tool choice[, GrammarContext]) → the call syntax of a family. None: there is no grammar, or it would constrain
# plain text.
Grammar = Callable[..., Constraint | None]


class CallWriter(Protocol):
    """How a family writes calls. `specials`: the special tokens of the vocabulary, in which generations may differ."""

    def write(self, calls: NamedCalls, dumps: Dumps, specials: Container[str] = ..., /) -> str: ...


class SwitchRegion(Struct, frozen=True):
    """The marker opens or closes a region. `reader` reads what may follow and belongs to no region."""

    region: str
    reader: Reader | None = None


class StartReader(Struct, frozen=True):
    """The marker starts a reader. After a call breaks, no inner marker up to one of `closing` is shown as text.

    A `bare` marker is ordinary text, such as a bracket. It opens a call only if the reader finds one. Otherwise it is
    shown like any other text.
    """

    reader: Reader
    closing: tuple[str, ...] = ()
    bare: bool = False


class Region(Struct, frozen=True):
    kind: Literal["text", "thinking"]
    markers: dict[str, SwitchRegion | StartReader]


class ReasoningBlock(Struct, frozen=True):
    """Reasoning between markers. `closing` ends it and begins the answer, as the family's template writes it."""

    start: str
    ends: tuple[str, ...]
    closing: str


class OutputFormat(Struct, frozen=True, kw_only=True, eq=False):
    """One output format. A module in `scanner/formats/` lists its formats in `FORMATS`."""

    name: str
    regions: dict[str, Region]
    start_region: str = "text"
    start_reader: Reader | None = None  # reads what may come before the first marker
    hidden_markers: tuple[str, ...] = ()  # dropped in every region
    inner_markers: tuple[str, ...] = ()  # markers only inside a call: visible text may contain them
    stop_tokens: tuple[str, ...] = ()  # texts of the tokens that end a turn
    turn_starts: tuple[str, ...] = ()  # what opens an assistant turn in a prompt; the prefill begins after the last one
    has_messages: bool = False  # the header of a message ends the one before; a line break separates those of text
    calls_in_reasoning: bool = False  # calls count there, too; else only one with which the model ends its turn
    trims_newlines: bool = True  # line breaks around markers belong to the markers
    template_hints: tuple[tuple[str, ...], ...] = ()  # a chat template with all strings of one group has this format
    name_hints: tuple[str, ...] = ()  # parts of model names in lower case, used if no template decides
    grammar: Grammar | None = None
    calls: CallWriter | None = None  # None: as `grammar` says, if it can write
    # What stands before and after the result of a call in a prompt; {name} and {id} are those of the call. Families
    # that have only a role for results, and no marks of their own, keep the usual ones.
    results: tuple[str, str] = RESULTS
    messages_of_reasoning: tuple[ReasoningBlock, ...] = ()  # where readers open the reasoning, not markers

    @property
    def reasoning_blocks(self) -> tuple[ReasoningBlock, ...]:
        if self.messages_of_reasoning or self.has_messages:
            return self.messages_of_reasoning
        texts = [region for region in self.regions.values() if region.kind == "text"]
        opened = {m: self.regions[a.region] for r in texts for m, a in r.markers.items() if isinstance(a, SwitchRegion)}
        blocks = []
        for start, region in opened.items():
            ends = tuple(
                marker
                for marker, action in region.markers.items()
                if isinstance(action, SwitchRegion) and self.regions[action.region].kind == "text"
            )
            if region.kind == "thinking" and ends:
                closing = f"\n{ends[0]}\n\n" if ends[0].startswith("</") else ends[0]
                blocks.append(ReasoningBlock(start, ends, closing))
        return tuple(blocks)

    @property
    def reads_calls(self) -> bool:
        return any(isinstance(action, StartReader) for _, action in self._actions)

    @property
    def call_markers(self) -> tuple[str, ...]:
        """What begins a call and is never text."""
        starting = (m for m, a in self._actions if isinstance(a, StartReader) and not a.bare)
        return tuple(dict.fromkeys(starting))

    @property
    def writer(self) -> CallWriter | None:
        grammar: Any = self.grammar
        return self.calls or (grammar if hasattr(grammar, "write") else None)

    @property
    def markers(self) -> tuple[str, ...]:
        """Everything that is never shown as visible text or reasoning."""
        acting = (m for m, action in self._actions if not (isinstance(action, StartReader) and action.bare))
        return tuple(dict.fromkeys((*acting, *self.hidden_markers)))

    @property
    def bare_markers(self) -> tuple[str, ...]:
        """Ordinary text that may open a call."""
        return tuple(dict.fromkeys(m for m, action in self._actions if isinstance(action, StartReader) and action.bare))

    @property
    def _actions(self) -> list[tuple[str, SwitchRegion | StartReader]]:
        return [item for region in self.regions.values() for item in region.markers.items()]
