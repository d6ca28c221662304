"""What the engines must know about the architectures of llama.cpp and no file says.

llama.cpp ends its process for some requests that an architecture cannot serve, so they are refused before. The facts
are those of the pinned releases. `tests/engines/llama_cpp/test_architectures.py` runs each architecture of `TESTED`
with a tiny model: its greedy tokens are the same with reused, edited, copied and restored KV. A model of any other
architecture gets its own process (`placement = "auto"`), where an assertion ends no other model.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

# `python -m bench.company --write` makes it: which architectures give the same tokens when several sequences share a
# batch, and what was wrong with the others.
COMPANY_FILE = Path(__file__).with_name("company.json")

ENCODERS = frozenset(
    {"bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed", "modern-bert", "neo-bert"}
    | {"nomic-bert", "nomic-bert-moe", "t5encoder"}
)
DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})
NO_EMBEDDINGS = frozenset({"deepseek4", "qwen4exp"})  # llama.cpp ends the process: their graphs have none

_DRAFT_HEAD = "is the draft head of another model: it cannot run alone. Use the model that it belongs to"
_ENDS = "is half-implemented in llama.cpp, which ends the process for an ordinary prompt. Use another model"
_SPEECH = "generates or codes sound, which no engine here does"
_REFUSED = {
    "t5": "is an encoder-decoder, which this engine does not run. Use a decoder-only model, or its encoder (t5encoder) "
    "for embeddings",
    "cogvlm": "is computed wrongly by llama.cpp: of several tokens it returns the logits of the first, not the last. "
    "Use another model",
    "chameleon": _ENDS,
    "plm": _ENDS,
    "dflash": _DRAFT_HEAD,
    "eagle3": _DRAFT_HEAD,
    "gemma4-assistant": _DRAFT_HEAD,
    "clip": "is the image encoder of another model (mmproj): set it as llama_server_mmproj_path of that model",
    "gptj": "has no implementation in llama.cpp",
    "pockettts": _SPEECH,
    "qwen3tts": _SPEECH,
    "wavtokenizer-dec": _SPEECH,
}

TESTED = frozenset(  # 137 of them
    [
        "afmoe",
        "apertus",
        "arcee",
        "arctic",
        "baichuan",
        "bailingmoe",
        "bailingmoe2",
        "bailingmoe3",
        "bert",
        "bitnet",
        "bloom",
        "chatglm",
        "codeshell",
        "cohere2",
        "cohere2moe",
        "command-r",
        "dbrx",
        "deci",
        "deepseek",
        "deepseek2",
        "deepseek2-ocr",
        "deepseek32",
        "deepseek4",
        "dots1",
        "dots3note",
        "dream",
        "ernie4_5",
        "ernie4_5-moe",
        "eurobert",
        "exaone",
        "exaone-moe",
        "exaone4",
        "falcon",
        "falcon-h1",
        "gemma",
        "gemma-embedding",
        "gemma2",
        "gemma3",
        "gemma3n",
        "gemma4",
        "glm-dsa",
        "glm4",
        "glm4moe",
        "gpt-oss",
        "gpt2",
        "gptneox",
        "granite",
        "granite_swa",
        "granitehybrid",
        "granitemoe",
        "graniteswitch",
        "grok",
        "grovemoe",
        "hrm_text",
        "hunyuan-dense",
        "hunyuan-moe",
        "hunyuan_vl",
        "hy_v3",
        "hy_v4",
        "internlm2",
        "jais",
        "jais2",
        "jamba",
        "jina-bert-v2",
        "jina-bert-v3",
        "kimi-k3",
        "kimi-linear",
        "laguna",
        "lfm2",
        "lfm2moe",
        "llada",
        "llada-moe",
        "llama",
        "llama-embed",
        "llama4",
        "maincoder",
        "mamba",
        "mamba2",
        "maple",
        "mellum",
        "mimo2",
        "minicpm",
        "minicpm3",
        "minimax-01",
        "minimax-m2",
        "minimax-m3",
        "mistral3",
        "mistral4",
        "modern-bert",
        "mpt",
        "muse-glimmer",
        "nanbeige",
        "nemotron",
        "nemotron_h",
        "nemotron_h_moe",
        "neo-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "olmo",
        "olmo2",
        "olmoe",
        "openelm",
        "orion",
        "paddleocr",
        "pangu-embedded",
        "phi2",
        "phi3",
        "phimoe",
        "plamo",
        "plamo3",
        "qwen",
        "qwen2",
        "qwen2moe",
        "qwen2vl",
        "qwen3",
        "qwen35",
        "qwen35moe",
        "qwen3moe",
        "qwen3next",
        "qwen3vl",
        "qwen3vlmoe",
        "qwen4exp",
        "refact",
        "rnd1",
        "rwkv6qwen2",
        "rwkv7",
        "seed_oss",
        "smallthinker",
        "smollm3",
        "spark2_5",
        "stablelm",
        "starcoder",
        "starcoder2",
        "step35",
        "t5encoder",
        "talkie",
        "xverse",
    ]
)


def refusal(architecture: str) -> str | None:
    """Why llama.cpp cannot run a model of this architecture in process, as the end of a sentence."""
    return _REFUSED.get(architecture)


def is_tested(architecture: str) -> bool:
    """Whether a model may share a process with others. What is refused never runs."""
    return architecture in TESTED or architecture in _REFUSED


def may_share_batch(architecture: str) -> bool:
    """Whether llama.cpp computes several sequences in one batch as it computes each alone. Untested ones may not."""
    return architecture in company()["together"]


@cache
def company() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(COMPANY_FILE.read_text())
    return table
