"""What the gateway itself costs, with the fake engine behind it, beside a LiteLLM proxy and smg: `make bench`.

    python bench/gateway.py [--quick] [--skip-others] [--json FILE]

(a) requests per CPU-second of the server; (b) server-sent events per CPU-second; (c) 1,000 concurrent streams: errors,
latencies, memory; (d) time added to the first token; (e) a conversation of 20,000 tokens that grows by 200;
(f) as a proxy: `openai_remote` in front of an upstream that costs nothing (`bench/baseline_server.py`).

LiteLLM is compared where both do the same: in (a) and (b) both respond by themselves, our fake engine behind a real
tokenizer and chat template, LiteLLM from its own `mock_response`; in (f) both forward to the same upstream, and so does
smg, a gateway in Rust.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import msgspec
import psutil
import uvloop
from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # a script's own folder is on the path, not the root

from bench import report
from bench.baseline_server import WORDS
from bench.prepared_load import COUNTER, LoadJob, RequestTarget
from bench.prompts import tokenizer_folder
from bench.servers import (
    LITELLM,
    LITELLM_VERSION,
    OURS,
    ROOT,
    SMG,
    SMG_VERSION,
    Server,
    baseline_server,
    busy_cores,
    install_litellm,
    install_smg,
    litellm_server,
    modelyard_server,
    smg_server,
)
from modelyard.config.load import load_config
from modelyard.prompt.render import Renderer
from modelyard.protocols import openai_chat
from modelyard.server.model_definition import define_model
from modelyard.tokenizer.shield import unshield
from modelyard_bench.load import Round, Sample
from modelyard_bench.statistics import Distribution, Interval, mean_interval, percentile, ratio_interval
from modelyard_bench.workload import UserTurn

# The targets.
REQUESTS_PER_CPU_S, LITELLM_RATIO, EVENTS_PER_CPU_S, MAX_RSS_MB, MAX_ADDED_TTFT_MS = 3_500, 25, 35_000, 286, 1.0
PROXIED_PER_CPU_S, PROXY_RATIOS = 2_500, {LITELLM: 15.0, SMG: 0.6}

OUTPUT_TOKENS = 16
_SLOTS = 1200  # more than concurrent streams: the queue is not measured here
_AT_ONCE, _ONE_BY_ONE = 0.0, 1e-6  # token delays of the fake engine: the whole output at once, or every token alone
_MOCK = "".join(WORDS)[: 3 * OUTPUT_TOKENS]  # LiteLLM streams three characters per event: the same number of events
_SYSTEM = "You are a careful assistant. Answer in plain words, say what you are not sure of, and keep it short."
_USER = (
    f"My order {COUNTER} arrived this morning, but one of the two lamps does not work and the box was open on one side."
    " I have tried another bulb and another socket without any luck. Could you tell me how to send it back, who pays "
    "for the parcel, and how long it usually takes until a new lamp arrives? Thank you very much for your help."
)

Tick = Callable[[str], None]


class Plan(Struct, frozen=True):
    """How long and how often. `rate` is tokens per second of each concurrent stream."""

    rounds: int = 3
    seconds: float = 5.0
    connections: int = 32
    streams: int = 1000
    stream_seconds: float = 10.0
    stream_rounds: int = 3
    rate: float = 10.0
    ttft_requests: int = 2000

    def ticks(self, servers: int) -> int:
        """Steps of the progress bar."""
        return 3 * servers * (self.rounds + 1) + (self.rounds + 1) * (servers > 1) + 2 * self.stream_rounds + 6


QUICK = Plan(rounds=1, seconds=3.0, stream_seconds=6.0, stream_rounds=1, ttft_requests=500)


# --- one measurement --------------------------------------------------------------------------------------------------


class ServerSample(Struct, frozen=True, kw_only=True):
    """One round of load on a server. `other_cores` is the load of the machine by neither the server nor the client."""

    responses: int
    errors: int
    first_error: str
    events: int
    seconds: float
    in_flight: int
    ttft_s: Distribution
    gap_s: Distribution
    cpu_s: float
    rss_mb: float
    other_cores: float


def request_body(*, stream: bool) -> str:
    """A short chat of ordinary size: a system message and about sixty words."""
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
    body: dict[str, Any] = {"model": "bench", "messages": messages, "max_tokens": 64}
    return json.dumps(body | ({"stream": True} if stream else {}))


def fake_config(tokenizer: Path, token_delay: float) -> dict[str, Any]:
    model = {
        "backend": "fake",
        "tokenizer_path": str(tokenizer),
        "token_delay": token_delay,
        "script": [{"steps": [{"tokens": OUTPUT_TOKENS}]}],
    }
    return {
        "models": {"bench": model},
        "caches": {"main": {"model": "bench", "n_ctx": 4096, "parallel": _SLOTS}},
        "routes": [{"match": "*", "cache": "main"}],
    }


def measure(server: Server, *, stream: bool, streams: int, seconds: float, ramp_s: float = 0.0) -> ServerSample:
    body = request_body(stream=stream)
    job = LoadJob(url=server.url, body=body, key="bench", streams=streams, seconds=seconds, ramp_s=ramp_s)
    before, machine, own, began = server.cpu_s(), _machine_cpu_s(), _own_cpu_s(), perf_counter()
    found = job.run_in_process()
    cpu_s = server.cpu_s() - before
    others = max(0.0, _machine_cpu_s() - machine - cpu_s - (_own_cpu_s() - own))
    return summarize(found, cpu_s, server.rss_mb(), others / (perf_counter() - began))


def summarize(found: Round, cpu_s: float, rss_mb: float, other_cores: float) -> ServerSample:
    samples, errors = found.succeeded, [sample.error for sample in found.samples if sample.error is not None]
    return ServerSample(
        responses=len(samples),
        errors=len(errors),
        first_error=errors[0] if errors else "",
        events=sum(sample.events for sample in samples),
        seconds=found.wall_s,
        in_flight=in_flight(samples),
        ttft_s=Distribution.of([sample.ttft_s for sample in samples if sample.ttft_s is not None]),
        gap_s=Distribution.of([gap for sample in samples for gap in sample.gaps_s]),
        cpu_s=cpu_s,
        rss_mb=rss_mb,
        other_cores=other_cores,
    )


def in_flight(samples: Sequence[Sample], moments: int = 101) -> int:
    """How many requests ran at once: the median over moments in the middle half of the round."""
    if not samples:
        return 0
    began, ended = (limit(sample.began_s for sample in samples) for limit in (min, max))
    times = [began + (ended - began) * (0.25 + 0.5 * n / (moments - 1)) for n in range(moments)]
    return int(median(sum(s.began_s <= at < s.began_s + s.total_s for s in samples) for at in times))


def _machine_cpu_s() -> float:
    """CPU time of the whole machine, without that of low priority (`busy_cores`)."""
    times = psutil.cpu_times()
    return float(
        sum(times)
        - times.idle
        - getattr(times, "nice", 0.0)
        - getattr(times, "iowait", 0.0)
        - getattr(times, "guest", 0.0)
    )


def _own_cpu_s() -> float:
    """CPU time of this process and of the load generators that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


