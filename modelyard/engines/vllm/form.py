"""What an answer is held to, as the arguments of vLLM's `StructuredOutputsParams`. Pure.

Grammars are in llguidance's dialect of Lark, as the rest of the program writes them, so vLLM is asked for its guidance
backend. A constraint that begins with a trigger becomes one grammar of the whole answer: anything up to the trigger,
then what must follow it, and so on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.request import Constraint

BACKEND = {"backend": "guidance"}
# One way to write it: small models that may put white space anywhere never stop doing so.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# The compiler goes as deep as rules refer to each other, and takes the whole process along where its stack ends.
_LONGEST, _LONGEST_WRITTEN = 1 << 18, 1 << 13
_FIELDS = {"gbnf": "grammar", "regex": "regex", "lark": "lark", "json_schema": "response_format"}
_START = re.compile(r"^start(?=\s*[:\[])", re.MULTILINE)


class Markers(Struct, frozen=True):
    """Tokens that no text of a grammar matches, by what they read."""

    ids: dict[str, int] = {}

    def others(self, id: int | None = None) -> str:
        """All of them but one, as llguidance writes sets of tokens; empty where there are none."""
        return ",".join(_ranges(sorted(set(self.ids.values()) - {id})))


def form(constraint: Constraint, markers: Markers = Markers()) -> dict[str, Any]:
    _check(constraint)
    if constraint.trigger:
        return {"grammar": _triggered(constraint.text, constraint.trigger, markers)}
    match constraint.kind:
        case "json_object":
            return {"json": _schema({"type": "object"})}
        case "json_schema":
            return {"json": _schema(_decoded(constraint))}
        case "regex":
            return {"regex": constraint.text}
    return {"grammar": constraint.text}


def _check(constraint: Constraint) -> None:
    longest = _LONGEST if constraint.tools or constraint.kind == "json_schema" else _LONGEST_WRITTEN
    if len(constraint.text) > longest:
        raise unusable(constraint, f"it is longer than {longest} characters")
    if not constraint.text and constraint.kind in ("tools", "lark"):
        raise Unsupported(
            "this model's way to call tools has no grammar: a call cannot be required", param="tool_choice"
        )


def unusable(constraint: Constraint, words: str) -> InvalidRequest:
    param = "tools" if constraint.tools else _FIELDS.get(constraint.kind)
    return InvalidRequest(f"the {constraint.kind} cannot be compiled: {words.strip()}", code="bad_grammar", param=param)


def _decoded(constraint: Constraint) -> Any:
    try:
        return json.loads(constraint.text or "{}")
    except ValueError as error:
        raise unusable(constraint, str(error)) from error


def _schema(schema: Any) -> str:
    """A schema that is only true or false can say nothing of its spacing."""
    return json.dumps({**schema, "x-guidance": _SPACING} if isinstance(schema, dict) else schema, ensure_ascii=False)


def _triggered(lark: str, trigger: str, markers: Markers) -> str:
    call = _START.sub("triggered", lark)
    id = markers.ids.get(trigger)
    if id is not None:
        return f"start: (free <[{id}]> triggered)* free\nfree: <[^{id}]>*\n{call}"
    others = markers.others()
    marker = f"WORDS? <[{others}]> | " if others else ""
    rules = (
        f"start: ({marker}until triggered)* WORDS?",
        f"until[suffix={json.dumps(trigger, ensure_ascii=False)}]: WORDS",
        "WORDS: /(?s:.*)/",
    )
    return "\n".join((*rules, call))


def _ranges(ids: Sequence[int]) -> list[str]:
    """3, 4, 5, 9 → 3-5, 9"""
    found: list[list[int]] = []
    for id in ids:
        if found and id == found[-1][-1] + 1:
            found[-1] = [found[-1][0], id]
        else:
            found.append([id, id])
    return [f"{first}" if first == last else f"{first}-{last}" for first, last in found]
