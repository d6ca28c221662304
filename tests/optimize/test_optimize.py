"""`modelyard optimize` end to end: the result is printed, saved for the workbench, applied or refused."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from modelyard.config.load import load_config
from modelyard.core.errors import Conflict, InvalidRequest, NotFound, Unavailable
from modelyard.core.knobs import Knob
from modelyard.http.admin.routes import tuning_runs
from modelyard_bench.statistics import Interval
from modelyard_fake import knobs
from modelyard_optimize import optimize as optimize_module
from modelyard_optimize.optimize import (
    OptimizeOptions,
    make_plan,
    optimize,
    overridden,
    parse_share,
    write_recommendation,
)
from modelyard_optimize.optimizer import Optimizer, OptimizerPlan
from modelyard_optimize.search import SearchRules
from modelyard_optimize.trial import Measurement, Outcome, TrialFailure, TrialJob, TrialLimits

TOML = """\
# a slow one
[models.demo]
backend = "fake"       # no weights
token_delay = 0.02     # slow
script = [{ steps = [{ tokens = 200 }] }]
"""


class Workspace:
    """A file, the two consoles, and the folder that the workbench reads."""

    def __init__(self, folder: Path, text: str = TOML, name: str = "modelyard.toml") -> None:
        self.file, self.tune = folder / name, folder / "tune"
        self.file.write_text(text)
        self.out, self.err = io.StringIO(), io.StringIO()

    def optimize(self, **options: object) -> int:
        consoles = (Console(file=file, width=160) for file in (self.out, self.err))
        loaded = load_config(self.file, env={})
        return optimize(loaded, OptimizeOptions(config=self.file, **options), *consoles, folder=self.tune)  # type: ignore[arg-type]


class Formula:
    """Trials that take no time: the speed of a setting is a formula."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trials, self.stop_after = 0, 10_000
        made = Optimizer.__init__

        def make(run: Optimizer, *args: object) -> None:
            made(run, *args, self.run_trial)  # type: ignore[arg-type]

        monkeypatch.setattr(Optimizer, "__init__", make)

    async def run_trial(self, job: TrialJob, limits: TrialLimits) -> Outcome:
        if self.trials == self.stop_after:
            raise KeyboardInterrupt
        self.trials += 1
        delay = 0.001 + job.config["models"]["demo"]["options"]["token_delay"]
        return Measurement(speed=1 / delay, ttft_s=0.1, answer_s=64 * delay, memory=1 << 28)


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> Formula:
    return Formula(monkeypatch)


def test_a_better_setting_is_written_into_the_file_and_nothing_else(tmp_path: Path, formula: Formula):
    workspace = Workspace(tmp_path)
    assert workspace.optimize(apply=True) == 0
    assert workspace.file.read_text() == TOML.replace("token_delay = 0.02 ", "token_delay = 0.0 ")
    assert (tmp_path / "modelyard.bak.toml").read_text() == TOML
    assert "written to" in workspace.err.getvalue()
    assert tuning_runs(workspace.tune)[0]["applied"] == [str(workspace.file)]


def test_without_apply_the_file_stays_and_the_recommendation_is_printed(tmp_path: Path, formula: Formula):
    workspace = Workspace(tmp_path)
    assert workspace.optimize() == 0
    assert workspace.file.read_text() == TOML
    text = workspace.out.getvalue()
    assert "[models.demo]\ntoken_delay = 0.0" in text
    assert "better than the current settings beyond the noise: 21.00 times as good" in text


def test_a_setting_that_is_not_better_is_not_written(tmp_path: Path, formula: Formula):
    best = TOML.replace("0.02", "0.0")
    workspace = Workspace(tmp_path, best)
    assert workspace.optimize(apply=True) == 0
    assert workspace.file.read_text() == best
    assert "nothing is written" in workspace.err.getvalue()
    assert [path.name for path in tmp_path.iterdir() if "bak" in path.name] == []


