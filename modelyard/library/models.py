"""The library's models: finding what a MODEL argument means, fetching, adding, listing, describing and removing."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path
from typing import Protocol

import psutil
from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound
from modelyard.library import catalogue, default_model, elsewhere, gguf, hub, model_files, variants
from modelyard.library.cache_dir import models_dir
from modelyard.library.elsewhere import FoundModel
from modelyard.library.hub import HubClient, HubListing, HubReference
from modelyard.library.model_files import LibraryEntry
from modelyard.library.progress import ProgressReporter, format_size
from modelyard.library.variants import KvShape, MemoryBudget, ModelVariant

_NAME = re.compile(r"\w[\w.+:-]*(/\w[\w.+:-]*)*")
_HEADER = 1 << 20  # bytes of a GGUF file in which its shape is found


class Converter(Protocol):
    """Writes a model in another format and adds it to the library: an entry point `modelyard.converters`."""

    def __call__(
        self, name: str, *, out: Path | None, quantization: str | None, progress: ProgressReporter
    ) -> LibraryEntry: ...


# --- what a MODEL argument means --------------------------------------------------------------------------------------


class ModelSource(Struct, frozen=True):
    """A model of the library (`entry`), a local file or folder (`path`), one that another program has here
    (`elsewhere`), or one on the hub (`hub`). A model that was
    fetched from the hub before is an entry and on the hub. A name of the catalogue is what the model will be called."""

    text: str
    entry: LibraryEntry | None = None
    path: Path | None = None
    elsewhere: FoundModel | None = None
    hub: HubReference | None = None
    name: str | None = None


def resolve_source(text: str, quant: str | None = None) -> ModelSource:
    """The meaning of a MODEL argument, in this order: a name in the library; a file or folder here or in ./models; a
    model of Ollama, LM Studio or the hub's cache; a repository of the hub as `owner/repo[:quant]`,
    `hf.co/owner/repo[:quant]` or a URL; a name of the catalogue. Raises NotFound."""
    if (entry := find_model(text)) is not None:
        return ModelSource(text, entry=entry)
    if (local := _find_local(text, quant)) is not None:
        return ModelSource(text, path=local)
    if quant is None and (found := elsewhere.find(text)) is not None:
        return ModelSource(text, elsewhere=found)
    if (reference := hub.parse_reference(text)) is not None:
        return ModelSource(text, entry=_find_fetched(reference, quant), hub=reference)
    if (listed := of_catalogue(text, quant)) is not None:
        return listed
    if "://" in text:
        raise NotFound(
            f"{text!r} is not a repository or file of the hub at {hub.endpoint()}: download it, then name its file",
            param="source",
        )
    names = [entry.name for entry in list_models()]
    raise NotFound(
        f"there is no model {text!r}: it is not a file or folder here, not in the library (which has "
        f"{', '.join(names) or 'nothing'}), not in the catalogue (modelyard models search), and not a repository such "
        f"as owner/name{did_you_mean(text, names)}",
        code="unknown_model",
        param="source",
    )


def of_catalogue(text: str, quant: str | None = None) -> ModelSource | None:
    """The model that a short name of the catalogue means."""
    reference = catalogue.find_reference(text)
    if reference is None:
        return None
    return ModelSource(text, _find_fetched(reference, quant), hub=reference, name=text.lower().removesuffix(":latest"))


def did_you_mean(text: str, known: list[str]) -> str:
    similar = catalogue.similar(text, known)
    return f". Did you mean {' or '.join(similar)}?" if similar else ""


def _find_local(source: str, quant: str | None) -> Path | None:
    """In the current folder or in ./models. Files in the library's folder came from a hub and are not added again."""
    if "://" in source:
        return None
    candidates = (Path(source).expanduser(), Path("models") / source)
    path = next((candidate.resolve() for candidate in candidates if candidate.exists()), None)
    if path is None:
        if source.lower().endswith(".gguf") and not source.lower().startswith(("hf.co/", "huggingface.co/")):
            raise NotFound(f"there is no file {source!r}", code="model_file_missing", param="source")
        return None
    if quant is not None and path.is_dir():
        path = _find_quant(path, quant)
    if model_files.folder_format(path) is not None:
        return path
    return model_files.locate_model_file(str(path))


