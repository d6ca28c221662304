"""The models of the library as the lowest source of the configuration: every pulled or added model is served by its
name, without a line in a file.

Each gets what its file says: the engine by its format, its sampling values, and a window that is bounded by the memory
of the machine. It is loaded at the first request. A section of the same name in a file overrides single settings; one
that has its own path replaces it.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from modelyard import libmtmd, plugins
from modelyard.config.problems import Table
from modelyard.core.engine import AvailableMemory, CacheInfo
from modelyard.core.errors import InvalidRequest, ModelyardError
from modelyard.core.units import format_size
from modelyard.engines.hf_folder import CONFIG, read_config, read_json, read_template
from modelyard.engines.llama_cpp.estimate import estimate_memory
from modelyard.engines.llama_cpp.library import visible_memory
from modelyard.engines.llama_cpp.model_shape import ModelShape, read_model_shape
from modelyard.engines.llama_cpp.options import Options
from modelyard.library import catalogue, gguf, hub, llama_server
from modelyard.library.cache_dir import models_dir
from modelyard.library.default_model import DEFAULT_MODEL, is_default
from modelyard.library.gguf import ModelPurpose, Task
from modelyard.library.model_files import (
    LibraryEntry,
    candidate_paths,
    find_model_file,
    read_entries,
    split_parts,
)
from modelyard.library.variants import AGENT_WINDOW, MemoryBudget
from modelyard.prompt.render import mentions_thinking_switch
from modelyard.prompt.template_source import find_template
from modelyard.router.router import model_entry
from modelyard.router.settings import CacheSettings, DecodingSettings, ModelSettings
from modelyard.telemetry import system

LIBRARY_SOURCE: Final = "library"
EMBEDDED_SOURCE: Final = "embedded default"
DEFAULT_SHAPE: Final = ModelShape(DEFAULT_MODEL.size, 8192, 30, 576, 9, 49_152, 5760, 5760, head_size=64)

log = logging.getLogger(__name__)

# --- the memory of this machine ---------------------------------------------------------------------------------------

_RAM_SHARE, _GPU_SHARE = 0.7, 0.9  # the rest is for other programs


@cache
def machine_budget(*, of_llama_cpp: bool = True) -> MemoryBudget:
    """What one model may take of this machine, whatever is free now: the choice of a quantization or of a window is
    for longer than a moment, must be the same in all processes, and the pool unloads other models for it. The library
    of llama.cpp may be one for CPUs; other engines use every GPU."""
    total = AvailableMemory(system.total_ram(), {gpu.uuid: gpu.total for gpu in system.read_gpus()})
    if total.gpus and of_llama_cpp:
        with suppress(ModelyardError):  # no llama.cpp: another engine may use the GPUs
            total = visible_memory(total)
    return MemoryBudget(int(_RAM_SHARE * total.ram_free), int(_GPU_SHARE * sum(total.gpus.values())))


# --- what a file says -------------------------------------------------------------------------------------------------
#
# Reading the header of a GGUF file takes a tenth of a second or more, so it is stored, with the size and time of the
# file by which a change is noticed.

_FACTS = "facts-4.json"

# names of llama.cpp (general.sampling.*) and of generation_config.json → ours
_SAMPLING = {
    "temp": "temperature",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "penalty_repeat": "repetition_penalty",
    "repetition_penalty": "repetition_penalty",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}


class ModelFacts(Struct, frozen=True):
    """`shape` is without tensors. `sampling` has our names of the values that the file recommends."""

    stamp: tuple[int, int]  # bytes and modification time
    shape: ModelShape
    sampling: dict[str, float] = field(default_factory=dict)
    switches_thinking: bool = False  # its template has a switch for thinking
    has_template: bool = False


def read_facts(path: Path) -> ModelFacts:
    """Raises ModelyardError for a file or folder that is no model."""
    if path.is_dir():
        return _folder_facts(path)
    with path.open("rb") as file:
        metadata = gguf.read_first_metadata(file)
    shape = replace(read_model_shape(path), files=())
    template = str(metadata.get("tokenizer.chat_template", ""))
    thinking = mentions_thinking_switch(template)
    return ModelFacts(_stamp(path), shape, _sampling(metadata, "general.sampling."), thinking, bool(template))


def recommended_sampling(path: Path) -> dict[str, float]:
    """Our names of the sampling values that a model's file or folder recommends."""
    if path.is_dir():
        return _sampling(read_json(path / "generation_config.json"), "")
    if path.suffix != ".gguf":
        return {}
    with path.open("rb") as file:
        return _sampling(gguf.read_first_metadata(file), "general.sampling.")


