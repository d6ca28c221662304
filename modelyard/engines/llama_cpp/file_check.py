"""Whether llama.cpp survives a model file. A child process of the pool finds out, and the parent remembers a pass.

llama.cpp ends its process when it meets some kinds of damage: an assertion, a division by zero, memory without end. So
no file is opened in a server's process before a child has opened it, the vocabulary and the weights separately:
`vocabulary` reads and uses all its tokens; `weights` builds the model from the header without the data, then computes a
few tokens with the data. The child prints each stage before it begins, so the parent knows where it died. A pass is
stored in the user's cache folder by the identity of the files and of the library; a changed file is checked again.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from modelyard import libllama
from modelyard.core.errors import InvalidRequest
from modelyard.engines.llama_cpp.model_shape import HEAD_FILES
from modelyard.engines.llama_cpp.selftest import fingerprint
from modelyard.library.cache_dir import cache_dir
from modelyard.library.llama_cpp_package import library_folder
from modelyard.library.model_files import split_parts
from modelyard.processes.sandbox import Limits, Stopped, pool, sandboxed

Purpose = Literal["vocabulary", "weights"]

_TIMEOUT_S = 60.0  # it takes half a second
_POLL_S = 0.25
_LIMITS = Limits(cpu_s=240, wall_s=_TIMEOUT_S, memory=8 << 30, opens_files=True)
_DATA_STAGE = "computing with the weights"  # takes as long as the disk needs
_DUPLICATE_TOKENS = "id_to_token.size() == token_to_id.size()"  # a failed assertion
_ASSERTION = re.compile(r"[\w.-]+\.\w+:\d+: (.+)")  # file, line and message of a failed assertion


# --- the parent -------------------------------------------------------------------------------------------------------


def check_vocabulary(model: Path) -> None:
    """Raises if llama.cpp cannot read the vocabulary of this GGUF file."""
    if (fault := find_fault("vocabulary", [model])) is not None:
        raise InvalidRequest(f"{model} has no readable vocabulary: {fault}", code="tokenizer_broken")


def check_weights(model: Path, keep_waiting: Callable[[], bool] = lambda: True) -> None:
    """Raises if llama.cpp cannot load this GGUF file, or when `keep_waiting` returns False."""
    if (fault := find_fault("weights", [model], keep_waiting)) is not None:
        raise InvalidRequest(f"{model} cannot be loaded: {fault}", code="model_unreadable")


def check_adapter(name: str, adapter: Path, model: Path) -> None:
    if (fault := find_fault("weights", [model, adapter])) is not None:
        raise InvalidRequest(f"the adapter {name!r} in {adapter} cannot be loaded: {fault}", code="adapter_unreadable")


def find_fault(
    purpose: Purpose,
    files: Sequence[Path],
    keep_waiting: Callable[[], bool] = lambda: True,
    check: Callable[[str, list[str], str], str | None] | None = None,
) -> str | None:
    """What is wrong with these files, in one clause, or None. Starts the child only if no pass is stored."""
    marker = _marker(purpose, files)
    if marker is not None and marker.exists():
        return None
    arguments = (purpose, [str(file) for file in files], str(library_folder()))
    job = pool.submit(check or use_files, arguments, _LIMITS)
    try:
        while not wait((job.future,), _POLL_S).done:
            job.is_cancelled = not keep_waiting()
        fault: str | None = job.future.result()
    except Stopped as stopped:
        fault = "loading was stopped" if stopped.why == "cancelled" else explain(stopped.code, stopped.output)
    # A file that was changed meanwhile has another marker.
    if fault is None and marker is not None and marker == _marker(purpose, files):
        with suppress(OSError):  # without the marker the next check takes half a second
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
    return fault


def _marker(purpose: Purpose, files: Sequence[Path]) -> Path | None:
    """None: a file is missing."""
    try:
        stats = [part.stat() for file in files for part in split_parts(file)]
    except OSError:
        return None
    # The time of the last change of the inode cannot be set, unlike that of the contents.
    identities = [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats]
    text = json.dumps([purpose, fingerprint(library_folder()), identities])
    return cache_dir() / "checked" / hashlib.sha256(text.encode()).hexdigest()[:32]


def explain(code: int | None, output: str) -> str | None:
    """`code` is minus the signal that ended the child; None: its time was over."""
    lines = output.splitlines()
    stage = next((line.removeprefix("stage ") for line in reversed(lines) if line.startswith("stage ")), "starting")
    if code is None:
        if stage == _DATA_STAGE:  # the header is sound, and the disk is slow
            return None
        return f"llama.cpp takes more than {_TIMEOUT_S:.0f} s for {stage}; the file is damaged, fetch it again"
    if code < 0:
        names = {int(each): each.name for each in signal.Signals}
        name = names.get(-code, f"signal {-code}")
        found = _ASSERTION.search(output)
        if found is not None and _DUPLICATE_TOKENS in found[1]:
            return "two tokens of its vocabulary are equal, which llama.cpp does not read; convert the model again"
        why = f"{name}, {found[1].strip()}" if found is not None else name
        if found is not None:  # a whole file may be of a kind that llama.cpp asserts it never sees
            return f"llama.cpp died while {stage} ({why}); it does not support this model, or the file is damaged"
        return f"llama.cpp died while {stage} ({why}); the file is damaged, fetch it again"
    return (output.strip().splitlines() or [f"exit code {code}"])[-1]


# --- the child --------------------------------------------------------------------------------------------------------


@sandboxed(_LIMITS)
def use_files(purpose: str, files: list[str], library: str) -> str | None:
    """What is wrong with them. `library` is the folder of llama.cpp."""
    os.environ |= {"LLAMA_CPP_LIB_PATH": library, "GGML_NO_BACKTRACE": "1", "OMP_NUM_THREADS": "1"}
    model, *adapters = files
    return _use_vocabulary(Path(model)) if purpose == "vocabulary" else _use_weights(Path(model), adapters)


def _begin(stage: str) -> None:
    print(f"stage {stage}", flush=True)


def _use_vocabulary(model: Path) -> str | None:
    from modelyard.tokenizer import llama_log
    from modelyard.tokenizer.gguf import GgufTokenizer

    _begin("reading the vocabulary")
    try:
        tokenizer = GgufTokenizer(model)
    except InvalidRequest:
        return llama_log.first_error()
    _begin("using the vocabulary")
    for text in (tokenizer.decode(range(tokenizer.size)), tokenizer.template or "", *map(chr, range(0x250))):
        tokenizer.encode(text)
    return None


def _use_weights(model: Path, adapters: Sequence[str]) -> str | None:
    lib = libllama.load()
    lib.llama_backend_init()
    _begin("reading the header")
    if not adapters and (fault := _compute(lib, model, (), header_only=True)) is not None:
        return fault
    _begin("reading the adapter" if adapters else _DATA_STAGE)
    return _compute(lib, model, adapters, header_only=False)


def _compute(lib: Any, model: Path, adapters: Sequence[str], *, header_only: bool) -> str | None:
    """What llama.cpp refuses, or None. It maps the file: the data are read at most once, and not copied."""
    from modelyard.tokenizer import llama_log

    params = lib.llama_model_default_params()
    no_devices = (ctypes.c_void_p * 1)()
    params.devices = ctypes.addressof(no_devices)
    params.use_extra_bufts = False
    params.no_alloc, params.load_mode = header_only, 0 if header_only else 1
    llama_log.clear()
    raw = lib.llama_model_load_from_file(str(model).encode(), params)
    if not raw:
        return llama_log.first_error()
    for adapter in adapters:
        if not lib.llama_adapter_lora_init(raw, adapter.encode()):
            return llama_log.first_error()
    kind = ctypes.create_string_buffer(64)
    lib.llama_model_meta_val_str(raw, b"general.architecture", kind, len(kind))
    if kind.value.decode("utf-8", "replace") in HEAD_FILES:  # it computes with its model only, in a process of its own
        lib.llama_model_free(raw)
        return None
    context_params = lib.llama_context_default_params()
    context_params.n_ctx = context_params.n_batch = context_params.n_ubatch = 64
    context_params.n_threads = context_params.n_threads_batch = 1
    context = lib.llama_init_from_model(raw, context_params)
    if not context:
        return llama_log.first_error()
    if not header_only and not lib.llama_model_has_encoder(raw):
        tokens = (ctypes.c_int32 * 4)(0, 1, 2, 3)
        lib.llama_decode(context, lib.llama_batch_get_one(tokens, 4))
    lib.llama_free(context)
    lib.llama_model_free(raw)
    return None
