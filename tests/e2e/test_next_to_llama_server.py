"""Embeddings, ranking and fill-in-the-middle next to llama-server: each tiny model runs twice behind one gateway, in
process and in a llama-server, and both answer alike."""

from __future__ import annotations

import asyncio
import atexit
import base64
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from modelyard.engines.llama_cpp.model_shape import read_model_shape
from tests.e2e.protocols import parse_events
from tests.engines.llama_cpp import exact_models, tiny_models
from tests.engines.llama_server.helpers import program
from tests.live_server import LiveServer, live_server

SENTENCE, CODE, LONG = "the cat sleeps on the sofa.", "Print(x) != 7;", "berlin is a capital, " * 130
QUERY, DOCUMENTS = "capital of france", ["paris is a capital", "the cat naps", "the court rejected the tax appeal"]
PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
HELLO = [{"role": "user", "content": "Hello!"}]
FILES = [{"filename": "a.py", "text": "A = 1\n"}, {"text": "B = <|im_end|> 2"}]
# What Continue sends for its autocompletion to a server with OpenAI's API, if the model is a Qwen coder.
CONTINUE = {
    "model": "code",
    "max_tokens": 8,
    "temperature": 0.01,
    "stream": True,
    "stop": [
        *("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>"),
        *("<|file_sep|>", "<|im_start|>", "<|im_end|>", "/src/", "#- coding: utf-8", "```"),
    ],
    "prompt": f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>",
}


