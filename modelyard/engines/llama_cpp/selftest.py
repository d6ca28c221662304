"""The self-test of the llama.cpp library, to be run in a process of its own: a bad build dies here, not in the server.

    python -m modelyard.engines.llama_cpp.selftest [--model FILE]

It loads the library, compares structs with those of the release that this code is written for, and decodes: a tiny
random model with the machine's fastest kernels and with the plain ones, which must agree, and the given model. Each
stage is said before it begins, so that the parent (`verdict.py`) knows how far a process came that died.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import math
import os
import platform
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct

from modelyard.core.errors import Unavailable
from modelyard.engines.llama_cpp.library import CONTEXT_DEFAULTS, MODEL_DEFAULTS, RELEASE, SIZES, library_folder
from modelyard.library.cache_dir import cache_dir

# A tiny random model as a GGUF file, so that the self-test can compute without anybody's weights.
#
# Each layer has another type of weights, because each type has kernels of its own: those for AMX, for AVX-512 and the
# plain ones. The model knows no words: token ids go in, logits come out.

WIDTH = VOCAB = 256
_HEADS, _ALIGN = 4, 32
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


class Quant(Struct, frozen=True):
    """A type of weights: blocks of `weights` in `size` bytes, random but for the numbers that scale a block, which
    stand at the given places and keep the weights near ±0.1."""

    id: int
    weights: int
    size: int
    scales: tuple[tuple[int, float], ...]


QUANTS = {
    "q4_0": Quant(2, 32, 18, ((0, 0.013),)),
    "q4_1": Quant(3, 32, 20, ((0, 0.013), (2, -0.0975))),
    "q8_0": Quant(8, 32, 34, ((0, 0.0008),)),
    "q4_k": Quant(12, 256, 144, ((0, 0.0002), (2, 0.0015))),
    "q5_k": Quant(13, 256, 176, ((0, 0.0001), (2, 0.0015))),
    "q6_k": Quant(14, 256, 210, ((208, 0.0001),)),
}
_F32, _F16 = 0, 1


class Tensor(Struct, frozen=True):
    name: str
    type: int
    shape: tuple[int, ...]
    data: bytes


def write_tiny_model(path: Path) -> None:
    """Always the same bytes."""
    tensors = list(_tensors(Random(7)))  # noqa: S311 nothing secret
    facts = list(_facts())
    sizes = [_padded(len(tensor.data)) for tensor in tensors]
    offsets = [0, *accumulate(sizes)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts)) + b"".join(facts)
    head += b"".join(_entry(tensor, offset) for tensor, offset in zip(tensors, offsets, strict=False))
    body = b"".join(tensor.data.ljust(size, b"\0") for tensor, size in zip(tensors, sizes, strict=True))
    path.write_bytes(head.ljust(_padded(len(head)), b"\0") + body)


def _tensors(random: Random) -> Iterator[Tensor]:
    yield Tensor("token_embd.weight", _F16, (WIDTH, VOCAB), _halves(random))
    yield _norm("output_norm")
    yield Tensor("output.weight", _F16, (WIDTH, VOCAB), _halves(random))
    for layer, quant in enumerate(QUANTS.values()):
        yield _norm(f"blk.{layer}.attn_norm")
        yield _norm(f"blk.{layer}.ffn_norm")
        for name in _MATRICES:
            yield Tensor(f"blk.{layer}.{name}.weight", quant.id, (WIDTH, WIDTH), _blocks(quant, random))


def _norm(name: str) -> Tensor:
    return Tensor(f"{name}.weight", _F32, (WIDTH,), struct.pack(f"<{WIDTH}f", *[1.0] * WIDTH))


def _halves(random: Random) -> bytes:
    return struct.pack(f"<{WIDTH * VOCAB}e", *(random.uniform(-0.1, 0.1) for _ in range(WIDTH * VOCAB)))


def _blocks(quant: Quant, random: Random) -> bytes:
    count = WIDTH * WIDTH // quant.weights
    data = bytearray(random.randbytes(count * quant.size))
    for block in range(0, len(data), quant.size):
        for place, value in quant.scales:
            struct.pack_into("<e", data, block + place, value)
    return bytes(data)


def _facts() -> Iterator[bytes]:
    for key, text in (("general.architecture", "llama"), ("tokenizer.ggml.model", "no_vocab")):
        yield _string(key) + struct.pack("<I", 8) + _string(text)
    numbers = {
        "context_length": 256,
        "embedding_length": WIDTH,
        "block_count": len(QUANTS),
        "feed_forward_length": WIDTH,
        "attention.head_count": _HEADS,
        "rope.dimension_count": WIDTH // _HEADS,
        "vocab_size": VOCAB,
    }
    for key, number in numbers.items():
        yield _string(f"llama.{key}") + struct.pack("<II", 4, number)
    yield _string("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5)


def _entry(tensor: Tensor, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
    return _string(tensor.name) + shape + struct.pack("<IQ", tensor.type, offset)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


_ALIKE = 0.95  # cosine between the logits of two kernels: rounding leaves 0.999, a wrong result is near 0
_PROMPT = [(7 * n) % 250 + 1 for n in range(40)]  # long enough for the kernels of whole matrices
_STEPS = 3

Stage = tuple[str, Callable[[], str | None]]


def stages(model: Path | None, alone: bool) -> Iterator[Stage]:
    """What is done, and the work: it returns what is wrong, or nothing."""
    yield "loading the library", lambda: _load(alone)
    yield "comparing its structs", _layout
    yield "decoding a tiny model", _decode_tiny
    if model is not None:
        yield f"decoding {model.name}", lambda: _decode_model(model)


def main(arguments: list[str] | None = None, *, alone: bool = False) -> int:
    """`alone` in its process it may take llama.cpp's log, of which there is one."""
    parser = argparse.ArgumentParser(description="Test the llama.cpp library on this machine.")
    parser.add_argument("--model", type=Path, help="a GGUF file to decode a few tokens with")
    for name, work in stages(parser.parse_args(arguments).model, alone):
        print(f"stage {name}", flush=True)
        fault = work()
        if fault is not None:
            print(f"fault {fault}", flush=True)
            return 1
    print("passed", flush=True)
    return 0


