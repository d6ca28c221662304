"""Which format a model speaks: the setting, else the markers in its chat template, else its name."""

from __future__ import annotations

from msgspec import Struct

from modelyard.core.format import Format
from modelyard.scanner.formats import load, names

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


def _by_template(formats: list[Format], template: str) -> Detected | None:
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


def _by_name(formats: list[Format], name: str) -> Detected | None:
    lower = name.lower()
    fitting = [(len(part), form.name, part) for form in formats for part in form.names if part in lower]
    if not fitting:
        return None
    _, found, part = max(fitting)
    return Detected(found, f"the model's name holds {part!r}")
