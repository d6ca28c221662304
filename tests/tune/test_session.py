"""`modelyard optimize` from end to end: what is found is printed, kept for the workbench, applied or refused."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from modelyard.benchmark.intervals import Interval
from rich.console import Console

from modelyard.config.load import load_config
from modelyard.core.errors import Conflict, InvalidRequest, NotFound
from modelyard.http.admin.routes import tuning_runs
from modelyard.tune import session
from modelyard.tune.order import Figures, Order, Outcome
from modelyard.tune.race import Rules
from modelyard.tune.run import Plan, Run
from modelyard.tune.session import Wishes, optimize, planned, share
from modelyard.tune.trial import Limits

TOML = """\
# a slow one
[models.demo]
backend = "fake"       # no weights
token_delay = 0.02     # slow
script = [{ steps = [{ tokens = 200 }] }]
"""


class Desk:
    """A file, the two consoles, and the folder that the workbench reads."""

    def __init__(self, folder: Path, text: str = TOML, name: str = "modelyard.toml") -> None:
        self.file, self.tune = folder / name, folder / "tune"
        self.file.write_text(text)
        self.out, self.err = io.StringIO(), io.StringIO()

    def optimize(self, **wishes: object) -> int:
        consoles = (Console(file=file, width=160) for file in (self.out, self.err))
        loaded = load_config(self.file, env={})
        return optimize(loaded, Wishes(config=self.file, **wishes), *consoles, folder=self.tune)  # type: ignore[arg-type]


class Formula:
    """Trials that take no time: how fast a setting is, is said here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trials, self.stop_after = 0, 10_000
        made = Run.__init__

        def make(run: Run, *args: object) -> None:
            made(run, *args, self.measure)  # type: ignore[arg-type]

        monkeypatch.setattr(Run, "__init__", make)

    async def measure(self, order: Order, limits: Limits) -> Outcome:
        if self.trials == self.stop_after:
            raise KeyboardInterrupt
        self.trials += 1
        delay = 0.001 + order.config["models"]["demo"]["options"]["token_delay"]
        return Figures(speed=1 / delay, ttft_s=0.1, answer_s=64 * delay, memory=1 << 28)


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> Formula:
    return Formula(monkeypatch)


def test_a_better_setting_is_written_into_the_file_and_nothing_else(tmp_path: Path, formula: Formula):
    desk = Desk(tmp_path)
    assert desk.optimize(apply=True) == 0
    assert desk.file.read_text() == TOML.replace("token_delay = 0.02 ", "token_delay = 0.0 ")
    assert (tmp_path / "modelyard.bak.toml").read_text() == TOML
    assert "written to" in desk.err.getvalue()
    assert tuning_runs(desk.tune)[0]["applied"] == [str(desk.file)]


def test_without_apply_the_file_stays_and_the_recommendation_is_printed(tmp_path: Path, formula: Formula):
    desk = Desk(tmp_path)
    assert desk.optimize() == 0
    assert desk.file.read_text() == TOML
    told = desk.out.getvalue()
    assert "[models.demo]\ntoken_delay = 0.0" in told
    assert "better than the current settings beyond the noise: 21.00 times as good" in told


def test_what_is_not_better_is_not_written(tmp_path: Path, formula: Formula):
    best = TOML.replace("0.02", "0.0")
    desk = Desk(tmp_path, best)
    assert desk.optimize(apply=True) == 0
    assert desk.file.read_text() == best
    assert "nothing is written" in desk.err.getvalue()
    assert [path.name for path in tmp_path.iterdir() if "bak" in path.name] == []


def test_a_json_configuration_is_written_too(tmp_path: Path, formula: Formula):
    text = json.dumps({"models": {"demo": {"backend": "fake", "token_delay": 0.02}}}, indent=2)
    desk = Desk(tmp_path, text, "settings.json")
    assert desk.optimize(apply=True) == 0
    assert desk.file.read_text() == text.replace("0.02", "0.0")


def test_the_run_is_kept_where_the_workbench_looks_with_its_drawing(tmp_path: Path, formula: Formula):
    desk = Desk(tmp_path)
    desk.optimize(plot=tmp_path / "mine.svg")
    (kept,) = tuning_runs(desk.tune)
    assert kept["model"] == "demo"
    assert kept["better"] is True
    assert kept["changes"] == {"token_delay": 0.0}
    assert kept["toml"] == "[models.demo]\ntoken_delay = 0.0"
    assert {"current", "best"} <= {row["name"] for row in kept["rows"]}
    assert (desk.tune / f"{kept['id']}.svg").read_text().startswith("<svg")
    assert (tmp_path / "mine.svg").read_text() == (desk.tune / f"{kept['id']}.svg").read_text()


