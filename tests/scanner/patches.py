"""A custom tool as Codex offers it: patches, with a grammar of their own."""

from __future__ import annotations

import re

from modelyard.core.request import Tool

GRAMMAR = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?

hunk: added | deleted | updated   // three kinds
added: "*** Add File: " name LF line+
deleted: "*** Delete File: " name LF
updated: "*** Update File: " name LF moved? change?

name: /(.+)/
line: "+" /(.*)/ LF -> line

moved: "*** Move to: " name LF
change: (context | changed)+ last?
context: ("@@" | "@@ " /(.+)/) LF
changed: ("+" | "-" | " ") /(.*)/ LF
last: "*** End of File" LF

%import common.LF
"""

PATCH = '*** Begin Patch\n*** Add File: a"b/c.py\n+x = "\\n"\n+\n*** Update File: d\n@@ f()\n-ä\n+b\n*** End Patch'

APPLY_PATCH = Tool("apply_patch", "Edits files.", kind="custom", grammar={"syntax": "lark", "definition": GRAMMAR})

_HUNK = re.compile(r"\*\*\* (Add|Delete|Update) File: .+")
_REST = re.compile(r"[-+ ].*|@@( .+)?|\*\*\* (Move to: .+|End of File)")


def is_patch(text: str) -> bool:
    """By another road than the grammar: line by line."""
    first, *inner, last = text.removesuffix("\n").split("\n")
    if (first, last) != ("*** Begin Patch", "*** End Patch") or not inner or not _HUNK.fullmatch(inner[0]):
        return False
    return all(_HUNK.fullmatch(line) or _REST.fullmatch(line) for line in inner)