# --- the phases -------------------------------------------------------------------------------------------------------


class Results(Struct):
    plan: Plan
    requests: dict[str, list[ServerSample]]
    events: dict[str, list[ServerSample]]
    streams: list[ServerSample]
    added_ttft: AddedTtft
    conversation: ConversationCost
    proxied: dict[str, list[ServerSample]]
    bare_client: list[float]  # requests per CPU-second of the HTTP client alone
    proxied_streams: list[ServerSample]
    proxied_ttft: AddedTtft


def run(plan: Plan, with_others: bool, tick: Tick) -> Results:
    tokenizer = tokenizer_folder()
    with ExitStack() as stack:
        others = {LITELLM: stack.enter_context(litellm_server(mock_response=_MOCK))} if with_others else {}
        requests = _throughput(fake_config(tokenizer, _AT_ONCE), others, plan, tick, stream=False)
        events = _throughput(fake_config(tokenizer, _ONE_BY_ONE), others, plan, tick, stream=True)
    streams = _concurrent_streams(fake_config(tokenizer, 1 / plan.rate), plan, tick)
    with baseline_server() as baseline:
        added = _added_ttft(fake_config(tokenizer, _AT_ONCE), baseline, plan, tick)
    tick("a growing conversation")
    conversation = conversation_cost(tokenizer)
    with ExitStack() as stack:
        upstream = stack.enter_context(baseline_server())
        if with_others:
            others = {
                LITELLM: stack.enter_context(litellm_server(api_base=f"{upstream.url}/v1")),
                SMG: stack.enter_context(smg_server(upstream.url)),
            }
        proxied = _throughput(proxy_config(upstream), others, plan, tick, stream=True)
        tick("the HTTP client alone")
        bare_client = _bare_client(upstream, plan)
        proxied_ttft = _added_ttft(proxy_config(upstream), upstream, plan, tick)
    with baseline_server(1 / plan.rate) as upstream:
        proxied_streams = _concurrent_streams(proxy_config(upstream), plan, tick)
    return Results(
        plan, requests, events, streams, added, conversation, proxied, bare_client, proxied_streams, proxied_ttft
    )


