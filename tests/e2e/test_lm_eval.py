"""lm-eval (`local-completions`) on two tiny tasks, here and in llama-server: the same numbers.

llama-server has no `echo`, which lm-eval's loglikelihoods need: a small server in front of it makes them from the
probabilities of single tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import msgspec
import pytest

from setup import compliance
from tests.engines.llama_cpp.helpers import model_file
from tests.engines.llama_server.helpers import program
from tests.live_server import LiveServer, live_server

pytestmark = pytest.mark.harness

DEADLINE = 500.0
SCORED = 6  # tokens at the end of a prompt: no choice of the task is longer
QUESTIONS = [
    ("The capital of France is", [" Paris", " Rome"], 0),
    ("The opposite of hot is", [" cold", " blue", " seven"], 0),
    ("Two plus two is", [" four", " nine"], 0),
    ("The sun rises in the", [" west", " east"], 1),
    ("Water freezes at zero degrees", [" Celsius", " banana"], 0),
]
CHOICES = """
task: tiny_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{c}}}}"
doc_to_target: "{{{{a}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ANSWERS = """
task: tiny_answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{c[a]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    usual = {"path": str(model_file()), "decoding": {"temperature": 0}}
    ours = usual | {"n_threads": 1, "speculation": "off", "flash_attn": "off"}
    theirs = usual | {
        "backend": "llama_server",
        "llama_server_binary": program(),
        "llama_server_n_threads": 1,
        "llama_server_flash_attn": "off",
    }
    windows = {name: {"model": name, "n_ctx": 256} for name in ("ours", "theirs")}
    with live_server({"models": {"ours": ours, "theirs": theirs}, "caches": windows}) as running:
        try:
            yield running
        finally:  # the engines before the server, so that they end regularly
            asyncio.run_coroutine_threadsafe(running.app.stop(), running.loop).result(60)


def ask(server: LiveServer, path: str, body: dict[str, Any]) -> Any:
    """The reply of the llama-server itself."""
    upstream = server.app.scheduler.engine("theirs").server.upstream  # type: ignore[union-attr]
    asked = asyncio.run_coroutine_threadsafe(
        upstream.request_json("POST", path, msgspec.json.encode(body)), server.loop
    )
    status, reply = asked.result(DEADLINE)
    assert status == 200, reply
    return reply


def scored(server: LiveServer, ids: list[int]) -> dict[str, Any]:
    """OpenAI's `logprobs` of a prompt: those of its last tokens, and 0 before them."""
    found: dict[str, list[Any]] = {"tokens": [str(id) for id in ids], "token_logprobs": [], "top_logprobs": []}
    for end, id in enumerate(ids):
        if end < max(1, len(ids) - SCORED):
            found["token_logprobs"].append(0.0)
            found["top_logprobs"].append({str(id): 0.0})
            continue
        body = {"prompt": ids[:end], "n_predict": 1, "n_probs": 49152, "temperature": 0}
        entry = ask(server, "/completion", body)["completion_probabilities"][0]["top_logprobs"]
        logprobs = {one["id"]: one["logprob"] for one in entry}
        best = max(logprobs, key=logprobs.__getitem__)
        found["token_logprobs"].append(logprobs[id])
        found["top_logprobs"].append({str(best): logprobs[best]})
    return found


@contextmanager
def echoing(server: LiveServer) -> Iterator[str]:
    """llama-server with `echo` and `logprobs` in its completions."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
            choices = [self.choice(index, ids, body) for index, ids in enumerate(prompts)]
            reply = json.dumps({"choices": choices}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def choice(self, index: int, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
            if not body.get("echo"):
                asked = {"prompt": ids, "n_predict": body["max_tokens"], "temperature": 0, "stop": body.get("stop")}
                return {"index": index, "text": ask(server, "/completion", asked)["content"]}
            logprobs = scored(server, ids)
            for values, last in (("tokens", "x"), ("token_logprobs", 0.0), ("top_logprobs", {"x": 0.0})):
                logprobs[values].append(last)  # the token after the prompt, which lm-eval cuts off
            return {"index": index, "text": "", "logprobs": logprobs}

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def evaluate(url: str, model: str, folder: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The results of both tasks, and the answer to each question."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"q": q, "c": c, "a": a}) + "\n" for q, c, a in QUESTIONS))
    (folder / "choices.yaml").write_text(CHOICES.format(data=data))
    (folder / "answers.yaml").write_text(ANSWERS.format(data=data))
    arguments = {
        "model": model,
        "base_url": url + "/v1/completions",
        "tokenizer": str(compliance.tokenizer()),
        "tokenized_requests": True,
        "num_concurrent": 1,
        "max_retries": 1,
        "timeout": 300,
    }
    command = [str(compliance.program("lm_eval")), "run", "--model", "local-completions", "--tasks"]
    command += ["tiny_choices,tiny_answers", "--include_path", str(folder), "--output_path", str(folder / "out")]
    command += ["--log_samples", "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf"), "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **offline, "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (results,) = (folder / "out").rglob("results_*.json")
    samples = {}
    for task in ("tiny_choices", "tiny_answers"):
        (file,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
        rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["doc_id"])
        samples[task] = [row["filtered_resps"] for row in rows]
    return json.loads(results.read_text())["results"], samples


def test_lm_eval_measures_the_same_here_and_in_llama_server(server: LiveServer, tmp_path: Path) -> None:
    assert httpx.get(server.url + "/health/ready", timeout=DEADLINE).status_code == 200
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    ours, our_samples = evaluate(server.url, "ours", tmp_path / "ours")
    with echoing(server) as url:
        theirs, their_samples = evaluate(url, "theirs", tmp_path / "theirs")
    for task, metrics in (("tiny_choices", ("acc,none", "acc_norm,none")), ("tiny_answers", ("exact_match,none",))):
        assert [ours[task][name] for name in metrics] == [theirs[task][name] for name in metrics]
    assert our_samples["tiny_answers"] == their_samples["tiny_answers"]
    mine, other = ([pair for row in found["tiny_choices"] for pair in row] for found in (our_samples, their_samples))
    assert len(mine) == sum(len(choices) for _, choices, _ in QUESTIONS)
    assert [float(pair[0]) for pair in mine] == pytest.approx([float(pair[0]) for pair in other], abs=2e-3)
    assert [pair[1] for pair in mine] == [pair[1] for pair in other]
    assert ours["tiny_choices"]["acc,none"] > 0.5  # it knows capitals, so the numbers are not noise


def test_the_description_of_the_api_is_a_valid_openapi_document(server: LiveServer, tmp_path: Path) -> None:
    (tmp_path / "openapi.json").write_bytes(httpx.get(server.url + "/openapi.json").content)
    command = [str(compliance.program("openapi-spec-validator")), str(tmp_path / "openapi.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