@pytest.mark.parametrize(("load", "is_told"), [(12.0, True), (0.1, False)])
def test_a_busy_machine_is_told_and_the_better_setting_written(
    tmp_path: Path, formula: Formula, monkeypatch: pytest.MonkeyPatch, load: float, is_told: bool
):
    monkeypatch.setattr(psutil, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    workspace = Workspace(tmp_path)
    assert workspace.optimize(apply=True) == 0
    assert ("the machine is busy: 6.0 programs want each of its processors" in workspace.err.getvalue()) == is_told
    assert "token_delay = 0.0 " in workspace.file.read_text()


def test_a_json_configuration_is_written(tmp_path: Path, formula: Formula):
    text = json.dumps({"models": {"demo": {"backend": "fake", "token_delay": 0.02}}}, indent=2)
    workspace = Workspace(tmp_path, text, "settings.json")
    assert workspace.optimize(apply=True) == 0
    assert workspace.file.read_text() == text.replace("0.02", "0.0")


def test_the_report_and_its_drawing_are_saved_for_the_workbench(tmp_path: Path, formula: Formula):
    workspace = Workspace(tmp_path)
    workspace.optimize(plot=tmp_path / "mine.svg")
    (kept,) = tuning_runs(workspace.tune)
    assert kept["model"] == "demo"
    assert kept["better"] is True
    assert kept["changes"] == {"token_delay": 0.0}
    assert kept["toml"] == "[models.demo]\ntoken_delay = 0.0"
    assert {"current", "best"} <= {row["name"] for row in kept["rows"]}
    assert (workspace.tune / f"{kept['id']}.svg").read_text().startswith("<svg")
    assert (tmp_path / "mine.svg").read_text() == (workspace.tune / f"{kept['id']}.svg").read_text()


def test_the_report_is_printed_as_json(tmp_path: Path, formula: Formula):
    workspace = Workspace(tmp_path)
    workspace.optimize(json=True, apply=True)
    text = json.loads(workspace.out.getvalue())
    assert text["best"]["token_delay"] == 0.0
    assert text["applied"] == [str(workspace.file)]
    assert Interval(**text["ratios"]["current"]).low > 1


def test_ctrl_c_leaves_the_file_and_the_next_run_resumes(tmp_path: Path, formula: Formula):
    workspace = Workspace(tmp_path)
    formula.stop_after = 5
    assert workspace.optimize(apply=True) == 130
    assert workspace.file.read_text() == TOML
    assert "interrupted" in workspace.out.getvalue()
    assert "token_delay = 0.0" in workspace.out.getvalue()
    formula.stop_after = 10_000
    again = Workspace(tmp_path)
    assert again.optimize(apply=True) == 0
    assert "trials are known" in again.err.getvalue()
    assert "token_delay = 0.0 " in workspace.file.read_text()


def test_fresh_does_not_resume(tmp_path: Path, formula: Formula):
    workspace = Workspace(tmp_path)
    formula.stop_after = 5
    workspace.optimize()
    formula.stop_after = 10_000
    again = Workspace(tmp_path)
    again.optimize(fresh=True)
    assert "resuming" not in again.err.getvalue()


def test_impossible_outputs_are_refused_before_the_first_trial(tmp_path: Path, formula: Formula):
    with pytest.raises(InvalidRequest, match=r"must end in \.svg or \.png"):
        Workspace(tmp_path).optimize(plot=tmp_path / "found.gif")
    with pytest.raises(InvalidRequest, match="does not exist"):
        Workspace(tmp_path).optimize(plot=tmp_path / "nowhere" / "found.svg")
    with pytest.raises(Conflict, match="no configuration file"):
        optimize(
            load_config(env={}, cwd=tmp_path / "tune"),
            OptimizeOptions(apply=True),
            Console(),
            Console(),
            folder=tmp_path,
        )
    assert formula.trials == 0


def test_a_run_that_measured_nothing_says_so_and_fails(tmp_path: Path, formula: Formula):
    async def hang(job: TrialJob, limits: TrialLimits) -> Outcome:
        return TrialFailure("hang", "stopped after 1 s")

    formula.run_trial = hang  # type: ignore[method-assign]
    workspace = Workspace(tmp_path)
    assert workspace.optimize(apply=True) == 1
    assert "nothing could be measured" in workspace.out.getvalue()
    assert workspace.file.read_text() == TOML


def test_each_line_of_a_log_says_how_long_it_takes_at_most(tmp_path: Path, formula: Formula):
    workspace = Workspace(tmp_path)
    workspace.optimize()
    assert "left at most)" in workspace.err.getvalue()


def test_an_unknown_model_is_refused(tmp_path: Path, formula: Formula):
    with pytest.raises(NotFound, match="'other'; there are demo"):
        Workspace(tmp_path).optimize(model="other")


def test_real_trials_of_the_fake_engine_end_in_a_saved_report_and_no_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def one_knob(*_: object) -> Iterator[Knob]:
        yield Knob(name="token_delay", values=(0.0,), stage=1)

    monkeypatch.setattr(knobs, "knobs", one_knob)
    few = SearchRules(rounds=1, passes=1, pairs=0, min_rounds=1, max_rounds=1)
    monkeypatch.setattr(optimize_module, "OptimizerPlan", partial(OptimizerPlan, rules=few))
    workspace = Workspace(tmp_path, TOML.replace("0.02", "0.005"))
    assert workspace.optimize() == 0
    (kept,) = tuning_runs(workspace.tune)
    assert kept["trials"] >= 4
    assert "current" in {row["name"] for row in kept["rows"]}
    assert not list(workspace.tune.glob("*.jsonl"))


def test_ctrl_c_in_the_terminal_ends_the_trial_and_leaves_the_file(tmp_path: Path):
    """A real command with real children, interrupted after the first trial is recorded."""
    workspace = Workspace(tmp_path)
    argv = [sys.executable, "-m", "modelyard", "optimize", "--config", str(workspace.file), "--apply"]
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
    assert "interrupted" in out
    assert workspace.file.read_text() == TOML
    assert not psutil.wait_procs(children, 60)[1]


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0.05", 0.05), (" 0 % ", 0.0), ("12.5%", 0.125)])
def test_shares_are_parsed(text, value):
    assert parse_share(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "five", "120%", "-1%", "1.5"])
