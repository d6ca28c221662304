"""The report: the verdict, the rows, the JSON file, and the text on the terminal."""

from __future__ import annotations

import io
import math

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from modelyard.core.knobs import Loss, Setting
from modelyard_bench.drawing import Circle, svg
from modelyard_bench.statistics import Interval
from modelyard_optimize.report import (
    ReportRow,
    Scale,
    TerminalReport,
    against_current,
    chart_value,
    format_changes,
    format_duration,
    gain,
    make_report,
    pareto_front,
    plot,
    save,
    verdict,
)
from modelyard_optimize.search import ScoreRequest, ScoreTable, SearchResult
from modelyard_optimize.trial import EngineBenchResult, Measurement, QualityResult, TrialFailure
from tests.optimize.fakes import FormulaTrials, finished_run, optimizer

A, B = Setting((("n", 1),)), Setting((("n", 2),))


def failing() -> ScoreTable:
    table = ScoreTable()
    table.failures[A] = "out of memory"
    return table


def hurried() -> ScoreTable:
    table = ScoreTable()
    table.out_of_time = True
    return table


def test_the_verdict_says_how_long_a_noisy_machine_needs():
    unsure = SearchResult(B, A, ScoreTable(), {B: [1.2] * 9}, Interval(1.2, 0.9, 1.5), False)
    said = verdict(unsure, "1.20 times as good", finished=True, min_rounds=4, needed_s=1700.0)
    assert said.startswith(
        "not confirmed beyond the noise: 1.20 times as good in 9 rounds, in which a setting varies by"
    )
    assert said.endswith("--budget 29m, or a quieter machine, may confirm it")
    short = SearchResult(B, A, ScoreTable(), {B: [1.2] * 3}, Interval(1.2, 0.9, 1.5), False)
    assert "--budget 29m may confirm it" in verdict(short, "", finished=True, min_rounds=4, needed_s=1700.0)


@pytest.mark.parametrize(
    ("found", "finished", "words"),
    [
        (SearchResult(A, A, ScoreTable(), {}), True, "nothing better"),
        (SearchResult(A, A, hurried(), {}), True, "before the time was up: a longer --budget"),
        (SearchResult(A, A, failing(), {}), True, "nothing could be measured: out of memory"),
        (SearchResult(A, A, ScoreTable(), {}), False, "interrupted before"),
        (SearchResult(B, A, ScoreTable(), {}), False, "interrupted: the best so far"),
        (SearchResult(B, A, ScoreTable(), {}, Interval(2.0, 1.5, 2.5), True), True, "2.00 times as good"),
        (SearchResult(B, A, ScoreTable(), {}, None, True), True, "it runs, the current setting does not"),
        (SearchResult(B, A, ScoreTable(), {}, None, False), True, "not confirmed: 0 of at least 4 rounds"),
        (SearchResult(A, B, failing(), {}, None, False), True, "failed when it was measured again: out of memory"),
        (
            SearchResult(B, A, ScoreTable(), {B: [2.0] * 3}, Interval(2.0, 1.9, 2.1), False),
            True,
            "not confirmed: 3 of at least 4 rounds",
        ),
        (SearchResult(B, A, ScoreTable(), {B: [1.0] * 4}, Interval(1.0, 0.9, 1.1), False), True, "no difference"),
    ],
)
def test_the_verdict_says_what_is_confirmed(found, finished, words):
    gained = gain("chat", found, [], found.ratio)
    assert words in verdict(found, gained, finished=finished, min_rounds=4)


def test_a_report_has_everything_and_can_be_written(tmp_path):
    made, result = finished_run()
    report = make_report(made, result)
    assert report.better
    assert report.changes == {"flash_attn": "on", "type_k": "q8_0", "type_v": "q8_0"}
    assert {row.name for row in report.rows} >= {"best", "current", "engine default"}
    assert report.rows[0].score == max(row.score for row in report.rows)
    assert {lost.within for lost in report.losses} == {True, False}
    assert report.failures
    assert report.trials <= report.grid
    kept = msgspec.json.decode(save(report, tmp_path / "tune").read_bytes())
    assert kept["verdict"] == report.verdict
    assert kept["toml"].startswith("[models.m]")


