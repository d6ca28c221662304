"""Drafts of a model's own MTP layer: our engine with and without them, beside llama-server with the same settings.

    python -m bench.mtp [FILE] [--rounds N] [--threads N] [--tokens N] [--server PATH|none] [--json FILE]

`bench/mtp_train.py` makes the file. Without one, the model is of 48 million weights whose layers are computed and add
nothing, and whose MTP layer is always right: the most that drafts can bring on this machine. Each round asks each
server for greedy continuations of a few lines of Python, with one stream and with eight; the servers alternate within a
round. Tokens per second, and per CPU-second of the server, which depends less on other work on the machine. Our texts
must be the same with and without drafts. Layers go to a GPU if the library has one; PATH is then a llama-server of the
same build. Without a llama-server, ours runs alone.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from msgspec import Struct
from rich.progress import Progress

from bench.prompts import NO_END
from bench.report import Comparison, console, save_json, show
from bench.servers import Server, llama_cpp_config, llama_server, modelyard_server
from modelyard.core.errors import ModelyardError
from modelyard.library.cache_dir import cache_dir
from setup.llama_server import fetch_binary

SLOTS, WINDOW = 8, 1024
PROMPTS = (
    'def read(self, size=-1):\n        """Read at most ',
    "    def __init__(self, name, value=None):\n        self.name = ",
    "import os\nimport sys\nfrom collections import ",
    "class BaseServer:\n\n    def close(self):\n        ",
    "    if not isinstance(other, ",
    "        try:\n            result = self._",
    "# Return the number of ",
    "        for key, value in self.items():\n            ",
)
OURS, OURS_MTP, THEIRS, THEIRS_MTP = "ours", "ours with MTP", "llama-server", "llama-server with MTP"