def test_json_is_what_is_printed_for_programs(tmp_path: Path, formula: Formula):
    desk = Desk(tmp_path)
    desk.optimize(json=True, apply=True)
    told = json.loads(desk.out.getvalue())
    assert told["best"]["token_delay"] == 0.0
    assert told["applied"] == [str(desk.file)]
    assert Interval(**told["ratios"]["current"]).low > 1


def test_ctrl_c_leaves_the_file_prints_the_best_and_the_next_run_goes_on(tmp_path: Path, formula: Formula):
    desk = Desk(tmp_path)
    formula.stop_after = 5
    assert desk.optimize(apply=True) == 130
    assert desk.file.read_text() == TOML
    assert "broken off" in desk.out.getvalue()
    assert "token_delay = 0.0" in desk.out.getvalue()
    formula.stop_after = 10_000
    again = Desk(tmp_path)
    assert again.optimize(apply=True) == 0
    assert "trials are known" in again.err.getvalue()
    assert "token_delay = 0.0 " in desk.file.read_text()


def test_fresh_forgets_what_was_broken_off(tmp_path: Path, formula: Formula):
    desk = Desk(tmp_path)
    formula.stop_after = 5
    desk.optimize()
    formula.stop_after = 10_000
    again = Desk(tmp_path)
    again.optimize(fresh=True)
    assert "going on" not in again.err.getvalue()


def test_what_would_go_wrong_at_the_end_is_said_at_the_beginning(tmp_path: Path, formula: Formula):
    with pytest.raises(InvalidRequest, match=r"must end in \.svg or \.png"):
        Desk(tmp_path).optimize(plot=tmp_path / "found.gif")
    with pytest.raises(InvalidRequest, match="is not there"):
        Desk(tmp_path).optimize(plot=tmp_path / "nowhere" / "found.svg")
    with pytest.raises(Conflict, match="no configuration file"):
        optimize(load_config(env={}, cwd=tmp_path / "tune"), Wishes(apply=True), Console(), Console(), folder=tmp_path)
    assert formula.trials == 0


def test_a_model_that_is_not_there_is_named(tmp_path: Path, formula: Formula):
    with pytest.raises(NotFound, match="'other'; there are demo"):
        Desk(tmp_path).optimize(model="other")


def test_real_trials_of_the_fake_engine_end_in_a_kept_result_and_no_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    few = Rules(rounds=1, passes=1, pairs=0, least=2, most=2)
    monkeypatch.setattr(session, "Plan", partial(Plan, rules=few))
    desk = Desk(tmp_path, TOML.replace("0.02", "0.005"))
    assert desk.optimize() == 0
    (kept,) = tuning_runs(desk.tune)
    assert kept["trials"] >= 4
    assert "current" in {row["name"] for row in kept["rows"]}
    assert not list(desk.tune.glob("*.jsonl"))


def test_ctrl_c_in_the_terminal_ends_the_trial_and_leaves_the_file(tmp_path: Path):
    """A real command with real children, interrupted once the first trial is written down."""
    desk = Desk(tmp_path)
    argv = [sys.executable, "-m", "modelyard", "optimize", "--config", str(desk.file), "--apply"]
    env = {**os.environ, "MODELYARD_CACHE": str(tmp_path / "cache")}
    command = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "cache" / "tune").glob("*.jsonl")):
            assert command.poll() is None, command.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        children = psutil.Process(command.pid).children(recursive=True)
        command.send_signal(signal.SIGINT)
        out, _ = command.communicate(timeout=120)
    finally:
        command.kill()
        command.communicate()
    assert command.returncode == 130
    assert "broken off" in out
    assert desk.file.read_text() == TOML
    assert not psutil.wait_procs(children, 60)[1]


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0.05", 0.05), (" 0 % ", 0.0), ("12.5%", 0.125)])
def test_shares_are_read(text, value):
    assert share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "five", "120%", "-1%", "1.5"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(InvalidRequest, match="is no share"):
        share(text)


def test_wishes_become_a_plan():
    plan = planned(Wishes(goal="batch", budget="2m", streams=4, memory=100, loss="2%"))
    assert (plan.goal, plan.budget_s, plan.streams, plan.memory) == ("batch", 120.0, 4, 100 << 20)
    assert plan.bounds.rise == pytest.approx(0.02)


def test_the_command_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from typer.testing import CliRunner

    from modelyard.cli.app import app

    seen: list[Wishes] = []
    monkeypatch.setattr(session, "optimize", lambda loaded, wishes, out, err: seen.append(wishes) or 3)
    desk = Desk(tmp_path)
    arguments = ["optimize", "--config", str(desk.file), "--for", "agent", "--budget", "3m", "--apply"]
    assert CliRunner().invoke(app, arguments).exit_code == 3
    assert seen == [Wishes(config=desk.file, goal="agent", budget="3m", apply=True)]
