"""Measures the llama.cpp engine beside a native llama-server on the same file, threads and context, both through HTTP.

    python bench/engine.py [--quick] [--model FILE] [--threads N] [--rounds N] [--json FILE] [--svg FILE]

Tokens a second of 1, 2, 4 and 8 streams and at a depth of 512 and 4,096 tokens, the time to the first token of prompts
of 32, 512 and 4,096, and our own single stream with 32 streams of the fake engine in the same process beside itself
alone. The servers take turns; every prompt begins with words of its own, so that no cache can help either.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

from msgspec import Struct
from rich.console import Console
from rich.progress import Progress

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # a script finds what stands beside it; we need the root

from bench import compared, peers, smollm
from bench.asking import Answer, ask, body
from bench.noise import noise
from bench.peers import NOISE, OURS, THEIRS
from bench.prompts import Prompts
from bench.ratios import Comparison
from bench.servers import Server
from modelyard.library import default_model

_SLOTS = 8


class Cell(Struct, frozen=True):
    """`streams` at once, each with a prompt of `depth` tokens and `tokens` out."""

    streams: int
    depth: int
    tokens: int


class Plan(Struct, frozen=True):
    rounds: int = 5
    cells: tuple[Cell, ...] = (
        *(Cell(streams, 32, 96) for streams in (1, 2, 4, 8)),
        Cell(1, 512, 64),
        Cell(1, 4096, 48),
    )
    noise: int = 32

    @property
    def window(self) -> int:
        return -(-max(cell.depth + cell.tokens for cell in self.cells) // 256) * 256


QUICK = Plan(1, (Cell(1, 32, 16), Cell(2, 32, 16), Cell(1, 128, 16)), 4)


class Taken(Struct, frozen=True):
    """What one cell gave: tokens a second of all its streams together, the mean time to a first token, and what all of
    it took of the server's CPU, which other work on the machine disturbs least."""

    rate: float
    ttft: float
    cpu_s: float


Rounds = dict[tuple[str, Cell], list[Taken]]


def taken(answers: list[Answer], cpu_s: float) -> Taken:
    """The rate while all streams run: from the last one's first token to the first one's last. A clock that began with
    anybody's first token would count it against a server that it answers one while it still reads the others' prompts;
    what prompts take is the other figure."""
    begin, end = max(answer.first for answer in answers), min(answer.last for answer in answers)
    rate = sum(answer.between(begin, end) for answer in answers) / (end - begin)
    return Taken(rate, fmean(answer.ttft for answer in answers), cpu_s)


class Bench:
    def __init__(self, plan: Plan, prompts: Prompts, tick: Callable[[str], None]) -> None:
        self._plan, self._prompts, self._tick = plan, prompts, tick

    def run(self, servers: dict[str, Server]) -> tuple[Rounds, list[Taken], list[Taken]]:
        """All cells of both; then our single stream alone and beside the noise."""
        found: Rounds = {(name, cell): [] for name in servers for cell in self._plan.cells}
        for name, server in servers.items():
            self._tick(f"warming up {name}")
            self._measure(server, Cell(_SLOTS, 32, 8))
        for number in range(self._plan.rounds):
            for cell in self._plan.cells:
                for name in _turn(servers, number):
                    self._tick(f"{name}: {cell.streams} × {cell.depth} tokens")
                    found[name, cell].append(self._measure(servers[name], cell))
        return found, *self._busy(servers[OURS])

    def _busy(self, server: Server) -> tuple[list[Taken], list[Taken]]:
        alone, busy, cell = [], [], self._plan.cells[0]
        for _ in range(self._plan.rounds):
            self._tick("alone")
            alone.append(self._measure(server, cell))
            self._tick(f"beside {self._plan.noise} streams")
            with noise(server.port, NOISE, self._plan.noise):
                busy.append(self._measure(server, cell))
        return alone, busy

    def _measure(self, server: Server, cell: Cell) -> Taken:
        asked = [body("real", self._prompts.unlike_any(cell.depth), cell.tokens) for _ in range(cell.streams)]
        before = server.cpu_s()
        answers = ask(server.port, *asked)
        cpu_s = server.cpu_s() - before
        for answer in answers:
            if abs(answer.prompt - cell.depth) > 2 or answer.tokens != cell.tokens:
                raise RuntimeError(f"{cell} gave {answer.prompt} tokens of prompt and {answer.tokens} of answer")
        return taken(answers, cpu_s)


