"""Models that other programs keep on this machine: Ollama, LM Studio and the cache of the Hugging Face hub.

They are used where they are; nothing is copied. Ollama's files have no suffix, so a link in the library's folder names
one as what it is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from modelyard.core.errors import Unavailable
from modelyard.library import model_files, variants
from modelyard.library.cache_dir import models_dir
from modelyard.library.model_files import LibraryEntry

_LAYER = "application/vnd.ollama.image."
_OLLAMA_SERVICE = Path("/usr/share/ollama/.ollama/models")
_REGISTRY = ("registry.ollama.ai", "library")  # left out of a model's name


class FoundModel(Struct, frozen=True):
    """`repo` is its repository of the hub, if that is known; `layers` are Ollama's files of the model, by kind."""

    program: str
    name: str
    path: Path
    projector: Path | None = None
    repo: str = ""
    layers: Mapping[str, Path] = {}

    def entry(self, name: str | None = None) -> LibraryEntry:
        path, projector = self.path, self.projector
        if self.program == "Ollama":
            path = _link(self.path, self.name)
            projector = _link(projector, f"mmproj-{self.name}") if projector else None
        source = self.repo or f"{self.program}: {self.name}"
        is_link = self.program == "Ollama"  # ours, and removed with the entry; the file behind it stays
        return LibraryEntry(name or self.name, str(path), source, is_link, str(projector or ""))


def find_models(env: Mapping[str, str] = os.environ) -> list[FoundModel]:
    """By program, the first of each name. A folder that cannot be read has none."""
    home = Path(env.get("HOME") or Path.home())
    found: dict[str, FoundModel] = {}
    for search, folders in (
        (
            ollama_models,
            (Path(env.get("OLLAMA_MODELS") or home / ".ollama/models"), _OLLAMA_SERVICE),
        ),
        (lm_studio_models, (home / ".lmstudio/models", home / ".cache/lm-studio/models")),
        (_hub_cache, (_hub_folder(env, home),)),
    ):
        for folder in folders:
            for model in search(folder):
                found.setdefault(model.name, model)
    return list(found.values())


def find(name: str, env: Mapping[str, str] = os.environ) -> FoundModel | None:
    """By the name in its program or its repository."""
    wanted = name.lower().removesuffix(":latest")
    return next((model for model in find_models(env) if wanted in (model.name.lower(), model.repo.lower())), None)


class _Layer(Struct, rename="camel"):
    media_type: str
    digest: str


class _Manifest(Struct):
    layers: list[_Layer]


def ollama_models(folder: Path) -> Iterator[FoundModel]:
    for file in _files(folder / "manifests"):
        try:
            layers = msgspec.json.decode(file.read_bytes(), type=_Manifest).layers
        except (OSError, msgspec.MsgspecError):
            continue
        blobs = {
            layer.media_type.removeprefix(_LAYER): folder / "blobs" / layer.digest.replace(":", "-") for layer in layers
        }
        *owner, name, tag = file.relative_to(folder / "manifests").parts
        short = "/".join([*([] if tuple(owner) == _REGISTRY else owner), name])
        tagged = short if tag == "latest" else f"{short}:{tag}"
        if "model" in blobs and blobs["model"].is_file():
            yield FoundModel("Ollama", tagged, blobs["model"], blobs.get("projector"), layers=blobs)


def lm_studio_models(folder: Path) -> Iterator[FoundModel]:
    for repo in sorted(folder.glob("*/*")):
        yield from _of_folder("LM Studio", repo, repo.relative_to(folder).as_posix())


def _hub_cache(folder: Path) -> Iterator[FoundModel]:
    for repo in sorted(folder.glob("models--*--*")):
        snapshots = sorted(repo.glob("snapshots/*"), key=lambda path: path.stat().st_mtime)
        name = repo.name.removeprefix("models--").replace("--", "/")
        if snapshots and model_files.folder_format(snapshots[-1]) == "hf":
            yield FoundModel("Hugging Face", name.rpartition("/")[2], snapshots[-1], repo=name)
        elif snapshots:
            yield from _of_folder("Hugging Face", snapshots[-1], name)


def _of_folder(program: str, folder: Path, repo: str) -> Iterator[FoundModel]:
    """The GGUF files, of a split model the first part. A download that is not complete leaves links without a file."""
    for file in _files(folder):
        parts = model_files.split_parts(file)
        is_model = file.suffix.lower() == ".gguf" and "mmproj" not in file.name.lower()
        if is_model and file == parts[0] and all(part.is_file() for part in parts):
            yield FoundModel(program, model_files.base_name(file.name), file, variants.projector_beside(file), repo)


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.rglob("*") if path.is_file())
    except OSError:
        return []


def _hub_folder(env: Mapping[str, str], home: Path) -> Path:
    named = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE")
    base = env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface"
    return Path(named) if named else Path(base) / "hub"


def _link(file: Path, name: str) -> Path:
    link = models_dir() / "ollama" / f"{name.replace('/', '-').replace(':', '-')}.gguf"
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(file)
    except OSError as error:
        raise Unavailable(f"{link} cannot be made a link to {file}: {error.strerror}") from error
    return link
