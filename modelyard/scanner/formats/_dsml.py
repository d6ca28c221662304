"""DeepSeek's markup: `invoke` tags with the token `｜DSML｜` in each, and an attribute that tells text from JSON.

    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>

Around the calls stands a block whose name depends on the version. Models confuse the two names, misspell them, forget
the block, and at times leave the token out of every tag.
"""

from __future__ import annotations

import re

from modelyard.core.output_format import StartReader
from modelyard.scanner.calls import Calls
from modelyard.scanner.formats._common import DEEPSEEK_ROLES, DEEPSEEK_TURN_END, NAME_LIMIT, closable
from modelyard.scanner.formats._invoke import tagged
from modelyard.scanner.lexer import SURROGATES, Steps, Tape, Unreadable

DSML = "｜DSML｜"
_BLOCKS = ("function_calls", "tool_calls")
_TAG_END = re.compile(rf"[>\n<{SURROGATES}]")
_TAG = re.compile(r"\s*\w+(?:\s+\w+=.*)?")
_OWN = tagged(f"<{DSML}", f"</{DSML}", _BLOCKS, plain_block=False, plain_invoke=False)
_BARE = tagged("<", "</", _BLOCKS, plain_block=True, plain_invoke=True)


def _other(tape: Tape, _: Calls) -> Steps[str | None]:
    """A tag that opens or closes nothing here, such as a misspelled block, is protocol all the same."""
    tag = yield from tape.until(_TAG_END, NAME_LIMIT)
    if not _TAG.fullmatch(tag) or (yield from tape.peek()) != ">":
        raise Unreadable("no tag")
    tape.skip(1)
    return None


REGIONS = closable({**_OWN.marks(), **_BARE.marks(), f"<{DSML}": StartReader(_other), f"</{DSML}": StartReader(_other)})
HIDDEN = (*_OWN.tags.ends, DSML, DEEPSEEK_TURN_END, *DEEPSEEK_ROLES)
INNER = (_OWN.tags.opening, _OWN.tags.closing)
STOPS = (DEEPSEEK_TURN_END,)
TURN = ("<｜Assistant｜>", "</function_results>")