def right_model() -> Path:
    """12 layers of 512 numbers. The tiny files of the tests have the same weights in other sizes."""
    from tests.engines.llama_cpp import architectures, mtp_models

    path = cache_dir() / "bench" / "mtp-right.gguf"
    if path.is_file():
        return path
    width, heads, layers = 512, 8, 12
    sizes: dict[str, Any] = {"embedding_length": width, "feed_forward_length": 3 * width, "context_length": 4096}
    sizes |= {"block_count": layers + 1, "full_attention_interval": 4, "rope.dimension_sections": [11, 11, 10, 0]}
    sizes |= {f"attention.{name}_length": width // heads for name in ("key", "value")}
    sizes |= {"attention.head_count": heads, "attention.head_count_kv": heads, "ssm.inner_size": width}
    sizes |= {"ssm.state_size": width // heads, "ssm.time_step_rank": heads, "ssm.group_count": heads}
    mtp_models.WIDTH = width
    architectures._OPTIONAL["qwen35"] = {
        f"blk.{layer}.attn_{name}.weight": (rows, architectures.WIDTH)
        for layer in range(layers)
        if (layer + 1) % 4
        for name, rows in (("qkv", 3 * width), ("gate", width))
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {f"qwen35.{key}": value for key, value in sizes.items()}
    architectures.write_model(mtp_models.NAME, path, facts, mtp_models._values("hidden", True))
    return path


class Run(Struct):
    """Of one server: tokens per second and per CPU-second, the texts, and how many tokens were drafted and accepted."""

    wall: float
    cpu: float
    texts: list[str]
    drafted: int
    accepted: int


async def _generate(server: Server, streams: int, tokens: int, at: int) -> Run:
    body: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "model": "real"}
    body["logit_bias"] = {str(token): bias for token, bias in NO_END.items()}
    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        prompts = [f"# {at}\n{PROMPTS[n % len(PROMPTS)]}" for n in range(streams)]
        before = await _drafts(client)
        cpu, began = server.cpu_s(), time.perf_counter()
        replies = await asyncio.gather(
            *(client.post("/v1/completions", json={**body, "prompt": prompt}) for prompt in prompts)
        )
        seconds, cpu = time.perf_counter() - began, server.cpu_s() - cpu
        ours = [now - then for now, then in zip(await _drafts(client), before, strict=True)]
    for reply in replies:
        reply.raise_for_status()
    found = [reply.json() for reply in replies]
    count = sum(one["usage"]["completion_tokens"] for one in found)
    theirs = [sum(one.get("timings", {}).get(name, 0) for one in found) for name in ("draft_n", "draft_n_accepted")]
    drafted, accepted = (a or b for a, b in zip(ours, theirs, strict=True))
    return Run(count / seconds, count / cpu, [one["choices"][0]["text"] for one in found], drafted, accepted)


async def _drafts(client: httpx.AsyncClient) -> tuple[int, int]:
    """Of ours; llama-server tells them with each reply."""
    reply = await client.get("/v1/admin/caches")
    rows = reply.json()["data"] if reply.is_success else []
    return sum(row.get("guessed_tokens", 0) for row in rows), sum(row.get("accepted_tokens", 0) for row in rows)


def _config(file: Path, threads: int, **options: Any) -> dict[str, Any]:
    config = llama_cpp_config(file, threads, {"main": (WINDOW, SLOTS)})
    config["models"]["real"] |= options
    return config


def _llama_server(choice: str | None) -> Path | None:
    if choice is not None:
        return None if choice == "none" else Path(choice)
    try:
        return fetch_binary()
    except ModelyardError as error:
        print(f"no llama-server: {error}")
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure drafts of a model's own MTP layer.")
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--draft", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--server", help="llama-server; by default Debian's, `none` for none")
    given = parser.parse_args()
    given.file = given.file or right_model()
    binary = _llama_server(given.server)
    rates: dict[tuple[str, int, str], list[float]] = {}
    drafts: dict[tuple[str, int], list[int]] = {}
    differing = 0
    with ExitStack() as stack, Progress(transient=True) as bar:
        mtp = ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(given.draft))
        servers = {
            OURS: stack.enter_context(modelyard_server(_config(given.file, given.threads))),
            OURS_MTP: stack.enter_context(
                modelyard_server(_config(given.file, given.threads, speculation="mtp", draft_n_max=given.draft))
            ),
        }
        if binary is not None:
            for name, options in ((THEIRS, ()), (THEIRS_MTP, mtp)):
                peer = llama_server(given.file, given.threads, WINDOW, SLOTS, *options, binary=binary)
                servers[name] = stack.enter_context(peer)
        task = bar.add_task("rounds", total=(given.rounds + 1) * 2 * len(servers))
        for at in range(given.rounds + 1):  # the first warms up
            for streams in (1, SLOTS):
                texts = {}
                for name, server in servers.items():
                    run = asyncio.run(_generate(server, streams, given.tokens, at))
                    texts[name] = run.texts
                    bar.advance(task)
                    if at:
                        rates.setdefault((name, streams, "tok/s"), []).append(run.wall)
                        rates.setdefault((name, streams, "tok/CPU-s"), []).append(run.cpu)
                        total = drafts.setdefault((name, streams), [0, 0])
                        total[:] = total[0] + run.drafted, total[1] + run.accepted
                differing += sum(a != b for a, b in zip(texts[OURS], texts[OURS_MTP], strict=True))
    notes = [
        f"texts of ours that differ with drafts: {differing} of {(given.rounds + 1) * (1 + SLOTS)}",
        f"{given.threads} threads, {given.tokens} tokens, drafts of {given.draft}, {given.file.name}",
        *(
            f"{name}, {streams} streams: {accepted} of {drafted} drafted tokens accepted ({accepted / drafted:.0%})"
            for (name, streams), (drafted, accepted) in drafts.items()
            if drafted
        ),
        *([] if binary is not None else ["without llama-server"]),
    ]
    comparisons = []
    for unit in ("tok/s", "tok/CPU-s"):
        for streams in (1, SLOTS):
            for left, right, bound in (
                (OURS_MTP, OURS, 1.3 if streams == 1 else 1.0),
                (OURS_MTP, THEIRS_MTP, 1.0),
                (THEIRS_MTP, THEIRS, None),
            ):
                if not {left, right} <= servers.keys():
                    continue
                name = f"{streams} stream{'s' * (streams > 1)}: {left} / {right}"
                values = [rates[side, streams, unit] for side in (left, right)]
                comparisons.append(Comparison(name, unit, tuple(values[0]), tuple(values[1]), bound))
    show("MTP", comparisons, ("left", "right"), notes, console())
    if given.json:
        save_json(comparisons, notes, given.json)


if __name__ == "__main__":
    main()