def _find_quant(folder: Path, quant: str) -> Path:
    """A quantization is a subfolder or part of a file name."""
    if (folder / quant).is_dir():
        return folder / quant
    files = (file for file in model_files.gguf_files(folder) if quant.lower() in file.name.lower())
    matching = {model_files.base_name(file.name): file for file in files}
    return next(iter(matching.values())) if len(matching) == 1 else folder


def _find_fetched(reference: HubReference, quant: str | None) -> LibraryEntry | None:
    """The model that was fetched for this reference, if its files are still here."""
    wanted = quant or reference.quant
    for entry in model_files.read_entries():
        is_wanted = (
            Path(entry.path).as_posix().endswith(f"/{reference.file}")
            if reference.file
            else wanted is None or wanted.lower() in (entry.quant.lower(), entry.quant.lower().removeprefix("ud-"))
        )
        if entry.owned and entry.source == reference.repo and is_wanted and Path(entry.path).exists():
            return entry
    return None


# --- adding and fetching ----------------------------------------------------------------------------------------------


def pull(
    source: str | ModelSource,
    *,
    name: str | None = None,
    quant: str | None = None,
    progress: ProgressReporter | None = None,
    budget: MemoryBudget | None = None,
    folder_budget: MemoryBudget | None = None,
    update: bool = False,
) -> LibraryEntry:
    """The library's entry of a model: it is fetched from the hub or registered if necessary.

    A model that is already here is returned without asking the hub, unless `update` is set: then a new version there
    replaces it. `budget` is the memory that decides between quantizations, by default that of a CPU; `folder_budget`
    that of engines for folders.
    """
    if name is not None:
        _check_name(name)  # before a large download
    found = resolve_source(source, quant) if isinstance(source, str) else source
    if found.entry is not None and (found.hub is None or not update) and name in (None, found.entry.name):
        return found.entry
    if found.path is not None:
        named = name or model_files.base_name(found.path.name)
        return register(LibraryEntry(named, str(found.path), projector=_find_projector(found.path)))
    if found.elsewhere is not None:
        return register(found.elsewhere.entry(name))
    if found.entry is not None and found.hub is None:
        entry = found.entry  # a second name of a model in the library; its files stay the first one's
        return register(LibraryEntry(name or entry.name, entry.path, entry.source, projector=entry.projector))
    if found.hub is None:
        raise NotFound(f"there is no model {found.text!r}", code="unknown_model", param="source")
    fetched = found.entry if name in (None, found.entry.name if found.entry else None) else None
    budgets = budget or default_budget(), folder_budget or budget or default_budget()
    return _fetch(found.hub, name or found.name, quant, progress or ProgressReporter(), budgets, fetched)


def default_budget() -> MemoryBudget:
    """What one model may take of the RAM. The rest is for other programs."""
    return MemoryBudget(int(0.7 * psutil.virtual_memory().total))


def register(entry: LibraryEntry) -> LibraryEntry:
    _check_name(entry.name)
    if not Path(entry.path).is_dir():
        gguf.read_summary(Path(entry.path))  # fails for an unreadable file
    model_files.put_entry(entry)
    return entry


def _find_projector(path: Path) -> str:
    """The image projector beside a local model; empty if there is none."""
    found = None if path.is_dir() else variants.projector_beside(path)
    return str(found) if found is not None else ""


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} cannot be a model's name: use letters, digits and . _ - + / with --name", param="name"
        )


