"""Agents on the real default model with its window of 8,192 tokens: each gets a reply and exits without error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from anthropic import Anthropic
from openai import OpenAI

from modelyard.library import default_model
from tests.clients.agent_bench import AgentBench
from tests.live_server import LiveServer, live_server

SHORT = "You are a helpful assistant. Answer in one sentence.\n"


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    default_model.fetch()
    config = {
        "models": {"smollm2": {"n_threads": 1}},
        "caches": {"main": {"model": "smollm2", "n_ctx": 8192, "parallel": 1}},
        "routes": [{"match": "*", "cache": "main"}],
        "engine": {"decoding": {"temperature": 0}},
    }
    with live_server(config) as running:
        yield running


def bench(name: str, folder: Path, server: LiveServer) -> AgentBench:
    made = AgentBench(name, folder)
    made.connect(server)
    return made


def test_claude_code_gets_a_reply(tmp_path: Path, server: LiveServer) -> None:
    claude = bench("claude", tmp_path, server)
    done = claude.run("-p", "Say hello.")
    assert (done.code, bool(done.out.strip())) == (0, True), done
    assert [tool.name for tool in claude.requests[0].tools] == ["Bash", "Edit", "Read"]


def test_codex_with_short_instructions_gets_a_reply(tmp_path: Path, server: LiveServer) -> None:
    codex = bench("codex", tmp_path, server)
    (tmp_path / "short.md").write_text(SHORT)
    less = (
        "-c",
        f'model_instructions_file="{tmp_path / "short.md"}"',
        "--disable",
        "multi_agent",
        "--disable",
        "goals",
    )
    done = codex.run("exec", "--skip-git-repo-check", *less, "Say hello.")
    assert (done.code, bool(done.out.strip())) == (0, True), done


def test_continue_gets_a_reply(tmp_path: Path, server: LiveServer) -> None:
    done = bench("continue", tmp_path, server).run("-p", "Say hello.")
    assert (done.code, bool(done.out.strip())) == (0, True), done


def test_aider_gets_a_reply(tmp_path: Path, server: LiveServer) -> None:
    aider = bench("aider", tmp_path, server)
    done = aider.run("--yes-always", "--no-git", "--no-pretty", "--message", "Say hello.")
    assert done.code == 0, done
    assert "tokens" in done.out.lower(), done
    assert len(aider.requests) >= 1


def test_both_sdks_stream_the_same_answer(server: LiveServer) -> None:
    """Greedy decoding on three protocols gives the same text."""
    question = [{"role": "user", "content": "Say hello."}]
    with Anthropic(base_url=server.url, api_key="none") as sdk:
        with sdk.messages.stream(model="claude-x", max_tokens=16, messages=question) as stream:  # type: ignore[arg-type]
            text = "".join(stream.text_stream)
        assert stream.get_final_message().usage.output_tokens <= 16
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as sdk:
        chunks = sdk.chat.completions.create(model="gpt-x", max_tokens=16, messages=question, stream=True)  # type: ignore[call-overload]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        events = sdk.responses.create(model="gpt-x", max_output_tokens=16, input="Say hello.", stream=True)
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert text.strip()
