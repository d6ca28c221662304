"""Whether the llama.cpp library works on this machine. A child process finds out, and the parent remembers a pass.

    python -m modelyard.engines.llama_cpp.selftest [--model FILE] [--gpu]

A library that was built for another CPU, or by a faulty compiler, kills its process at the first decode. So a child
loads it, compares its structs with our declarations, and decodes a tiny random model with the machine's fastest
kernels, those of a GPU if the library finds one, and with the generic ones of the CPU: both must agree. The child
prints each stage before it begins, so the parent knows where it died. A pass is stored in the user's cache folder, by
the library's files, the CPU and the GPU's driver. A failure is not stored: the cause may be temporary, and repeating
the test costs a second.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import json
import math
import os
import platform
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct

from modelyard import libllama
from modelyard.core.errors import Unavailable
from modelyard.engines.llama_cpp.library import gpu_plugins, has_gpu_backend
from modelyard.libllama import CONTEXT_DEFAULTS, CONTEXT_LAYOUTS, MODEL_DEFAULTS
from modelyard.library.cache_dir import cache_dir
from modelyard.library.llama_cpp_package import library_folder
from modelyard.plugins import MissingLibrary

SELFTEST_COMMAND = (sys.executable, "-m", "modelyard.engines.llama_cpp.selftest")
_TIMEOUT_S = 120.0  # the test takes a second
_GPU_TIMEOUT_S = 600.0  # at the first use a driver compiles each kernel: seconds on a GPU, minutes in software
_REBUILD = "`modelyard setup --build` builds one for this machine"
_PORTABLE = "with CMAKE_ARGS=-DGGML_NATIVE=OFF it is built for any CPU of this kind"
_SIGNALS = {
    "SIGILL": "SIGILL, an instruction that this CPU does not have or that the compiler got wrong",
    "SIGKILL": "SIGKILL, which is how the system ends a process when memory runs out",
}


# --- the parent -------------------------------------------------------------------------------------------------------


_GPU_ERROR = re.compile(r"((?:CUDA|Vulkan|Metal) error: .*\S)")


class BrokenLibrary(Unavailable):
    """The library does not work on this machine."""

    default_code = "engine_broken"


def require_working_library(
    env: Mapping[str, str] = os.environ, examine: Callable[[], str | None] | None = None
) -> None:
    """Raises if the library is missing or broken. Starts the child only if no pass is stored."""
    fault = find_fault(library_folder(env), env, examine)
    if fault is not None:
        raise BrokenLibrary(fault)


def find_fault(
    folder: Path, env: Mapping[str, str] = os.environ, examine: Callable[[], str | None] | None = None
) -> str | None:
    """What is wrong with the library in a folder, in one sentence, or None."""
    marker = cache_dir(env) / "selftest" / fingerprint(folder)
    if marker.exists():
        return None
    fault = examine() if examine else run_selftest(folder=folder)
    if fault is None:
        with suppress(OSError):  # without the marker each start takes a second longer
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
    return fault


class SelfTest(Struct, frozen=True):
    """What the child reports: a fault in one sentence, and the GPUs that it decoded on."""

    fault: str | None
    gpus: tuple[str, ...] = ()
    seconds: float = 0.0
    version: str = "?"
    lacking: Mapping[str, str] = {}  # kind of speculation → the functions that the library does not export


def run_selftest(
    child: Sequence[str] = SELFTEST_COMMAND, timeout: float | None = None, folder: Path | None = None
) -> str | None:
    """Runs the child, on the library in `folder` or the one in use. Returns what is wrong, in one sentence, or None."""
    return examine_library(child, timeout, folder).fault


def examine_library(
    child: Sequence[str] = SELFTEST_COMMAND,
    timeout: float | None = None,
    folder: Path | None = None,
    *,
    gpu: bool = False,
) -> SelfTest:
    """With `gpu` a library that finds no GPU fails."""
    env = os.environ | {"GGML_NO_BACKTRACE": "1"} | ({"LLAMA_CPP_LIB_PATH": str(folder)} if folder else {})
    limit = timeout or (_GPU_TIMEOUT_S if gpu or (folder and has_gpu_backend(folder)) else _TIMEOUT_S)
    command, began = [*child, *(["--gpu"] if gpu else [])], time.monotonic()
    code: int | None = None
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, errors="replace", timeout=limit, check=False, env=env
        )
        code, output, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode("utf-8", "replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        errors = ""
    fault, seconds = explain_failure(code, limit, output, errors), time.monotonic() - began
    lacking = dict(line.split(": ", 1) for line in _lines(output, "lacks "))
    return SelfTest(fault, _lines(output, "gpu "), seconds, _last_line(output, "version ") or "?", lacking)


def explain_failure(code: int | None, timeout: float, output: str = "", errors: str = "") -> str | None:
    """`code` is that of subprocess (minus the signal); None: the child was stopped at the time limit."""
    if code == 0:
        return None
    fault, stage = _last_line(output, "fault "), _last_line(output, "stage ") or "starting"
    if fault is not None:
        return f"the llama.cpp library does not fit this program: {fault}; {_REBUILD}."
    if code is None:
        return f"the llama.cpp library hung for {timeout:.0f} s while {stage}; {_REBUILD}."
    if code < 0:
        names = {int(each): each.name for each in signal.Signals}
        name = names.get(-code, f"signal {-code}")
        if (gpu_error := _GPU_ERROR.search(errors)) is not None:
            return f"the llama.cpp library died while {stage}: {gpu_error[1].rstrip('.')}; {_REBUILD}."
        return f"the llama.cpp library died while {stage}: {_SIGNALS.get(name, name)}; {_REBUILD}, and {_PORTABLE}."
    reason = (errors.strip().splitlines() or [f"exit code {code}"])[-1]
    return f"the llama.cpp library failed while {stage}: {reason}; {_REBUILD}."


def _last_line(output: str, prefix: str) -> str | None:
    return found[-1] if (found := _lines(output, prefix)) else None


def _lines(output: str, prefix: str) -> tuple[str, ...]:
    return tuple(line.removeprefix(prefix) for line in output.splitlines() if line.startswith(prefix))


def fingerprint(folder: Path) -> str:
    """Changes with the library's files, the CPU, the driver of an NVIDIA GPU and our declarations."""
    files = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.glob("*") if p.is_file())
    text = json.dumps([struct_sizes(), str(folder), files, cpu_description(), nvidia_driver()])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def nvidia_driver(file: Path = Path("/sys/module/nvidia/version")) -> str:
    try:
        return file.read_text("utf-8").strip()
    except OSError:
        return ""