def _folder_facts(folder: Path) -> ModelFacts:
    config: Mapping[str, Any] = read_config(folder) if (folder / CONFIG).is_file() else {}
    thinking = mentions_thinking_switch(read_template(folder) or "")
    sampling: dict[str, float] = {}
    with suppress(ModelyardError):
        sampling = _sampling(read_json(folder / "generation_config.json"), "")
    return ModelFacts(_stamp(folder), _folder_shape(folder, config), sampling, thinking)


def _folder_shape(folder: Path, config: Mapping[str, Any]) -> ModelShape:
    def number(*names: str) -> int:
        return next((value for name in names if isinstance(value := config.get(name), int)), 0)

    layers, width = number("num_hidden_layers", "n_layer"), number("hidden_size", "n_embd")
    heads = number("num_attention_heads", "n_head")
    head_size = number("head_dim") or (width // heads if heads else 0)
    kv = layers * (number("num_key_value_heads") or heads) * head_size
    files = [*folder.glob("*.safetensors"), *folder.glob("model.bin")]
    is_encoder = (folder / "modules.json").is_file() or any(
        str(name).startswith(("Bert", "Roberta", "XLMRoberta", "ModernBert", "MPNet"))
        for name in _architectures(config)
    )
    return ModelShape(
        weights=sum(file.stat().st_size for file in files),
        trained=number("max_position_embeddings", "n_positions"),
        layers=layers,
        width=width,
        heads=heads,
        vocab=number("vocab_size"),
        key=kv,
        value=kv,
        head_size=head_size,
        purpose=ModelPurpose("embedding") if is_encoder else ModelPurpose(),
    )


def _architectures(config: Mapping[str, Any]) -> Sequence[Any]:
    found = config.get("architectures")
    return found if isinstance(found, list) else ()


def _sampling(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    found = {ours: values.get(prefix + name) for name, ours in _SAMPLING.items() if prefix + name in values}
    if values.get("do_sample") is False:  # Hugging Face: the model is meant to be greedy
        return {"temperature": 0.0}
    return {name: value for name, value in found.items() if isinstance(value, int | float) and value >= 0}


def _stamp(path: Path) -> tuple[int, int]:
    parts = split_parts(path) if path.is_file() else [path, *path.glob("*.safetensors"), path / CONFIG]
    stats = [part.stat() for part in parts if part.exists()]
    return sum(each.st_size for each in stats), max(each.st_mtime_ns for each in stats)


class _FactsStore:
    """The facts of all models, kept in a file of the library's folder. If it cannot be written, they are read again."""

    def __init__(self, *, keep: bool = False) -> None:
        """`keep`: also what is not read this time."""
        self._file = models_dir() / _FACTS
        try:
            self._known = msgspec.json.decode(self._file.read_bytes(), type=dict[str, ModelFacts])
        except (OSError, msgspec.MsgspecError):  # none yet, or of another version
            self._known = {}
        self._found: dict[str, ModelFacts] = dict(self._known) if keep else {}

    def read(self, path: Path) -> ModelFacts:
        known = self._known.get(str(path))
        if known is None or known.stamp != _stamp(path):
            known = read_facts(path)
        self._found[str(path)] = known
        return known

    def save(self) -> None:
        if self._found == self._known:
            return
        with suppress(OSError):
            temporary = self._file.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(msgspec.json.encode(self._found))
            temporary.replace(self._file)


# --- the window -------------------------------------------------------------------------------------------------------

_WINDOWS = (131_072, 98_304, 65_536, 49_152, 40_960, 32_768, 24_576, 16_384, 12_288, 8_192, 6_144, 4_096)
_LONGEST = 131_072
_LONGEST_ON_CPU = 65_536  # a longer prompt takes a CPU half an hour
_UNKNOWN = 4_096  # for a file that does not say how long it was trained
_KV_SHARE = 0.3  # of the memory, or as much as the weights take: a model that nobody asked for leaves room


_PARALLEL = (8, 6, 4, 3, 2)  # conversations at the same time, the most first
_SMALL, _SMALL_SHARE = 1 << 30, 1 / 16  # for more than two of a small model: nobody expects 2 GiB for one of 94 MiB
_UNKNOWN_PARALLEL = 4  # of a model whose files are not here


class WindowChoice(Struct, frozen=True):
    """The window of a conversation, how many are kept at the same time, and why, as a clause for people."""

    window: int
    parallel: int
    reason: str


def choose_window(shape: ModelShape, budget: MemoryBudget) -> WindowChoice:
    """The largest window that the model was trained for and the memory allows. Where an agent's conversation fits
    twice, two are kept, so that its side requests do not push out the main one; with more memory up to eight."""
    on_gpu, room, more = _room(shape, budget)
    longest = min(shape.trained or _UNKNOWN, _LONGEST if on_gpu else _LONGEST_ON_CPU)
    windows = sorted({longest, *(window for window in _WINDOWS if window < longest)}, reverse=True)

    def fits(window: int, parallel: int) -> bool:
        needed = _beyond_weights(shape, {"": CacheInfo(window, parallel)}, on_gpu)
        return needed <= (room if parallel <= 2 else more)

    window = next((window for window in windows if fits(window, 1)), windows[-1])
    parallel = next((count for count in _PARALLEL if fits(window, count)), 1)
    if parallel == 1 and window > AGENT_WINDOW:  # two conversations of an agent are better than one that is longer
        smaller = [other for other in windows if AGENT_WINDOW <= other < window and fits(other, 2)]
        window, parallel = (smaller[0], 2) if smaller else (window, 1)
    return WindowChoice(window, parallel, _reason(shape, window, longest, budget, on_gpu))


def _room(shape: ModelShape, budget: MemoryBudget) -> tuple[bool, int, int]:
    """Whether the weights fit on the GPU, and the bytes for the KV and buffers of two conversations, and of more."""
    on_gpu = bool(budget.gpu) and shape.weights < budget.gpu
    memory = budget.gpu if on_gpu else budget.gpu + budget.ram
    room = min(memory - shape.weights, max(shape.weights, int(_KV_SHARE * memory)))
    return on_gpu, room, min(room, int(_SMALL_SHARE * memory)) if shape.weights < _SMALL else room


def _beyond_weights(shape: ModelShape, caches: Mapping[str, CacheInfo], on_gpu: bool) -> int:
    machine = AvailableMemory(0, {"": 1} if on_gpu else {})
    estimated = estimate_memory(shape, Options(path=""), caches, machine, buffers=())
    return estimated.kv + estimated.compute


# --- parallel = "auto" ------------------------------------------------------------------------------------------------


def choose_parallel(
    shape: ModelShape, caches: Mapping[str, CacheInfo], chosen: Collection[str], budget: MemoryBudget
) -> int:
    """The conversations of each `chosen` cache: as many as fit beside the weights and the model's other caches."""
    on_gpu, room, more = _room(shape, budget)

    def fits(count: int) -> bool:
        with_count = {name: replace(info, parallel=count) if name in chosen else info for name, info in caches.items()}
        return _beyond_weights(shape, with_count, on_gpu) <= (room if count <= 2 else more)

    return next((count for count in _PARALLEL if fits(count)), 1)


def resolve_parallel(
    models: Mapping[str, ModelSettings], caches: Mapping[str, CacheSettings], budget: MemoryBudget | None = None
) -> None:
    """Replaces each `parallel = "auto"` by a number. It depends on the size of the memory, not on what is free now."""
    for name, model in models.items():
        own = {key: cache for key, cache in caches.items() if cache.model == name}
        chosen = [key for key, cache in own.items() if cache.parallel == "auto"]
        if not chosen and (own or model.parallel != "auto"):
            continue
        entry = model_entry(name, model, caches, DecodingSettings())
        infos = {key: cache.info for key, cache in entry.caches.items()}
        shape = _shape_of(model)
        count = _UNKNOWN_PARALLEL
        if shape is not None:
            count = choose_parallel(shape, infos, chosen or list(infos), budget or machine_budget())
        for key in chosen:
            own[key].parallel = count
        if model.parallel == "auto":
            model.parallel = count
        log.info("%s: %d conversations at the same time (parallel = auto)", name, count)


def _shape_of(model: ModelSettings) -> ModelShape | None:
    facts = _facts_of(model)
    if facts is None and is_default(model.path):
        return DEFAULT_SHAPE  # it is fetched when the server starts
    return None if facts is None else facts.shape


def _facts_of(model: ModelSettings) -> ModelFacts | None:
    """None if its file is not here, or is no model: loading explains it."""
    if model.path is None:
        return None
    store = _FactsStore(keep=True)
    try:
        facts = store.read(find_model_file(model.path) or Path(model.path).expanduser())
    except (ModelyardError, OSError):
        return None
    store.save()
    return facts


def can_chat(name: str, model: ModelSettings) -> bool:
    """Whether a model of the configuration has a chat template, as far as its file is here to tell."""
    if model.chat_template is not None or model.prompt_format is not None or (facts := _facts_of(model)) is None:
        return True
    path = find_model_file(model.path or "") or Path(model.path or "").expanduser()
    return facts.shape.purpose.task == "chat" and (facts.has_template or _finds_template(path, name))


def _reason(shape: ModelShape, window: int, longest: int, budget: MemoryBudget, on_gpu: bool) -> str:
    if window == shape.trained:
        return "as trained"
    trained = f"trained {shape.trained}" if shape.trained else "trained length unknown"
    if window == longest and shape.trained:
        return f"{trained}, and more is slow on a CPU" if not on_gpu else trained
    if not shape.trained:
        return trained
    return f"{trained}, bounded by the memory: {budget.describe()} may be used"


# --- the models -------------------------------------------------------------------------------------------------------


class LibraryModel(Struct, frozen=True):
    """`table` is its section of the configuration; None: it cannot be served here, for this `reason`."""

    entry: LibraryEntry
    table: Table | None = None
    reason: str = ""
    is_chat: bool = False
    stamp: tuple[int, int] = (0, 0)  # changes with its files
    task: Task = "chat"
    switches_thinking: bool = False


def read_library_models(budget: MemoryBudget | None = None) -> list[LibraryModel]:
    """All models of the library, oldest first. A list that cannot be read does not stop a server with other models."""
    try:
        entries = read_entries()
    except InvalidRequest as error:
        log.warning("%s", error.message)
        return []
    if not entries:
        return []
    store, memory = _FactsStore(), budget or machine_budget()
    found = [_library_model(entry, store, memory, budget) for entry in entries]
    store.save()
    return found


def _library_model(
    entry: LibraryEntry, store: _FactsStore, budget: MemoryBudget, other: MemoryBudget | None = None
) -> LibraryModel:
    """`budget` is for llama.cpp, `other` for other engines; None: that of this machine."""
    path = Path(entry.path)
    if not path.exists():
        return LibraryModel(entry, reason=f"{path} is missing")
    try:
        facts, backend = store.read(path), entry_backend(entry)
        engine = plugins.engine(str(backend["backend"]))
        if backend["backend"] != "llama_cpp":  # its self-test takes a moment, and a failure concerns every model
            engine.verify()
    except (ModelyardError, OSError) as error:
        return LibraryModel(entry, reason=error.message if isinstance(error, ModelyardError) else str(error))
    if backend["backend"] not in ("llama_cpp", "llama_server"):
        budget = other or machine_budget(of_llama_cpp=False)
    choice = choose_window(facts.shape, budget)
    if (lacking := _lacking_memory(facts.shape, choice)) is not None:
        return LibraryModel(entry, reason=lacking)
    kv_values = (facts.shape.key + facts.shape.value) * choice.window * choice.parallel
    try:
        backend |= engine.library_options(kv_values, bool(budget.gpu))
    except ModelyardError as error:
        return LibraryModel(entry, reason=error.message)
    table: Table = {
        **backend,
        "path": entry.path,
        "enabled": False,
        "autoload": True,
        "n_ctx": choice.window,
        "parallel": choice.parallel,
        "description": " ".join(text for text in (entry.source, entry.quant) if text),
    }
    listed = catalogue.of_repo(entry.source)
    decoding = facts.sampling or (listed.sampling if listed is not None else {})
    decoding |= entry.settings.get("decoding", {})
    table |= entry.settings | ({"decoding": decoding} if decoding else {})
    if facts.shape.purpose.task != "chat":
        del table["n_ctx"], table["parallel"]  # it reads single texts, as long as the file says
        task = facts.shape.purpose.task
        return LibraryModel(entry, table, task, stamp=facts.stamp, task=task)
    plural = "s" if choice.parallel > 1 else ""
    reason = f"{choice.parallel} conversation{plural} of {choice.window} tokens: {choice.reason}"
    own = entry.settings.get("chat_template") or entry.settings.get("prompt_format")
    thinking, talks = facts.switches_thinking, bool(facts.has_template or own or _finds_template(path, entry.name))
    return LibraryModel(entry, table, reason, is_chat=talks, stamp=facts.stamp, switches_thinking=thinking)


def _lacking_memory(shape: ModelShape, choice: WindowChoice) -> str | None:
    """Why a model can never be loaded, even alone on this machine."""
    machine = system.total_ram() + sum(gpu.total for gpu in system.read_gpus())
    needed = shape.weights + _beyond_weights(shape, {"": CacheInfo(choice.window, choice.parallel)}, on_gpu=False)
    if needed <= machine:
        return None
    return f"needs about {format_size(needed)}, and this machine has {format_size(machine)}"


def _finds_template(path: Path, name: str) -> bool:
    """Whether a model has a template outside of its file: in its folder, or by its name."""
    with suppress(InvalidRequest):  # a template that cannot be read: the definition reports it
        return find_template(folder=path if path.is_dir() else path.parent, name=name).missing is None
    return True


def entry_backend(entry: LibraryEntry) -> Table:
    """The engine for the format of a model, and its options. A model with a projector runs in process if libmtmd is
    there (`modelyard setup --media`), else in a llama-server, if there is one."""
    path = Path(entry.path)
    if path.is_dir():
        return folder_backend(path)
    if entry.projector and libmtmd.find_library() is not None:
        return {"backend": "llama_cpp", "mmproj": entry.projector}
    program = shutil.which(llama_server.PROGRAM) or (
        path_of if (path_of := llama_server.binary_path()).is_file() else ""
    )
    if entry.projector and program:
        images = {"llama_server_mmproj_path": entry.projector}
        return {"backend": "llama_server", **images}
    return {"backend": "llama_cpp"}


def folder_backend(folder: Path) -> Table:
    """The engine whose own format it is, else one that runs every Hugging Face folder."""
    taken: dict[str, int] = {}
    for name in plugins.names("engines"):
        with suppress(ModelyardError):  # a plug-in that cannot be imported takes nothing
            taken[name] = plugins.engine(name).takes_folder(folder)
    if not any(taken.values()):
        raise plugins.MissingLibrary(f"no engine that is installed here runs the folder {folder}")
    return {"backend": max(taken, key=taken.__getitem__)}


def missing_hub_model(settings: ModelSettings) -> str | None:
    """The repository on the hub that a model of the configuration names, if it is not on this machine."""
    name = settings.options.get("vllm_model") or settings.path
    if not isinstance(name, str) or hub.parse_reference(name) is None:
        return None
    find = plugins.engine(settings.backend).find_model if settings.backend in plugins.names("engines") else None
    is_here = find(name) is not None if find is not None else any(path.exists() for path in candidate_paths(name))
    return None if is_here else name


def default_for_any_name(models: Sequence[LibraryModel]) -> str | None:
    """Without a configuration, the model that answers to names that nobody has: the one that was pulled or added last,
    not a conversion of another. Coding agents ask for names such as claude-sonnet."""
    suited = [model for model in models if model.table is not None and model.is_chat and not model.entry.base]
    names = [model.entry.name for model in suited if model.entry.commit or not model.entry.owned]
    return names[-1] if names else None