def _fetch(
    reference: HubReference,
    name: str | None,
    quant: str | None,
    progress: ProgressReporter,
    budgets: tuple[MemoryBudget, MemoryBudget],
    fetched: LibraryEntry | None,
) -> LibraryEntry:
    repo, wanted = reference.repo, quant or reference.quant or (fetched.quant if fetched else None) or None
    client = HubClient()
    listing = client.list_files(repo, reference.revision)
    format = variants.repo_format(listing.sizes)
    if format == "gguf":
        entry = _fetch_gguf(client, listing, reference.file or wanted, progress, budgets[0])
    else:
        entry = _fetch_folder(client, listing, reference, wanted, progress, budgets[1])
    taken = fetched.name if fetched else _free_name(_short_name(reference, entry), entry)
    return register(replace(entry, name=name or taken))


def _short_name(reference: HubReference, entry: LibraryEntry) -> str:
    if reference.file is not None:
        return model_files.base_name(Path(entry.path).name)
    return re.sub(r"[-_.]gguf$", "", reference.repo.rpartition("/")[2], flags=re.IGNORECASE)


def _free_name(short: str, entry: LibraryEntry) -> str:
    """A second quantization of a repository has its quantization in its name."""
    other = model_files.find_entry(short)
    return short if other is None or other.path == entry.path or not entry.quant else f"{short}-{entry.quant}"


def _fetch_gguf(
    client: HubClient, listing: HubListing, wanted: str | None, progress: ProgressReporter, budget: MemoryBudget
) -> LibraryEntry:
    found = variants.find_variants(listing.sizes)
    if wanted is not None:
        variant, reason = variants.named_variant(listing.repo, found, wanted), ""
        projector = variants.choose_projector(listing.sizes, variant)
    else:
        projector = variants.choose_projector(listing.sizes, found[0])
        extra = listing.sizes[projector.file] if projector else 0
        shape = _read_shape(client, listing, found)
        choice = variants.choose_variant(listing.repo, found, budget, shape, extra)
        variant, reason = choice.variant, choice.reason
        projector = variants.choose_projector(listing.sizes, variant)
    reasons = [text for text in (reason, projector.reason if projector else "") if text]
    for text in reasons:
        progress.write_line(text)
    folder = models_dir() / listing.repo
    names = [*variant.files, *([projector.file] if projector else [])]
    title = f"{Path(variant.files[0]).name}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
    hub.download(client, listing, names, folder, title, progress)
    return LibraryEntry(
        "",
        str(folder / variant.files[0]),
        listing.repo,
        owned=True,
        projector=str(folder / projector.file) if projector else "",
        quant=variant.label,
        commit=listing.commit,
        choice="; ".join(reasons),
    )


class VariantOffer(Struct, frozen=True):
    """A variant of a repository: `needed` bytes of memory with the KV of a useful window, and whether it `fits`."""

    label: str
    size: int
    needed: int
    fits: bool
    chosen: bool = False  # by `pull` without a quantization


class RepositoryOffer(Struct, frozen=True):
    repo: str
    variants: tuple[VariantOffer, ...]
    reason: str = ""  # of the choice, or why nothing is chosen


def offer(reference: HubReference, budget: MemoryBudget) -> RepositoryOffer:
    """What a repository has for this machine, without fetching it: smallest first."""
    client = HubClient()
    listing = client.list_files(reference.repo, reference.revision)
    found = variants.find_variants(listing.sizes)
    if not found:
        raise NotFound(f"{reference.repo} has no GGUF files", code="unknown_format", param="source")
    projector = variants.choose_projector(listing.sizes, found[0])
    extra = listing.sizes[projector.file] if projector else 0
    shape = _read_shape(client, listing, found)
    chosen, reason = None, ""
    try:
        choice = variants.choose_variant(reference.repo, found, budget, shape, extra)
        chosen, reason = choice.variant, choice.reason
    except ModelyardError as error:
        reason = error.message
    memory = budget.ram + budget.gpu
    offers = []
    for variant in sorted(found, key=lambda variant: variant.size):
        needed = variants.needed_memory(variant.size, shape, extra)
        offers.append(VariantOffer(variant.label, variant.size, needed, needed <= memory, variant == chosen))
    return RepositoryOffer(reference.repo, tuple(offers), reason)


