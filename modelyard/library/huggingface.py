"""Models from a Hugging Face repository, or from any server that speaks like one (HF_ENDPOINT)."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct

from modelyard.core.errors import Forbidden, InvalidRequest, ModelyardError, NotFound, Unavailable
from modelyard.library.cache_dir import file_lock, models_dir
from modelyard.library.model_files import group_split_files
from modelyard.library.progress import OnBytes, ProgressReporter, format_size
from modelyard.plugins import MissingLibrary


def fetch(repo: str, quant: str | None, meter: ProgressReporter) -> Path:
    """The model's first file in the library; a download that was broken off goes on where it ended."""
    with _translated(repo):
        sizes, digests = _listing(repo)
        variant = choose_variant(repo, find_variants(sizes), quant)
        folder = models_dir() / repo
        with file_lock(
            folder / ".fetch.lock", lambda: meter.say(f"another process is fetching from {repo}: waiting for it")
        ):
            _check_room(variant, sizes, folder)
            _download(repo, variant, folder, meter)
        for name in variant.files:
            _verify_digest(folder / name, digests.get(name))
    return folder / variant.files[0]


def _listing(repo: str) -> tuple[dict[str, int], dict[str, str]]:
    """The repository's files with their sizes, and the checksums of those that have one."""
    from huggingface_hub import HfApi

    files = HfApi(endpoint=_endpoint()).model_info(repo, files_metadata=True).siblings or []
    digests = {file.rfilename: file.lfs.sha256 for file in files if file.lfs is not None and file.lfs.sha256}
    return {file.rfilename: file.size or 0 for file in files}, digests


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _check_room(variant: ModelVariant, sizes: dict[str, int], folder: Path) -> None:
    """Better said now than after an hour."""
    needed = sum(sizes[name] for name in variant.files if not (folder / name).exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise Unavailable(
            f"{variant.label} needs {format_size(needed)} and {folder} has room for {format_size(free)}",
            code="disk_full",
        )


def _download(repo: str, variant: ModelVariant, folder: Path, meter: ProgressReporter) -> None:
    from huggingface_hub import hf_hub_download

    for number, name in enumerate(variant.files, 1):
        part = f" ({number} of {len(variant.files)})" if len(variant.files) > 1 else ""
        with meter.watch(Path(name).name + part) as on_bytes:
            hf_hub_download(repo, name, local_dir=folder, endpoint=_endpoint(), tqdm_class=_teller(on_bytes))


def _teller(on_bytes: OnBytes) -> Any:
    """A stand-in for the hub's own progress bar that tells ours."""
    from tqdm import tqdm

    class Teller(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **named: Any) -> None:
            named.pop("name", None)
            super().__init__(*args, **{**named, "disable": True})
            self._done, self._all = int(named.get("initial") or 0), int(named.get("total") or 0)

        def update(self, n: float | None = 1) -> bool | None:
            self._done += int(n or 0)
            on_bytes(self._done, self._all)
            return None

    return Teller


def _verify_digest(file: Path, wanted: str | None) -> None:
    if wanted is None:
        return
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != wanted:
        file.unlink()
        raise InvalidRequest(
            f"{file.name} arrived broken (checksum {found}, not {wanted}) and was removed: add it again",
            code="checksum_mismatch",
        )


@contextmanager
def _translated(repo: str) -> Iterator[None]:
    try:
        from huggingface_hub import errors
    except ModuleNotFoundError as error:
        raise MissingLibrary("models from a hub need huggingface_hub: pip install 'modelyard[hub]'") from error
    try:
        yield
    except ModelyardError:
        raise
    except errors.GatedRepoError as error:
        raise Forbidden(f"{repo} asks for its terms to be accepted on its page, and for HF_TOKEN after that") from error
    except errors.RepositoryNotFoundError as error:
        raise NotFound(f"the hub has no repository {repo!r}, or HF_TOKEN does not open it") from error
    except (
        Exception
    ) as error:  # several HTTP libraries' errors, by the hub library's version; a full disk; a name it refuses
        raise Unavailable(f"{repo} could not be fetched: {_first_line(error)}", code="fetch_failed") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0]


# Which files of a repository are which variant of the model, and which one is meant.

_QUANT = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|F16|F32|MXFP4(?:_MOE)?)(?![A-Za-z0-9])",
    re.IGNORECASE,
)


class ModelVariant(Struct, frozen=True):
    """One model of a repository: its files in order and their bytes in all."""

    label: str
    files: tuple[str, ...]
    format_size: int


def find_variants(files: Mapping[str, int]) -> list[ModelVariant]:
    """From the repository's files with their sizes."""
    names = [name for name in files if _is_model(PurePosixPath(name))]
    found = group_split_files(names).items()
    return [ModelVariant(_label(base), tuple(parts), sum(files[part] for part in parts)) for base, parts in found]


def _is_model(path: PurePosixPath) -> bool:
    """Not a projector or a statistic, and nothing that would land outside its folder."""
    if path.is_absolute() or ".." in path.parts:
        return False
    return path.suffix.lower() == ".gguf" and not path.name.lower().startswith(("mmproj", "imatrix"))


def _label(base: str) -> str:
    """The quantization that the name says, in the file's own part of it before the folder's."""
    for part in reversed(PurePosixPath(base).parts):
        if found := _QUANT.findall(part):
            return str(found[-1]).upper()
    return PurePosixPath(base).name


def choose_variant(repo: str, found: Sequence[ModelVariant], quant: str | None) -> ModelVariant:
    """The one that is meant: by its quantization or a file's name, or because there is no other."""
    if not found:
        raise NotFound(f"{repo} holds no GGUF file: look for a repository whose name ends in GGUF", code="no_gguf")
    fitting = [variant for variant in found if quant is None or _is_called(variant, quant)]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise NotFound(f"{repo} has no {quant!r}; it has {_listed(found)}", code="unknown_quant", param="quant")
    names = fitting if quant is None else [ModelVariant(v.files[0], v.files, v.size) for v in fitting]
    raise InvalidRequest(
        f"{repo} has {len(fitting)} variants: choose one with --quant: {_listed(names)}",
        code="ambiguous_quant",
        param="quant",
    )


def _is_called(variant: ModelVariant, quant: str) -> bool:
    wanted = quant.lower().strip("/")
    return wanted == variant.label.lower() or wanted in {name.lower() for name in variant.files}


def _listed(found: Sequence[ModelVariant]) -> str:
    return ", ".join(
        f"{variant.label} ({format_size(variant.size)})" for variant in sorted(found, key=lambda v: v.size)
    )
