"""Decide which output format a model has: by the setting, else by its chat template, else by its name."""

from __future__ import annotations

from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.output_format import OutputFormat, Region, StartReader
from modelyard.scanner.formats import load, names

_FALLBACK = "plain"


class DetectedFormat(Struct, frozen=True):
    format: str
    why: str


def detect(setting: str | None, template: str, name: str) -> DetectedFormat:
    """`setting` is the configured format. None and "auto" leave the decision to the template and the name."""
    if setting and setting != "auto":
        return DetectedFormat(load(setting).name, "set in the configuration")
    formats = [load(n) for n in names()]
    return _by_template(formats, template) or _by_name(formats, name) or DetectedFormat(_FALLBACK, "nothing else fits")


def _by_template(formats: list[OutputFormat], template: str) -> DetectedFormat | None:
    """Formats with calls come first: reasoning tags alone say less. Then the longest hints decide."""
    fitting = [
        (form.reads_calls, sum(map(len, hints)), form.name, hints)
        for form in formats
        for hints in form.template_hints
        if all(hint in template for hint in hints)
    ]
    if not fitting:
        return None
    _, _, found, hints = max(fitting)
    return DetectedFormat(found, f"the chat template contains {' and '.join(hints)}")


def _by_name(formats: list[OutputFormat], name: str) -> DetectedFormat | None:
    lower = name.lower()
    fitting = [(len(hint), form.name, hint) for form in formats for hint in form.name_hints if hint in lower]
    if not fitting:
        return None
    _, found, hint = max(fitting)
    return DetectedFormat(found, f"the model name contains {hint!r}")


@lru_cache(maxsize=256)
def with_hermes_calls(form: OutputFormat) -> OutputFormat:
    """The format of a model without calls of its own, which the system prompt teaches to call as `hermes` does."""
    hermes = load("hermes")
    if form is hermes:
        return form
    added = {m: action for m, action in hermes.regions["text"].markers.items() if isinstance(action, StartReader)}
    regions = {name: Region(region.kind, {**region.markers, **added}) for name, region in form.regions.items()}
    hidden = (*form.hidden_markers, *(closing for action in added.values() for closing in action.closing))
    return replace(form, regions=regions, hidden_markers=hidden, trims_newlines=True, grammar=hermes.grammar)
