"""Whatever a prompt says arrives at the worker, also what somebody adds to it later."""

from __future__ import annotations

import msgspec
import pytest

from modelyard.core.engine import Media, Prompt, TokenRun
from modelyard.core.request import Constraint, Sampling
from modelyard.workers.messages import AddRequest, InferRequest, decode_for_worker, encode, to_infer_request, to_prompt
from modelyard.workers.packing import MalformedMessage

FULL = Prompt(
    parts=(TokenRun([1, 2]), Media("image", "ab", b"\0\1", 4), TokenRun([3])),
    sampling=Sampling(temperature=0.5, seed=7),
    max_tokens=99,
    stop_ids=(5, 6),
    constraint=Constraint("regex", "a+"),
    cache="main",
    session="s",
    priority="background",
    adapters=(("law", 0.5),),
    logprobs=3,
    deadline=12.5,
    trace="t",
    dedup_key="j",
)


def test_this_prompt_says_all_that_a_prompt_can() -> None:
    silent = [field.name for field in msgspec.structs.fields(Prompt) if getattr(FULL, field.name) == field.default]
    assert silent == [], "say something in it, or the next test shows nothing"


def test_all_that_it_says_arrives() -> None:
    message = decode_for_worker(encode(AddRequest("e", to_infer_request(7, FULL))))
    assert isinstance(message, AddRequest)
    assert message.request.request_id == 7
    assert to_prompt(message.request) == FULL


def test_tokens_that_are_none_are_refused() -> None:
    with pytest.raises(MalformedMessage):
        to_prompt(InferRequest(1, b"\0\1\2"))
