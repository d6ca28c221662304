"""llama.cpp with the default model: the built-in configuration, constrained output, LoRA, and the cache of an agent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from modelyard.cli.models import explain_model
from modelyard.config.load import load_config
from modelyard.library import default_model
from tests.telemetry.prometheus_text import sample_values
from tests.live_server import LiveServer, live_server

# The overflow example of llama-bridge's guide, unchanged except for the port.
EXAMPLE = """
import openai

client = openai.OpenAI(
    base_url="http://localhost:8000/v1",
    api_key="sk-dummy"
)

# 即使请求过长，现在也会收到清晰的 400 错误
try:
    response = client.chat.completions.create(
        model="claude-sonnet-4",
        messages=[{"role": "user", "content": "..." * 10000}]
    )
except openai.BadRequestError as e:
    print(f"Context Overflow: {e}")
"""
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    default_model.fetch()
    with live_server(
        {
            "models": {"smollm2": {"n_threads": 1}},
            "caches": {"main": {"n_ctx": 1024, "parallel": 2}, "fast": {"n_ctx": 512, "n_ubatch": 64}},
        }
    ) as running:
        yield running


@pytest.fixture(scope="module")
def sdk(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="sk-dummy", max_retries=0) as client:
        yield client


def test_the_overflow_example_prints_both_token_counts(
    server: LiveServer, capsys: pytest.CaptureFixture[str]
):
    exec(compile(EXAMPLE.replace("http://localhost:8000", server.url), "example", "exec"), {})
    output = capsys.readouterr().out
    assert output.startswith("Context Overflow: Error code: 400")
    assert "maximum context length is 1024 tokens" in output
    assert "resulted in 1905 tokens" in output


def test_the_server_works_after_an_overflow(sdk: openai.OpenAI):
    reply = sdk.chat.completions.create(
        model="claude-sonnet-4",
        messages=[{"role": "user", "content": "Write the number seven."}],
        max_tokens=8,
        temperature=0,
    )
    assert reply.choices[0].message.content
    assert reply.usage is not None
    assert 0 < reply.usage.completion_tokens <= 8


@pytest.mark.parametrize(("name", "window"), [("claude-haiku-4-5", 512), ("gpt-5", 1024), ("smollm2", 1024)])
def test_every_model_name_is_accepted_and_haiku_has_the_small_window(sdk: openai.OpenAI, name: str, window: int):
    with pytest.raises(openai.BadRequestError, match=f"{window} tokens") as caught:
        sdk.chat.completions.create(model=name, messages=[{"role": "user", "content": "word " * 2000}])
    assert caught.value.code == "context_length_exceeded"


def test_background_requests_do_not_use_the_main_cache(server: LiveServer, sdk: openai.OpenAI):
    messages = [{"role": "user", "content": "Count from one to twenty in words, please. " * 8}]

    def cached(model: str, content: list[dict[str, str]]) -> int:
        reply = sdk.chat.completions.create(model=model, messages=content, max_tokens=1)  # type: ignore[arg-type]
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        return reply.usage.prompt_tokens_details.cached_tokens or 0

    cached("claude-sonnet-5", messages)
    for number in range(3):
        cached("claude-haiku-4-5", [{"role": "user", "content": f"{number} is another title to be found. " * 8}])
    assert cached("claude-sonnet-5", messages) > 60


def test_embeddings_of_similar_sentences_are_closer(sdk: openai.OpenAI):
    output = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "The court rejected the tax appeal."]
    embeddings = sdk.embeddings.create(model="smollm2", input=[*output, output[0]])
    cat, kitten, law, again = (entry.embedding for entry in embeddings.data)
    assert len(cat) == 576
    assert cat == again
    assert cosine(cat, kitten) > cosine(cat, law)
    assert embeddings.usage.prompt_tokens > 20
    assert sdk.embeddings.create(model="smollm2", input=output[0]).data[0].embedding == pytest.approx(cat, abs=0.02)


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_a_changed_system_prompt_is_counted(server: LiveServer, sdk: openai.OpenAI):
    before = sample_values(httpx.get(server.url + "/metrics").content, "system_prompt_changes_total")
    for day in ("Monday", "Tuesday"):
        messages = [{"role": "system", "content": f"Be kind. It is {day}."}, {"role": "user", "content": "Hi."}]
        sdk.chat.completions.create(model="smollm2", messages=messages, max_tokens=1)  # type: ignore[arg-type]
    changes = sample_values(httpx.get(server.url + "/metrics").content, "system_prompt_changes_total")
    assert changes["main",] == before.get(("main",), 0) + 1


def test_health_lists_the_model(server: LiveServer):
    health = httpx.get(server.url + "/health").json()
    assert health["models"]["smollm2"]["state"] == "ready"


def test_the_claude_code_configuration_finds_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "models/unsloth/MiMo-V2-Flash-GGUF/UD-Q6_K_XL"
    folder.mkdir(parents=True)
    (folder / "MiMo.gguf").symlink_to(default_model.fetch())
    monkeypatch.chdir(tmp_path)
    loaded = load_config(CONFIGS / "claude-code.toml", env={})
    rows = dict(explain_model(loaded.config, "mimo"))
    assert not loaded.problems
    assert (rows["engine"], rows["architecture"], rows["quantization"]) == ("llama_cpp", "llama, 30 layers", "Q4_1")
    assert rows["cache main"] == "1 × 32768 tokens 主对话缓存"
    assert rows["cache fast"] == "1 × 8192 tokens 后台任务缓存"