def test_an_invalid_share_is_refused(text):
    with pytest.raises(InvalidRequest, match="is not a share"):
        parse_share(text)


def test_the_plan_follows_the_options():
    plan = make_plan(OptimizeOptions(goal="batch", budget="2m", streams=4, memory=100, loss="2%"))
    assert (plan.goal, plan.budget_s, plan.streams, plan.memory) == ("batch", 120.0, 4, 100 << 20)
    assert plan.bounds.rise == pytest.approx(0.02)


def test_the_command_passes_its_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from typer.testing import CliRunner

    from modelyard.cli.app import app

    seen: list[OptimizeOptions] = []
    monkeypatch.setattr(optimize_module, "optimize", lambda loaded, options, out, err: seen.append(options) or 3)
    workspace = Workspace(tmp_path)
    arguments = ["optimize", "--config", str(workspace.file), "--for", "agent", "--budget", "3m", "--apply"]
    assert CliRunner().invoke(app, arguments).exit_code == 3
    assert seen == [OptimizeOptions(config=workspace.file, goal="agent", budget="3m", apply=True)]


USER_TOML = """\
# mine
[models.m]
backend = "llama_cpp"
path = "/nowhere/m.gguf"   # here
gguf_flash_attn = "off"    # by its old name

[caches.main]
model = "m"
n_ctx = 4096
cache_type_k = "f16"
"""


def written(folder: Path, text: str, changes, name: str = "modelyard.toml", model: str = "m") -> tuple[Path, Path]:
    file = folder / name
    file.write_text(text)
    done = write_recommendation(load_config(file, env={}), changes, {model: "llama_cpp"})
    assert list(done) == [file]
    return file, done[file]


def test_comments_and_order_stay_and_a_backup_is_kept(tmp_path: Path):
    file, backup = written(tmp_path, USER_TOML, {("models", "m", "n_threads"): 2})
    assert backup.read_text() == USER_TOML
    assert file.read_text() == USER_TOML.replace(
        '"off"    # by its old name\n', '"off"    # by its old name\nn_threads = 2\n'
    )
    assert backup.name == "modelyard.bak.toml"
    assert load_config(backup, env={}).config.models.keys() == {"m"}


def test_a_key_is_changed_under_its_name_in_the_file(tmp_path: Path):
    changes = {("models", "m", "flash_attn"): "on", ("caches", "main", "type_k"): "q8_0"}
    file, _ = written(tmp_path, USER_TOML, changes)
    assert file.read_text() == USER_TOML.replace('"off"', '"on"').replace('"f16"', '"q8_0"')