def _read_shape(client: HubClient, listing: HubListing, found: list[ModelVariant]) -> KvShape | None:
    """From the header of the smallest file; None if the server cannot send a part of a file."""
    smallest = min(found, key=lambda variant: variant.size)
    try:
        data = client.read_start(listing, smallest.files[0], _HEADER)
    except ModelyardError as error:
        if error.code in ("gated", "forbidden", "unknown_repo"):
            raise
        return None
    return variants.kv_shape(gguf.read_first_metadata(io.BytesIO(data)))


def _fetch_folder(
    client: HubClient,
    listing: HubListing,
    reference: HubReference,
    wanted: str | None,
    progress: ProgressReporter,
    budget: MemoryBudget,
) -> LibraryEntry:
    """A CTranslate2, Hugging Face or EXL3 folder. EXL3 repositories have a branch for each size."""
    repo, reason = listing.repo, ""
    branch = reference.revision if reference.revision not in (None, "main") else ""
    if wanted is not None or variants.repo_format(listing.sizes) is None:
        branch, reason, listing = _choose_branch(client, listing, wanted, budget)
    format = variants.repo_format(listing.sizes)
    if format is None or format == "gguf":
        raise NotFound(
            f"{repo} has no model that an engine here can use: no GGUF file, no safetensors with a config.json and no "
            "CTranslate2 folder; look for a repository whose name ends in GGUF",
            code="no_model",
        )
    names = variants.folder_files(listing.sizes, format)
    if reason:
        progress.write_line(reason)
    folder = models_dir() / (f"{repo}@{branch}" if branch else repo)
    title = f"{repo.rpartition('/')[2]} ({len(names)} files)"
    hub.download(client, listing, names, folder, title, progress)
    return LibraryEntry("", str(folder), repo, owned=True, quant=branch, commit=listing.commit, choice=reason)


def _choose_branch(
    client: HubClient, listing: HubListing, wanted: str | None, budget: MemoryBudget
) -> tuple[str, str, HubListing]:
    branches = client.list_branches(listing.repo)
    if wanted is not None:
        match = next((name for name in branches if name.lower() == wanted.lower()), None)
        if match is None:
            known = ", ".join(branches) or "none"
            raise NotFound(
                f"{listing.repo} has no {wanted!r}: it has no GGUF files, and its branches are {known}",
                code="unknown_quant",
                param="quant",
            )
        return match, "", client.list_files(listing.repo, match)
    sized = {name: client.list_files(listing.repo, name) for name in variants.sized_branches(branches)}
    if not sized:
        return "", "", listing
    branch, reason = variants.choose_branch(
        listing.repo, {name: sum(each.sizes.values()) for name, each in sized.items()}, budget
    )
    return branch, reason, sized[branch]


# --- the list ---------------------------------------------------------------------------------------------------------


def list_models() -> list[LibraryEntry]:
    """All added models, and the default model if it has been fetched."""
    entries = model_files.read_entries()
    file = models_dir() / default_model.DEFAULT_MODEL.path
    if file.is_file() and all(Path(entry.path) != file for entry in entries):
        entries.insert(0, LibraryEntry("smollm2", str(file), default_model.DEFAULT_MODEL.requirement, owned=True))
    return entries


def find_model(name: str) -> LibraryEntry | None:
    return next((entry for entry in list_models() if entry.name == name), None)


def remove_model(name: str) -> LibraryEntry:
    """Remove an entry. Its files are deleted only if the library fetched or converted them."""
    entry = find_model(name)
    if entry is None:
        names = ", ".join(e.name for e in list_models()) or "nothing"
        raise NotFound(f"the library has no {name!r}; it has {names}")
    others = [other for other in model_files.read_entries() if other.name != name]
    if entry.owned and all(other.path != entry.path for other in others):
        _delete(Path(entry.path))
        if entry.projector and all(other.projector != entry.projector for other in others):
            _delete(Path(entry.projector))
    model_files.remove_entry(name)
    return entry


