"""Takes llama-server's arguments and becomes `modelyard serve` with the same settings: llama.cpp's own tests start it.

LLAMA_TEST_MODELS is a folder: `stories.gguf` stands for the model of most tests, which is on a hub, and `bert`, `rank`,
`infill` and `gemma3` with `mmproj` for the others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from typing import Any

# part of the name on the hub → file
KINDS = {"bert": "bert", "rerank": "rank", "infill": "infill", "gemma3": "gemma3"}


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--port", "--seed", "--ctx-size", "--parallel", "--n-predict", "--batch-size", "--ubatch-size"):
        parser.add_argument(name, type=int)
    parser.add_argument("--temp", type=float)
    for name in ("--host", "--alias", "--api-key", "--slot-save-path", "--chat-template-file", "--cors-origins"):
        parser.add_argument(name)
    for name in ("--reasoning", "--pooling", "--model", "--hf-repo", "--hf-file", "--tags", "--model-url"):
        parser.add_argument(name)
    for name in ("--kv-unified", "--embedding", "--slots", "--jinja", "--no-mmproj"):
        parser.add_argument(name, action="store_true")
    return parser.parse_known_args(arguments)[0]


def configuration(given: argparse.Namespace) -> dict[str, Any]:
    slots = given.parallel or 1
    name, *aliases = (given.alias or "model").split(",")
    wanted = " ".join(filter(None, (given.hf_repo, given.hf_file, given.model_url))).lower()
    kind = next((kind for part, kind in KINDS.items() if part in wanted), "stories")
    path = given.model or os.path.join(os.environ["LLAMA_TEST_MODELS"], f"{kind}.gguf")
    model: dict[str, Any] = {"path": path, "n_threads": 1, "parallel": slots}
    if kind == "gemma3" and not given.no_mmproj:
        model["mmproj"] = os.path.join(os.environ["LLAMA_TEST_MODELS"], "mmproj.gguf")
    model["kv_store"] = tempfile.mkdtemp(dir=given.slot_save_path) if given.slot_save_path else False
    model |= {"n_ctx": (given.ctx_size or 4096) // (1 if given.kv_unified else slots), "aliases": aliases}
    model["decoding"] = {"temperature": given.temp, "seed": given.seed, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    model |= {"n_batch": max(32, given.batch_size or 2048), "n_ubatch": given.ubatch_size or 512}
    if given.n_predict and given.n_predict > 0:
        model["decoding"]["max_tokens"] = given.n_predict
    if given.embedding:
        model["embeddings"] = True
    if kind in ("stories", "gemma3") and not given.chat_template_file:
        model["prompt_format"] = "chatml"  # llama-server's choice for a file without a template
    if given.chat_template_file:
        model["chat_template"] = os.path.abspath(given.chat_template_file)
    if given.reasoning in ("on", "off"):
        model["enable_thinking"] = given.reasoning == "on"
    http: dict[str, Any] = {"host": given.host, "port": given.port, "cors_enabled": True}
    http["cors_origins"] = [each for each in (given.cors_origins or "").split(",") if "://" in each]
    config: dict[str, Any] = {"http": http, "models": {name: model}, "default_model": name, "library": False}
    if given.api_key:
        config["keys"] = [{"name": "tests", "key": given.api_key}]
    return config


if __name__ == "__main__":
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(configuration(read_arguments(sys.argv[1:])), file)
    os.execv(sys.executable, [sys.executable, "-m", "modelyard", "serve", "--config", file.name])