def test_a_slash_in_a_model_name_makes_no_folder(tmp_path):
    made = optimizer(FormulaTrials(), tmp_path)
    report = msgspec.structs.replace(make_report(made, made.interim_result(), finished=False), model="org/name")
    assert save(report, tmp_path).parent == tmp_path


def test_an_infinite_ratio_is_left_out(tmp_path):
    made, result = finished_run()
    found = result
    once = {setting: scores[:1] for setting, scores in found.rounds.items()}
    one = SearchResult(found.best, found.current, found.table, once, Interval(2.0, 0.0, math.inf), False)
    report = make_report(made, one)
    assert report.ratio is None
    assert report.ratios == {}


def test_the_shown_ratio_is_the_one_that_decided(tmp_path):
    made, result = finished_run()
    report = make_report(made, result)
    assert report.ratios["current"] == report.ratio


def test_noise_is_left_out_if_nothing_was_measured_twice(tmp_path):
    made, result = finished_run()
    fresh = optimizer(FormulaTrials(), tmp_path)
    assert make_report(fresh, fresh.interim_result(), finished=False).noise is None
    assert make_report(made, result).noise is not None


def test_for_memory_ratios_are_of_memory_and_the_gain_includes_speed(tmp_path):
    made, result = finished_run("memory")
    report = make_report(made, result)
    assert report.better
    assert report.ratios["current"].middle == pytest.approx(1000 / 600)
    assert (
        report.gain
        == "0.60 times the memory, 2.60 times the speed; the current settings are slower than --slack allows"
    )
    assert report.gain in report.verdict
    assert {row.name: row.slow for row in report.rows if row.name} == {
        "best": False,
        "current": True,
        "engine default": True,
    }


NOW = Setting((("n_threads", 1), ("flash_attn", "off")))
NEW = NOW.but({"n_threads": 2})


def terminal() -> tuple[TerminalReport, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return TerminalReport("chat", NOW, 600.0, Console(file=out, width=160), Console(file=err, width=160)), out, err


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (
            Measurement(speed=12.34, ttft_s=0.5, answer_s=1.0, memory=100 << 20),
            "12.3 tok/s, first token 500 ms, 100 MiB",
        ),
        (TrialFailure("memory", "stopped at 3 MiB"), "out of memory: stopped at 3 MiB"),
        (QualityResult(Loss(10.2, 10.0, 0.01)), "perplexity +2.00%, divergence 0.0100"),
        (QualityResult(Loss(10.2, 10.0)), "perplexity +2.00%"),
        (EngineBenchResult(1.0, 2.0), "EngineBenchResult"),
    ],
)
def test_every_outcome_is_a_line(outcome, expected):
    terminal_report, _, err = terminal()
    with terminal_report.progress:
        terminal_report.trial_started(ScoreRequest(NEW, "stage", "n_threads"), 300.0)
        terminal_report.trial_ended(ScoreRequest(NEW, "stage", "n_threads"), outcome, NOW, replayed=False)
    assert "n_threads = 2" in err.getvalue()
    assert expected in err.getvalue()


def test_a_replayed_outcome_is_marked():
    terminal_report, _, err = terminal()
    terminal_report.trial_ended(ScoreRequest(NOW, "stage"), TrialFailure("hang", "late"), NOW, replayed=True)
    assert "current settings: not finished in time: late (from the history)" in err.getvalue()


def test_the_result_has_a_table_the_losses_the_failures_and_the_recommendation(tmp_path):
    made, result = finished_run()
    report = make_report(made, result)
    terminal_report, out, _ = terminal()
    terminal_report.show(report)
    text = out.getvalue()
    assert "2.60×" in text
    assert "too much: not recommended" in text
    assert "within the bound" in text
    assert "failed n_ubatch = 1024" in text
    assert "not confirmed" not in text
    assert "[models.m]" in text
    assert 'flash_attn = "on"' in text