def _delete(path: Path) -> None:
    """Delete a model's folder, or its files and the folders that have no model left. Only inside `models_dir()`."""
    root = models_dir().resolve()
    if path.is_dir() and path.resolve() != root and path.resolve().is_relative_to(root):
        shutil.rmtree(path)
        return
    for file in model_files.split_parts(path):
        if file.parent.resolve().is_relative_to(root):  # the file itself may be a link into the hub's cache folder
            file.unlink(missing_ok=True)
    folder = path.parent
    while folder.resolve() != root and folder.resolve().is_relative_to(root):
        if any(file.suffix.lower() in (".gguf", ".safetensors", ".bin", ".part") for file in folder.rglob("*")):
            break
        shutil.rmtree(folder, ignore_errors=True)  # metadata of the hub, locks
        folder = folder.parent


# --- descriptions -----------------------------------------------------------------------------------------------------

Rows = list[tuple[str, str]]


class FileRow(Struct, frozen=True):
    """A model's file in a list. `note` says why it cannot be read: missing, not fetched yet, or not a model."""

    bytes: int = 0
    quant: str = ""
    note: str = ""

    @property
    def size(self) -> str:
        return format_size(self.bytes) if self.bytes else ""


def file_row(path: str | None) -> FileRow:
    """Empty for a model without a file."""
    if path is None:
        return FileRow()
    if default_model.is_default(path) and not default_model.is_fetched():
        return FileRow(default_model.DEFAULT_MODEL.size, "", "not fetched yet")
    if (folder := model_files.find_model_folder(path)) is not None:
        return FileRow(folder.size, folder.quant)
    file = model_files.find_model_file(path)
    if file is None:
        return FileRow(note="its file is missing")
    if file.suffix.lower() != ".gguf":
        return FileRow(file.stat().st_size)
    try:
        summary = gguf.read_summary(file)
    except ModelyardError:
        return FileRow(file.stat().st_size, "", "its file cannot be read")
    return FileRow(summary.size, summary.quant)


def describe_file(path: str | None) -> Rows:
    """The rows of `modelyard models show` about a file or folder; empty if there is none."""
    if default_model.is_default(path) and not default_model.is_fetched():
        size = format_size(default_model.DEFAULT_MODEL.size)
        return [("file", f"not fetched yet ({size}): modelyard serve fetches it at start")]
    if path is not None and (folder := model_files.find_model_folder(path)) is not None:
        kind = {"ct2": "CTranslate2", "hf": "Hugging Face"}[folder.kind]
        rows = [("folder", f"{folder.path}, {format_size(folder.size)}"), ("kind", kind)]
        return [*rows, ("quantization", folder.quant)] if folder.quant else rows
    file = model_files.find_model_file(path) if path is not None else None
    if file is None or file.suffix.lower() != ".gguf":
        return []
    summary = gguf.read_summary(file)
    parts = len(model_files.split_parts(file))
    rows = [
        ("file", f"{file}, {format_size(summary.size)}{f' in {parts} files' if parts > 1 else ''}"),
        ("architecture", f"{summary.architecture}, {summary.layers} layers"),
        ("parameters", _format_count(summary.parameters)),
        ("quantization", summary.quant),
        ("trained context", f"{summary.trained_context} tokens" if summary.trained_context else ""),
    ]
    return [row for row in rows if row[1]]


def _format_count(number: int) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number) if number else ""


def describe_entry(entry: LibraryEntry) -> Rows:
    return [
        ("model", entry.name),
        ("source", entry.source),
        *describe_file(entry.path),
        ("configuration", config_snippet(entry)),
    ]


def config_snippet(entry: LibraryEntry) -> str:
    """The configuration that serves the model."""
    name = entry.name
    is_bare_key = name.replace("-", "").replace("_", "").isalnum() and name.isascii()
    key = name if is_bare_key else f'"{name}"'
    return f'[models.{key}]\npath = "{Path(entry.path).as_posix()}"'
