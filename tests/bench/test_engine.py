"""The engine's benchmark: what a cell gives, and what is compared with what."""

from __future__ import annotations

from bench.asking import Answer
from bench.engine import QUICK, Cell, Plan, Taken, comparisons, taken
from bench.peers import OURS, THEIRS


def answer(sent: float, *times: float) -> Answer:
    return Answer(sent, times[0], times[-1], len(times), 32, 32, "", times)


def test_a_rate_counts_the_tokens_that_come_while_all_streams_run():
    early, late = answer(0.0, 1.0, 2.0, 3.0, 4.0), answer(0.0, 2.0, 2.5, 3.0, 3.5, 5.0)
    assert taken([early, late], 4.0) == Taken(rate=(2 + 3) / 2, ttft=1.5, cpu_s=4.0)


def test_the_rate_of_one_stream_leaves_out_the_wait_for_its_first_token():
    assert taken([answer(0.0, 7.0, 8.0, 9.0)], 1.0).rate == 1.0


def test_streams_depths_and_prompts_are_those_of_the_targets():
    cells = Plan().cells
    assert [cell.streams for cell in cells if cell.depth == 32] == [1, 2, 4, 8]
    assert [cell.depth for cell in cells if cell.streams == 1] == [32, 512, 4096]
    assert Plan().window >= 4096 + 48


def test_each_figure_stands_beside_its_counterpart_and_its_target():
    cells = (Cell(1, 32, 16), Cell(8, 32, 16))
    found = {(name, cell): [Taken(100.0 * cell.streams, 0.1, 1.0)] for name in (OURS, THEIRS) for cell in cells}
    lines = list(comparisons(found, [Taken(100.0, 0.1, 1.0)], [Taken(80.0, 0.1, 1.0)]))
    assert [(line.what, line.bound, line.met) for line in lines if line.bound is not None] == [
        ("1 stream", 0.97, True),
        ("8 streams", 1.0, True),
        ("first token, prompt of 32", 1.05, True),
        ("ours beside fake streams, against alone", 0.9, False),
    ]


def test_a_quick_run_is_small():
    assert QUICK.rounds == 1
    assert QUICK.window <= 512