def proxy_config(upstream: Server) -> dict[str, Any]:
    model = {"backend": "openai_remote", "remote_base_url": f"{upstream.url}/v1", "remote_model": "bench"}
    return {
        "models": {"bench": model},
        "caches": {"main": {"model": "bench", "n_ctx": 4096, "parallel": _SLOTS}},
        "routes": [{"match": "*", "cache": "main", "allow_remote": True}],
    }


def _throughput(
    config: Mapping[str, Any], others: Mapping[str, Server], plan: Plan, tick: Tick, *, stream: bool
) -> dict[str, list[ServerSample]]:
    """(a), (b), (f): every server in every round, so that a disturbance of the machine affects all of them."""
    what = "streams" if stream else "requests"
    with modelyard_server(config) as ours, busy_cores():
        servers = {OURS: ours, **others}
        for name, server in servers.items():
            tick(f"{what}: warming up {name}")
            measure(server, stream=stream, streams=plan.connections, seconds=2.0)
        found: dict[str, list[ServerSample]] = {name: [] for name in servers}
        for _ in range(plan.rounds):
            for name, server in servers.items():
                tick(f"{what}: {name}")
                found[name].append(measure(server, stream=stream, streams=plan.connections, seconds=plan.seconds))
    return found


def _bare_client(upstream: Server, plan: Plan) -> list[float]:
    """(f) without the gateway: `bench/bare_client.py` on the same upstream."""
    command = [sys.executable, "-m", "bench.bare_client", f"{upstream.url}/v1/chat/completions", str(plan.seconds)]
    with busy_cores():
        found = [json.loads(subprocess.check_output(command, cwd=ROOT)) for _ in range(plan.rounds)]
    return [round["responses"] / round["cpu_s"] for round in found]


def _concurrent_streams(config: Mapping[str, Any], plan: Plan, tick: Tick) -> list[ServerSample]:
    """(c), (f): starts are spread over a stream's duration, and stay spread as each stream is followed by the next."""
    found = []
    with modelyard_server(config) as ours:
        measure(ours, stream=True, streams=20, seconds=0.0)
        for _ in range(plan.stream_rounds):
            tick(f"{plan.streams} streams")
            ramp_s = OUTPUT_TOKENS / plan.rate
            found.append(measure(ours, stream=True, streams=plan.streams, seconds=plan.stream_seconds, ramp_s=ramp_s))
    return found


class AddedTtft(Struct, frozen=True):
    """Milliseconds to the first token, and those of the baseline server, whose median is subtracted from both."""

    measured_p50: float
    measured_p99: float
    baseline_p50: float

    @property
    def p50(self) -> float:
        return self.measured_p50 - self.baseline_p50

    @property
    def p99(self) -> float:
        return self.measured_p99 - self.baseline_p50


def _added_ttft(config: Mapping[str, Any], baseline: Server, plan: Plan, tick: Tick) -> AddedTtft:
    """(d), (f): one request at a time, alternating with the baseline, which is also the upstream of a proxy."""
    with modelyard_server(config) as ours:
        tick("time to first token: warming up")
        uvloop.run(alternating_ttft(ours, baseline, 100))
        tick("time to first token")
        gc.collect()
        gc.disable()
        try:
            times, baseline_times = uvloop.run(alternating_ttft(ours, baseline, plan.ttft_requests))
        finally:
            gc.enable()
    return AddedTtft(percentile(times, 50), percentile(times, 99), percentile(baseline_times, 50))