def _turn(servers: dict[str, Server], number: int) -> list[str]:
    """Nobody is always first."""
    names = list(servers)
    return names if number % 2 == 0 else names[::-1]


def comparisons(found: Rounds, alone: list[Taken], busy: list[Taken]) -> Iterator[Comparison]:
    cells = list(dict.fromkeys(cell for _, cell in found))
    for cell in cells:
        ours, theirs = (tuple(one.rate for one in found[name, cell]) for name in (OURS, THEIRS))
        yield Comparison(_title(cell), "tok/s", ours, theirs, _bound(cell))
    for cell in (cell for cell in cells if cell.streams == 1):
        ours, theirs = (tuple(one.ttft for one in found[name, cell]) for name in (OURS, THEIRS))
        yield Comparison(f"first token, prompt of {cell.depth:,}", "s", ours, theirs, 1.05, "at most")
    for cell in cells:
        ours, theirs = (tuple(one.cpu_s for one in found[name, cell]) for name in (OURS, THEIRS))
        yield Comparison(f"{_title(cell)}: CPU of prompt and answer", "s", ours, theirs)
    rates = (tuple(one.rate for one in side) for side in (busy, alone))
    yield Comparison("ours beside fake streams, against alone", "tok/s", *rates, 0.9)


def _title(cell: Cell) -> str:
    depth = f" at depth {cell.depth:,}" if cell.depth > 32 else ""
    return f"{cell.streams} stream{'s' if cell.streams > 1 else ''}{depth}"


def _bound(cell: Cell) -> float | None:
    return {1: 0.97, 8: 1.0}.get(cell.streams)


def measure(plan: Plan, model: Path, threads: int, tick: Callable[[str], None], *flags: str) -> list[Comparison]:
    prompts = Prompts(smollm.tokenizer_folder())
    config = peers.configuration(model, threads, {"main": (plan.window, _SLOTS)})
    with ExitStack() as stack:
        ours = stack.enter_context(peers.modelyard(config))
        theirs = stack.enter_context(
            peers.llama_server(model, threads, plan.window, _SLOTS, "--cache-ram", "0", *flags)
        )
        return list(comparisons(*Bench(plan, prompts, tick).run({OURS: ours, THEIRS: theirs})))


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end, too
    options, console = _options(), Console()
    if not console.is_terminal:
        console.width = 130
    plan = QUICK if options.quick else Plan(rounds=options.rounds)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=2 + plan.rounds * (2 * len(plan.cells) + 2))
        tick = lambda what: progress.update(task, description=what, advance=1)  # noqa: E731
        found = measure(plan, options.model or default_model.fetch(), options.threads, tick)
    title = f"The engine beside llama-server, {options.threads} thread(s)"
    notes = [
        f"{plan.rounds} interleaved round(s), medians, 95 % by bootstrap over rounds; window {plan.window} × {_SLOTS}",
        "both through HTTP, chat completions streamed, no speculation, prompts never seen before, equal lengths",
        f"the last line has {plan.noise} streams of 50 tokens/s from the fake engine in the same process",
    ]
    compared.show(title, found, (OURS, THEIRS), notes, console)
    if options.json is not None:
        compared.keep(found, notes, options.json)
    if options.svg is not None:
        options.svg.write_text(compared.draw(title, found), encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the llama.cpp engine beside llama-server.")
    parser.add_argument("--quick", action="store_true", help="once each, few tokens: to see that it works")
    parser.add_argument("--model", type=Path, help="another GGUF with SmolLM2's vocabulary; unset: the default model")
    parser.add_argument("--threads", type=int, default=1, help="of both servers; on a busy machine 1 is the fairest")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every measurement in this file")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the ratios into this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