def test_an_unconfirmed_best_is_marked(tmp_path):
    made, result = finished_run()
    terminal_report, out, _ = terminal()
    terminal_report.show(replace(make_report(made, result), better=False, noise=None))
    assert "not confirmed" in out.getvalue()
    assert "The noise of a trial" not in out.getvalue()


def test_a_setting_is_compared_with_the_current_one_by_the_goal():
    one = ReportRow(name="", changes={"n": 1}, trials=1, score=2.0, speed=1.0, ttft_s=1.0, memory=100, front=True)
    now = replace(one, changes={}, score=1.0, memory=150)
    assert (against_current(one, now, "chat"), against_current(one, now, "memory")) == ("2.00×", "1.50×")
    assert against_current(replace(one, slow=True), now, "memory") == "too slow"
    assert against_current(one, None, "chat") == ""


def test_a_warning_goes_to_stderr():
    terminal_report, out, err = terminal()
    terminal_report.warning("only 3 [trials] fit")
    assert "warning only 3 [trials] fit" in err.getvalue()
    assert not out.getvalue()


def test_durations_and_changes_are_formatted():
    assert (format_duration(59.4), format_duration(61), format_duration(-3)) == ("59 s", "1 min 01 s", "0 s")
    assert format_changes({}) == "current settings"
    assert format_changes({"a": 1, "b": "x"}) == "a = 1, b = x"


# The report as a drawing.


def test_every_setting_is_a_circle_and_baselines_have_labels(tmp_path):
    made, result = finished_run()
    report = make_report(made, result)
    drawing = plot(report)
    assert (
        len([shape for shape in drawing.shapes if isinstance(shape, Circle)]) == len(report.rows) + 1
    )  # and the legend
    text = svg(drawing)
    assert ">best<" in text
    assert ">current<" in text
    assert report.verdict in text


def test_circles_stay_inside_the_drawing(tmp_path):
    made, result = finished_run()
    drawing = plot(make_report(made, result))
    dots = [shape.at for shape in drawing.shapes if isinstance(shape, Circle)]
    assert all(0 <= x <= drawing.width and 0 <= y <= drawing.height for x, y in dots)


def test_a_report_without_rows_can_be_drawn(tmp_path):
    made = optimizer(FormulaTrials(), tmp_path)
    report = make_report(made, made.interim_result(), finished=False)
    assert svg(plot(msgspec.structs.replace(report, rows=()))).startswith("<svg")


def test_the_pareto_front_never_falls_to_the_right():
    points = [(1.0, 9.0), (2.0, 5.0), (3.0, 7.0), (4.0, 5.0), (5.0, 2.0)]
    assert pareto_front(points) == [(1.0, 9.0), (2.0, 5.0), (5.0, 2.0)]


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((1.0, 1.7), [1.0, 1.2, 1.4, 1.6]),
        ((0.0, 100.0), [0.0, 50.0, 100.0]),
        ((323.4, 323.7), [320.0, 325.0, 330.0]),
    ],
    ids=["ratios", "from nothing", "nearly the same"],
)
def test_an_axis_has_round_numbers_and_room_for_noise(values, ticks):
    scale = Scale.of(values, 0.0, 1.0)
    assert scale.ticks == ticks
    assert all(0 <= scale.at(value) <= 1 for value in values)


def test_for_memory_the_vertical_axis_is_speed():
    row = ReportRow(name="", changes={}, trials=1, score=2.0, speed=30.0, ttft_s=1.0, memory=1, front=True)
    assert [chart_value(row, goal) for goal in ("chat", "agent", "batch", "memory")] == [2.0, 2.0, 2.0, 30.0]


def test_the_best_is_the_unit_if_the_current_setting_does_not_run(tmp_path):
    made, result = finished_run()
    report = make_report(made, result)
    rows = tuple(msgspec.structs.replace(row, changes={"n": 1}) for row in report.rows if row.name != "current")
    assert "the best = 1" in svg(plot(msgspec.structs.replace(report, rows=rows)))
    assert "current = 1" in svg(plot(report))
