"""Trials: engines that die, hang, fill the memory or refuse their settings are results, and no process is left."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from modelyard.core.errors import InvalidRequest, ModelyardError, Unavailable
from modelyard_bench.load import Round, Sample
from modelyard_bench.workload import Workload
from modelyard_optimize.trial import (
    Measurement,
    Outcome,
    QualityResult,
    TrialFailure,
    TrialJob,
    TrialLimits,
    fit_workload,
    main,
    resident_bytes,
    run_job,
    run_trial,
    summarize,
    undisturbed_share,
)
from tests.engines.llama_cpp.helpers import model_file
from tests.live_server import demo_config

LONG = TrialLimits(300.0)
SHORT = Workload(name="chat", prompt_tokens=24, output_tokens=6)
ABSURD = 1 << 24  # tokens of a window: hundreds of GiB


def job(config: dict[str, Any], **more: Any) -> TrialJob:
    raw = {key: config[key] for key in ("models", "caches")}
    return TrialJob(config=raw, model=next(iter(raw["models"])), workload=SHORT, **more)


def fake(*steps: dict[str, Any], **more: Any) -> TrialJob:
    return job(demo_config([{"steps": list(steps)}]), **more)


def llama(**model: Any) -> TrialJob:
    chosen = {"backend": "llama_cpp", "path": str(model_file()), "n_threads": 1, "n_ctx": 256, "speculation": "off"}
    return job({"models": {"real": chosen | model}, "caches": {}})


def python(code: str):
    """A command that runs other code as the trial."""
    return lambda job, outcome: [sys.executable, "-c", code, str(job), str(outcome)]


def failure(outcome: object) -> TrialFailure:
    assert isinstance(outcome, TrialFailure), outcome
    return outcome


async def test_a_real_load_in_a_child_gives_a_measurement():
    found = await run_trial(fake({"tokens": 50}, conversations=2), LONG)
    assert isinstance(found, Measurement), found
    assert found.speed > 0
    assert found.memory > 1 << 20


async def test_an_engine_that_dies_fails_its_trial():
    assert failure(await run_trial(fake({"text": "one"}, {"die": "segmentation fault"}), LONG)).kind == "errors"


async def test_an_engine_that_hangs_is_stopped():
    hung = failure(await run_trial(fake({"hang": True}), TrialLimits(4.0)))
    assert hung.kind in ("hang", "errors")


async def test_a_process_that_never_ends_is_killed_with_its_children(tmp_path: Path):
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r} + '.part', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(pids)!r} + '.part', {str(pids)!r})\n"
        "time.sleep(600)\n"
    )
    outcome = await run_trial(fake(), TrialLimits(1.0), python(code), clock=lambda: 10.0 if pids.exists() else 0.0)
    assert failure(outcome).kind == "hang"
    found = [psutil.Process(int(pid)) for pid in pids.read_text().split() if psutil.pid_exists(int(pid))]
    _, alive = await asyncio.to_thread(psutil.wait_procs, found, 60)
    assert alive == []


async def test_a_crash_is_reported_with_its_last_output():
    died = failure(await run_trial(fake(), LONG, python("import os; print('all lost', flush=True); os.abort()")))
    assert died.kind == "crash"
    assert "SIGABRT" in died.reason
    assert "all lost" in died.reason


async def test_a_process_that_uses_too_much_memory_is_stopped():
    code = "import time; held = bytearray(b'x') * (400 << 20); time.sleep(600)"
    assert failure(await run_trial(fake(), TrialLimits(120.0, 200 << 20), python(code))).kind == "memory"


async def test_a_process_killed_by_the_system_ran_out_of_memory():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert failure(await run_trial(fake(), LONG, python(code))).kind == "memory"


async def test_llama_cpp_with_a_window_beyond_the_memory_is_a_result():
    assert failure(await run_trial(llama(n_ctx=ABSURD), LONG)).kind == "memory"


async def test_llama_cpp_that_allocates_it_anyway_is_a_result():
    found = failure(await run_trial(llama(n_ctx=ABSURD, overcommit=True), TrialLimits(300.0, 2 << 30)))
    assert found.kind in ("memory", "refused", "crash")


async def test_llama_cpp_with_an_invalid_number_format_is_refused():
    refused = failure(await run_trial(llama(type_k="q3_k"), LONG))
    assert refused.kind == "refused"
    assert "q3_k" in refused.reason


async def test_a_quality_loss_is_measured_in_a_child():
    exact, rounded = llama(n_ctx=1024), llama(n_ctx=1024, type_k="q8_0", type_v="q8_0")
    job = TrialJob(config=rounded.config, model="real", workload=SHORT, reference=exact.config)
    short_text = "t.QUALITY_TEXT = t.QUALITY_TEXT[:500]"
    code = f"import sys, modelyard_optimize.trial as t; {short_text}; t.main(sys.argv[1:])"
    found = await run_trial(job, LONG, python(code))
    assert isinstance(found, QualityResult), found
    assert abs(found.loss.rise) < 0.05
    assert found.loss.divergence is not None
    assert 0 < found.loss.divergence < 0.05


async def test_a_cancelled_trial_leaves_no_process():
    before, started = children(), asyncio.Event()

    def clock() -> float:
        started.set()
        return 0.0

    task = asyncio.create_task(run_trial(fake({"hang": True}), LONG, clock=clock))
    await asyncio.wait_for(started.wait(), 60)
    assert children() > before
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert children() <= before


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


def test_an_ended_process_uses_no_memory():
    assert resident_bytes(os.getpid()) > 0
    assert resident_bytes(2**22 - 1) == 0


# The child process of a trial: measurements of a round, a workload that fits, failures by their kind.

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

    monkeypatch.setattr("modelyard_optimize.trial._create_engine", refuse)
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


@pytest.mark.parametrize(
    ("threads", "cores", "share"),
    [
        ({1: (10.0, 0.0)}, 2, 1.0),
        ({1: (10.0, 0.0), 2: (10.0, 0.0)}, 2, 1.0),
        ({1: (2.5, 7.5)}, 2, 0.25),
        ({1: (5.0, 5.0), 2: (5.0, 5.0)}, 2, 0.25),
        ({1: (10.0, 0.0), 2: (5.0, 5.0)}, 2, 0.5),
        ({1: (0.5, 0.5)}, 2, 0.5**0.1),
        (dict.fromkeys(range(4), (5.0, 5.0)), 2, 1.0),
        (dict.fromkeys(range(4), (2.5, 7.5)), 2, 0.5**4),
        ({}, 2, 1.0),
    ],
    ids=[
        "a quiet machine",
        "two threads on two quiet cores",
        "one thread had a quarter of a core",
        "two threads advance while both have a core",
        "one of two had to wait for half of the time",
        "a thread that mostly sleeps loses little",
        "more threads than cores wait for each other, as they always would",
        "more threads than cores, and other programs",
        "a system that does not report it",
    ],
)
def test_the_time_that_other_programs_took_is_left_out(threads: dict, cores: int, share: float):
    after = {(1, thread): times for thread, times in threads.items()}
    before = dict.fromkeys(after, (0.0, 0.0))
    assert undisturbed_share(10.0, before, after, cores) == pytest.approx(share)


def test_a_corrected_measurement_has_the_times_of_the_cores_alone():
    one = Round(streams=1, wall_s=30.0, samples=tuple(sample(1.0, n) for n in (2.0, 3.0, 21.0)))
    quiet, busy = summarize(one, 5, 0.5), summarize(one, 5, 0.5, 0.25)
    assert isinstance(quiet, Measurement)
    assert isinstance(busy, Measurement)
    assert (busy.answer_s, busy.ttft_s) == (quiet.answer_s / 4, quiet.ttft_s / 4)
    assert (busy.speed, busy.wall_s) == (quiet.speed * 4, quiet.wall_s)
