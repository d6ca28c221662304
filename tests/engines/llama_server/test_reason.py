"""Why it ended, out of its last lines."""

from __future__ import annotations

from modelyard.engines.llama_server.reason import reason

MISSING = [
    "0.00.012.975 I srv  llama_server: initializing ...",
    "0.00.076.243 W srv  llama_server: security: no API key is set",
    "0.00.077.094 E gguf_init_from_file: failed to open GGUF file '/nowhere.gguf' (No such file or directory)",
    "0.00.077.204 E llama_model_load: error loading model",
    "0.00.077.267 E gguf_init_from_file: failed to open GGUF file '/nowhere.gguf' (No such file or directory)",
    "0.00.077.274 I srv    operator(): operator(): cleaning up before exit...",
    "0.00.077.721 E srv  llama_server: exiting due to model loading error",
]


def test_the_first_errors_are_told_once_each_and_without_their_time() -> None:
    assert reason(MISSING) == (
        "gguf_init_from_file: failed to open GGUF file '/nowhere.gguf' (No such file or directory); "
        "llama_model_load: error loading model"
    )


def test_errors_without_a_time_are_known_by_their_words() -> None:
    usage = ["", "usage:", "--spec-type none,draft-simple", "", "to show complete usage, run with -h"]
    told = 'error while handling argument "--spec-type": unknown speculative type: draft'
    assert reason([told, *usage]) == told
    assert reason(["sh: 1: exec: /x: not found"]) == "sh: 1: exec: /x: not found"
    assert reason(["ggml.c:123: GGML_ASSERT(a == b) failed"]) == "ggml.c:123: GGML_ASSERT(a == b) failed"


def test_warnings_and_notes_are_no_reason() -> None:
    assert reason(MISSING[:2]) == ""
    assert reason([]) == ""


def test_no_more_than_three_are_told() -> None:
    assert reason([f"error {n}" for n in range(9)]) == "error 0; error 1; error 2"
