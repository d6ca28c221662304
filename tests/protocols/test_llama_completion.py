"""llama-server's /completion: requests, replies and streams, and /completions, which OpenAI's clients use too."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Started,
    TokenLogprob,
    Usage,
    collect_reply,
)
from modelyard.core.request import Constraint, Request, Sampling
from modelyard.protocols import bare_completions, llama_completion

A, LINE = (
    TokenLogprob(" a", -0.5, b" a", (TokenLogprob(" a", -0.5, b" a", id=7),), 7),
    TokenLogprob("\n", -1, b"\n", (), 8),
)
EVENTS: list[Event] = [
    Started("id", "m", 7),
    BlockStart(0, "text"),
    BlockDelta(0, " a", (A,)),
    BlockDelta(0, "\n", (LINE,)),
    BlockEnd(0),
    Finished("max_tokens", Usage(20, 5, 2)),
]


def read(**fields: Any) -> Request:
    return llama_completion.read_request(msgspec.json.encode({"prompt": "Once"} | fields), {})


def stream(events: list[Event], request: Request, module: Any = llama_completion) -> list[Any]:
    writer = module.writer(request, "trace")
    data = b"".join(writer.write(event) for event in events) + writer.end()
    return [msgspec.json.decode(part.removeprefix(b"data: ")) for part in data.split(b"\n\n") if part]


def whole(request: Request, replies: int = 1) -> Any:
    return msgspec.json.decode(llama_completion.write_reply([collect_reply(EVENTS)] * replies, request))


def test_every_field_is_read() -> None:
    request = read(
        model="m", n_predict=9, top_k=5, repeat_penalty=1.5, stop=["x"], stream=True, seed=-1, n_probs=2, grammar="",
        json_schema={"type": "object"}, logit_bias=[[15, 1.5], [16, False]], cache_prompt=True, top_n_sigma=-1,
    )  # fmt: skip
    assert request.sampling == Sampling(top_k=5, repetition_penalty=1.5, logit_bias={15: 1.5, 16: -1e9})
    assert (request.max_tokens, request.stop, request.stream, request.logprobs) == (9, ("x",), True, 2)
    assert request.constraint == Constraint("json_schema", '{"type":"object"}')
    assert (request.prompts, request.warnings) == (("Once",), ())


@pytest.mark.parametrize(("n_predict", "expected"), [(-1, None), (0, 1), (3, 3), (None, None)])
def test_n_predict_is_the_limit(n_predict: int | None, expected: int | None) -> None:
    assert read(n_predict=n_predict).max_tokens == expected


def test_settings_that_no_engine_has_are_warnings() -> None:
    request = read(t_max_predict_ms=9, post_sampling_probs=True, n_probs=3, top_n_sigma=1.5)
    assert set(request.warnings) == {"t_max_predict_ms_ignored"}
    assert request.post_sampling
    assert request.sampling.top_n_sigma == 1.5


@pytest.mark.parametrize("given", [["top_k", "typical_p", "temperature"], "kyt"])
def test_the_order_of_samplers_is_read_by_names_or_letters(given: Any) -> None:
    assert read(samplers=given).sampling.samplers == ("top_k", "typ_p", "temperature")


@pytest.mark.parametrize("given", [["top_z"], "k?"])
def test_an_unknown_sampler_is_named(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"samplers has '(top_z|\?)', which is none of") as refused:
        read(samplers=given)
    assert refused.value.param == "samplers"


def test_ignore_eos_is_a_setting_of_the_sampler() -> None:
    assert read(ignore_eos=True).sampling.ignore_eos is True


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_probs": 21}, "n_probs"),
        ({"logit_bias": [["word", "much"]]}, "logit_bias"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": {"prompt_string": "<__media__>", "multimodal_data": ["AA"]}}, "prompt"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def test_reply_shows_the_settings_that_were_used() -> None:
    reply = whole(read(n_predict=2, temperature=0, repeat_penalty=1.5))
    settings = reply["generation_settings"]
    assert (settings["temperature"], settings["repeat_penalty"], settings["n_predict"]) == (0, 1.5, 2)
    assert (reply["content"], reply["prompt"], reply["stop_type"]) == (" a\n", "Once", "limit")
    assert (reply["tokens_evaluated"], reply["tokens_predicted"], reply["has_new_line"]) == (20, 2, True)
    assert reply["tokens"] == []
    assert "completion_probabilities" not in reply


def test_tokens_and_probabilities_are_written_if_asked_for() -> None:
    reply = whole(read(n_probs=1, return_tokens=True))
    assert reply["tokens"] == [7, 8]
    first = {"id": 7, "token": " a", "bytes": [32, 97], "logprob": -0.5}
    assert reply["completion_probabilities"][0] == first | {"top_logprobs": [first]}
    pieces = stream(EVENTS, read(n_probs=1, return_tokens=True, stream=True))
    assert [piece["tokens"] for piece in pieces] == [[7], [8], []]
    assert pieces[0]["completion_probabilities"] == reply["completion_probabilities"][:1]
    assert read(return_tokens=True).logprobs == 0


def test_several_prompts_make_a_list() -> None:
    request = read(prompt=["Once", [1, 2]])
    assert [(reply["index"], reply["prompt"]) for reply in whole(request, 2)] == [(0, "Once"), (1, [1, 2])]


def test_stream_ends_with_the_fields_of_the_whole_reply() -> None:
    *pieces, last = stream(EVENTS, read(stream=True))
    assert [piece["content"] for piece in pieces] == [" a", "\n"]
    assert [piece["tokens_predicted"] for piece in pieces] == [1, 2]
    assert last == whole(read(stream=True)) | {"content": ""}


def test_a_chunk_has_one_token_if_their_probabilities_are_told() -> None:
    both = BlockDelta(0, " a\n", (A, LINE))
    events = [each for each in EVENTS if not isinstance(each, BlockDelta)]
    at = next(number for number, each in enumerate(events) if isinstance(each, BlockStart)) + 1
    chunks = stream([*events[:at], both, *events[at:]], read(n_probs=1, stream=True))
    assert [chunk["content"] for chunk in chunks[:2]] == [" a", "\n"]
    assert [[each["id"] for each in chunk["completion_probabilities"]] for chunk in chunks[:2]] == [[7], [8]]
    cut = BlockDelta(0, " a", (A, LINE))  # the second token's text is not complete
    assert stream([*events[:at], cut, *events[at:]], read(n_probs=1, stream=True))[0]["content"] == " a"


def test_stream_that_ends_early_has_an_error() -> None:
    assert "error" in stream(EVENTS[:3], read(stream=True))[-1]
    failed = stream([*EVENTS[:3], Failed(Unavailable("gone"))], read(stream=True))[-1]
    assert failed["error"]["message"] == "gone"


@pytest.mark.parametrize(
    ("body", "is_openai"),
    [({"model": "m"}, True), ({}, False), ({"model": "m", "n_predict": 4}, False), ({"n_predict": 4}, False)],
)
def test_completions_without_v1_answers_in_the_dialect_of_the_body(body: dict[str, Any], is_openai: bool) -> None:
    request = bare_completions.read_request(msgspec.json.encode({"prompt": "Once"} | body), {})
    reply = msgspec.json.decode(bare_completions.write_reply([collect_reply(EVENTS)], request))
    assert ("choices" in reply, "content" in reply) == (is_openai, not is_openai)
    assert type(bare_completions.writer(request, "trace")) is not type(
        bare_completions.writer(request_of_the_other(is_openai), "trace")
    )


def request_of_the_other(is_openai: bool) -> Request:
    body = {"prompt": "Once"} | ({} if is_openai else {"model": "m"})
    return bare_completions.read_request(msgspec.json.encode(body), {})


def test_prompts_may_be_objects_and_mix_texts_with_ids() -> None:
    assert read(prompt={"prompt_string": "Once"}).prompts == ("Once",)
    assert read(prompt=[[1, 2], {"prompt_string": "Once"}, "more"]).prompts == ((1, 2), "Once", "more")
    mixed = read(prompt=[1, "Once", 2])
    assert (mixed.prompts, mixed.mixed_prompts) == ((), ((1, "Once", 2),))
    assert read(prompt=[[1, "a"], "b"]).mixed_prompts == ((1, "a"), ("b",))


def test_texts_in_logit_bias_are_kept_for_the_tokenizer() -> None:
    pairs = read(logit_bias=[[" the ", -100], [15, 1.5], ["word", False]])
    assert (pairs.biased_texts, pairs.sampling.logit_bias) == (((" the ", -100.0), ("word", -1e9)), {15: 1.5})
    mapping = read(logit_bias={" the ": -100, "15": 1.5})
    assert (mapping.biased_texts, mapping.sampling.logit_bias) == (((" the ", -100.0),), {15: 1.5})