def _library() -> Any:
    from llama_cpp import llama_cpp

    return llama_cpp


def _load(alone: bool) -> str | None:
    import llama_cpp

    if llama_cpp.__version__ != RELEASE:
        return f"llama-cpp-python is {llama_cpp.__version__}, and this program is written for {RELEASE}"
    lib = _library()
    if alone:
        _held.append(lib.llama_log_callback(_print_errors))
        lib.llama_log_set(_held[0], None)
    lib.llama_backend_init()
    return None


_held: list[Any] = []  # C keeps its address: it must live as long as the process


def _print_errors(level: int, text: bytes | None, _: Any) -> None:
    if level == 4 and text:  # GGML_LOG_LEVEL_ERROR
        sys.stderr.write(text.decode("utf-8", "replace"))


def _layout() -> str | None:
    lib = _library()
    for name, size in SIZES.items():
        if (found := ctypes.sizeof(getattr(lib, name))) != size:
            return f"{name} has {found} bytes where release {RELEASE} has {size}"
    return (
        first_difference("llama_context_params", lib.llama_context_default_params(), CONTEXT_DEFAULTS)
        or first_difference("llama_model_params", lib.llama_model_default_params(), MODEL_DEFAULTS)
        or _batch_layout(lib)
    )


def first_difference(name: str, found: Any, defaults: dict[str, Any]) -> str | None:
    for field, value in defaults.items():
        if (other := getattr(found, field)) != value:
            return f"{name}.{field} is {other} where release {RELEASE} has {value}"
    return None


