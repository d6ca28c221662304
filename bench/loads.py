"""From «load it» to the first token, for each engine: through the admin API, and by hand with nothing of ours.

    python -m bench.loads [--rounds N] [--json FILE]

By hand means llama-cpp-python's own class, CTranslate2's own generator, and llama-server started from a shell, each on
the same file and one thread, in a process of its own or in this one. Both in turns, after one load each that is not
counted: the file is in the page cache then.
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
from rich.console import Console
from rich.progress import track

from bench.compared import keep, show
from bench.peers import llama_server, modelyard
from bench.ratios import Comparison
from bench.servers import Server
from modelyard.library import default_model
from modelyard.library.convert import convert

_WINDOW = 2048
_ASK = [{"role": "user", "content": "Say hello."}]
_NOTES = ("one thread, a window of 2,048 tokens, seconds from the order to the first token", "page cache warm")


def configuration(gguf: Path, ct2: Path) -> dict[str, Any]:
    common = {"enabled": False, "n_ctx": _WINDOW}
    return {
        "models": {
            "llama_cpp": {**common, "backend": "llama_cpp", "path": str(gguf), "n_threads": 1},
            "ct2": {**common, "backend": "ct2", "path": str(ct2), "intra_threads": 1},
            "llama_server": {**common, "backend": "llama_server", "path": str(gguf), "llama_server_n_threads": 1},
            "always": {"backend": "fake"},  # the server counts as ready
        }
    }


# --- ours -------------------------------------------------------------------------------------------------------------


def ordered(server: Server, model: str) -> float:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120) as client:
        began = time.perf_counter()
        client.post(f"/v1/admin/models/{model}/load").raise_for_status()
        _first_token(client, model)
        spent = time.perf_counter() - began
        client.post(f"/v1/admin/models/{model}/unload").raise_for_status()
    return spent


def _first_token(client: httpx.Client, model: str) -> None:
    body = {"model": model, "messages": _ASK, "stream": True, "max_tokens": 8, "temperature": 0}
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        for line in reply.iter_lines():
            if '"content":"' in line.replace(" ", "") and '"content":""' not in line.replace(" ", ""):
                return
    raise SystemExit(f"{model} said nothing")


# --- by hand ----------------------------------------------------------------------------------------------------------


_BINDING = """
import sys, time, llama_cpp
began = time.perf_counter()
llama = llama_cpp.Llama(sys.argv[1], n_ctx=int(sys.argv[2]), n_threads=1, n_threads_batch=1, verbose=False)
messages = [{"role": "user", "content": "Say hello."}]
for chunk in llama.create_chat_completion(messages, max_tokens=8, temperature=0, stream=True):
    if chunk["choices"][0]["delta"].get("content"):
        break
print(time.perf_counter() - began)
"""


def by_binding(gguf: Path) -> float:
    """In a child, because that class leaves files open; its imports are not counted."""
    command = [sys.executable, "-c", _BINDING, str(gguf), str(_WINDOW)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def by_generator(ct2: Path) -> float:
    import ctranslate2
    from tokenizers import Tokenizer

    began = time.perf_counter()
    tokenizer = Tokenizer.from_file(str(ct2 / "tokenizer.json"))
    generator = ctranslate2.Generator(str(ct2), compute_type="int8", inter_threads=1, intra_threads=1)
    prompt = tokenizer.encode(f"<|im_start|>user\n{_ASK[0]['content']}<|im_end|>\n<|im_start|>assistant\n").tokens
    next(iter(generator.generate_tokens(prompt, max_length=8)))
    spent = time.perf_counter() - began
    generator.unload_model()
    return spent


def by_shell(gguf: Path) -> float:
    began = time.perf_counter()
    with (
        llama_server(gguf, 1, _WINDOW, 1) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as client,
    ):
        _first_token(client, "any")
        return time.perf_counter() - began


def measure(rounds: int, gguf: Path, ct2: Path) -> list[Comparison]:
    hands: dict[str, Callable[[], float]] = {
        "llama_cpp": lambda: by_binding(gguf),
        "ct2": lambda: by_generator(ct2),
        "llama_server": lambda: by_shell(gguf),
    }
    found = []
    with modelyard(configuration(gguf, ct2)) as server:
        for name, hand in hands.items():
            turns = [(ordered(server, name), hand()) for _ in track(range(rounds + 1), name)][1:]
            ours, theirs = zip(*turns, strict=True)
            found.append(Comparison(f"{name}: load to first token", "s", ours, theirs))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="From «load it» to the first token, for each engine.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    gguf = default_model.fetch()
    found = measure(asked.rounds, gguf, Path(convert("smollm2", "ct2").path))
    show("From «load it» to the first token", found, ("Modelyard", "by hand"), _NOTES, Console())
    if asked.json:
        keep(found, _NOTES, asked.json)


if __name__ == "__main__":
    main()
