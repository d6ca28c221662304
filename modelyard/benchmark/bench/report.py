"""What a run has found: tables for people, and the same as values for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from modelyard.benchmark.bench.book import Book, Pairing, Subject
from modelyard.benchmark.sample import Round, Sample
from modelyard.benchmark.summary import Spread, Summary

_WIDTH = 120
_SHARES = "p50/p90/p99"
_STYLES = {"better": "green", "worse": "red"}


def show(book: Book, out: Console) -> None:
    if not out.is_terminal:  # a file has no margin to keep
        out = Console(file=out.file, width=max(out.width, _WIDTH))
    for subject in book.subjects:
        out.print(f"[bold]{subject.label}[/bold] {escape(subject.name)} [dim]{escape(subject.model)}[/dim]")
    table = _results(book)
    out.print(table if table.row_count else "nothing was measured")
    if len(book.subjects) > 1 and (pairings := book.pairings()):
        out.print()
        out.print(_comparison(pairings))
    out.print()
    for note in notes(book):
        out.print(f"[dim]· {escape(note)}[/dim]", highlight=False, soft_wrap=True)
    for line in _errors(book):
        out.print(f"[red]error[/red] {escape(line)}", highlight=False, soft_wrap=True)


def _results(book: Book) -> Table:
    table = _table(
        "",
        "streams",
        "answers",
        f"TTFT ms\n{_SHARES}",
        f"ITL ms\n{_SHARES}",
        "tok/s\na stream",
        "tok/s\nin all",
        "req/s",
    )
    for subject, found, _ in book.results():
        failed = sum(found.errors.values())
        answers = f"{found.answers}" + (f" [red]+{failed} failed[/red]" if failed else "")
        rates = (_number(found.stream_rate.mean), _within(found.tokens_per_s.middle, found.tokens_per_s.high))
        figures = (_spread(found.ttft_s), _spread(found.gap_s), *rates, _number(found.requests_per_s.middle))
        table.add_row(subject.label, str(found.streams), answers, *figures)
    return table


def _comparison(pairings: list[Pairing]) -> Table:
    others = {pairing.subject.label for pairing in pairings}
    other = others.pop() if len(others) == 1 else "other"
    table = _table("", "streams", "", pairings[0].first.label, other, "ratio", "")
    for pairing in pairings:
        found = pairing.found
        what = f"{pairing.subject.label} over {pairing.first.label}"
        sides = [_measured(side, found.unit) for side in (found.second, found.first)]
        table.add_row(what, str(found.streams), found.figure, *sides, _ratio(pairing), _judged(pairing))
    return table


def _measured(side: Sequence[float], unit: str) -> str:
    if not side:
        return "–"
    return f"{_number(fmean(side) * 1000)} ms" if unit == "s" else _number(fmean(side))


def _ratio(pairing: Pairing) -> str:
    ratio = pairing.found.ratio
    if ratio is None:
        return "–"
    if not math.isfinite(ratio.high):
        return f"{ratio.middle:.3f}"
    high = f"{ratio.high:.3f}" if ratio.high < 100 else f"{ratio.high:.0e}"
    return rf"{ratio.middle:.3f} \[{ratio.low:.3f}, {high}]"


def _judged(pairing: Pairing) -> str:
    verdict = pairing.found.verdict
    style = _STYLES.get(verdict)
    return f"[{style}]{pairing.subject.label} is {verdict}[/{style}]" if style else verdict


def notes(book: Book) -> list[str]:
    plan, workload = book.plan, book.plan.workload
    turns = f", {workload.turns} turns of {workload.turn_tokens} more" if workload.turns > 1 else ""
    said = [
        f"workload {workload.name}: prompts of {workload.prompt_tokens} tokens{turns}, "
        f"answers of {workload.output_tokens} at most; {plan.rounds} rounds; --seed {plan.seed}",
        "TTFT: time to the first token; ITL: between two tokens; rates are means, ± of 95 % over the rounds",
        *book.notes,
        *_lengths(book),
    ]
    if len(book.subjects) > 1:
        said.append("rounds of all subjects take turns; the intervals of all lines hold together with 95 %")
        if plan.rounds < 2:
            said.append("one round says nothing of noise: nothing can be called better or worse")
    if book.is_interrupted:
        said.append("interrupted: only what was measured until then")
    return said


def _lengths(book: Book) -> list[str]:
    """What was really asked and answered, said once of all numbers of streams where it was the same."""
    told: dict[tuple[str, str], list[str]] = {}
    for subject, found, _ in book.results():
        told.setdefault((subject.label, _length(found)), []).append(str(found.streams))
    return [f"{label} at {', '.join(streams)}: {line}" for (label, line), streams in told.items()]


def _length(found: Summary) -> str:
    if not found.answers:
        return "no answer"
    prompt, cached, output = (
        f"{tokens / found.answers:.0f}" for tokens in (found.prompt_tokens, found.cached_tokens, found.output_tokens)
    )
    if found.is_counted:
        return f"{output} pieces of answer, each counted as a token: the server does not tell their numbers"
    return f"{prompt} tokens of prompt, {cached} of them from a cache, {output} of answer"


def _errors(book: Book) -> list[str]:
    lines = [f"{count} × in the warm-up: {said}" for said, count in book.warmup_errors.items()]
    for subject, found, _ in book.results():
        lines += [f"{count} × {subject.label} at {found.streams}: {said}" for said, count in found.errors.items()]
    return lines


def _table(*columns: str) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if not place or not column else "right", overflow="fold")
    return table


def _spread(values: Spread) -> str:
    return "/".join(_number(value * 1000) for value in (values.p50, values.p90, values.p99))


def _within(middle: float, high: float) -> str:
    return f"{_number(middle)} ± {_number(high - middle)}" if math.isfinite(high) else _number(middle)


def _number(value: float) -> str:
    if math.isnan(value):
        return "–"
    digits = next((digits for least, digits in ((100, 0), (10, 1), (1, 2)) if abs(value) >= least), None)
    return f"{value:.2g}" if digits is None else f"{value:,.{digits}f}"


# --- JSON -------------------------------------------------------------------------------------------------------------


def values(book: Book) -> dict[str, Any]:
    plan = book.plan
    return {
        "workload": msgspec.to_builtins(plan.workload),
        "plan": {name: getattr(plan, name) for name in ("streams", "rounds", "requests", "seconds", "warmup", "seed")},
        "subjects": [msgspec.to_builtins(subject) for subject in book.subjects],
        "results": [_result(*result) for result in book.results()],
        "comparisons": [_pairing(pairing) for pairing in book.pairings()],
        "warmup_errors": book.warmup_errors,
        "notes": notes(book),
        "interrupted": book.is_interrupted,
    }


def _result(subject: Subject, found: Summary, rounds: list[Round]) -> dict[str, Any]:
    told = [{"wall_s": one.wall_s, "samples": [_sample(sample) for sample in one.samples]} for one in rounds]
    return {"subject": subject.label, **msgspec.to_builtins(found), "of_rounds": told}


def _sample(sample: Sample) -> dict[str, Any]:
    """All but the gaps, which are many; their rate stands for them."""
    fields = ("began_s", "prompt_tokens", "cached_tokens", "output_tokens", "ttft_s", "total_s", "rate", "error")
    return {name: getattr(sample, name) for name in fields}


def _pairing(pairing: Pairing) -> dict[str, Any]:
    found = msgspec.to_builtins(pairing.found)
    return {"subject": pairing.subject.label, "over": pairing.first.label, **found}
