"""What the engines must know about the architectures of llama.cpp and no file says.

llama.cpp ends its process for some requests that an architecture cannot serve, so they are refused before. The facts
are those of the pinned releases. `tests/engines/llama_cpp/test_architectures.py` runs each architecture of `TESTED`
with a tiny model: its greedy tokens are the same with reused, edited, copied and restored KV. A model of any other
architecture gets its own process (`placement = "auto"`), where an assertion ends no other model.
"""

from __future__ import annotations

ENCODERS = frozenset(
    {"bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "llama-embed", "modern-bert", "neo-bert"}
    | {"nomic-bert", "nomic-bert-moe", "t5encoder"}
)
DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})
NO_EMBEDDINGS = frozenset({"deepseek4", "qwen4exp"})  # llama.cpp ends the process: their graphs have none

_DRAFT_HEAD = "is the draft head of another model: it cannot run alone. Use the model that it belongs to"
_SPEECH = "generates or codes sound, which no engine here does"
_REFUSED = {
    "t5": "is an encoder-decoder, which this engine does not run. Use a decoder-only model, or its encoder (t5encoder) "
    "for embeddings",
    "dflash": _DRAFT_HEAD,
    "eagle3": _DRAFT_HEAD,
    "gemma4-assistant": _DRAFT_HEAD,
    "clip": "is the image encoder of another model (mmproj): set it as llama_server_mmproj_path of that model",
    "gptj": "has no implementation in llama.cpp",
    "pockettts": _SPEECH,
    "qwen3tts": _SPEECH,
    "wavtokenizer-dec": _SPEECH,
}

TESTED = frozenset[str]()


def refusal(architecture: str) -> str | None:
    """Why llama.cpp cannot run a model of this architecture in process, as the end of a sentence."""
    return _REFUSED.get(architecture)


def is_tested(architecture: str) -> bool:
    """Whether a model may share a process with others. What is refused never runs."""
    return architecture in TESTED or architecture in _REFUSED