def steering() -> tuple[dict[str, Any], list[str]]:
    """Two control vectors with their scales for a few layers: as our options and as llama-server's."""
    shape = read_model_shape(tiny_models.coder())
    folder = Path(mkdtemp(prefix="modelyard-test-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    random = np.random.default_rng(5)
    scales = {folder / "kind.gguf": 0.8, folder / "brief.gguf": -0.5}
    for file in scales:
        rows = {f"direction.{layer}": random.normal(0, 1, shape.width) for layer in range(1, shape.layers)}
        facts = {"general.architecture": "controlvector"}
        exact_models.write(file, facts, {name: row.astype(np.float32) for name, row in rows.items()})
    options = {"control_vectors": [{"path": str(file), "scale": scale} for file, scale in scales.items()]}
    flags = ["--control-vector-scaled", ",".join(f"{file}:{scale}" for file, scale in scales.items())]
    return options | {"control_vector_layers": [1, 2]}, [*flags, "--control-vector-layer-range", "1", "2"]


def config() -> dict[str, Any]:
    files: dict[str, tuple[Path, int, dict[str, Any], list[str]]] = {
        "cls": (tiny_models.bert("cls"), 512, {}, []),
        "mean": (tiny_models.bert("mean"), 512, {}, []),
        "long": (tiny_models.nomic_bert(), 1024, {}, []),
        "last": (tiny_models.last_token_embedder(), 1024, {}, []),
        "causal": (tiny_models.coder(False), 1024, {"embeddings": True}, ["--embeddings", "--pooling", "mean"]),
        "rank": (tiny_models.bert("rank"), 512, {}, []),
        "judge": (tiny_models.last_token_ranker(), 512, {}, []),
        "code": (tiny_models.coder(), 1024, {}, []),
        "greeter": (tiny_models.greeter(), 512, {}, []),
        "steered": (tiny_models.coder(), 512, *steering()),
    }
    models: dict[str, Any] = {"plain": {"path": str(tiny_models.coder(False)), "n_threads": 1, "n_ctx": 512}}
    for name, (file, _, settings, flags) in files.items():
        models[name] = {"path": str(file), "n_threads": 1, "speculation": "off", "decoding": {"temperature": 0}}
        models[name] |= settings
        if name == "greeter":  # its file has sampling values
            del models[name]["decoding"]
        models[f"{name}-server"] = {
            "backend": "llama_server",
            "path": str(file),
            "llama_server_binary": program(),
            "llama_server_n_threads": 1,
            "llama_server_extra_args": flags,
            **({} if name == "greeter" else {"decoding": {"temperature": 0}}),
        }
    windows = {
        name: {"model": name, "n_ctx": 1024 if name == "plain" else files[name.removesuffix("-server")][1]}
        for name in models
    }
    windows["code-server"]["n_batch"] = (
        256  # llama-server shows a model as much of other files as a batch leaves room for
    )
    return {"models": models, "caches": windows}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(config()) as running:
        try:
            yield running
        finally:  # the engines before the server, so that they end regularly
            asyncio.run_coroutine_threadsafe(running.app.stop(), running.loop).result(60)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, headers=server.owner) as client:
        yield client


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def both(client: httpx.Client, path: str, name: str, **body: Any) -> tuple[Any, Any]:
    """Our reply and that of llama-server."""
    return post(client, path, model=name, **body), post(client, path, model=f"{name}-server", **body)


def refusal(client: httpx.Client, path: str, **body: Any) -> tuple[int, Any]:
    reply = client.post(path, json=body)
    return reply.status_code, reply.json()["error"]


# --- embeddings -------------------------------------------------------------------------------------------------------


def vectors(reply: Any) -> Any:
    return np.array([entry["embedding"] for entry in reply["data"]])


@pytest.mark.parametrize("name", ["cls", "mean", "long", "last", "causal"])
def test_vectors_are_those_of_llama_server(client: httpx.Client, name: str) -> None:
    texts = [SENTENCE, CODE] if name in ("cls", "mean") else [SENTENCE, CODE, LONG]
    ours, theirs = both(client, "/v1/embeddings", name, input=texts)
    assert ours["usage"] == theirs["usage"]
    assert len(texts) == 2 or ours["usage"]["prompt_tokens"] > 512
    cosines = (vectors(ours) * vectors(theirs)).sum(1)  # both have length 1
    assert cosines.min() > 0.9999, cosines


def test_inputs_of_token_ids_are_read_as_they_are(client: httpx.Client) -> None:
    ids = post(client, "/tokenize", model="cls", content=SENTENCE)["tokens"]
    text, raw, bare = (
        post(client, "/v1/embeddings", model="cls", input=value) for value in (SENTENCE, [2, *ids, 3], ids)
    )
    assert vectors(raw)[0] @ vectors(text)[0] > 0.9999
    assert vectors(bare)[0] @ vectors(text)[0] < 0.999
    assert bare["usage"]["prompt_tokens"] == len(ids)


def test_vectors_are_shortened_to_length_one_and_sent_as_base64(client: httpx.Client) -> None:
    whole = vectors(post(client, "/v1/embeddings", model="mean", input=SENTENCE))[0]
    reply = post(client, "/v1/embeddings", model="mean", input=SENTENCE, dimensions=16, encoding_format="base64")
    short = np.frombuffer(base64.b64decode(reply["data"][0]["embedding"]), "<f4")
    assert short == pytest.approx(whole[:16] / np.linalg.norm(whole[:16]), abs=1e-5)


@pytest.mark.parametrize("name", ["cls", "cls-server"])
def test_an_input_that_is_too_long_is_refused_with_the_limit(client: httpx.Client, name: str) -> None:
    status, error = refusal(client, "/v1/embeddings", model=name, input=["cat", "cat " * 511])
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (513, 512)
    post(client, "/v1/embeddings", model=name, input="cat " * 510)


# --- ranking ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rank", "judge"])
def test_scores_are_those_of_llama_server(client: httpx.Client, name: str) -> None:
    body: dict[str, Any] = {"query": QUERY, "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]}
    ours, theirs = both(client, "/v1/rerank", name, **body)
    assert [entry["index"] for entry in ours["results"]] == [entry["index"] for entry in theirs["results"]]
    scores = [[entry["relevance_score"] for entry in reply["results"]] for reply in (ours, theirs)]
    assert scores[0] == sorted(scores[0], reverse=True)
    assert scores[0] == pytest.approx(scores[1], abs=5e-3)
    assert ours["usage"] == theirs["usage"]
    assert ours["usage"]["prompt_tokens"] == ours["usage"]["total_tokens"] > 10


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank", "/reranking"])
def test_the_best_documents_are_returned_with_their_texts(client: httpx.Client, path: str) -> None:
    reply = post(client, path, model="rank", query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=True)
    assert len(reply["results"]) == 2
    assert all(entry["document"] == {"text": DOCUMENTS[entry["index"]]} for entry in reply["results"])


def test_text_embeddings_inference_gets_its_own_reply(client: httpx.Client) -> None:
    reply = post(client, "/rerank", model="rank", query=QUERY, texts=DOCUMENTS, return_text=True)
    assert [set(entry) for entry in reply] == [{"index", "score", "text"}] * 3


# --- fill-in-the-middle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"prompt": "a +", "input_extra": FILES}], ids=["gap", "project"])
def test_gaps_are_filled_as_by_llama_server(client: httpx.Client, more: dict[str, Any]) -> None:
    body = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 6, "temperature": 0, **more}
    ours, theirs = both(client, "/infill", "code", **body)
    same = ("content", "stop", "stop_type", "tokens_evaluated", "tokens_predicted", "truncated")
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    assert (ours["stop"], ours["stop_type"], ours["tokens_predicted"]) == (True, "limit", 6)


@pytest.mark.parametrize("name", ["code", "code-server"])
def test_a_streamed_gap_has_the_same_text(client: httpx.Client, name: str) -> None:
    body = {"model": name, "input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 6, "temperature": 0}
    whole = post(client, "/infill", **body)
    events = [event.data for event in parse_events(client.post("/infill", json=body | {"stream": True}).text)]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["tokens_predicted"] == 6


def test_an_editor_gets_only_the_fields_that_it_asks_for(client: httpx.Client) -> None:
    fields = ["content", "timings/predicted_n", "no/such"]
    body = {"input_prefix": PREFIX, "input_suffix": "", "n_predict": 2, "response_fields": fields}
    assert set(post(client, "/infill", model="code", **body)) == {"content", "timings/predicted_n"}


def test_a_suffix_of_a_completion_makes_a_gap(client: httpx.Client) -> None:
    """As the model's own tokens in the prompt do, which is how Continue asks."""
    body = {"model": "code", "prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 8, "temperature": 0}
    filled = post(client, "/v1/completions", **body)
    events = parse_events(client.post("/v1/completions", json=CONTINUE | {"temperature": 0}).text)
    chunks = [event.data for event in events if isinstance(event.data, dict)]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == filled["choices"][0]["text"]
    events = parse_events(client.post("/v1/fim/completions", json=body | {"stream": True}).text)
    deltas = [event.data["choices"][0]["delta"]["content"] for event in events if isinstance(event.data, dict)]
    assert "".join(deltas) == filled["choices"][0]["text"]
    bare = post(client, "/v1/completions", **body | {"suffix": ""})
    assert bare["usage"]["prompt_tokens"] < filled["usage"]["prompt_tokens"]


def test_the_files_first_token_and_sampling_values_apply_as_in_llama_server(client: httpx.Client) -> None:
    """The file's top_k of 1 makes its temperature of 1.5 greedy: two runs, and both engines, answer alike."""
    replies = [
        client.post("/v1/chat/completions", json={"model": name, "messages": HELLO, "max_tokens": 8}).json()
        for name in ("greeter", "greeter", "greeter-server")
    ]
    assert len({reply["choices"][0]["message"]["content"] for reply in replies}) == 1
    ours, _, theirs = (reply["usage"]["prompt_tokens"] for reply in replies)
    plain = client.post("/v1/chat/completions", json={"model": "plain", "messages": HELLO, "max_tokens": 8}).json()
    assert ours == theirs == plain["usage"]["prompt_tokens"] + 1  # the template writes none
    text = [
        client.post("/v1/completions", json={"model": name, "prompt": "Hello", "max_tokens": 8}).json()
        for name in ("greeter", "greeter-server")
    ]
    assert text[0]["choices"][0]["text"] == text[1]["choices"][0]["text"]
    assert text[0]["usage"]["prompt_tokens"] == text[1]["usage"]["prompt_tokens"] == 2


def test_llama_server_takes_bare_prompts_and_suffixes(client: httpx.Client) -> None:
    body = {"prompt": [PREFIX, "x ="], "max_tokens": 4, "temperature": 0, "n": 1, "logprobs": 1}
    ours, theirs = both(client, "/v1/completions", "code", **body)
    assert [choice["text"] for choice in theirs["choices"]] == [choice["text"] for choice in ours["choices"]]
    assert [len(choice["logprobs"]["tokens"]) for choice in theirs["choices"]] == [4, 4]
    assert post(client, "/v1/completions", model="code-server", prompt=PREFIX, suffix=SUFFIX, max_tokens=4)["choices"]


# --- llama-server's own endpoints -------------------------------------------------------------------------------------

# What its replies have and ours have not: samplers that no engine here has, and how it is built.
SETTINGS_WITHOUT = {
    *("adaptive_decay", "adaptive_target", "backend_sampling", "chat_format", "dynatemp_exponent", "dynatemp_range"),
    *("generation_prompt", "grammar_lazy", "grammar_triggers", "ignore_eos", "min_keep", "n_discard", "n_keep"),
    *("post_sampling_probs", "preserved_tokens", "reasoning_format", "reasoning_in_content", "repeat_last_n"),
    *("samplers", "speculative.types", "timings_per_token", "top_n_sigma"),
}
PROPS_WITHOUT = {"media_marker", "ui", "ui_settings", "chat_template_caps", "model_ftype", "cors_proxy_enabled"}


def direct(server: LiveServer, model: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The reply of the llama-server behind a model, without us."""
    upstream = server.app.scheduler.engine(model).server.upstream  # type: ignore[union-attr]
    encoded = b"" if body is None else msgspec.json.encode(body)
    asked = asyncio.run_coroutine_threadsafe(upstream.request_json(method, path, encoded), server.loop)
    status, reply = asked.result(60)
    assert status == 200, reply
    return reply


def test_completion_has_the_fields_and_tokens_of_llama_server(server: LiveServer, client: httpx.Client) -> None:
    body = {"prompt": PREFIX, "n_predict": 6, "temperature": 0, "n_probs": 2, "return_tokens": True}
    ours, theirs = (
        post(client, "/completion", model="code", **body),
        direct(server, "code-server", "POST", "/completion", body),
    )
    assert theirs.keys() <= ours.keys()
    assert theirs["timings"].keys() == ours["timings"].keys()
    assert theirs["generation_settings"].keys() - ours["generation_settings"].keys() <= SETTINGS_WITHOUT
    same = ("content", "tokens", "stop", "stop_type", "stopping_word", "tokens_evaluated", "tokens_predicted", "prompt",
            "truncated", "has_new_line", "index")  # fmt: skip
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    for mine, other in zip(ours["completion_probabilities"], theirs["completion_probabilities"], strict=True):
        assert mine.keys() == other.keys()
        assert (mine["id"], mine["bytes"]) == (other["id"], other["bytes"])
        assert mine["logprob"] == pytest.approx(other["logprob"], abs=0.02)
        assert [top["id"] for top in mine["top_logprobs"]] == [top["id"] for top in other["top_logprobs"]]


def test_control_vectors_change_answers_as_in_llama_server(server: LiveServer, client: httpx.Client) -> None:
    body = {"prompt": PREFIX, "n_predict": 6, "temperature": 0, "n_probs": 2, "return_tokens": True}
    ours = post(client, "/completion", model="steered", **body)
    theirs = direct(server, "steered-server", "POST", "/completion", body)
    assert ours["tokens"] == theirs["tokens"]
    found = [each["logprob"] for each in ours["completion_probabilities"]]
    assert found == pytest.approx([each["logprob"] for each in theirs["completion_probabilities"]], abs=0.02)
    plain = [each["logprob"] for each in post(client, "/completion", model="code", **body)["completion_probabilities"]]
    assert found != pytest.approx(plain, abs=0.2)


@pytest.mark.parametrize("name", ["code", "code-server"])
def test_a_streamed_completion_has_the_same_text(client: httpx.Client, name: str) -> None:
    body = {"model": name, "prompt": PREFIX, "n_predict": 6, "temperature": 0}
    whole = post(client, "/completion", **body)
    events = [event.data for event in parse_events(client.post("/completions", json=body | {"stream": True}).text)]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert (events[-1]["stop"], events[-1]["tokens_predicted"], events[-1]["stop_type"]) == (True, 6, "limit")


def test_lookups_have_the_fields_of_llama_server(server: LiveServer, client: httpx.Client) -> None:
    ours, theirs = client.get("/props?model=code").json(), direct(server, "code-server", "GET", "/props")
    assert theirs.keys() - ours.keys() <= PROPS_WITHOUT
    same = ("total_slots", "modalities", "eos_token", "is_sleeping")  # bos_token is empty: prompts have none
    assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    assert ours["default_generation_settings"]["n_ctx"] == theirs["default_generation_settings"]["n_ctx"]
    (slot,), (their_slot,) = client.get("/slots?model=code").json(), direct(server, "code-server", "GET", "/slots")
    assert {name: slot[name] for name in slot} == {name: their_slot[name] for name in slot}
    adapters = client.get("/lora-adapters?model=code").json()
    assert adapters == direct(server, "code-server", "GET", "/lora-adapters") == []
    body = {"messages": HELLO}
    counted = post(client, "/v1/chat/completions/input_tokens", model="code", **body)
    assert counted == direct(server, "code-server", "POST", "/v1/chat/completions/input_tokens", body)


def test_embedding_has_the_shape_and_vectors_of_llama_server(server: LiveServer, client: httpx.Client) -> None:
    body = {"content": [SENTENCE, CODE]}
    ours, theirs = (
        post(client, "/embedding", model="mean", **body),
        direct(server, "mean-server", "POST", "/embedding", body),
    )
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    np.testing.assert_allclose([row["embedding"] for row in ours], [row["embedding"] for row in theirs], atol=2e-3)


def test_scores_are_those_of_the_ranking(client: httpx.Client) -> None:
    ranked = post(client, "/v1/rerank", model="rank", query=QUERY, documents=DOCUMENTS)["results"]
    expected = [row["relevance_score"] for row in sorted(ranked, key=lambda row: row["index"])]
    for path, query in (("/v1/score", QUERY), ("/score", [QUERY] * 3)):
        scored = post(client, path, model="rank", text_1=query, text_2=DOCUMENTS)["data"]
        assert [row["score"] for row in scored] == pytest.approx(expected)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/chat/completions", {"model": "cls", "messages": HELLO}, "model_has_no_chat"),
        ("/v1/chat/completions", {"model": "cls-server", "messages": HELLO}, "model_has_no_chat"),
        ("/v1/completions", {"model": "rank", "prompt": "x"}, "model_has_no_chat"),
        ("/v1/responses", {"model": "last", "input": "x"}, "model_has_no_chat"),
        ("/v1/embeddings", {"model": "plain", "input": "x"}, "embeddings_unsupported"),
        ("/v1/embeddings", {"model": "rank", "input": "x"}, "embeddings_unsupported"),
        ("/v1/embeddings", {"model": "code-server", "input": "x"}, "embeddings_unsupported"),
        ("/v1/rerank", {"model": "cls", "query": "x", "documents": ["y"]}, "rerank_unsupported"),
        ("/infill", {"model": "plain", "input_prefix": "", "input_suffix": "x"}, "suffix_unsupported"),
        ("/v1/completions", {"model": "plain", "prompt": "x", "suffix": "y"}, "suffix_unsupported"),
        ("/infill", {"model": "code", "input_suffix": "x"}, "missing_required_parameter"),
        ("/v1/rerank", {"model": "rank", "documents": ["y"]}, "missing_required_parameter"),
        ("/v1/rerank", {"model": "rank", "query": "x", "documents": [{"title": "y"}]}, None),
    ],
)
def test_a_model_refuses_what_it_was_not_trained_for(
    client: httpx.Client, path: str, body: dict[str, Any], code: str | None
) -> None:
    status, error = refusal(client, path, **body)
    assert (status, error["code"]) == (400, code)


def test_the_admin_api_shows_what_each_model_does(client: httpx.Client) -> None:
    models = {model["id"]: model["capabilities"] for model in client.get("/v1/admin/models").json()["data"]}
    does = {
        name: {key for key in ("chat", "embeddings", "rerank", "infill") if can[key]} for name, can in models.items()
    }
    expected = {"cls": {"embeddings"}, "rank": {"rerank"}, "code": {"chat", "infill"}, "plain": {"chat"}}
    assert {name: does[name] for name in expected} == expected
    assert does["causal"] == {"chat", "embeddings"}
    assert (does["cls-server"], does["judge-server"]) == ({"embeddings"}, {"rerank"})


def test_requests_that_generate_nothing_are_recorded(client: httpx.Client) -> None:
    post(client, "/v1/rerank", model="rank", query=QUERY, documents=DOCUMENTS)
    record = client.get("/v1/admin/requests").json()["ended"][0]
    assert (record["endpoint"], record["model"], record["status"]) == ("/v1/rerank", "rank", "end")
    assert record["usage"]["prompt"] > 10


# --- times and progress -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/completions", {"prompt": "One " + LONG}),
        ("/completion", {"prompt": "Two " + LONG}),
    ],
)
def test_the_page_of_llama_server_finds_the_times_and_the_progress(
    server: LiveServer, client: httpx.Client, path: str, asked: dict[str, Any]
) -> None:
    fields = {"stream": True, "timings_per_token": True, "return_progress": True, "max_tokens": 3, "temperature": 0}
    sent = {name: chunks_of(client, path, model=name, **fields, **asked) for name in ("code", "code-server")}
    for name, chunks in sent.items():
        progress = [chunk["prompt_progress"] for chunk in chunks if chunk.get("prompt_progress")]
        assert [set(entry) for entry in progress] == [{"total", "cache", "processed", "time_ms"}] * len(progress)
        assert progress[-1]["processed"] == progress[-1]["total"] > 500, name
        assert [entry["processed"] for entry in progress] == sorted(entry["processed"] for entry in progress)
        assert len(progress) > 2
        timings = [chunk["timings"] for chunk in chunks if chunk.get("timings")]
        assert [entry["predicted_n"] for entry in timings][-1] == 3
        assert timings[-1]["prompt_n"] + timings[-1]["cache_n"] == progress[-1]["total"]
        assert timings[-1]["prompt_ms"] > 0
    own = direct(server, "code-server", "POST", "/completion", {"prompt": "x", "n_predict": 1})
    assert set(timings[-1]) <= set(own["timings"])


def chunks_of(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return [event.data for event in parse_events(reply.text) if isinstance(event.data, dict)]
