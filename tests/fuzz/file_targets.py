"""Damaged model files: GGUF headers and CTranslate2 weights, for our own readers and, in a child, for llama.cpp.

Our readers read a file or refuse it with InvalidRequest, soon. A GGUF file that passes the check of `file_check` does
not end a process that opens it.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import modelyard
import modelyard_ct2 as ct2
from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec
from modelyard.core.errors import InvalidRequest
from modelyard.engines import llama_cpp
from modelyard.library.gguf import read_contents, read_summary, without_tensors
from modelyard_ct2.model_folder import WEIGHTS
from tests.fuzz.explore import DEADLINE_S, Finding, Target
from tests.fuzz.values import Json, Values, code_words, damaged, shrunk
from tests.library.files import text

_PACKAGE = Path(modelyard.__file__).parent
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _INT, _FLOAT = 8, 9, 4, 6
_CHILD_S = 120.0
_MACHINE = AvailableMemory(8 << 30)

# What a small Llama has in its header. A value is [kind, value], or [9, kind of the elements, list].
_LLAMA: Json = {
    "version": 3,
    "entries": [
        ["general.architecture", [_STRING, "llama"]],
        ["general.alignment", [_INT, 32]],
        ["general.file_type", [_INT, 1]],
        ["llama.context_length", [_INT, 64]],
        ["llama.embedding_length", [_INT, 32]],
        ["llama.block_count", [_INT, 1]],
        ["llama.feed_forward_length", [_INT, 32]],
        ["llama.attention.head_count", [_INT, 4]],
        ["llama.attention.head_count_kv", [_ARRAY, _INT, [2]]],
        ["llama.attention.layer_norm_rms_epsilon", [_FLOAT, 1e-5]],
        ["llama.rope.dimension_count", [_INT, 8]],
        ["tokenizer.ggml.model", [_STRING, "gpt2"]],
        ["tokenizer.ggml.pre", [_STRING, "gpt-2"]],
        ["tokenizer.ggml.tokens", [_ARRAY, _STRING, ["a", "b", "ab", "<|end|>"]]],
        ["tokenizer.ggml.scores", [_ARRAY, _FLOAT, [0.0, 0.0, 1.0, 0.0]]],
        ["tokenizer.ggml.token_type", [_ARRAY, 5, [1, 1, 1, 3]]],
        ["tokenizer.ggml.merges", [_ARRAY, _STRING, ["a b"]]],
        ["tokenizer.ggml.eos_token_id", [_INT, 3]],
        ["tokenizer.chat_template", [_STRING, "{% for m in messages %}{{ m.content }}{% endfor %}"]],
        ["split.count", [2, 1]],
    ],
    "tensors": [["token_embd.weight", [32, 4], 0, 0], ["blk.0.attn_q.weight", [32, 32], 8, 512]],
}
_WORDS = code_words(_PACKAGE / "library/gguf.py", _PACKAGE / "engines/llama_cpp/estimate.py")
_VALUES = Values([*_WORDS, *(key for key, _ in _LLAMA["entries"])])


class ModelFile(NamedTuple):
    """`header` is written as GGUF, with as many bytes damaged as the noise says."""

    header: Json
    noise: int = 0

    def gguf(self) -> bytes:
        data = gguf_of(self.header)
        return damaged(data, Random(self.noise)) if self.noise else data

    def shrunk(self, still_fails: Callable[[ModelFile], bool]) -> ModelFile:
        return ModelFile(shrunk(self.header, lambda less: still_fails(ModelFile(less, self.noise)), 60), self.noise)


def random_file(rng: Random) -> ModelFile:
    header = _VALUES.mutated(_LLAMA, rng, rng.randrange(4))
    return ModelFile(header, rng.randrange(1, 2**32) if rng.random() < 0.5 else 0)


# --- writing a header that may be wrong -------------------------------------------------------------------------------


def gguf_of(header: Json) -> bytes:
    """Whatever the header says, with numbers cut to the size of their field."""
    fields = header if isinstance(header, dict) else {}
    entries, tensors = (_list(fields.get(name)) for name in ("entries", "tensors"))
    out = [b"GGUF", _number("I", fields.get("version")), struct.pack("<QQ", len(tensors), len(entries))]
    out += [_text(_at(entry, 0)) + _value(_at(entry, 1)) for entry in entries]
    out += [_tensor(tensor) for tensor in tensors]
    return b"".join(out) + b"\0" * 4096


def _tensor(tensor: Json) -> bytes:
    shape = _list(_at(tensor, 1))
    dimensions = _number("I", len(shape)) + b"".join(_number("Q", one) for one in shape)
    return _text(_at(tensor, 0)) + dimensions + _number("I", _at(tensor, 2)) + _number("Q", _at(tensor, 3))


def _value(value: Json) -> bytes:
    kind = _at(value, 0)
    if kind != _ARRAY:
        return _number("I", kind) + _scalar(kind, _at(value, 1))
    elements = _list(_at(value, 2))
    head = _number("I", _ARRAY) + _number("I", _at(value, 1)) + _number("Q", len(elements))
    return head + b"".join(_scalar(_at(value, 1), one) for one in elements)


def _scalar(kind: Json, value: Json) -> bytes:
    if kind == _STRING:
        return _text(value)
    return _number(_SCALARS.get(kind, "I") if isinstance(kind, int) else "I", value)


def _number(layout: str, value: Json) -> bytes:
    size = struct.calcsize("<" + layout)
    if layout in "fd":
        try:
            return struct.pack("<" + layout, float(value) if isinstance(value, int | float) else 0.0)
        except OverflowError:
            return b"\xff" * size
    number = int(value) if isinstance(value, int | float) else 0
    return (number % (1 << 8 * size)).to_bytes(size, "little")


def _text(value: Json) -> bytes:
    return text(value if isinstance(value, str) else str(value)[:100])


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else [value]


def _at(value: Json, index: int) -> Json:
    return value[index] if isinstance(value, list) and index < len(value) else value


# --- our readers ------------------------------------------------------------------------------------------------------


def _reading(name: str, read: Callable[[Any], None]) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        began = time.monotonic()
        try:
            read(value)
            outcome = "read"
        except InvalidRequest:
            outcome = "refused"
        except Exception as error:
            raise Finding("exception", name, repr(error)[:300], value) from error
        if (spent := time.monotonic() - began) > DEADLINE_S:
            raise Finding("hang", name, f"{spent:.0f} s", value)
        return outcome

    return check


@contextmanager
def file_targets() -> Iterator[list[Target[Any]]]:
    with tempfile.TemporaryDirectory(prefix="modelyard-fuzz-") as name:
        gguf, weights = Path(name) / "model.gguf", Path(name) / WEIGHTS
        spec = EngineSpec("m", llama_cpp.Options(path=str(gguf)), {"main": CacheInfo(64, 2)})
        ct2_spec = EngineSpec("m", ct2.Options(path=name), {"main": CacheInfo(64, 2)})

        def read_gguf(file: ModelFile) -> None:
            gguf.write_bytes(file.gguf())
            read_summary(gguf)
            for lists in ("none", "short", "all"):
                read_contents(gguf, lists=lists)  # type: ignore[arg-type]
            without_tensors(gguf)
            llama_cpp.estimate(spec, _MACHINE)

        def read_ct2(data: bytes) -> None:
            weights.write_bytes(data)
            ct2.estimate(ct2_spec, _MACHINE)

        yield [
            Target("GGUF headers", random_file, _reading("GGUF headers", read_gguf), ModelFile.shrunk),
            Target("CTranslate2 weights", lambda rng: damaged(_ct2_bytes(), rng), _reading("CTranslate2", read_ct2)),
        ]


@cache
def _ct2_bytes() -> bytes:
    """A file with two weights."""
    variables = [("decoder/layer_0/self_attention/linear_1/weight", (4, 4), 1), ("decoder/scale", (4,), 0)]
    out = [struct.pack("<IH", 6, 5), b"Spec\0", struct.pack("<II", 1, len(variables))]
    for name, shape, dtype in variables:
        size = 16 if dtype else 4 * shape[0]
        head = struct.pack("<H", len(name) + 1) + name.encode() + b"\0" + struct.pack("<B", len(shape))
        out += [head, struct.pack(f"<{len(shape)}IBI", *shape, dtype, size), b"\1" * size]
    return b"".join(out)


# --- llama.cpp --------------------------------------------------------------------------------------------------------

_CHILD = """
import sys
from pathlib import Path
from modelyard.core.errors import InvalidRequest
from modelyard.engines.llama_cpp.file_check import check_vocabulary
from modelyard.tokenizer.gguf import GgufTokenizer
try:
    check_vocabulary(Path(sys.argv[1]))
    tokenizer = GgufTokenizer(Path(sys.argv[1]))
    tokenizer.decode(tokenizer.encode("abab <|end|>"))
    print("read")
except InvalidRequest:
    print("refused")
"""


def vocabulary_target(folder: Path) -> Target[ModelFile]:
    """Takes seconds for each file: for long runs."""
    file = folder / "vocabulary.gguf"

    def check(made: ModelFile) -> str:
        file.write_bytes(made.gguf())
        try:
            command = [sys.executable, "-c", _CHILD, str(file)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_S, check=False)
        except subprocess.TimeoutExpired:
            raise Finding("hang", "GGUF vocabulary", f"{_CHILD_S:g} s", made) from None
        if done.returncode < 0:
            raise Finding("killed", "GGUF vocabulary", f"signal {-done.returncode}", f"{made}\n{done.stderr[-1000:]}")
        if done.returncode:
            raise Finding("exception", "GGUF vocabulary", done.stderr.strip().splitlines()[-1][:200], made)
        return done.stdout.strip()

    return Target("GGUF vocabulary", random_file, check)
