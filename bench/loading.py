"""From a load request to the first token, for each engine: through the admin API, and with the engine used directly.

    python -m bench.loading [--rounds N] [--json FILE]

Directly means the C library of llama.cpp, CTranslate2's own generator, and llama-server started as a program, each on
the same file with one thread. Rounds are interleaved, after one load each that is not counted: it fills the page cache.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from rich.progress import track

from bench.report import Comparison, console, save_json, show
from bench.servers import OURS, Server, llama_server, modelyard_server
from modelyard.library import default_model
from modelyard_convert import convert

_WINDOW = 2048
_MESSAGES = [{"role": "user", "content": "Say hello."}]
_PROMPT = f"<|im_start|>user\n{_MESSAGES[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
_NOTES = ("one thread, a window of 2,048 tokens, seconds from the request to the first token", "page cache warm")


def configuration(gguf: Path, ct2: Path) -> dict[str, Any]:
    common = {"enabled": False, "n_ctx": _WINDOW}
    return {
        "models": {
            "llama_cpp": {**common, "backend": "llama_cpp", "path": str(gguf), "n_threads": 1},
            "ct2": {**common, "backend": "ct2", "path": str(ct2), "intra_threads": 1},
            "llama_server": {**common, "backend": "llama_server", "path": str(gguf), "llama_server_n_threads": 1},
            "always": {"backend": "fake"},  # makes the server ready
        }
    }


# --- ours -------------------------------------------------------------------------------------------------------------


def through_our_server(server: Server, model: str) -> float:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        began = time.perf_counter()
        client.post(f"/v1/admin/models/{model}/load").raise_for_status()
        _first_token(client, model)
        spent = time.perf_counter() - began
        client.post(f"/v1/admin/models/{model}/unload").raise_for_status()
    return spent


def _first_token(client: httpx.Client, model: str) -> None:
    body = {"model": model, "messages": _MESSAGES, "stream": True, "max_tokens": 8, "temperature": 0}
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        for line in reply.iter_lines():
            if '"content":"' in line.replace(" ", "") and '"content":""' not in line.replace(" ", ""):
                return
    raise SystemExit(f"{model} produced no text")


# --- directly ---------------------------------------------------------------------------------------------------------


_LIBRARY = """
import ctypes, sys, time
from modelyard import libllama
lib = libllama.load()
began = time.perf_counter()
model = lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
params = lib.llama_context_default_params()
params.n_ctx, params.n_threads, params.n_threads_batch = int(sys.argv[2]), 1, 1
context, vocab = lib.llama_init_from_model(model, params), lib.llama_model_get_vocab(model)
text, ids = sys.argv[3].encode(), (ctypes.c_int32 * 256)()
count = lib.llama_tokenize(vocab, text, len(text), ids, 256, False, True)
assert lib.llama_decode(context, lib.llama_batch_get_one(ids, count)) == 0
lib.llama_sampler_sample(lib.llama_sampler_init_greedy(), context, -1)
print(time.perf_counter() - began)
"""


def with_library(gguf: Path) -> float:
    """The C library alone, in a child process; its imports are not counted."""
    command = [sys.executable, "-c", _LIBRARY, str(gguf), str(_WINDOW), _PROMPT]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def with_generator(ct2: Path) -> float:
    import ctranslate2
    from tokenizers import Tokenizer

    began = time.perf_counter()
    tokenizer = Tokenizer.from_file(str(ct2 / "tokenizer.json"))
    generator = ctranslate2.Generator(str(ct2), compute_type="int8", inter_threads=1, intra_threads=1)
    prompt = tokenizer.encode(_PROMPT).tokens
    next(iter(generator.generate_tokens(prompt, max_length=8)))
    spent = time.perf_counter() - began
    generator.unload_model()
    return spent


def with_program(gguf: Path) -> float:
    began = time.perf_counter()
    with (
        llama_server(gguf, 1, _WINDOW, 1) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        _first_token(client, "any")
        return time.perf_counter() - began


def measure(rounds: int, gguf: Path, ct2: Path, warmup: int = 1) -> list[Comparison]:
    engines: dict[str, Callable[[], float]] = {
        "llama_cpp": lambda: with_library(gguf),
        "ct2": lambda: with_generator(ct2),
        "llama_server": lambda: with_program(gguf),
    }
    found = []
    with modelyard_server(configuration(gguf, ct2)) as server:
        for name, direct in engines.items():
            rounds_ = [(through_our_server(server, name), direct()) for _ in track(range(warmup + rounds), name)][
                warmup:
            ]
            ours, theirs = zip(*rounds_, strict=True)
            found.append(Comparison(f"{name}: load to first token", "s", ours, theirs))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="From a load request to the first token, for each engine.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    gguf = default_model.fetch()
    found = measure(options.rounds, gguf, Path(convert("smollm2", "ct2").path))
    show("From a load request to the first token", found, (OURS, "directly"), _NOTES, console())
    if options.json:
        save_json(found, _NOTES, options.json)


if __name__ == "__main__":
    main()
