"""The self-test of the llama.cpp library, to be run in a process of its own: a bad build dies here, not in the server.

    python -m modelyard.engines.llama_cpp.selftest [--model FILE]

It loads the library, compares structs with those of the release that this code is written for, and decodes: a tiny
random model with the machine's fastest kernels and with the plain ones, which must agree, and the given model. Each
stage is said before it begins, so that the parent (`verdict.py`) knows how far a process came that died.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from modelyard.engines.llama_cpp import tiny
from modelyard.engines.llama_cpp.release import CONTEXT_DEFAULTS, MODEL_DEFAULTS, RELEASE, SIZES

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
        differing("llama_context_params", lib.llama_context_default_params(), CONTEXT_DEFAULTS)
        or differing("llama_model_params", lib.llama_model_default_params(), MODEL_DEFAULTS)
        or _batch_layout(lib)
    )


def differing(name: str, found: Any, defaults: dict[str, Any]) -> str | None:
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
        tiny.write(path)
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