async def alternating_ttft(ours: Server, baseline: Server, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds to the first token of `count` streams from each of two servers."""
    body = request_body(stream=True)
    times: tuple[list[float], list[float]] = ([], [])
    async with (
        RequestTarget(ours.url, body, key="bench") as first,
        RequestTarget(baseline.url, body, key="bench") as second,
    ):
        for _ in range(count):
            for target, found in zip((first, second), times, strict=True):
                sample = await target.send(UserTurn("", 0, 0))
                if sample.ttft_s is None:
                    raise RuntimeError(f"the response is not a complete stream: {sample.error}")
                found.append(sample.ttft_s * 1000)
    return times


# --- (e) a growing conversation ---------------------------------------------------------------------------------------

_CONVERSATION_TOKENS, GROWTH, _TURNS = 20_000, 200, 30


class ConversationCost(Struct, frozen=True):
    """Milliseconds. `first` renders and tokenizes the whole conversation; a turn adds `GROWTH` tokens to it."""

    tokens: int
    first: float
    turn_median: float
    turn_max: float
    read_median: float


def conversation_cost(tokenizer: Path) -> ConversationCost:
    """The gateway's own reading, rendering and tokenizing, in this process."""
    writer = ConversationWriter(_renderer(tokenizer))
    messages, tokens = writer.conversation(_CONVERSATION_TOKENS)
    renderer = _renderer(tokenizer)  # the writer's renderer has already seen the conversation
    _, first = _time_turn(renderer, messages)
    reads, turns = [], []
    for _ in range(_TURNS):
        messages.append(writer.message(len(messages)))
        read, turn = _time_turn(renderer, messages)
        reads.append(read)
        turns.append(turn)
    return ConversationCost(tokens, first, median(turns), max(turns), median(reads))


def _renderer(tokenizer: Path) -> Renderer:
    config = load_config(env={}, overrides=fake_config(tokenizer, 0)).config
    return define_model(config.router().catalog.models["bench"]).pipeline.renderer


class ConversationWriter:
    """Messages of about `GROWTH` tokens, of random words that are the same in every run."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        texts = (renderer.tokenizer.token_bytes(id) for id in range(1000, 30_000))
        self._words = [word.decode() for word in texts if word[:1] == b" " and word[1:].isalpha()]
        self._rng = random.Random(20_000)

    def conversation(self, size: int) -> tuple[list[dict[str, str]], int]:
        """User and assistant messages until there are `size` tokens."""
        messages: list[dict[str, str]] = []
        tokens = 0
        while tokens < size:
            messages.append(self.message(len(messages)))
            request = openai_chat.read_request(_conversation_body(messages), {})
            tokens = len(self._renderer.tokens(self._renderer.text(request)))
        return messages, tokens

    def message(self, number: int) -> dict[str, str]:
        role = "assistant" if number % 2 else "user"
        return {"role": role, "content": "".join(self._rng.choices(self._words, k=GROWTH - 5))}  # 5: the role's tokens


def _conversation_body(messages: list[dict[str, str]]) -> bytes:
    if messages[-1]["role"] == "assistant":  # a final assistant message would be continued instead
        messages = [*messages, {"role": "user", "content": "Go on."}]
    return json.dumps({"model": "bench", "messages": messages}).encode()


def _time_turn(renderer: Renderer, messages: list[dict[str, str]]) -> tuple[float, float]:
    """Milliseconds to read the body, and to render and tokenize it, as the gateway does both."""
    body = _conversation_body(messages)
    began = perf_counter()
    request = openai_chat.read_request(body, {})
    read = perf_counter()
    text = renderer.text(request)
    renderer.fresh(text)
    ids = renderer.tokens(text)
    done = perf_counter()
    if ids != renderer.tokenizer.encode(unshield(text)):
        raise RuntimeError("the cached tokens differ from a full tokenization")
    return (read - began) * 1000, (done - read) * 1000


# --- the report -------------------------------------------------------------------------------------------------------


class Row(Struct, frozen=True):
    name: str
    ours: str
    theirs: Mapping[str, tuple[str, str]] = {}  # by server: the value, and the ratio to it
    target: str = ""
    met: bool | None = None


def _per_cpu_s(sample: ServerSample) -> float:
    return sample.responses / sample.cpu_s


def _events_per_cpu_s(sample: ServerSample) -> float:
    return sample.events / sample.cpu_s


def rows(results: Results) -> Iterator[Row]:
    """Both respond by themselves."""
    ratios = {LITELLM: float(LITELLM_RATIO)}
    yield _compared("requests per CPU-second", results.requests, _per_cpu_s, REQUESTS_PER_CPU_S, ratios)
    yield _compared("requests/s, one process", results.requests, lambda s: s.responses / s.seconds)
    yield _compared("SSE events per CPU-second", results.events, _events_per_cpu_s, EVENTS_PER_CPU_S)
    yield _compared("SSE events/s, one process", results.events, lambda s: s.events / s.seconds)
    yield from _stream_rows(results.streams, results.added_ttft)
    conversation = results.conversation
    name = f"{conversation.tokens:,} tokens grow by {GROWTH}: render + tokenize"
    yield Row(name, _ms(conversation.turn_median))
    yield Row("   the slowest turn", _ms(conversation.turn_max))
    yield Row("   the first time, all of it", _ms(conversation.first))
    yield Row("   reading the JSON body", _ms(conversation.read_median))


def proxy_rows(results: Results) -> Iterator[Row]:
    """All forward to the same upstream."""
    yield _compared("requests per CPU-second, streamed", results.proxied, _per_cpu_s, PROXIED_PER_CPU_S, PROXY_RATIOS)
    yield _compared("requests/s, one process", results.proxied, lambda s: s.responses / s.seconds)
    bare, ours = fmean(results.bare_client), fmean(map(_per_cpu_s, results.proxied[OURS]))
    yield Row("the HTTP client alone, per CPU-second", f"{bare:,.0f}")
    yield Row("   the proxy's share of it", f"{ours / bare:.2f}×")
    yield _compared("SSE events per CPU-second", results.proxied, _events_per_cpu_s)
    yield from _stream_rows(results.proxied_streams, results.proxied_ttft)


def _stream_rows(streams: Sequence[ServerSample], added: AddedTtft) -> Iterator[Row]:
    errors = sum(sample.errors for sample in streams)
    yield Row("concurrent streams", f"{median(s.in_flight for s in streams):,.0f}")
    yield Row("   errors", str(errors), target="0", met=errors == 0)
    for name, field in (("TTFT", "ttft_s"), ("inter-token", "gap_s")):
        for percent in ("p50", "p99"):
            value = median(getattr(getattr(sample, field), percent) for sample in streams)
            yield Row(f"   {name} {percent}", _ms(value * 1000))
    yield Row("   CPU, cores", f"{fmean(s.cpu_s / s.seconds for s in streams):.2f}")
    rss = max(sample.rss_mb for sample in streams)
    yield Row("   RSS", f"{rss:.0f} MiB", target=f"< {MAX_RSS_MB} MiB", met=rss < MAX_RSS_MB)
    target, met = f"≤ {MAX_ADDED_TTFT_MS:g} ms", added.p50 <= MAX_ADDED_TTFT_MS
    yield Row("added TTFT p50, one request at a time", _ms(added.p50), target=target, met=met)
    yield Row("added TTFT p99", _ms(added.p99))


def _compared(
    name: str,
    found: Mapping[str, list[ServerSample]],
    value: Callable[[ServerSample], float],
    target: float = 0,
    ratio_targets: Mapping[str, float] = {},
) -> Row:
    values = {server: [value(sample) for sample in samples] for server, samples in found.items()}
    targets, met = ([f"≥ {target:,.0f}"] if target else []), fmean(values[OURS]) >= target
    theirs = {}
    for server in values.keys() - {OURS}:
        if min(values[server]) > 0:
            interval = ratio_interval(values[OURS], values[server])
            digits = 1 if interval.middle >= 10 else 2
            theirs[server] = (_with_interval(mean_interval(values[server])), _with_interval(interval, "×", digits))
            met = met and interval.middle >= ratio_targets.get(server, 0)
    targets += [f"≥ {ratio:g}× {server}" for server, ratio in ratio_targets.items() if server in theirs]
    ours = _with_interval(mean_interval(values[OURS]))
    return Row(name, ours, theirs, ", ".join(targets), met if targets else None)


def _with_interval(found: Interval, unit: str = "", digits: int = 0) -> str:
    if found.high == float("inf"):
        return f"{found.middle:,.{digits}f}{unit}"
    return rf"{found.middle:,.{digits}f}{unit} \[{max(0.0, found.low):,.{digits}f}, {found.high:,.{digits}f}]"


def _ms(value: float) -> str:
    return f"{value:.2f} ms" if value < 10 else f"{value:,.0f} ms"


def notes(results: Results) -> Iterator[str]:
    plan = results.plan
    yield report.machine()
    yield "load: bench/prepared_load.py in a process of its own (raw sockets on uvloop); its CPU is not counted"
    yield (
        f"ours: the fake engine behind SmolLM2's tokenizer and template, {OUTPUT_TOKENS} tokens out, no two prompts "
        f"alike; {plan.connections} connections; mean of {plan.rounds} interleaved round(s) of {plan.seconds:.0f} s "
        "with its 95 % interval"
    )
    yield "per CPU-second: all other cores are busy at the lowest priority, so that both CPU times are worth the same"
    if LITELLM in results.requests:
        yield (
            f"LiteLLM {LITELLM_VERSION}, one worker: in the first table it responds from its own mock_response, in "
            f"the second it forwards to the same server, as smg {SMG_VERSION} does"
        )
    yield (
        f"concurrent streams: {plan.rate:.0f} tokens/s each, the next starts when one ends, for "
        f"{plan.stream_seconds:.0f} s, {plan.stream_rounds} round(s); TTFT is the first text, not the first event"
    )
    yield (
        f"added TTFT: {plan.ttft_requests} streams on one keep-alive connection, alternating with a minimal socket "
        f"server whose p50 ({results.added_ttft.baseline_p50:.2f} ms) is subtracted from both percentiles"
    )
    yield (
        "as a proxy: the upstream sends 16 prepared events in one write and costs nothing; its own p50 "
        f"({results.proxied_ttft.baseline_p50:.2f} ms, called directly) is subtracted from the TTFT"
    )
    samples = [*results.requests[OURS], *results.events[OURS], *results.streams]
    samples += [*results.proxied[OURS], *results.proxied_streams]
    if failed := next((sample.first_error for sample in samples if sample.errors), ""):
        yield f"[red]an error: {failed}[/red]"
    if (busy := max(sample.other_cores for sample in samples)) > 0.15:
        yield f"[yellow]other programs used up to {busy:.1f} cores: latencies and rates are worse for it[/yellow]"


def show(results: Results, out: Console) -> None:
    tables = (
        ("The gateway, both responding by themselves", "mock", (LITELLM,), rows(results)),
        ("The gateway as a proxy, all in front of the same server", "proxy", (LITELLM, SMG), proxy_rows(results)),
    )
    for title, role, others, found in tables:
        table = Table(title=title, title_justify="left", expand=False)
        table.add_column("")
        for name in (OURS, *(head for other in others for head in (f"{other} ({role})", "ratio")), "target"):
            table.add_column(name, justify="right")
        for row in found:
            theirs = [text for other in others for text in row.theirs.get(other, ("", ""))]
            table.add_row(row.name, row.ours, *theirs, row.target + report.mark(row.met))
        out.print(table)
    report.show_notes(list(notes(results)), out)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the gateway beside LiteLLM and smg.")
    parser.add_argument("--quick", action="store_true", help="half a minute, once each, without the others")
    parser.add_argument("--skip-others", action="store_true", help="the whole run, without LiteLLM and smg")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save every measurement in this file")
    options = parser.parse_args()
    out, plan = report.console(160), QUICK if options.quick else Plan()
    with_others = not (options.quick or options.skip_others)
    tokenizer_folder()
    if with_others:
        install_litellm()
        install_smg()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=out, transient=True) as progress:
        task = progress.add_task("", total=plan.ticks(1 + with_others))
        results = run(plan, with_others, lambda what: progress.update(task, description=what, advance=1))
    show(results, out)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2))


if __name__ == "__main__":
    main()
