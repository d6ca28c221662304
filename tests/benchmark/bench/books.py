"""Books with made-up rounds in them, for tests of what is printed and drawn."""

from __future__ import annotations

from modelyard.benchmark.bench.book import Book, Subject
from modelyard.benchmark.bench.plan import Plan, steps
from modelyard.benchmark.sample import Round, Sample
from modelyard.benchmark.workload import named


def answer(scale: float = 1.0, **more: object) -> Sample:
    gaps = (0.01 * scale,) * 9
    base = {"prompt_tokens": 64, "output_tokens": 10, "ttft_s": 0.1 * scale, "gaps_s": gaps, "total_s": 0.2 * scale}
    return Sample(**{**base, **more})  # type: ignore[arg-type]


def filled(*scales: float, streams: tuple[int, ...] = (1, 4), rounds: int = 4, **sample: object) -> Book:
    """One subject a scale: 2.0 is twice as slow. Rounds differ a little, as they do."""
    plan = Plan(workload=named("chat"), streams=streams, rounds=rounds, seed=7)
    subjects = [Subject("ABCD"[n], f"http://h:{n}", "m") for n in range(len(scales))]
    book = Book(plan, subjects)
    for step in steps(plan, len(scales)):
        scale = scales[step.subject] * (1 + 0.01 * ((step.number * 7 + step.subject * 3) % 5))
        samples = tuple(answer(scale, **sample) for _ in range(step.streams))
        book.note(step, Round(streams=step.streams, wall_s=0.2 * scale, samples=samples))
    return book
