"""Converts a GGUF model to a Hugging Face or CTranslate2 folder, once, without torch.

A conversion of a quantized file does not restore precision: the weights have the same values in another format. The
folder is put in place by one rename, and contains a note about its source.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path

import msgspec
from msgspec import Struct

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.library import default_model, model_files
from modelyard.library.cache_dir import file_lock, models_dir
from modelyard.library.model_files import LibraryEntry
from modelyard.library.models import find_model
from modelyard.library.progress import ProgressReporter
from modelyard.plugins import MissingLibrary

# By format; the first is the default. bfloat16 for CTranslate2 would need torch.
QUANTIZATIONS = {
    "hf": ("bfloat16", "float16", "float32"),
    "ct2": ("int8", "int8_float32", "int8_float16", "int16", "float16", "float32"),
}
_LIBRARIES = {"hf": ("numpy", "gguf"), "ct2": ("numpy", "gguf", "ctranslate2")}
_NOTE = "modelyard.json"
_RECIPE = 1  # a folder of another recipe is converted again


class ConversionNote(Struct, frozen=True):
    """What a folder was converted from."""

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
    progress: ProgressReporter | None = None,
) -> LibraryEntry:
    """Convert a model of the library or a path. An existing conversion is reused."""
    if to not in QUANTIZATIONS:
        raise InvalidRequest(
            f"{to!r} is not a format to convert to; choose one of {', '.join(QUANTIZATIONS)}", param="to"
        )
    _require_libraries(to)
    default, *_ = known = QUANTIZATIONS[to]
    chosen = quantization or default
    if chosen not in known:
        raise InvalidRequest(f"{chosen!r} is not a quantization of {to}; choose one of {', '.join(known)}")
    progress = progress or ProgressReporter()
    entry = find_model(name)
    if entry is None and name == "smollm2":  # the default model may not be fetched yet
        file = default_model.fetch(progress)
    else:
        file = model_files.locate_model_file(entry.path if entry is not None else name)
    base = name if find_model(name) is not None else model_files.base_name(file.name)
    folder_name = f"{base}-{to}" + (f"-{chosen}" if chosen != default else "")
    target = out.expanduser().absolute() if out is not None else models_dir() / folder_name
    note = ConversionNote(str(file), sum(part.stat().st_size for part in model_files.split_parts(file)), to, chosen)
    _create_folder(target, note, lambda folder: _write(file, folder, to, chosen, progress), progress, owned=out is None)
    entry = LibraryEntry(target.name, str(target), f"{file.name} as {to} {chosen}", owned=out is None)
    model_files.put_entry(entry)
    return entry


def _require_libraries(to: str) -> None:
    try:
        for library in _LIBRARIES[to]:
            import_module(library)
    except ModuleNotFoundError as error:
        raise MissingLibrary(
            f"converting to {to} needs the Python package {error.name!r}: install it with pip install "
            "'modelyard[convert]'"
        ) from error


def _write(file: Path, folder: Path, to: str, quantization: str, progress: ProgressReporter) -> None:
    from modelyard_convert import writers
    from modelyard_convert.gguf_model import GgufModel

    model = GgufModel(file)
    for name, content in writers.tokenizer_files(model.metadata, model.shape.context_length):
        (folder / name).write_bytes(content)
    total, done = sum(map(prod, model.shapes.values())), 0
    with progress.track(f"{file.name} to {quantization}", "converting") as on_bytes:

        def on_tensor(elements: int) -> None:
            nonlocal done
            done += elements
            on_bytes(4 * done, 4 * total)  # as float32

        write = writers.write_hf if to == "hf" else writers.write_ct2
        write(model, folder, quantization, on_tensor)


HF = partial(convert, to="hf")
CT2 = partial(convert, to="ct2")


# --- the folder -------------------------------------------------------------------------------------------------------


def _create_folder(
    target: Path, note: ConversionNote, write: Callable[[Path], None], progress: ProgressReporter, *, owned: bool
) -> None:
    wait = f"another process is making {target.name}: waiting for it"
    try:
        with file_lock(target.with_name(f".{target.name}.lock"), lambda: progress.write_line(wait)):
            existing = _read_note(target)
            if existing == note:
                return
            if target.exists() and not (owned and existing is not None):  # replace only our own conversions
                raise InvalidRequest(f"{target} already exists: remove it or choose another with --out", param="out")
            with _replaced_folder(target) as folder:
                write(folder)
                (folder / _NOTE).write_bytes(msgspec.json.encode(note))
    except OSError as error:
        raise Unavailable(f"{target} cannot be written: {error}", code="convert_failed") from error


def _read_note(target: Path) -> ConversionNote | None:
    try:
        return msgspec.json.decode((target / _NOTE).read_bytes(), type=ConversionNote)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None


@contextmanager
def _replaced_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that replaces `target` at the end."""
    for stale in target.parent.glob(f".convert-{target.name}-*"):  # left by a killed process: we hold the lock
        shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".convert-{target.name}-"))
    try:
        yield folder
        if target.exists():
            shutil.rmtree(target)
        folder.chmod(0o755)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
