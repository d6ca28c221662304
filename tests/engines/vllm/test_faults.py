"""What vLLM raises, as our errors."""

from __future__ import annotations

from modelyard.core.errors import ContextOverflow, Internal, InvalidRequest, NotFound, Unavailable
from modelyard.core.request import Constraint
from modelyard.engines import vllm
from modelyard.engines.vllm import errors

REFUSED = (ValueError,)


def test_our_own_errors_stay_what_they_are() -> None:
    own = NotFound("gone")
    assert errors.request_error(own, REFUSED) is own


def test_prompt_that_is_too_long_is_an_overflow() -> None:
    words = "The decoder prompt (length 300) is longer than the maximum model length of 256. Make sure that …"
    assert errors.request_error(ValueError(words), REFUSED) == ContextOverflow(300, 256)


def test_refusal_of_a_grammar_names_the_field() -> None:
    error = errors.request_error(ValueError("Grammar error: at 1(8)"), REFUSED, Constraint("regex", "("))
    assert (error.code, error.param) == ("bad_grammar", "regex")


def test_refusal_of_anything_else_is_told_in_vllms_words() -> None:
    error = errors.request_error(ValueError("min_p must be in [0, 1]"), REFUSED, Constraint("regex", "a"))
    assert isinstance(error, InvalidRequest)
    assert "min_p must be in [0, 1]" in error.message


def test_what_is_not_the_clients_fault_says_nothing_of_the_inside() -> None:
    error = errors.request_error(RuntimeError("secret"), REFUSED)
    assert isinstance(error, Internal)
    assert "secret" not in error.message


def test_death_tells_how_the_process_ended() -> None:
    assert errors.death_error([None, -9]) == Unavailable("vLLM's engine process was killed by SIGKILL")
    assert errors.death_error([]) == Unavailable("vLLM's engine process died")


def test_death_at_the_first_token_tells_the_way_out() -> None:
    assert "killed by SIGILL" in (told := errors.first_token_error([-4]).message)
    assert "float32" in told


def test_load_that_failed_is_explained_by_what_vllms_processes_wrote() -> None:
    failed = errors.load_error(RuntimeError("Engine core initialization failed. See root cause above."), "/m")
    lines = [
        "(EngineCore pid=812) INFO 11-15 09:51:02 [core.py:1] all is well",
        "(EngineCore pid=812) ERROR 11-15 09:51:02 [core.py:1101] ValueError: the KV cache does not fit",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    explained = vllm.explain(failed, lines)
    assert explained.message == "vLLM cannot load /m: ValueError: the KV cache does not fit"
    assert explained.code == failed.code
    assert vllm.explain(failed, []) is failed


def test_fault_of_another_kind_needs_no_explanation() -> None:
    missing = NotFound("the model is not here")
    assert vllm.explain(missing, ["ValueError: something"]) is missing