def test_a_key_under_options_is_changed_there(tmp_path: Path):
    text = '[models.m]\nbackend = "llama_cpp"\npath = "/x.gguf"\n[models.m.options]\nn_threads = 1\n'
    file, _ = written(tmp_path, text, {("models", "m", "n_threads"): 4})
    assert file.read_text() == text.replace("n_threads = 1", "n_threads = 4")


def test_a_configuration_in_another_vocabulary_keeps_its_own_names(tmp_path: Path):
    text = json.dumps({"engine": {"models": {"m": {"backend": "llama_cpp", "model_path": "/x.gguf"}}}}, indent=4)
    file, _ = written(tmp_path, text, {("models", "m", "n_threads"): 4}, "settings.json")
    assert json.loads(file.read_text()) == {
        "engine": {"models": {"m": {"backend": "llama_cpp", "model_path": "/x.gguf", "n_threads": 4}}}
    }


def test_a_second_run_does_not_overwrite_the_first_backup(tmp_path: Path):
    file, first = written(tmp_path, USER_TOML, {("models", "m", "n_threads"): 2})
    done = write_recommendation(load_config(file, env={}), {("models", "m", "n_threads"): 3}, {"m": "llama_cpp"})
    assert first.read_text() == USER_TOML
    assert "n_threads = 2" in done[file].read_text()


def test_the_built_in_model_is_written_completely(tmp_path: Path):
    """A file that names a model replaces the built-in configuration, so a part of it would not be a model."""
    before = load_config(env={}, cwd=tmp_path).config
    file, _ = written(tmp_path, "[http]\nport = 8001\n", {("models", "smollm2", "n_threads"): 2}, model="smollm2")
    after = load_config(file, env={}).config
    assert after.models["smollm2"].options == {"n_threads": 2}
    assert after.models["smollm2"].path == before.models["smollm2"].path
    assert after.caches == before.caches
    assert after.routes == before.routes
    assert after.http.port == 8001


def test_applying_without_a_file_is_refused(tmp_path: Path):
    with pytest.raises(Conflict, match="no configuration file"):
        write_recommendation(
            load_config(env={}, cwd=tmp_path), {("models", "smollm2", "n_threads"): 2}, {"smollm2": "llama_cpp"}
        )


def test_the_file_that_has_the_key_is_changed(tmp_path: Path):
    base, local = tmp_path / "config" / "settings.json", tmp_path / "config" / "local.json"
    base.parent.mkdir()
    base.write_text('{"models": {"m": {"backend": "llama_cpp", "path": "/x.gguf"}}}')
    local.write_text('{"models": {"m": {"n_threads": 1}}}')
    loaded = load_config(env={}, cwd=tmp_path)
    done = write_recommendation(
        loaded, {("models", "m", "n_threads"): 2, ("models", "m", "n_ubatch"): 64}, {"m": "llama_cpp"}
    )
    assert list(done) == [local]
    assert json.loads(local.read_text()) == {"models": {"m": {"n_threads": 2, "n_ubatch": 64}}}
    assert base.read_text() == '{"models": {"m": {"backend": "llama_cpp", "path": "/x.gguf"}}}'


def test_a_full_disk_leaves_the_file_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "modelyard.toml"
    file.write_text(USER_TOML)
    monkeypatch.setattr("modelyard.config.file_editor.shutil.copy2", full)
    with pytest.raises(Unavailable, match="No space left"):
        write_recommendation(load_config(file, env={}), {("models", "m", "n_threads"): 2}, {"m": "llama_cpp"})
    assert [path.name for path in tmp_path.iterdir()] == ["modelyard.toml"]


def test_a_value_overridden_by_the_environment_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    changes = {("models", "m", "n_threads"): 2}
    file, _ = written(tmp_path, USER_TOML, changes)
    assert overridden(file, changes, {"m": "llama_cpp"}) == []
    monkeypatch.setenv("MODELYARD_MODELS__M__N_THREADS", "1")
    assert overridden(file, changes, {"m": "llama_cpp"}) == ["models.m.n_threads"]


def test_the_file_keeps_its_permissions(tmp_path: Path):
    file = tmp_path / "modelyard.toml"
    file.write_text(USER_TOML)
    file.chmod(0o600)
    write_recommendation(load_config(file, env={}), {("models", "m", "n_threads"): 2}, {"m": "llama_cpp"})
    assert file.stat().st_mode & 0o777 == 0o600
