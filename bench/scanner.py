"""What the scanner costs per token: plain text, reasoning and tool calls, beside the same loop without a scanner.

    python bench/scanner.py [--rounds N]

Every row is the median over the rounds of the CPU time of a whole output, divided by its tokens. The last rows are one
call with an argument of 64 KiB to 1 MiB: the cost per token must not grow with the length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from modelyard.core.events import BlockDelta, Event
from modelyard.core.request import Tool
from modelyard.core.tokenizer import Piece
from modelyard.scanner import Scanner
from modelyard.scanner.formats import load

TARGET_US = 3.0
_TOKEN_LENGTH = 4  # characters, about as many as a token of English has
_TOOL = Tool("write", parameters={"properties": {"path": {"type": "string"}, "content": {"type": "string"}}})
_PROSE = "The quick brown fox jumps over the lazy dog, and then it goes home for tea; it is late. "
_CODE = "    if value < limit and name != 'x':\n        return {\"a\": [1, 2]}\n"
_CALLS: dict[str, Callable[[str], str]] = {
    "hermes": lambda body: (
        f'<tool_call>\n{{"name": "write", "arguments": {{"content": {json.dumps(body)}}}}}\n</tool_call>'
    ),
    "harmony": lambda body: (
        "<|start|>assistant<|channel|>commentary to=functions.write <|constrain|>json<|message|>"
        f"{json.dumps({'content': body})}<|call|>"
    ),
    "qwen3_coder": lambda body: (
        f"<tool_call>\n<function=write>\n<parameter=content>\n{body}\n</parameter>\n</function>\n</tool_call>"
    ),
    "glm45": lambda body: f"<tool_call>write\n<arg_key>content</arg_key>\n<arg_value>{body}</arg_value>\n</tool_call>",
}


class ScanCase(Struct, frozen=True):
    name: str
    format: str
    text: str


class ScanCost(Struct, frozen=True):
    case: ScanCase
    tokens: int
    without_us: float
    with_us: float


def cases() -> Iterator[ScanCase]:
    prose = _PROSE * 400
    for format in ("plain", "hermes", "qwen3_coder", "harmony", "muse_glimmer", "gigachat3", "llama3_json"):
        yield ScanCase("plain text", format, prose)
    yield ScanCase("plain text with line breaks", "hermes", prose.replace("; ", ";\n\n"))
    yield ScanCase("reasoning", "hermes", f"<think>\n{prose}\n</think>\nDone.")
    for format, call in _CALLS.items():
        yield ScanCase("a call with code", format, call(_CODE * 500))
    for size in (64, 256, 1024):
        for format in ("hermes", "qwen3_coder"):
            yield ScanCase(f"a call of {size} KiB", format, _CALLS[format](_PROSE * (size * 1024 // len(_PROSE))))


def pieces(text: str) -> list[Piece]:
    return [Piece(text[at : at + _TOKEN_LENGTH]) for at in range(0, len(text), _TOKEN_LENGTH)]


def without_scanner(given: list[Piece], _: ScanCase) -> int:
    """The loop that a gateway needs anyway: one event per token."""
    events = 0
    for piece in given:
        made: list[Event] = [BlockDelta(0, piece.text)]
        events += len(made)
    return events


def with_scanner(given: list[Piece], case: ScanCase) -> int:
    ids, events = count(), 0
    scanner = Scanner(load(case.format), tools=(_TOOL,), new_id=lambda: f"call_{next(ids)}")
    for piece in given:
        events += len(scanner.feed((piece,)))
    return events + len(scanner.finish())


def measure(case: ScanCase, rounds: int) -> ScanCost:
    given = pieces(case.text)
    times: dict[Callable[[list[Piece], ScanCase], int], list[float]] = {without_scanner: [], with_scanner: []}
    for _ in range(rounds):
        for loop, taken in times.items():
            start = time.process_time()
            loop(given, case)
            taken.append((time.process_time() - start) / len(given) * 1e6)
    return ScanCost(case, len(given), statistics.median(times[without_scanner]), statistics.median(times[with_scanner]))


def table(rows: list[ScanCost]) -> Table:
    shown = Table(title=f"Scanner: µs per token, one token at a time (target for plain text: ≤ {TARGET_US:g} µs)")
    for column in ("what", "format", "tokens", "without", "with", "ratio"):
        shown.add_column(column, justify="left" if column in ("what", "format") else "right")
    for row in rows:
        slow = row.case.name == "plain text" and row.with_us > TARGET_US
        cost = f"{row.with_us:.2f}"
        ratio = f"{row.with_us / row.without_us:.1f}"
        shown.add_row(
            row.case.name,
            row.case.format,
            f"{row.tokens:,}",
            f"{row.without_us:.2f}",
            f"[red]{cost}[/red]" if slow else cost,
            ratio,
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    Console().print(table([measure(case, rounds) for case in cases()]))


if __name__ == "__main__":
    main()
