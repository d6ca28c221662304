"""The scanner's benchmark: every case is the output that its name says."""

from __future__ import annotations

import io

from rich.console import Console

from bench.scanner import ScanCase, cases, measure, pieces, table, with_scanner
from modelyard.scanner import parse
from modelyard.scanner.formats import load


def test_a_case_is_the_output_that_it_is_named_after() -> None:
    for case in cases():
        if "KiB" not in case.name:
            found = parse([case.text], format=load(case.format))
            assert bool(found.tool_calls) == ("call" in case.name), case.name
            assert bool(found.reasoning) == (case.name == "reasoning"), case.name


def test_plain_text_is_one_event_per_token() -> None:
    case = ScanCase("plain text", "hermes", "one two three four")
    given = pieces(case.text)
    assert with_scanner(given, case) == len(given) + 2  # a block's start and end


def test_the_table_has_a_line_for_each_measurement() -> None:
    row = measure(ScanCase("plain text", "hermes", "one two three four"), rounds=1)
    out = io.StringIO()
    Console(file=out, width=120).print(table([row]))
    assert "hermes" in out.getvalue()