def _batch_layout(lib: Any) -> str | None:
    batch = lib.llama_batch_init(4, 0, 1)
    filled = [bool(getattr(batch, name)) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")]
    count = batch.n_tokens
    if count != 0 or filled != [True, False, True, True, True, True]:
        return "llama_batch has another layout than that of the release"
    lib.llama_batch_free(batch)
    return None


def _decode_tiny() -> str | None:
    with tempfile.TemporaryDirectory(prefix="modelyard-selftest-") as folder:
        path = Path(folder) / "tiny.gguf"
        write_tiny_model(path)
        fast, plain = _decode(path, fast=True), _decode(path, fast=False)
    if fast is None or plain is None:
        return "a tiny model cannot be loaded or decoded"
    alike = cosine(fast, plain)
    return None if alike >= _ALIKE else f"the fast kernels compute something else than the plain ones ({alike:.3f})"


def _decode_model(path: Path) -> str | None:
    logits = _decode(path, fast=True)
    if logits is None:
        return f"{path} cannot be loaded or decoded"
    return None if all(map(math.isfinite, logits)) else f"{path} gives logits that are no numbers"


def _decode(path: Path, *, fast: bool) -> list[float] | None:
    """The logits after a prompt and a few single tokens; None where a call fails."""
    lib = _library()
    params = lib.llama_model_default_params()
    params.use_extra_bufts = fast
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        return None
    context = lib.llama_init_from_model(model, _context_params(lib))
    logits = _run(lib, model, context) if context else None
    if context:
        lib.llama_free(context)
    lib.llama_model_free(model)
    return logits


def _context_params(lib: Any) -> Any:
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 64
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = 0
    return params


def _run(lib: Any, model: Any, context: Any) -> list[float] | None:
    for ids in [_PROMPT, *([token] for token in _PROMPT[:_STEPS])]:
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        if lib.llama_decode(context, lib.llama_batch_get_one(tokens, len(ids))) != 0:
            return None
    size: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    return list(lib.llama_get_logits_ith(context, -1)[:size])


def cosine(a: list[float], b: list[float]) -> float:
    """1 for the same direction; 0 where a number is none."""
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    norms = math.hypot(*a) * math.hypot(*b)
    return dot / norms if math.isfinite(dot) and norms else 0.0


if __name__ == "__main__":
    sys.exit(main(alone=True))


# Whether the llama.cpp library works on this machine: asked of a child process once, and remembered.
#
# A library that was built for another CPU, or by a faulty compiler, kills its process at the first decode. The child
# (`selftest.py`) dies in the server's place, and what happened becomes one sentence that says what to do. A pass is kept
# in the user's cache folder under the library's files and the CPU; a failure is not, since it may have been the machine's
# bad hour, and finding it again costs little.

SELFTEST_COMMAND = (sys.executable, "-m", "modelyard.engines.llama_cpp.selftest")
_TIMEOUT_S = 120.0  # it takes one second; a GPU's first use takes longer
_REBUILD = "`make rebuild-engine` builds it anew for this machine"
_PORTABLE = "with CMAKE_ARGS=-DGGML_NATIVE=OFF it is built for any CPU of this kind"


class ChildResult(Struct, frozen=True):
    """How the child ended: `code` as subprocess has it (minus the signal), None where it had to be stopped."""

    code: int | None
    output: str = ""
    errors: str = ""


class BrokenLibrary(Unavailable):
    """The library does not work on this machine."""

    default_code = "engine_broken"


def require_working_library(
    env: Mapping[str, str] = os.environ, examine: Callable[[], str | None] | None = None
) -> None:
    """Raise where the library is missing or broken; the child is started only where no pass is remembered."""
    mark = cache_dir(env) / "selftest" / fingerprint(library_folder(env))
    if mark.exists():
        return
    fault = (examine or run_selftest)()
    if fault is not None:
        raise BrokenLibrary(fault)
    _remember(mark)


def run_selftest(child: Sequence[str] = SELFTEST_COMMAND, timeout: float = _TIMEOUT_S) -> str | None:
    """What is wrong, in one sentence, or None."""
    try:
        done = subprocess.run(child, capture_output=True, text=True, errors="replace", timeout=timeout, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        return explain_failure(ChildResult(None, _text(error.stdout)), timeout)
    return explain_failure(ChildResult(done.returncode, done.stdout, done.stderr), timeout)


def explain_failure(ending: ChildResult, timeout: float) -> str | None:
    if ending.code == 0:
        return None
    fault, stage = _last(ending.output, "fault "), _last(ending.output, "stage ") or "starting"
    if fault is not None:
        return f"the llama.cpp library does not fit this program: {fault}; {_REBUILD}."
    if ending.code is None:
        return f"the llama.cpp library hung for {timeout:.0f} s while {stage}; {_REBUILD}."
    if ending.code < 0:
        return f"the llama.cpp library died while {stage}: {_of_signal(-ending.code)}; {_REBUILD}, and {_PORTABLE}."
    words = (ending.errors.strip().splitlines() or [f"exit code {ending.code}"])[-1]
    return f"the llama.cpp library failed while {stage}: {words}; {_REBUILD}."


def _of_signal(number: int) -> str:
    known = {
        "SIGILL": "SIGILL, an instruction that this CPU does not have or that the compiler got wrong",
        "SIGKILL": "SIGKILL, which is how the system ends a process when memory runs out",
    }
    names = {int(one): one.name for one in signal.Signals}
    name = names.get(number, f"signal {number}")
    return known.get(name, name)


def _last(output: str, prefix: str) -> str | None:
    found = [line.removeprefix(prefix) for line in output.splitlines() if line.startswith(prefix)]
    return found[-1] if found else None


def _text(raw: bytes | str | None) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else raw or ""


# --- remembering ------------------------------------------------------------------------------------------------------


def fingerprint(folder: Path) -> str:
    """Other library files, another CPU or a program for another release: another name."""
    files = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.glob("*") if p.is_file())
    told = json.dumps([RELEASE, str(folder), files, cpu_description()])
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def cpu_description(info: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name and its instruction sets."""
    try:
        lines = info.read_text("utf-8", "replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _remember(mark: Path) -> None:
    """A folder that cannot be written costs a second at each start, nothing more."""
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError:
        return
