"""Downloads models from the Hugging Face hub, or from any server with its API (HF_ENDPOINT)."""

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


def fetch(repo: str, quant: str | None, progress: ProgressReporter) -> Path:
    """The model's first file in the library. An interrupted download is resumed."""
    with _translated_errors(repo):
        sizes, digests = _list_files(repo)
        variant = choose_variant(repo, find_variants(sizes), quant)
        folder = models_dir() / repo
        wait = f"another process is fetching from {repo}: waiting for it"
        with file_lock(folder / ".fetch.lock", lambda: progress.write_line(wait)):
            _check_disk_space(variant, sizes, folder)
            _download(repo, variant, folder, progress)
        for name in variant.files:
            _verify(folder / name, digests.get(name))
    return folder / variant.files[0]


def _list_files(repo: str) -> tuple[dict[str, int], dict[str, str]]:
    """The repository's files with their sizes, and the checksums of those that have one."""
    from huggingface_hub import HfApi

    files = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None).model_info(repo, files_metadata=True).siblings or []
    digests = {file.rfilename: file.lfs.sha256 for file in files if file.lfs is not None and file.lfs.sha256}
    return {file.rfilename: file.size or 0 for file in files}, digests


def _check_disk_space(variant: ModelVariant, sizes: dict[str, int], folder: Path) -> None:
    needed = sum(sizes[name] for name in variant.files if not (folder / name).exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise Unavailable(
            f"{variant.label} needs {format_size(needed)}, and {folder} has {format_size(free)} free", code="disk_full"
        )


def _download(repo: str, variant: ModelVariant, folder: Path, progress: ProgressReporter) -> None:
    from huggingface_hub import hf_hub_download

    endpoint = os.environ.get("HF_ENDPOINT") or None
    for number, name in enumerate(variant.files, 1):
        part = f" ({number} of {len(variant.files)})" if len(variant.files) > 1 else ""
        with progress.track(Path(name).name + part) as on_bytes:
            hf_hub_download(repo, name, local_dir=folder, endpoint=endpoint, tqdm_class=_tqdm_class(on_bytes))


def _tqdm_class(on_bytes: OnBytes) -> Any:
    """A replacement of the hub's progress bar that reports to `on_bytes`."""
    from tqdm import tqdm

    class ReportingTqdm(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **named: Any) -> None:
            named.pop("name", None)
            super().__init__(*args, **{**named, "disable": True})
            self._done, self._all = int(named.get("initial") or 0), int(named.get("total") or 0)

        def update(self, n: float | None = 1) -> bool | None:
            self._done += int(n or 0)
            on_bytes(self._done, self._all)
            return None

    return ReportingTqdm


def _verify(file: Path, sha256: str | None) -> None:
    if sha256 is None:
        return
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256:
        file.unlink()
        raise InvalidRequest(
            f"{file.name} was corrupted in transfer (checksum {found}, expected {sha256}) and removed: add it again",
            code="checksum_mismatch",
        )


@contextmanager
def _translated_errors(repo: str) -> Iterator[None]:
    try:
        from huggingface_hub import errors
    except ModuleNotFoundError as error:
        raise MissingLibrary("models from a hub need huggingface_hub: pip install 'modelyard[hub]'") from error
    try:
        yield
    except ModelyardError:
        raise
    except errors.GatedRepoError as error:
        raise Forbidden(f"{repo} is gated: accept its terms on its page and set HF_TOKEN") from error
    except errors.RepositoryNotFoundError as error:
        raise NotFound(f"the hub has no repository {repo!r}, or HF_TOKEN has no access to it") from error
    except Exception as error:  # errors of several HTTP libraries (by the hub's version), a full disk, an invalid name
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise Unavailable(f"{repo} could not be fetched: {reason}", code="fetch_failed") from error


# --- variants ---------------------------------------------------------------------------------------------------------

_QUANT = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|F16|F32|MXFP4(?:_MOE)?)(?![A-Za-z0-9])",
    re.IGNORECASE,
)


class ModelVariant(Struct, frozen=True):
    """One model of a repository: its files in order and their total size."""

    label: str
    files: tuple[str, ...]
    size: int


def find_variants(sizes: Mapping[str, int]) -> list[ModelVariant]:
    """The variants of a repository with these files."""
    names = [name for name in sizes if _is_model(PurePosixPath(name))]
    groups = group_split_files(names).items()
    return [ModelVariant(_label(base), tuple(parts), sum(sizes[part] for part in parts)) for base, parts in groups]


def _is_model(path: PurePosixPath) -> bool:
    """Not an image projector or an importance matrix, and not a path outside the folder."""
    if path.is_absolute() or ".." in path.parts:
        return False
    return path.suffix.lower() == ".gguf" and not path.name.lower().startswith(("mmproj", "imatrix"))


def _label(base: str) -> str:
    """The quantization in the name of the file or, second, of its folder."""
    for part in reversed(PurePosixPath(base).parts):
        if found := _QUANT.findall(part):
            return str(found[-1]).upper()
    return PurePosixPath(base).name


def choose_variant(repo: str, variants: Sequence[ModelVariant], quant: str | None) -> ModelVariant:
    """The variant with this quantization or file name, or the only one."""
    if not variants:
        raise NotFound(f"{repo} has no GGUF file: look for a repository whose name ends in GGUF", code="no_gguf")
    wanted = quant.lower().strip("/") if quant is not None else None
    matching = [
        variant
        for variant in variants
        if wanted is None or wanted in (variant.label.lower(), *(name.lower() for name in variant.files))
    ]
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise NotFound(f"{repo} has no {quant!r}; it has {_format(variants)}", code="unknown_quant", param="quant")
    # The quantization does not decide: show file names, which do.
    shown = matching if quant is None else [ModelVariant(v.files[0], v.files, v.size) for v in matching]
    raise InvalidRequest(
        f"{repo} has {len(matching)} variants: choose one with --quant: {_format(shown)}",
        code="ambiguous_quant",
        param="quant",
    )


def _format(variants: Sequence[ModelVariant]) -> str:
    ordered = sorted(variants, key=lambda variant: variant.size)
    return ", ".join(f"{variant.label} ({format_size(variant.size)})" for variant in ordered)
