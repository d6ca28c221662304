"""Failure reasons and loading progress in the log of vLLM."""

from __future__ import annotations

from modelyard_vllm.errors import failure_reason, startup_stage

STARTING = [
    "(APIServer pid=1) INFO 11-15 10:09:36 [model.py:733] Resolved architecture: LlamaForCausalLM",
    "(APIServer pid=1) WARNING 11-15 10:09:36 [vllm.py:1703] Enforce eager set, disabling torch.compile, CUDAGraphs",
    "(EngineCore pid=2) INFO 11-15 10:09:49 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: …",
    "(Worker pid=3) INFO 11-15 10:10:02 [cpu_model_runner.py:68] Starting to load model /models/m...",
]
FAILED = [
    "(EngineCore pid=2) ERROR 11-15 10:10:02 [core.py:1101] EngineCore failed to start.",
    "(EngineCore pid=2) ERROR 11-15 10:10:02 [core.py:1101] Traceback (most recent call last):",
    '(EngineCore pid=2) ERROR 11-15 10:10:02 [core.py:1101]   File "/x.py", line 1, in y',
    "(EngineCore pid=2) ERROR 11-15 10:10:02 [core.py:1101] ValueError: No available memory for the cache blocks.",
    "(EngineCore pid=2) ValueError: No available memory for the cache blocks.",
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
]
REFUSED = [
    "(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
    "(APIServer pid=1)   Value error, Sleep mode is not supported on current platform. [type=value_error, "
    "input_value=ArgsKwargs((), {'model': '/models/m', …}), input_type=ArgsKwargs]",
    "(APIServer pid=1)     For further information visit https://errors.pydantic.dev/2.13/v/value_error",
]


def test_root_cause_is_reported_once_without_consequences() -> None:
    assert failure_reason([*STARTING, *FAILED]) == "ValueError: No available memory for the cache blocks."


def test_invalid_setting_is_reported_without_the_other_settings() -> None:
    assert failure_reason([*STARTING, *REFUSED]) == "Value error, Sleep mode is not supported on current platform."


def test_consequence_is_reported_if_there_is_no_cause() -> None:
    assert failure_reason([*STARTING, FAILED[-1]]).startswith("RuntimeError: Engine core initialization failed")


def test_invalid_arguments_and_crashes_are_recognized() -> None:
    error = "vllm: error: unrecognized arguments: --nonsense"
    assert failure_reason(["usage: vllm [-h]", error]) == error
    assert failure_reason(["Fatal Python error: Illegal instruction"]) == "Fatal Python error: Illegal instruction"


def test_last_lines_are_reported_if_nothing_is_recognized() -> None:
    assert (
        failure_reason([*STARTING, "the moon is full", "and the dog barks"]) == "the moon is full | and the dog barks"
    )
    assert failure_reason([*STARTING, "INFO:     Application startup complete."]) == ""
    assert failure_reason([]) == ""


def test_progress_only_grows() -> None:
    shards = ["Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01,  1.0s/it]"]
    later = [*STARTING, *shards, "(Worker pid=3) INFO 11-15 10:10:05 [default_loader.py:501] Loading weights took 3 s"]
    assert startup_stage([]) == (0.05, "starting vllm serve")
    assert [startup_stage(later[:count]) for count in (3, 4, 5, 6)] == [
        (0.1, "starting the engine"),
        (0.2, "loading the weights"),
        (0.4, "loading the weights"),
        (0.6, "allocating the KV cache"),
    ]
    last = "(APIServer pid=1) INFO 11-15 10:10:14 [entry.py:140] Starting vLLM server on unix:/x.sock"
    assert startup_stage([*later, last]) == (0.9, "starting the HTTP server")
