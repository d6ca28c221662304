"""llama.cpp with the default model: the built-in configuration, constrained output, LoRA, and the cache of an agent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from modelyard.cli.models import explain_model
from modelyard.config.load import load_config
from modelyard.library import default_model
from modelyard.protocols.common.extensions import RANGES
from tests.engines.llama_cpp.lora_files import write_lora
from tests.engines.llama_cpp.short_model import LAYERS, short_model_file
from tests.live_server import LiveServer, live_server
from tests.scanner.patches import GRAMMAR, is_patch
from tests.telemetry.prometheus_text import sample_values

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
            "models": {"smollm2": {"n_threads": 1, "embeddings": True}},
            "caches": {"main": {"n_ctx": 1024, "parallel": 2}, "fast": {"n_ctx": 512, "n_ubatch": 64}},
        }
    ) as running:
        yield running


@pytest.fixture(scope="module")
def sdk(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="sk-dummy", max_retries=0) as client:
        yield client


def test_the_overflow_example_prints_both_token_counts(server: LiveServer, capsys: pytest.CaptureFixture[str]):
    namespace: dict[str, Any] = {}
    exec(compile(EXAMPLE.replace("http://localhost:8000", server.url), "example", "exec"), namespace)
    namespace["client"].close()
    output = capsys.readouterr().out
    assert output.startswith("Context Overflow: Error code: 400")
    assert "maximum context length is 1024 tokens" in output
    assert "resulted in 1905 tokens" in output


@pytest.mark.parametrize("name", sorted(RANGES))
def test_no_allowed_value_of_a_sampler_ends_the_engine(server: LiveServer, name: str) -> None:
    for value in RANGES[name]:
        body = {
            "model": "smollm2",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": "Hi"}],
            "temperature": 1.0,
        }
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body | {name: value}, timeout=60)
        assert reply.status_code in (200, 400), reply.text  # some protocols allow less


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
        cached("claude-haiku-4-5", [{"role": "user", "content": f"{number} is another title to be found. " * 3}])
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
    assert rows["cache main"] == "1 × 32768 tokens Conversations"
    assert rows["cache fast"] == "1 × 8192 tokens Background requests"


# --- constrained output -----------------------------------------------------------------------------------------------

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
SCHEMAS = {"get_weather": WEATHER, "now": NOW}
CHAT_TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
QUESTION: Any = [{"role": "user", "content": "What is the weather in Rome?"}]


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    name: str = Field(min_length=3, max_length=12)
    friends: list[Literal["Tom", "Kim"]] = Field(min_length=1, max_length=2)


def test_parse_returns_an_instance(sdk: openai.OpenAI) -> None:
    reply = sdk.chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": "Describe a pet."}],
        response_format=Pet,
        max_tokens=64,
        temperature=0,
    )
    assert isinstance(reply.choices[0].message.parsed, Pet)
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", [None, *SCHEMAS])
def test_a_required_call_fits_its_schema(sdk: openai.OpenAI, name: str | None, stream: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": name}} if name else "required"
    params: Any = {
        "model": "smollm2",
        "messages": QUESTION,
        "tools": CHAT_TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 96,
        "temperature": 0,
    }
    if stream:
        with sdk.chat.completions.stream(**params) as events:
            reply = events.get_final_completion().choices[0]
    else:
        reply = sdk.chat.completions.create(**params).choices[0]
    assert reply.finish_reason == "tool_calls"
    (call,) = reply.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == (name or call.function.name)
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_response_schema_does_not_prevent_calls(sdk: openai.OpenAI, choice: Any) -> None:
    """The output is a call or a pet, and nothing else; a required call is a call."""
    reply = sdk.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "What is the weather in Rome? Use a tool."}],
        tools=CHAT_TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        response_format={"type": "json_schema", "json_schema": {"name": "pet", "schema": Pet.model_json_schema()}},
        max_tokens=96,
        temperature=0,
    )
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls"
    for call in message.tool_calls or ():
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert message.tool_calls


def complete(server: LiveServer, **fields: Any) -> httpx.Response:
    body = {"model": "smollm2", "messages": QUESTION, "max_tokens": 48, "temperature": 0, **fields}
    return httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"grammar": 'root ::= "sunny" | "rainy"'}, ("sunny", "rainy")),
        ({"regex": "(warm|cold) in Rome"}, ("warm in Rome", "cold in Rome")),
        ({"lark": 'start: "2" ("0" | "1")'}, ("20", "21")),
    ],
)
def test_grammars_are_extension_fields(server: LiveServer, fields: dict[str, str], allowed: tuple[str, ...]) -> None:
    assert complete(server, **fields).json()["choices"][0]["message"]["content"] in allowed


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("fields", [{"grammar": "root ::= ("}, {"regex": "(a"}, {"lark": "start: other"}])
def test_a_bad_grammar_is_a_400_that_names_the_field(server: LiveServer, fields: dict[str, str], stream: bool) -> None:
    reply = complete(server, stream=stream, **fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "bad_grammar"
    assert reply.json()["error"]["param"] in fields


def test_an_unsatisfiable_schema_is_a_400(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"a": False}, "required": ["a"]}
    reply = complete(server, response_format={"type": "json_schema", "json_schema": {"name": "none", "schema": schema}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "response_format")


def test_unsupported_schema_keywords_do_not_fail_the_request(server: LiveServer) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2, "maxItems": 2}
    reply = complete(server, response_format={"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}})
    assert len(json.loads(reply.json()["choices"][0]["message"]["content"])) == 2


# --- custom tools with a grammar, as Codex offers them ----------------------------------------------------------------

# The same language with bounded parts, so that a small model reaches the end.
SHORT_GRAMMAR = GRAMMAR.replace("/(.+)/", "/.{1,3}/").replace("/(.*)/", "/.{0,3}/").replace("hunk+", "hunk")
SHORT_GRAMMAR = SHORT_GRAMMAR.replace("line+", "line~1..2").replace("(context | changed)+", "(context | changed)~1..2")


def call_apply_patch(server: LiveServer, grammar: str, choice: Any, **fields: Any) -> dict[str, Any]:
    shape = {"type": "grammar", "syntax": "lark", "definition": grammar}
    tools = [{"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": shape}]
    body = {"model": "smollm2", "input": "Write hello to a.py.", "tools": tools, "tool_choice": choice}
    reply = httpx.post(server.url + "/v1/responses", json=body | {"max_output_tokens": 160} | fields, timeout=120)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_the_input_of_a_custom_tool_fits_its_grammar(server: LiveServer) -> None:
    choice = {"type": "custom", "name": "apply_patch"}
    reply = call_apply_patch(server, SHORT_GRAMMAR, choice, parallel_tool_calls=False, temperature=0)
    (call,) = reply["output"]
    assert (reply["status"], call["type"], call["name"]) == ("completed", "custom_tool_call", "apply_patch")
    assert is_patch(call["input"]), call


def test_sampled_input_of_a_custom_tool_fits_its_grammar(server: LiveServer) -> None:
    """The output limit may cut the last call off; such a call is marked as incomplete."""
    reply = call_apply_patch(server, SHORT_GRAMMAR, "required", temperature=1.5, seed=0, max_output_tokens=100)
    for item in reply["output"]:
        if item["type"] == "custom_tool_call" and (item is not reply["output"][-1] or reply["status"] == "completed"):
            assert (item["status"], is_patch(item["input"])) == ("completed", True), item


def test_an_incomplete_patch_is_not_called(server: LiveServer) -> None:
    """The grammar allows any number of lines, so the limit cuts the patch off."""
    reply = call_apply_patch(server, GRAMMAR, "required", max_output_tokens=12, temperature=0)
    assert reply["status"] == "incomplete"
    assert "custom_tool_call" not in [item["type"] for item in reply["output"]]


def test_an_optional_custom_tool_call_works(server: LiveServer) -> None:
    reply = call_apply_patch(server, GRAMMAR, "auto", max_output_tokens=24, temperature=0)
    assert reply["output"]
    assert all(is_patch(item["input"]) for item in reply["output"] if item["type"] == "custom_tool_call")


def test_an_unsupported_grammar_does_not_fail_the_request(server: LiveServer) -> None:
    reply = call_apply_patch(server, 'start: "(" start? ")"', "auto", max_output_tokens=8, temperature=0)
    assert reply["output"]


# --- LoRA adapters ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lora_sdk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    file = write_lora(tmp_path_factory.mktemp("lora") / "law.gguf", width=576, layers=LAYERS, seed=3, strength=0.2)
    models = {"smollm2": {"path": str(short_model_file()), "n_threads": 1, "lora": {"law": str(file)}}}
    with (
        live_server({"models": models, "caches": {"main": {"model": "smollm2", "n_ctx": 512}}}) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="sk-dummy", max_retries=0) as client,
    ):
        yield client


def colours(lora_sdk: openai.OpenAI, adapter: str | None) -> str | None:
    reply = lora_sdk.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Name three colours."}],
        max_tokens=8,
        temperature=0,
        extra_body={"lora_adapter": adapter} if adapter else {},
    )
    return reply.choices[0].message.content


def test_a_lora_adapter_affects_only_its_request(lora_sdk: openai.OpenAI):
    before, adapted, after = colours(lora_sdk, None), colours(lora_sdk, "law"), colours(lora_sdk, None)
    assert adapted != before
    assert after == before


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_lora_adapter_is_a_400_that_lists_the_known_ones(lora_sdk: openai.OpenAI, stream: bool):
    with pytest.raises(openai.BadRequestError, match="unknown adapter 'poet'; use one of 'law'") as caught:
        lora_sdk.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "hi"}],
            stream=stream,
            extra_body={"lora_adapter": "poet"},
        )
    assert caught.value.code == "adapter_unknown"
    assert caught.value.param == "lora_adapter"


# --- an agent with one slot -------------------------------------------------------------------------------------------

AGENT_TOOLS = [
    {"name": "Bash", "description": "Runs a command. " * 6, "input_schema": {"type": "object", "properties": {}}}
]
AGENT_SYSTEM = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=00000;"},
    {"type": "text", "text": "You are a coding agent. Be brief and exact. " * 4},
]
TITLE_FORMAT = {"format": {"type": "json_schema", "schema": {"type": "object", "properties": {"t": {"const": "Fix"}}}}}
TASK = {"role": "user", "content": "Fix the tests."}


@pytest.fixture(scope="module")
def agent_server() -> Iterator[LiveServer]:
    model = {"backend": "llama_cpp", "path": str(short_model_file()), "n_threads": 1}
    caches = {name: {"model": "smollm2", "n_ctx": n, "parallel": 1} for name, n in (("main", 1024), ("fast", 256))}
    with pytest.MonkeyPatch.context() as patch:
        # Independent of the speed of this machine.
        patch.setattr(
            "modelyard.engines.llama_cpp.sequences.is_copy_worthwhile", lambda saved, moved, costs: saved >= 8
        )
        with live_server({"models": {"smollm2": model}, "caches": caches}) as running:
            yield running


def send(agent_server: LiveServer, agent: str | None = None, **body: Any) -> dict[str, Any]:
    headers = {"x-claude-code-session-id": "s1"} | ({"x-claude-code-agent-id": agent} if agent else {})
    full = {"model": "smollm2", "max_tokens": 8, "temperature": 0, "messages": [TASK]} | body
    reply = httpx.post(agent_server.url + "/v1/messages", json=full, headers=headers, timeout=120)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def prompt_tokens(usage: dict[str, int]) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]


def test_background_requests_do_not_evict_the_conversation_of_an_agent(agent_server: LiveServer) -> None:
    first = send(agent_server, system=AGENT_SYSTEM, tools=AGENT_TOOLS)
    send(agent_server, system="Explore the code.", tools=AGENT_TOOLS, agent="a1")
    send(agent_server, output_config=TITLE_FORMAT, max_tokens=32)
    send(agent_server, system="Block or not? " * 12, stop_sequences=["</block>"], thinking={"type": "disabled"})
    send(agent_server, system="Explore more.", tools=AGENT_TOOLS, agent="a2")
    history = [TASK, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "And now?"}]
    changed = [AGENT_SYSTEM[0] | {"text": "x-anthropic-billing-header: cc_version=1; cch=11111;"}, AGENT_SYSTEM[1]]
    second = send(agent_server, system=changed, tools=AGENT_TOOLS, messages=history)
    assert second["usage"]["cache_read_input_tokens"] >= prompt_tokens(first["usage"])


def test_llama_servers_prompts_may_mix_texts_with_token_ids(server: LiveServer) -> None:
    def complete(**fields: Any) -> Any:
        return httpx.post(f"{server.url}/completion", json={"n_predict": 1, "temperature": 0, **fields}, timeout=60)

    text = "The capital of France is"
    ids = httpx.post(f"{server.url}/tokenize", json={"content": text, "add_special": True}).json()["tokens"]
    split = [*ids[:2], httpx.post(f"{server.url}/detokenize", json={"tokens": ids[2:]}).json()["content"]]
    prompts = (text, ids, split, {"prompt_string": text})
    whole = [complete(prompt=prompt).json() for prompt in prompts]
    assert len({reply["content"] for reply in whole}) == 1
    assert {reply["tokens_evaluated"] for reply in whole} == {len(ids)}
    found = whole[0]["content"]
    assert complete(prompt=text, logit_bias=[[found, False]]).json()["content"] != found
    assert complete(prompt=text, logit_bias={found: -100}).json()["content"] != found
    too_long = complete(prompt=[*ids, text * 400]).json()["error"]
    assert (too_long["type"], too_long["n_ctx"]) == ("exceed_context_size_error", 1024)
    assert complete(prompt={"prompt_string": "<__media__>", "multimodal_data": ["AA=="]}).status_code == 400
