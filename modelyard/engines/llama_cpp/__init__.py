"""llama.cpp in process: named, isolated KV caches on one set of weights, no HTTP hop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import structs

from modelyard import libmtmd
from modelyard.core.engine import Capabilities, Engine, EnginePlugin, EngineSpec, Media
from modelyard.core.errors import InvalidRequest, ModelyardError
from modelyard.engines.llama_cpp.estimate import require_mtp_layers, require_supported
from modelyard.engines.llama_cpp.library import offloads_to_gpu
from modelyard.engines.llama_cpp.model_shape import read_model_shape
from modelyard.engines.llama_cpp.offload import estimate as estimate
from modelyard.engines.llama_cpp.options import CAPABILITIES as CAPABILITIES
from modelyard.engines.llama_cpp.options import KV_TYPES as KV_TYPES
from modelyard.engines.llama_cpp.options import LIVE_OVERRIDES as LIVE_OVERRIDES
from modelyard.engines.llama_cpp.options import Options as Options
from modelyard.engines.llama_cpp.options import flash_attention_mode, model_capabilities
from modelyard.engines.option_faults import OptionFault, try_options
from modelyard.library import variants
from modelyard.library.architectures import is_tested
from modelyard.library.gguf import read_architecture, read_purpose, require_complete
from modelyard.library.model_files import find_model_file, locate_model_file
from modelyard.library.progress import ProgressReporter

_PLAIN_TYPES = ("f32", "f16", "bf16")


def own_process(options: Options) -> bool:
    """On a GPU a step takes half a millisecond: the gateway's own work in the same process would slow it down. Whoever
    truncates a mapped file kills the process that reads it (SIGBUS). And an architecture that the test suite does not
    cover may meet an assertion of llama.cpp."""
    if options.numa or options.use_mmap or offloads_to_gpu(options.n_gpu_layers):  # numa holds for a whole process
        return True
    return not all(_is_tested(path) for path in (options.path, options.draft_model_path) if path)


def _is_tested(path: str) -> bool:
    try:
        return is_tested(read_architecture(locate_model_file(path)))
    except (ModelyardError, OSError):  # loading explains it
        return True


def _require_runnable(file: Path) -> None:
    require_complete(file)
    require_supported(file, read_architecture(file))


def _require_mtp_layers(options: Options) -> None:
    if options.draft_model_path is None and (file := find_model_file(options.path)) is not None:
        require_mtp_layers(read_model_shape(file))


def _require_projector(path: str) -> None:
    if not variants.projector_kinds(found := locate_model_file(path)):
        raise InvalidRequest(f"{found} is not a projector for images or audio", code="projector_unreadable")


def capabilities(options: Options, header: Path | None = None) -> Capabilities:
    """By the file, or by a copy of its header: a model generates, embeds or ranks. By its projector's file: what else
    than text it takes."""
    found = model_capabilities(read_purpose(header or locate_model_file(options.path)), options)
    if not found.generates or find_model_file(options.path) is None:
        return found
    projector = variants.locate_projector(options.mmproj, locate_model_file(options.path))
    kinds = variants.projector_kinds(projector) if projector is not None else ()
    if kinds and libmtmd.find_library() is None:
        return structs.replace(found, modalities_need=libmtmd.NOT_BUILT)
    return structs.replace(found, modalities=("text", *kinds))


def count_media(options: Options, media: Sequence[Media], python: str | None = None) -> list[int]:
    """The tokens of each, without a loaded model: the projector is loaded for it, and a model without its weights."""
    del python
    from modelyard.engines.llama_cpp.media import count_without_model

    return count_without_model(options, media)


def prepare(progress: ProgressReporter | None = None) -> None:
    """At first use, fetch the library for this machine, or build it if none fits."""
    from modelyard.engines.llama_cpp import setup

    setup.ensure_library(progress)


def verify() -> None:
    """Runs the self-test: a library that this machine cannot run dies in a child process."""
    # Imported here: the child runs that module as its main program.
    from modelyard.engines.llama_cpp import selftest

    selftest.require_working_library()


def create(spec: EngineSpec) -> Engine:
    """Call it on the event loop that reads the engine's answers."""
    verify()
    from modelyard.engines.llama_cpp.engine import LlamaCppEngine

    return LlamaCppEngine(spec)


def tokenizer_path(options: Options) -> Path:
    """The model file: its vocabulary is read without its weights."""
    return locate_model_file(options.path)


def faults(spec: EngineSpec) -> Iterator[OptionFault]:
    options: Options = spec.options
    yield from try_options(
        ("path", lambda path: _require_runnable(locate_model_file(path)), options.path),
        ("speculation", lambda _: _require_mtp_layers(options), "mtp" if options.speculation == "mtp" else None),
        ("draft_model_path", locate_model_file, options.draft_model_path),
        ("mmproj", _require_projector, options.mmproj if isinstance(options.mmproj, str) else None),
        *((f"lora.{name}", locate_model_file, lora.path) for name, lora in options.lora.items()),
        *((f"control_vectors.{at}", locate_model_file, one.path) for at, one in enumerate(options.control_vectors)),
    )
    for name, cache in spec.caches.items():
        if flash_attention_mode(options.for_cache(cache), gpu=False) == "off" and cache.type_v not in _PLAIN_TYPES:
            message = f"{cache.type_v} values of the cache {name!r} need flash attention, which flash_attn turns off"
            yield "type_v", message


ENGINE = EnginePlugin(
    Options=Options,
    create=create,
    capabilities=CAPABILITIES,
    capabilities_of=capabilities,
    own_process=own_process,
    tokenizer_path=tokenizer_path,
    marks_media=True,
    count_media=count_media,
    live_overrides=LIVE_OVERRIDES,
    kv_types=KV_TYPES,
    verify=verify,
    prepare=prepare,
    estimate=estimate,
    faults=faults,
    tuning=__name__,
    has_fitted=True,
)
