"""The child process of a trial: measurements of a round, a workload that fits, failures by their kind."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from modelyard.benchmark.load import Round, Sample
from modelyard.benchmark.workload import Workload
from modelyard.core.errors import InvalidRequest, ModelyardError, Unavailable
from modelyard.tune.trial import Measurement, Outcome, TrialFailure, TrialJob
from modelyard.tune.trial_process import fit_workload, main, run_job, summarize
from tests.live_server import demo_config

LOAD = Workload(name="chat", prompt_tokens=100, output_tokens=20)


def sample(ttft: float, total: float, tokens: int = 11, error: str | None = None) -> Sample:
    gap = (total - ttft) / (tokens - 1)
    return Sample(output_tokens=tokens, ttft_s=ttft, total_s=total, gaps_s=(gap,) * (tokens - 1), error=error)


def test_one_stream_is_measured_by_its_median_answer():
    found = summarize(Round(streams=1, wall_s=30.0, samples=tuple(sample(1.0, n) for n in (2.0, 3.0, 21.0))), 5, 0.5)
    assert isinstance(found, Measurement)
    assert (found.answer_s, found.ttft_s, found.memory, found.load_s) == (3.0, 1.0, 5, 0.5)
    assert found.speed == pytest.approx(5.0)


def test_several_streams_are_measured_by_all_their_tokens():
    found = summarize(Round(streams=2, wall_s=2.0, samples=(sample(1.0, 2.0), sample(1.0, 2.0))), 5, 0.5)
    assert isinstance(found, Measurement)
    assert found.speed == pytest.approx(11.0)


def test_a_failed_answer_fails_the_trial():
    found = summarize(Round(streams=1, wall_s=2.0, samples=(sample(1.0, 2.0), sample(1.0, 2.0, error="lost"))), 5, 0.5)
    assert found == TrialFailure("errors", "1 of 2 answers failed, the first with: lost")


def test_answers_without_a_token_fail_the_trial():
    assert isinstance(summarize(Round(streams=1, wall_s=1.0, samples=(Sample(total_s=1.0),)), 5, 0.5), TrialFailure)


def test_a_workload_is_shortened_to_the_window():
    assert fit_workload(LOAD, 4096) is LOAD
    assert fit_workload(LOAD, 101).context_tokens == 100
    with pytest.raises(Unavailable, match="too small"):
        fit_workload(LOAD, 30)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequest("no such format"), "refused"),
        (InvalidRequest("it needs 3 GiB", code="model_too_large"), "memory"),
        (Unavailable("failed to allocate buffer of size 123"), "memory"),
        (Unavailable("CUDA error: out of memory"), "memory"),
    ],
)
def test_a_failure_to_load_says_whether_memory_was_the_reason(
    error: ModelyardError, kind: str, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr("modelyard.tune.trial_process._create_engine", refuse)
    outcome = run_job(TrialJob(config={}, model="m", workload=LOAD))
    assert isinstance(outcome, TrialFailure)
    assert outcome.kind == kind


def test_the_outcome_file_is_complete(tmp_path: Path):
    config = {key: demo_config([{"steps": [{"tokens": 50}]}])[key] for key in ("models", "caches")}
    job, outcome = tmp_path / "job.json", tmp_path / "outcome.json"
    job.write_bytes(msgspec.json.encode(TrialJob(config=config, model="demo", workload=LOAD)))
    main([str(job), str(outcome)])
    assert isinstance(msgspec.json.decode(outcome.read_bytes(), type=Outcome), Measurement)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json", "outcome.json"]


def test_fewer_slots_run_the_same_number_of_answers():
    raw = demo_config([{"steps": [{"tokens": 30}]}])
    raw["caches"]["main"]["parallel"] = 2
    config = {key: raw[key] for key in ("models", "caches")}
    many = Workload(name="batch", prompt_tokens=20, output_tokens=5, streams=8)
    assert isinstance(run_job(TrialJob(config=config, model="demo", workload=many)), Measurement)


def test_a_chat_engine_is_measured():
    raw = demo_config([{"steps": [{"tokens": 30}]}], kind="chat")
    config = {key: raw[key] for key in ("models", "caches")}
    assert isinstance(run_job(TrialJob(config=config, model="demo", workload=LOAD)), Measurement)
