"""How many prompt tokens of coding agents are evaluated again: real agents on the real engine, with scripted responses.

    python -m bench.reuse [--patterns] [--only NAME] [--template NAME] [--skip-llama-server] [--json FILE]

With `--patterns` it sends typical mixes of conversations instead (`bench/reuse_patterns.py`).

Each session of `bench/reuse_sessions.py` is run by the agent itself (installed by `setup/clients.py`) on our server.
Of the tokens in the cache after one turn, those that the next turn evaluates again are counted, including the tokens of
the last response. The requests are recorded and sent to a llama-server with the same model, template, window and number
of slots, which counts for itself. The model has one layer: how many tokens are evaluated depends on vocabulary,
template and cache, not on the weights.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from gguf import GGUFReader, GGUFValueType, GGUFWriter, ReaderField
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from bench import reuse_patterns
from bench.reuse_sessions import SESSIONS, AgentSession, write_files
from bench.scripted_llama import scripted_answers
from bench.servers import llama_server
from modelyard.library import default_model
from modelyard.library.cache_dir import cache_dir
from modelyard.prompt.template_source import builtin
from modelyard.telemetry.history import RequestRecord
from tests.clients.agent_bench import AgentBench, AgentResult
from tests.live_server import LiveServer, live_server

WINDOW, SLOTS = 65536, 3
TARGET = 0.02
_FIRST = ("new_session", "other_session")  # another conversation with the same session name, such as a title request
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_GENERATION = re.compile(r"\{%-? (?:end)?generation -?%\}")  # a tag for training that only some renderers know
_LAYERS, _MODEL_WINDOW = 1, 131072
_REPLACED = ("GGUF.", "llama.block_count", "llama.context_length", "general.architecture")


class SessionFailed(Exception):
    """A session that could not be measured."""


class Turn(Struct, frozen=True):
    """One request of a session, as the server counted it. `cached` of the `prompt` tokens were reused."""

    session: str
    prompt: int
    cached: int
    output: int = 0
    cause: str = ""

    @property
    def evaluated(self) -> int:
        return self.prompt - self.cached

    @property
    def cache_tokens(self) -> int:
        """The tokens in the cache after it."""
        return self.prompt + self.output


class Tally(Struct, frozen=True):
    """Of all turns but the first of each conversation: `known` tokens were in the cache before, `again` of them were
    evaluated again; `evaluated` includes new tokens."""

    requests: int
    known: int
    again: int
    evaluated: int

    @property
    def share(self) -> float:
        return self.again / self.known if self.known else 0.0


def _predecessor(last: Sequence[Turn], turn: Turn) -> Turn | None:
    """The longest earlier turn that fits: conversations only grow, and side requests are small."""
    return max(last, key=lambda one: (one.prompt <= turn.prompt, one.cache_tokens), default=None)


def tally(turns: Sequence[Turn]) -> Tally:
    latest: dict[str, list[Turn]] = {}  # the last turn of each conversation of a session
    known = again = evaluated = 0
    for turn in turns:
        last = latest.setdefault(turn.session, [])
        before = None if turn.cause in _FIRST else _predecessor(last, turn)
        if before is not None:
            common = min(before.cache_tokens, turn.prompt)
            known += common
            again += max(0, common - turn.cached)
            evaluated += turn.evaluated
            last.remove(before)
        last.append(turn)
    return Tally(len(turns), known, again, evaluated)


class SessionResult(Struct, frozen=True):
    name: str
    ours: tuple[Turn, ...]
    theirs: tuple[Turn, ...]


def run(session: AgentSession, template: str, llama_server: bool) -> SessionResult:
    with tempfile.TemporaryDirectory(prefix="modelyard-reuse-") as folder:
        bench = AgentBench(session.agent, Path(folder))
        write_files(bench.work)
        with scripted_answers(session.rules(bench.work)), live_server(configuration(template)) as served:
            bench.connect(served)
            _drive(bench, session)
            records = sorted(served.app.gateway.history.recent(1000), key=lambda one: one.at)
            recorded = [_recorded(served, one) for one in records]
    ours = tuple(map(_turn, records))
    counted = _llama_server_counts(recorded, template) if llama_server else []
    theirs = tuple(Turn(one.session, *pair, cause=one.cause) for one, pair in zip(ours, counted, strict=False))
    return SessionResult(session.name, ours, theirs)


def _llama_server_counts(recorded: Sequence[RecordedRequest], template: str) -> list[tuple[int, int]]:
    """Empty if llama-server refuses what the agent sends."""
    try:
        return replay(recorded, shallow_model(), template, WINDOW, SLOTS)
    except SessionFailed as error:
        print(error, file=sys.stderr)
        return []


def _drive(bench: AgentBench, session: AgentSession) -> None:
    session_id = ""
    for own in session.runs:
        done = bench.run(*(word.replace("{session}", session_id) for word in own), **session.env)
        if done.code != 0:
            raise SessionFailed(f"the agent failed: {done!r}")
        session_id = session_id or _session_id(done)


def _session_id(done: AgentResult) -> str:
    """Claude Code prints it in its last line."""
    try:
        return str(json.loads(done.out.strip().splitlines()[-1])["session_id"])
    except (ValueError, LookupError, TypeError):
        return ""


def configuration(template: str) -> dict[str, Any]:
    real = {
        "backend": "llama_cpp",
        "path": str(shallow_model()),
        "n_threads": 1,
        "speculation": "off",
        "prompt_format": template,
    }
    return {
        "models": {"real": real},
        "caches": {"main": {"model": "real", "n_ctx": WINDOW, "parallel": SLOTS}},
        "routes": [{"match": "*", "cache": "main"}],
        "log": {"history_texts": True},
    }


def _turn(record: RequestRecord) -> Turn:
    cause = record.reuse.cause if record.reuse is not None else ""
    return Turn(record.session or "", record.usage.prompt, record.usage.cached, record.usage.output, cause)


def _recorded(served: LiveServer, record: RequestRecord) -> RecordedRequest:
    url = f"{served.url}/v1/admin/requests/req_{record.trace}"
    found = httpx.get(url, headers=served.owner, timeout=60, trust_env=False).json()
    return RecordedRequest(record.endpoint, found["texts"]["request"])


# --- the same requests at a llama-server ------------------------------------------------------------------------------


class RecordedRequest(Struct, frozen=True):
    path: str
    body: str


def replay(
    requests: Sequence[RecordedRequest], model: Path, template: str, window: int, slots: int
) -> list[tuple[int, int]]:
    """Prompt tokens and cached tokens of each request, as a llama-server counts them."""
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as file:
        file.write(_GENERATION.sub("", builtin(template)))
        file.flush()
        options = ("--jinja", "--chat-template-file", file.name)
        with (
            llama_server(model, 1, window, slots, *options) as server,
            httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=600, trust_env=False) as client,
        ):
            return [_send(client, one) for one in requests]


def _send(client: httpx.Client, one: RecordedRequest) -> tuple[int, int]:
    reply = client.post(one.path, json=shorten(json.loads(one.body), one.path))
    if reply.status_code != 200:
        raise SessionFailed(f"llama-server refused a recorded {one.path}: {reply.status_code} {reply.text[:500]}")
    return count_tokens(reply.json())


def shorten(body: dict[str, Any], path: str) -> dict[str, Any]:
    """For one output token, not streamed, and without hosted tools, which llama-server refuses."""
    kept = {key: value for key, value in body.items() if key not in (*_LIMITS, "stream", "stream_options")}
    if "tools" in kept:
        kept["tools"] = [tool for tool in kept["tools"] if _is_function(tool, path)]
    return kept | {"stream": False, "max_output_tokens" if path.endswith("responses") else "max_tokens": 1}


def _is_function(tool: dict[str, Any], path: str) -> bool:
    if path.endswith("messages"):
        return "input_schema" in tool
    return tool.get("type") == "function"


def count_tokens(reply: dict[str, Any]) -> tuple[int, int]:
    """Prompt and cached tokens; every protocol has its own fields for them."""
    if timings := reply.get("timings"):
        return timings["prompt_n"] + timings["cache_n"], timings["cache_n"]
    usage = reply["usage"]
    if "cache_read_input_tokens" in usage:
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    if "input_tokens" in usage:
        return usage["input_tokens"], usage.get("input_tokens_details", {}).get("cached_tokens", 0)
    return usage["prompt_tokens"], usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)


# --- the model --------------------------------------------------------------------------------------------------------


def shallow_model(layers: int = _LAYERS) -> Path:
    """The default model cut to its first layers, with a long window; made once."""
    path = cache_dir() / "bench" / f"smollm2-{layers}-layer.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        cut_model(default_model.fetch(), draft, layers)
        draft.replace(path)
    return path


def cut_model(source: Path, target: Path, layers: int) -> None:
    reader = GGUFReader(str(source))
    writer = GGUFWriter(str(target), "llama")
    for name, field in reader.fields.items():
        if not name.startswith(_REPLACED):
            _copy(writer, name, field)
    writer.add_uint32("llama.block_count", layers)
    writer.add_uint32("llama.context_length", _MODEL_WINDOW)
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy(writer: GGUFWriter, name: str, field: ReaderField) -> None:
    kind = field.types[0]
    inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
    writer.add_key_value(name, field.contents(), kind, inner)


# --- the report -------------------------------------------------------------------------------------------------------


def table(found: Iterable[SessionResult]) -> Table:
    shown = Table("session", "requests", "known", "again", "share", "llama-server", "ratio", box=None)
    for one in found:
        ours, theirs = tally(one.ours), tally(one.theirs)
        beside = (f"{theirs.share:.1%}", f"{ratio(one):.2f}") if one.theirs else ("", "")
        shown.add_row(one.name, str(ours.requests), f"{ours.known:,}", f"{ours.again:,}", f"{ours.share:.2%}", *beside)
    return shown


def ratio(found: SessionResult) -> float:
    """Of the tokens evaluated in all turns but the first. Generated tokens are in our cache and never were in theirs:
    they are subtracted."""
    ours, theirs = tally(found.ours), tally(found.theirs)
    generated = tally([msgspec.structs.replace(turn, cached=0) for turn in found.ours]).known
    generated -= tally([msgspec.structs.replace(turn, cached=0, output=0) for turn in found.ours]).known
    return ours.evaluated / max(1, theirs.evaluated - generated)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers end, too
    options, console = _options(), Console()
    console.width = max(console.width, 120)
    if options.patterns:
        measure_patterns(options, console)
        return
    chosen = [one for one in SESSIONS if options.only is None or options.only.lower() in one.name.lower()]
    found: list[SessionResult] = []
    for session in chosen:
        try:
            found.append(run(session, options.template, not options.skip_llama_server))
        except (SessionFailed, AssertionError) as error:  # Bench asserts that the agent is installed and ends
            console.print(f"{session.name}: {error}", markup=False, soft_wrap=True)
            continue
        console.print(table(found[-1:]))
        if options.json is not None:
            options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
        for turn in found[-1].ours if options.verbose else ():
            console.print(f"  {turn}", markup=False, soft_wrap=True)
    console.print(table(found))
    if len(found) < len(chosen) or any(tally(one.ours).share > TARGET for one in found):
        raise SystemExit(f"a session failed, or more than {TARGET:.0%} of the tokens were evaluated again")


def measure_patterns(options: argparse.Namespace, console: Console) -> None:
    found: list[reuse_patterns.PatternResult] = []
    with_llama_server = not options.skip_llama_server
    for one in reuse_patterns.run_patterns(shallow_model(), options.only, with_llama_server=with_llama_server):
        found.append(one)
        print(one, file=sys.stderr)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    console.print(reuse_patterns.table(found))
    if any(one.ours > reuse_patterns.GOAL for one in found):
        raise SystemExit(f"a pattern evaluates more than {reuse_patterns.GOAL} of the least number of tokens")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How many prompt tokens of coding agents are evaluated again.")
    parser.add_argument("--patterns", action="store_true", help="mixes of conversations instead of real agents")
    parser.add_argument("--only", help="sessions or patterns whose name has this in it")
    parser.add_argument("--template", default="generic", help="a built-in chat template; both servers use it")
    parser.add_argument("--skip-llama-server", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="every turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save every turn in this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
