"""`POST /v1/decisions` with OpenAI's SDK on a real model."""

from __future__ import annotations

import base64
import math
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI

from modelyard.library import default_model
from tests.engines.llama_cpp import tiny_models
from tests.engines.llama_cpp.media_files import picture, require_libmtmd
from tests.live_server import LiveServer, live_server

INPUT = "Dear support, I was charged twice for my subscription in May. Please refund one of the payments. Yours, Ada"
PREDICATE: Any = {"type": "predicate", "name": "refund", "instructions": "The customer wants a refund."}
CHOICE: Any = {
    "type": "choice",
    "instructions": [{"type": "input_text", "text": "What is the message about?"}],
    "choices": [{"value": "billing", "description": "payments"}, {"value": "weather"}, {"value": True}],
}
SCORE: Any = {
    "type": "score",
    "name": "urgency",
    "instructions": "How urgent is it?",
    "levels": [{"label": "low"}, {"label": "medium"}, {"label": "high"}],
}
KEYS = [{"name": "ada", "key": "ada-key"}, {"name": "bob", "key": "bob-key", "tokens_per_minute": 100}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    default_model.fetch()
    models = {
        "smollm2": {"backend": "llama_cpp", "path": "smollm2", "n_threads": 1, "n_ctx": 1024, "parallel": 2},
        "fake": {"backend": "fake", "kind": "chat", "script": [{"steps": [{"text": "Hello"}]}]},
    }
    with live_server({"models": models, "keys": KEYS}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="ada-key", max_retries=0) as sdk:
        yield sdk


def evaluated(server: LiveServer) -> int:
    engine: Any = server.app.scheduler.engine("smollm2")
    return int(engine.stats().evaluated_tokens)


def test_each_kind_of_question_has_its_answer(client: OpenAI) -> None:
    made = client.decisions.create(model="smollm2", input=INPUT, questions=[PREDICATE, CHOICE, SCORE])
    predicate, choice, score = made.answers
    assert (predicate.type, predicate.name) == ("predicate", "refund")
    assert predicate.type == "predicate"
    assert 0 < predicate.probability < 1
    assert choice.type == "choice"
    assert choice.name is None
    assert [each.value for each in choice.probabilities] == ["billing", "weather", True]
    assert math.isclose(sum(each.probability for each in choice.probabilities), 1, abs_tol=1e-6)
    assert choice.confidence == max(each.probability for each in choice.probabilities)
    assert choice.choice == max(choice.probabilities, key=lambda each: each.probability).value
    assert score.type == "score"
    assert [(each.value, each.label) for each in score.probabilities] == [(0, "low"), (1, "medium"), (2, "high")]
    assert math.isclose(score.score, sum(each.value * each.probability for each in score.probabilities))
    assert made.usage.output_tokens == 0
    assert made.usage.total_tokens == made.usage.input_tokens > 100


def test_an_answer_does_not_depend_on_the_questions_around_it(client: OpenAI) -> None:
    alone = client.decisions.create(model="smollm2", input=INPUT, questions=[SCORE]).answers[0]
    several = client.decisions.create(model="smollm2", input=INPUT, questions=[PREDICATE, CHOICE, SCORE, SCORE]).answers
    assert alone.type == "score"
    for other in several[2:]:
        assert other.type == "score"
        assert other.score == pytest.approx(alone.score, abs=0.02)


def test_the_probability_is_that_of_the_whole_text(server: LiveServer, client: OpenAI) -> None:
    """As one gets it from the log probabilities of whole prompts."""
    question = {"type": "choice", "instructions": "Which?", "choices": [{"value": "red"}, {"value": "red and blue"}]}
    made = client.decisions.create(model="smollm2", input="A red flag.", questions=[question])  # type: ignore[list-item]
    answer = made.answers[0]
    assert answer.type == "choice"
    system = "Answer the question about the input. Answer with one of the given options and nothing else."
    text = "A red flag.\n\nWhich?\nOptions:\n- red\n- red and blue\nAnswer:"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    headers = {"authorization": "Bearer ada-key"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as http:
        prompt = http.post("/apply-template", json={"model": "smollm2", "messages": messages}).json()["prompt"]

        def logprob(option: str) -> float:
            body = {"model": "smollm2", "prompt": f"{prompt}{option}<|im_end|>", "echo": True, "logprobs": 0}
            found = http.post("/v1/completions", json=body | {"max_tokens": 0}).json()["choices"][0]["logprobs"]
            start = next(at for at, offset in enumerate(found["text_offset"]) if offset >= len(prompt))
            return float(sum(found["token_logprobs"][start:]))

        expected = [math.exp(logprob("red")), math.exp(logprob("red and blue"))]
    assert answer.probabilities[0].probability == pytest.approx(expected[0] / sum(expected), abs=0.03)


def test_the_input_is_read_once(server: LiveServer, client: OpenAI) -> None:
    long = " ".join(f"Order {number} was paid on day {number}." for number in range(25))
    before = evaluated(server)
    made = client.decisions.create(model="smollm2", input=long, questions=[PREDICATE] * 6)
    assert evaluated(server) - before <= 1.3 * made.usage.input_tokens
    again = client.decisions.create(model="smollm2", input=long, questions=[PREDICATE])
    assert again.usage.input_tokens_details.cached_tokens > 200


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ([], "1 to 400"),
        ([PREDICATE] * 401, "1 to 400"),
        ([CHOICE | {"choices": [{"value": "a"}]}], "2 to 255"),
        ([CHOICE | {"choices": [{"value": "true"}, {"value": True}]}], "the same text"),
        ([SCORE | {"levels": [{"label": str(n)} for n in range(255)]}] * 17, "4096"),
        ([{"type": "guess", "instructions": "?"}], "predicate, choice or score"),
        ([PREDICATE | {"instructions": [{"type": "input_image", "image_url": "data:,"}]}], "images in input"),
    ],
)
def test_bad_questions_are_refused(client: OpenAI, questions: Any, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        client.decisions.create(model="smollm2", input=INPUT, questions=questions)


def test_an_input_that_does_not_fit_is_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.decisions.create(model="smollm2", input=INPUT * 60, questions=[PREDICATE])
    assert caught.value.code == "context_length_exceeded"


def test_an_engine_without_log_probabilities_is_a_400(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.decisions.create(model="fake", input=INPUT, questions=[PREDICATE])
    assert caught.value.code == "prompt_logprobs_unsupported"


def test_the_limits_of_a_key_hold_and_its_kv_is_its_own(server: LiveServer) -> None:
    body = {"model": "smollm2", "input": INPUT, "questions": [PREDICATE]}

    def ask(key: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{server.url}/v1/decisions", json=body, headers=headers, timeout=60)

    ask("ada-key")
    assert ask("ada-key").json()["usage"]["input_tokens_details"]["cached_tokens"] > 30
    first = ask("bob-key")
    assert first.json()["usage"]["input_tokens_details"]["cached_tokens"] == 0, "of another key's KV"
    assert ask("bob-key").status_code == 429
    assert ask("nobody").status_code == 401


def test_a_client_that_leaves_frees_the_places(server: LiveServer, client: OpenAI) -> None:
    def leave() -> None:
        body = {"model": "smollm2", "input": INPUT, "questions": [SCORE] * 400}
        headers = {"authorization": "Bearer ada-key"}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/decisions", json=body, headers=headers, timeout=0.5)

    leaving = threading.Thread(target=leave)
    leaving.start()
    leaving.join(60)
    made = client.with_options(timeout=30).decisions.create(model="smollm2", input=INPUT, questions=[PREDICATE])
    assert len(made.answers) == 1


@pytest.fixture
def seeing() -> Iterator[LiveServer]:
    require_libmtmd()
    model, projector = tiny_models.seeing("tiles")
    eyes = {"backend": "llama_cpp", "path": str(model), "mmproj": str(projector), "n_threads": 1, "n_ctx": 512}
    with live_server({"models": {"seeing": eyes}}) as running:
        yield running


def test_the_input_may_have_images(seeing: LiveServer) -> None:
    """The model's weights are random: what counts is that the picture is part of the input."""

    def ask(seed: int) -> list[float]:
        url = f"data:image/png;base64,{base64.b64encode(picture(seed)).decode()}"
        content: Any = [{"type": "input_text", "text": "A picture:"}, {"type": "input_image", "image_url": url}]
        messages: Any = [{"role": "user", "content": content}]
        with OpenAI(base_url=f"{seeing.url}/v1", api_key="-", max_retries=0) as client:
            made = client.decisions.create(model="seeing", input=messages, questions=[PREDICATE, SCORE])
        assert made.answers[1].type == "score"
        assert made.usage.input_tokens > 50
        return [each.probability for each in made.answers[1].probabilities]

    assert ask(1) != ask(2)


def test_one_row_answers_a_question_whose_options_have_one_token(server: LiveServer, client: OpenAI) -> None:
    client.decisions.create(model="smollm2", input=INPUT, questions=[PREDICATE])
    before = evaluated(server)
    client.decisions.create(model="smollm2", input=INPUT, questions=[PREDICATE])
    assert evaluated(server) - before <= 2  # the last token of the question, and the first option's
