"""Which files of a repository are which variant of the model, and which one is meant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from msgspec import Struct

from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.library.places import groups
from modelyard.library.progress import size

_QUANT = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|F16|F32|MXFP4(?:_MOE)?)(?![A-Za-z0-9])",
    re.IGNORECASE,
)


class Variant(Struct, frozen=True):
    """One model of a repository: its files in order and their bytes in all."""

    label: str
    files: tuple[str, ...]
    size: int


def variants(files: Mapping[str, int]) -> list[Variant]:
    """From the repository's files with their sizes."""
    names = [name for name in files if _is_model(PurePosixPath(name))]
    found = groups(names).items()
    return [Variant(_label(base), tuple(parts), sum(files[part] for part in parts)) for base, parts in found]


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


def choose(repo: str, found: Sequence[Variant], quant: str | None) -> Variant:
    """The one that is meant: by its quantization or a file's name, or because there is no other."""
    if not found:
        raise NotFound(f"{repo} holds no GGUF file: look for a repository whose name ends in GGUF", code="no_gguf")
    fitting = [variant for variant in found if quant is None or _is_called(variant, quant)]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise NotFound(f"{repo} has no {quant!r}; it has {_listed(found)}", code="unknown_quant", param="quant")
    names = fitting if quant is None else [Variant(v.files[0], v.files, v.size) for v in fitting]
    raise InvalidRequest(
        f"{repo} has {len(fitting)} variants: choose one with --quant: {_listed(names)}",
        code="ambiguous_quant",
        param="quant",
    )


def _is_called(variant: Variant, quant: str) -> bool:
    wanted = quant.lower().strip("/")
    return wanted == variant.label.lower() or wanted in {name.lower() for name in variant.files}


def _listed(found: Sequence[Variant]) -> str:
    return ", ".join(f"{variant.label} ({size(variant.size)})" for variant in sorted(found, key=lambda v: v.size))
