"""The scanner's benchmark measures what it says: every output is read as what it is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from bench.scanner import Job, jobs, measure, pieces, scanned, table
from modelyard.scanner import parse
from modelyard.scanner.formats import load


@pytest.mark.parametrize("job", [j for j in jobs() if "KB" not in j.name], ids=lambda j: f"{j.format}: {j.name}")
def test_a_job_is_the_output_that_it_is_named_after(job: Job) -> None:
    found = parse([job.text], format=load(job.format))
    assert bool(found.tool_calls) == ("call" in job.name)
    assert bool(found.reasoning) == (job.name == "reasoning")


def test_plain_text_flows_token_by_token() -> None:
    job = Job("plain text", "hermes", "one two three four")
    given = pieces(job.text)
    assert scanned(given, job) == len(given) + 2  # a block's start and end


def test_the_table_has_a_line_for_each_measurement() -> None:
    row = measure(Job("plain text", "hermes", "one two three four"), rounds=1)
    out = io.StringIO()
    Console(file=out, width=120).print(table([row]))
    assert "hermes" in out.getvalue()
