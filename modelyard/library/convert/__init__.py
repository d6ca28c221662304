"""Converts a GGUF model of the library into a Hugging Face or a CTranslate2 folder, once, without torch.

The weights of a quantized file are what they are: a conversion holds the same numbers in another form, it gives no
precision back. A folder is put in place by one rename, with a note in it that says what it was made from.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.library import default_model, model_files, models
from modelyard.library.cache_dir import file_lock, models_dir
from modelyard.library.convert import tokenizer
from modelyard.library.model_files import LibraryEntry
from modelyard.library.progress import OnBytes, ProgressReporter
from modelyard.plugins import MissingLibrary

DEFAULTS = {"hf": "bfloat16", "ct2": "int8"}
_NOTE = "modelyard.json"
_RECIPE = 1  # what was made by another one is made anew


class ConversionNote(Struct, frozen=True):
    """What a folder was made from."""

    source: str
    bytes: int
    to: str
    quantization: str
    recipe: int = _RECIPE


def convert(
    name: str,
    to: str,
    *,
    out: Path | None = None,
    quantization: str | None = None,
    meter: ProgressReporter | None = None,
) -> LibraryEntry:
    """`name` is the library's or a path. What has been converted already is taken as it is."""
    writer = _writer(to)
    chosen = quantization or DEFAULTS[to]
    if chosen not in writer.TYPES:
        raise InvalidRequest(f"{chosen!r} is no quantization of {to}; there are {', '.join(writer.TYPES)}")
    file, meter = _source(name, meter or ProgressReporter()), meter or ProgressReporter()
    called = f"{_called(name, file)}-{to}" + (f"-{chosen}" if chosen != DEFAULTS[to] else "")
    target = out.expanduser().absolute() if out is not None else models_dir() / called
    note = ConversionNote(str(file), sum(part.stat().st_size for part in model_files.split_parts(file)), to, chosen)
    _make(target, note, lambda folder: _write(writer, file, folder, chosen, meter), meter, ours=out is None)
    entry = LibraryEntry(target.name, str(target), f"{file.name} as {to} {chosen}", owned=out is None)
    model_files.put_entry(entry)
    return entry


def _writer(to: str) -> ModuleType:
    if to not in DEFAULTS:
        raise InvalidRequest(f"{to!r} is no format to convert to; there are {', '.join(DEFAULTS)}", param="to")
    try:
        for library in ("numpy", "gguf"):
            import_module(library)
        return import_module(f"modelyard.library.convert.{to}")
    except ModuleNotFoundError as error:
        raise MissingLibrary(
            f"converting to {to} needs the Python package {error.name!r}: install it with pip install "
            "'modelyard[convert]'"
        ) from error


def _source(name: str, meter: ProgressReporter) -> Path:
    entry = models.find_model(name)
    if entry is None and name == "smollm2":  # the default model, before anybody has asked for it
        return default_model.fetch(meter)
    return model_files.locate_model_file(entry.path if entry is not None else name)


def _called(name: str, file: Path) -> str:
    return name if models.find_model(name) is not None else model_files.base_name(file.name)


# --- putting a folder in place ----------------------------------------------------------------------------------------


def _make(
    target: Path, note: ConversionNote, write: Callable[[Path], None], meter: ProgressReporter, *, ours: bool
) -> None:
    wait = f"another process is making {target.name}: waiting for it"
    try:
        with file_lock(target.with_name(f".{target.name}.lock"), lambda: meter.say(wait)):
            if _note(target) != note:
                _check_free(target, ours=ours)
                with _fresh(target) as folder:
                    write(folder)
                    (folder / _NOTE).write_bytes(msgspec.json.encode(note))
    except OSError as error:
        raise Unavailable(f"{target} cannot be written: {error}", code="convert_failed") from error


def _note(target: Path) -> ConversionNote | None:
    try:
        return msgspec.json.decode((target / _NOTE).read_bytes(), type=ConversionNote)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None


def _check_free(target: Path, *, ours: bool) -> None:
    """A folder of our own making in our own place is made anew; anybody else's is left alone."""
    if target.exists() and not (ours and _note(target) is not None):
        raise InvalidRequest(f"{target} exists already: remove it or choose another place with --out", param="out")


@contextmanager
def _fresh(target: Path) -> Any:
    for left in target.parent.glob(f".convert-{target.name}-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".convert-{target.name}-"))
    try:
        yield folder
        if target.exists():
            shutil.rmtree(target)
        folder.chmod(0o755)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(writer: Any, file: Path, folder: Path, quantization: str, meter: ProgressReporter) -> None:
    from modelyard.library.convert.gguf_model import GgufModel

    source = GgufModel(file)
    for name, content in tokenizer.files(source.metadata, source.shape.context):
        (folder / name).write_bytes(content)
    with meter.watch(f"{file.name} to {quantization}", "converting") as on_bytes:
        writer.write(source, folder, quantization, _Count(sum(map(prod, source.sizes.values())), on_bytes))


class _Count:
    """Numbers done, told as the bytes that they are in memory."""

    def __init__(self, total: int, on_bytes: OnBytes) -> None:
        self._done, self._total, self._on_bytes = 0, total, on_bytes

    def __call__(self, numbers: int) -> None:
        self._done += numbers
        self._on_bytes(4 * self._done, 4 * self._total)
