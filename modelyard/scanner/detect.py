"""Which format a model speaks: the setting, else the markers in its chat template, else its name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.output_format import OutputFormat, Region, StartReader, SwitchRegion
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats import load, names
from modelyard.scanner.lexer import Steps, Tape

_FALLBACK = "plain"


class Detected(Struct, frozen=True):
    format: str
    why: str


def detect(setting: str | None, template: str, name: str) -> Detected:
    """`setting` is the configured id; None and "auto" leave it to the template and the name."""
    if setting and setting != "auto":
        return Detected(load(setting).name, "set in the configuration")
    formats = [load(n) for n in names()]
    return _by_template(formats, template) or _by_name(formats, name) or Detected(_FALLBACK, "no sign of any other")


@lru_cache(maxsize=256)
def taught(form: OutputFormat) -> OutputFormat:
    """The same, of a model that was told in words to call as hermes does: its own markers count as before."""
    hermes = load("hermes")
    if form is hermes:
        return form
    told = {mark: act for mark, act in hermes.regions["text"].marks.items() if isinstance(act, StartReader)}
    regions = {name: Region(region.kind, _with(told, region.marks)) for name, region in form.regions.items()}
    closing = tuple(close for act in told.values() for close in act.close)
    return replace(form, regions=regions, hidden=(*form.hidden, *closing), framed=True, grammar=hermes.grammar)


def _with(
    told: Mapping[str, StartReader], marks: Mapping[str, SwitchRegion | StartReader]
) -> dict[str, SwitchRegion | StartReader]:
    return {**marks, **{mark: _either(act, marks.get(mark)) for mark, act in told.items()}}


def _either(told: StartReader, own: SwitchRegion | StartReader | None) -> StartReader:
    """What was told is JSON; a family that has another use for the same marker keeps it."""
    if not isinstance(own, StartReader):
        return told
    other = own.reader

    def read(tape: Tape, calls: Calls) -> Steps[str | None]:
        yield from tape.space()
        reader = told.reader if (yield from tape.peek()) in ("{", "[") else other
        return (yield from reader(tape, calls))

    return StartReader(read, (*own.close, *told.close))


def _by_template(formats: list[OutputFormat], template: str) -> Detected | None:
    """Formats with calls come first: reasoning tags alone say less. Then the one whose signs are the longest."""
    fitting = [
        (form.reads_calls, sum(map(len, signs)), form.name, signs)
        for form in formats
        for signs in form.template
        if all(sign in template for sign in signs)
    ]
    if not fitting:
        return None
    _, _, found, signs = max(fitting)
    return Detected(found, f"the chat template holds {' and '.join(signs)}")


def _by_name(formats: list[OutputFormat], name: str) -> Detected | None:
    lower = name.lower()
    fitting = [(len(part), form.name, part) for form in formats for part in form.names if part in lower]
    if not fitting:
        return None
    _, found, part = max(fitting)
    return Detected(found, f"the model's name holds {part!r}")