def cpu_description(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name and its instruction sets."""
    try:
        lines = cpuinfo.read_text("utf-8", "replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    prefixes = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(prefixes)))


# --- the child --------------------------------------------------------------------------------------------------------

_MIN_SIMILARITY = 0.95  # cosine of the logits of two kernels: rounding leaves 0.999, a wrong result is near 0
_PROMPT = [(7 * n) % 250 + 1 for n in range(40)]  # long enough for the matrix kernels
_STEPS = 3
_log_callback: Any = None  # C keeps its address: it must live as long as the process

Stage = tuple[str, Callable[[], str | None]]


def main(arguments: list[str] | None = None, *, owns_process: bool = False) -> int:
    """With `owns_process` the test may take llama.cpp's log callback, of which a process has one."""
    parser = argparse.ArgumentParser(description="Test the llama.cpp library on this machine.")
    parser.add_argument("--model", type=Path, help="a GGUF file to decode a few tokens with")
    parser.add_argument("--gpu", action="store_true", help="fail if the library finds no GPU")
    parsed = parser.parse_args(arguments)
    for name, check in _stages(parsed.model, owns_process, gpu=parsed.gpu):
        print(f"stage {name}", flush=True)
        fault = check()
        if fault is not None:
            print(f"fault {fault}", flush=True)
            return 1
    print("passed", flush=True)
    return 0


def _stages(model: Path | None, owns_process: bool, *, gpu: bool) -> Iterator[Stage]:
    """Name and check of each stage. A check returns what is wrong, or None."""
    yield "loading the library", lambda: _load_library(owns_process)
    yield "comparing its structs", _check_layout
    if gpu or has_gpu_backend(libllama.load().folder):
        yield "looking for GPUs", lambda: _find_gpus(required=gpu)
    place = ", ".join(device.name for device in libllama.load().gpu_devices())
    yield "decoding a tiny model" + (f" on {place}" if place else ""), _decode_tiny_model
    yield "reading a vocabulary", _read_vocabulary
    if model is not None:
        yield f"decoding {model.name}", lambda: _decode_model(model)


def _load_library(owns_process: bool) -> str | None:
    global _log_callback  # noqa: PLW0603
    if owns_process:  # as in an engine's process: numpy brings the C++ runtime that one in the library may clash with
        importlib.import_module("numpy")
    try:
        lib = libllama.load()
    except MissingLibrary as error:
        return error.message
    if owns_process:
        _log_callback = lib.llama_log_callback(_print_errors)
        lib.llama_log_set(_log_callback, None)
    lib.llama_backend_init()
    print(f"version {lib.version}", flush=True)
    for feature in libllama.FEATURES:
        if missing := lib.lacks(feature):
            print(f"lacks {feature}: {', '.join(missing)}", flush=True)
    return None


def _print_errors(level: int, text: bytes | None, _: Any) -> None:
    if level == 4 and text:  # GGML_LOG_LEVEL_ERROR
        sys.stderr.write(text.decode("utf-8", "replace"))


def _find_gpus(*, required: bool) -> str | None:
    devices = libllama.load().gpu_devices()
    for device in devices:
        gib = device.total / 2**30
        print(f"gpu {device.name}: {device.description}, {gib:.1f} GiB", flush=True)
    if devices or not required:
        return None
    return "it finds no GPU" + "".join(f": {reason}" for reason in _plugin_errors(libllama.load().folder))


def _plugin_errors(folder: Path) -> Iterator[str]:
    """Why a GPU plug-in cannot be loaded; llama.cpp does not say."""
    for file in gpu_plugins(folder):
        try:
            ctypes.CDLL(str(file))
        except OSError as error:
            yield str(error)


def _check_layout() -> str | None:
    lib = libllama.load()
    sizes = chosen_sizes(lib)
    return (
        _check_extent(lib, "llama_context_default_params", sizes["llama_context_params"])
        or _check_extent(lib, "llama_model_default_params", sizes["llama_model_params"])
        or first_difference("llama_context_params", lib.llama_context_default_params(), CONTEXT_DEFAULTS)
        or first_difference("llama_model_params", lib.llama_model_default_params(), MODEL_DEFAULTS)
        or _check_batch_layout(lib)
    )


def chosen_sizes(lib: Any) -> dict[str, int]:
    """Bytes of the structs in the layout that was chosen for this library."""
    return {each.__name__: ctypes.sizeof(each) for each in (lib.llama_context_params, lib.llama_model_params)}


def struct_sizes() -> dict[str, int]:
    """Bytes of the structs as we declare them."""
    structs = (
        libllama.llama_model_params,
        libllama.llama_batch,
        libllama.llama_sampler_i,
    )
    contexts = {f"llama_context_params {name}": ctypes.sizeof(each) for name, each in CONTEXT_LAYOUTS.items()}
    return contexts | {each.__name__: ctypes.sizeof(each) for each in structs}


_X86 = ("x86_64", "amd64")
_MAX_STRUCT, _PADDING = 1024, 8


def _check_extent(lib: Any, function: str, size: int) -> str | None:
    """Compares the bytes that the C function writes with our struct.

    On x86-64 a function that returns a big struct takes its address as the first argument. Bytes that keep two
    different fillings were not written; padding at the end may be among them.
    """
    if platform.machine().lower() not in _X86:
        return None  # there the address is elsewhere; the defaults are compared on every machine
    call = ctypes.CDLL(str(lib.path))[function]
    call.restype, call.argtypes = None, [ctypes.c_void_p]
    buffers = [ctypes.create_string_buffer(filling * _MAX_STRUCT, _MAX_STRUCT) for filling in (b"\xaa", b"\x55")]
    for buffer in buffers:
        call(ctypes.addressof(buffer))
    written = [n for n, (a, b) in enumerate(zip(buffers[0].raw, buffers[1].raw, strict=True)) if a == b]
    found = written[-1] + 1
    if size - _PADDING < found <= size:
        return None
    return f"{function} writes {found} bytes where the struct has {size}"


def first_difference(name: str, struct_: Any, defaults: dict[str, Any]) -> str | None:
    for field, value in defaults.items():
        if (found := getattr(struct_, field)) != value:
            return f"{name}.{field} is {found} where the supported releases have {value}"
    return None


def _check_batch_layout(lib: Any) -> str | None:
    batch = lib.llama_batch_init(4, 0, 1)
    allocated = [bool(getattr(batch, name)) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")]
    if batch.n_tokens != 0 or allocated != [True, False, True, True, True, True]:
        return "llama_batch has another layout than that of the supported releases"
    lib.llama_batch_free(batch)
    return None


def _decode_tiny_model() -> str | None:
    with tempfile.TemporaryDirectory(prefix="modelyard-selftest-") as folder:
        path = Path(folder) / "tiny.gguf"
        write_tiny_model(path)
        if (fault := _read_back(path)) is not None:
            return fault
        runs = [_decode(path, fast=True), _decode(path, fast=False)]
        if libllama.load().gpu_devices():
            runs.append(_decode(path, fast=True, flash_attention=True))
    found = [logits for logits in runs if logits is not None]
    if len(found) < len(runs):
        return "a tiny model cannot be loaded or decoded"
    similarity = min(cosine(found[1], fast) for fast in (found[0], *found[2:]))
    if similarity >= _MIN_SIMILARITY:
        return None
    return f"the fast kernels compute something else than the generic ones ({similarity:.3f})"


def _read_vocabulary() -> str | None:
    """Words to tokens and back: code that loading and decoding do not reach, and in which a library dies whose C++
    runtime is linked statically beside that of this process."""
    lib, text = libllama.load(), "Ünïcode, don't 123  \n".encode()
    with tempfile.TemporaryDirectory(prefix="modelyard-selftest-") as folder:
        path = Path(folder) / "words.gguf"
        path.write_bytes(_header(0, list(_words())))
        params = lib.llama_model_default_params()
        params.vocab_only = True
        if not (model := lib.llama_model_load_from_file(str(path).encode(), params)):
            return "a vocabulary cannot be loaded"
    vocab, tokens = lib.llama_model_get_vocab(model), (ctypes.c_int32 * 64)()
    count = lib.llama_tokenize(vocab, text, len(text), tokens, len(tokens), False, False)
    piece, found = ctypes.create_string_buffer(16), b""
    for token in tokens[: max(0, count)]:
        size = lib.llama_token_to_piece(vocab, token, piece, len(piece), 0, False)
        found += piece.raw[: max(0, size)]
    lib.llama_model_free(model)
    return None if found == text else f"its tokenizer makes {found!r} of {text!r}"


# Fields whose places defaults alone do not tell, by the functions that read them back from a context.
_READ_BACK = {"n_ctx": 512, "n_batch": 128, "n_ubatch": 64, "n_seq_max": 2, "n_threads": 3, "n_threads_batch": 5}


def _read_back(path: Path) -> str | None:
    """A context is made with a value of its own in each of these fields, and asked for them."""
    lib = libllama.load()
    model_params, params = lib.llama_model_default_params(), lib.llama_context_default_params()
    model_params.n_gpu_layers = 0
    for field, value in _READ_BACK.items():
        setattr(params, field, value)
    model = lib.llama_model_load_from_file(str(path).encode(), model_params)
    context = lib.llama_init_from_model(model, params) if model else None
    if not context:
        return "a tiny model cannot be loaded"
    wrong = []
    for field, value in _READ_BACK.items():
        found = libllama.declared(lib.raw, f"llama_{field}", (ctypes.c_uint32, [ctypes.c_void_p]))(context)
        wrong += [f"{field} is {found} and not {value}"] if found != value else []
    lib.llama_free(context)
    lib.llama_model_free(model)
    return f"a context has other values than it was given: {', '.join(wrong)}" if wrong else None


def _decode_model(path: Path) -> str | None:
    logits = _decode(path, fast=True)
    if logits is None:
        return f"{path} cannot be loaded or decoded"
    return None if all(map(math.isfinite, logits)) else f"{path} gives logits that are not finite"


def _decode(path: Path, *, fast: bool, flash_attention: bool = False) -> list[float] | None:
    """The logits after a prompt and a few single tokens; None if a call fails. A GPU is used with flash attention, and
    its driver may have to compile those kernels: better here than in the first request."""
    lib = libllama.load()
    model_params = lib.llama_model_default_params()
    model_params.use_extra_bufts = fast
    model_params.n_gpu_layers = -1 if fast else 0
    model = lib.llama_model_load_from_file(str(path).encode(), model_params)
    if not model:
        return None
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 64
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = -1 if flash_attention else 0
    params.offload_kqv = params.op_offload = fast
    context = lib.llama_init_from_model(model, params)
    logits = _decode_prompt(lib, model, context) if context else None
    if logits is not None and not fast and _misreads_graph_samplers(lib, context, len(logits)):
        logits = None
    if context:
        lib.llama_free(context)
    lib.llama_model_free(model)
    return logits


def _decode_prompt(lib: Any, model: Any, context: Any) -> list[float] | None:
    for ids in [_PROMPT, *([token] for token in _PROMPT[:_STEPS])]:
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        if lib.llama_decode(context, lib.llama_batch_get_one(tokens, len(ids))) != 0:
            return None
    size: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    return list(lib.llama_get_logits_ith(context, -1)[:size])


def _misreads_graph_samplers(lib: Any, context: Any, size: int) -> bool:
    """One of the samplers is ours: if its struct had another layout, the process would end here. A library that does
    not sample in its graph is not at fault."""
    from modelyard.engines.llama_cpp.graph_sampler import GraphSampler

    sampler = GraphSampler(context, 1, accepts=False, has_memory=lambda: True)
    sampler.start(1.0)
    if not sampler.is_active:
        return False
    token = (ctypes.c_int32 * 1)(_PROMPT[0])
    decoded = lib.llama_decode(context, lib.llama_batch_get_one(token, 1))
    is_wrong = decoded != 0 or not 0 <= sampler.sample(0, 0) < size
    sampler.detach()
    return is_wrong


def cosine(a: list[float], b: list[float]) -> float:
    """1 for the same direction; 0 if a number is not finite."""
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    norms = math.hypot(*a) * math.hypot(*b)
    return dot / norms if math.isfinite(dot) and norms else 0.0


# --- the tiny model ---------------------------------------------------------------------------------------------------
#
# A random GGUF file without words: token ids in, logits out. Each layer has another type of weights, because each type
# has its own kernels for AMX and AVX-512, and generic ones.

WIDTH = VOCAB = 256
_HEADS, _ALIGN = 4, 32
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_F32, _F16 = 0, 1


class Quant(Struct, frozen=True):
    """A type of weights: blocks of `weights` in `size` bytes. They are random except for the fp16 scales at the given
    offsets, which keep the weights near ±0.1."""

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


_Tensor = tuple[str, int, tuple[int, ...], bytes]  # name, type, shape, data


def write_tiny_model(path: Path) -> None:
    """Always the same bytes."""
    tensors = list(_tensors(Random(7)))  # noqa: S311 nothing secret
    metadata = list(_metadata())
    head, body = _header(len(tensors), metadata), b""
    for name, kind, shape, data in tensors:
        head += _string(f"{name}.weight") + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        head += struct.pack("<IQ", kind, len(body))
        body += _aligned(data)
    path.write_bytes(_aligned(head) + body)


def _header(tensors: int, metadata: Sequence[bytes]) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(metadata)) + b"".join(metadata)


def _words() -> Iterator[bytes]:
    """A vocabulary of bytes, in the letters that GPT-2 writes for them, and one merge."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    for key, text in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "gpt-2"),
    ):
        yield _string(key) + struct.pack("<I", 8) + _string(text)
    for key, texts in (("tokens", [*letters, "de"]), ("merges", ["d e"])):
        yield _string(f"tokenizer.ggml.{key}") + struct.pack("<IIQ", 9, 8, len(texts)) + b"".join(map(_string, texts))


def _tensors(random: Random) -> Iterator[_Tensor]:
    norm = _F32, (WIDTH,), struct.pack(f"<{WIDTH}f", *[1.0] * WIDTH)
    yield "token_embd", _F16, (WIDTH, VOCAB), _fp16(random)
    yield "output_norm", *norm
    yield "output", _F16, (WIDTH, VOCAB), _fp16(random)
    for layer, quant in enumerate(QUANTS.values()):
        yield f"blk.{layer}.attn_norm", *norm
        yield f"blk.{layer}.ffn_norm", *norm
        for name in _MATRICES:
            yield f"blk.{layer}.{name}", quant.id, (WIDTH, WIDTH), _blocks(quant, random)


def _fp16(random: Random) -> bytes:
    return struct.pack(f"<{WIDTH * VOCAB}e", *(random.uniform(-0.1, 0.1) for _ in range(WIDTH * VOCAB)))


def _blocks(quant: Quant, random: Random) -> bytes:
    data = bytearray(random.randbytes(WIDTH * WIDTH // quant.weights * quant.size))
    for block in range(0, len(data), quant.size):
        for offset, value in quant.scales:
            struct.pack_into("<e", data, block + offset, value)
    return bytes(data)


def _metadata() -> Iterator[bytes]:
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


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _aligned(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % _ALIGN)


if __name__ == "__main__":
    sys.exit(main(owns_process=True))
