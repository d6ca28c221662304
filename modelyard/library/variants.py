"""What a repository offers, and which of it this machine should use. Pure.

The rule for a GGUF repository, unless the user names a quantization: the best quality that fits the memory together
with the KV of a useful window, at most Q8_0. 16-bit files take twice the memory for a difference that does not show.
With a GPU the model must fit its memory; if nothing does, it is shared between GPU and CPU, where speed decides, and
the best up to Q4_K_M is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from msgspec import Struct

from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound, Unavailable
from modelyard.library.gguf import read_contents
from modelyard.library.model_files import group_split_files, locate_model_file
from modelyard.library.progress import format_size

RepoFormat = Literal["gguf", "ct2", "hf"]  # EXL3 is an `hf` folder whose config.json says so

# --- what a repository has --------------------------------------------------------------------------------------------

_QUANT = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_MOE)?)(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_BRANCH = re.compile(r"(\d+(?:\.\d+)?)[-_ ]?bpw.*", re.IGNORECASE)  # EXL3 repositories have a branch per size


class ModelVariant(Struct, frozen=True):
    """One model of a repository: its files in order and their total size."""

    label: str
    files: tuple[str, ...]
    size: int

    @property
    def stem(self) -> str:
        """The name without the quantization: equal for variants of one model."""
        name = PurePosixPath(self.files[0]).name
        base = next(iter(group_split_files([name])))
        return re.sub(r"[^a-z0-9]+", "-", _QUANT.sub("", base).lower()).strip("-")


def find_variants(sizes: Mapping[str, int]) -> list[ModelVariant]:
    """The GGUF models of a repository with these files."""
    names = [name for name in sizes if _is_model(PurePosixPath(name))]
    groups = group_split_files(names).items()
    return [ModelVariant(_label(base), tuple(parts), sum(sizes[part] for part in parts)) for base, parts in groups]


def _is_model(path: PurePosixPath) -> bool:
    """Not an image projector or an importance matrix, and not a path outside the folder."""
    return _is_gguf(path) and not is_projector(path.name) and not path.name.lower().startswith("imatrix")


def _is_gguf(path: PurePosixPath) -> bool:
    return path.suffix.lower() == ".gguf" and not path.is_absolute() and ".." not in path.parts


def is_projector(name: str) -> bool:
    """Repositories name it mmproj-F16.gguf, or MODEL-mmproj-f16.gguf."""
    return "mmproj" in PurePosixPath(name).name.lower()


def _label(base: str) -> str:
    """The quantization in the name of the file or, second, of its folder."""
    for part in reversed(PurePosixPath(base).parts):
        if found := _QUANT.findall(part):
            return str(found[-1]).upper().replace("FP16", "F16").replace("FP32", "F32")
    return PurePosixPath(base).name


def repo_format(sizes: Mapping[str, int]) -> RepoFormat | None:
    """GGUF first: some repositories have both, and only GGUF runs everywhere."""
    if find_variants(sizes):
        return "gguf"
    if "model.bin" in sizes and any(f"vocabulary.{suffix}" in sizes for suffix in ("json", "txt")):
        return "ct2"
    if "config.json" in sizes and any(name.endswith(".safetensors") and "/" not in name for name in sizes):
        return "hf"
    return None


_FOLDER_FILES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")  # tokenizer, template, processor, own code


def folder_files(sizes: Mapping[str, int], format: RepoFormat) -> tuple[str, ...]:
    """The files of a CTranslate2 or Hugging Face folder: no other formats, no pictures, no subfolders. If the weights
    are there twice, a consolidated copy is left out."""
    suffixes = (*_FOLDER_FILES, *((".bin",) if format == "ct2" else (".safetensors",)))
    names = [name for name in sizes if "/" not in name and name.endswith(suffixes)]
    if any(name.startswith("model") and name.endswith(".safetensors") for name in names):
        names = [name for name in names if not name.startswith("consolidated")]
    return tuple(sorted(names))


# --- quality ----------------------------------------------------------------------------------------------------------

# Best first. Mixed and dynamic variants (_XL, UD-) are as good as the plain one or better.
_QUALITY = (
    *("F32", "BF16", "F16"),
    *("Q8_K", "Q8_1", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0"),
    *("MXFP4", "MXFP4_MOE", "Q4_K_M", "Q4_K_S", "IQ4_NL", "IQ4_XS", "Q4_1", "Q4_0"),
    *("Q3_K_L", "IQ3_M", "Q3_K_M", "IQ3_S", "Q3_K_S", "IQ3_XS", "IQ3_XXS"),
    *("Q2_K_L", "Q2_K", "IQ2_M", "Q2_K_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "TQ2_0", "IQ1_M", "TQ1_0", "IQ1_S"),
)
_RANK = {label: rank for rank, label in enumerate(_QUALITY)}
_BEST, _BEST_SHARED = _RANK["Q8_K"], _RANK["MXFP4"]  # what is better is not chosen without being asked for
_UNKNOWN = len(_QUALITY)


def quality_rank(label: str) -> tuple[int, int]:
    """Smaller is better. Of two equal ones the dynamic (UD-) or larger (_XL, _L) mix comes first."""
    plain = label.upper().removeprefix("UD-")
    mix = 0 if plain != label.upper() else 2
    for suffix in ("_XL", "_L"):
        if plain not in _RANK and plain.endswith(suffix):
            plain, mix = plain.removesuffix(suffix), mix - 1 if mix else 0
            break
    if plain.startswith("Q") and f"{plain}_M" in _RANK:
        plain = f"{plain}_M"  # Q4_K is Q4_K_M
    return _RANK.get(plain, _UNKNOWN), mix


# --- memory -----------------------------------------------------------------------------------------------------------

USEFUL_WINDOW = 16_384  # tokens: a conversation with files; a choice that leaves room for less is not useful
AGENT_WINDOW = 40_960  # tokens: the prompt of a coding agent, its tools, and the files of a task
_KV_SHARE = 0.15  # of the weights, if the file's shape is unknown
_COMPUTE = 400 << 20


class MemoryBudget(Struct, frozen=True):
    """Bytes that one model may take: of RAM, and of the GPUs that the engine can use."""

    ram: int
    gpu: int = 0

    def describe(self) -> str:
        return f"{format_size(self.gpu)} of GPU memory" if self.gpu else f"{format_size(self.ram)} of memory"


class KvShape(Struct, frozen=True):
    """Bytes of KV per token at 16 bits, and the trained window; zero: unknown."""

    per_token: int = 0
    trained: int = 0


def kv_shape(metadata: Mapping[str, Any]) -> KvShape:
    """From the metadata of a GGUF file, which may be incomplete."""
    family = metadata.get("general.architecture", "")

    def number(name: str, default: int = 0) -> int:
        value = metadata.get(f"{family}.{name}", default)
        return value if isinstance(value, int) else default

    layers, heads, width = number("block_count"), number("attention.head_count"), number("embedding_length")
    size = width // heads if heads else 0
    per_layer = metadata.get(f"{family}.attention.head_count_kv", heads)
    kv_heads = sum(per_layer) if isinstance(per_layer, list) else layers * number("attention.head_count_kv", heads)
    width = number("attention.key_length", size) + number("attention.value_length", size)
    return KvShape(2 * kv_heads * width, number("context_length"))


def needed_memory(size: int, shape: KvShape | None, projector: int = 0) -> int:
    """Weights, the KV of a useful window, and compute buffers."""
    if shape is None or not shape.per_token:
        kv = int(_KV_SHARE * size)
    else:
        kv = shape.per_token * min(shape.trained or USEFUL_WINDOW, USEFUL_WINDOW)
    return size + kv + projector + min(_COMPUTE, size // 2)


# --- the choice -------------------------------------------------------------------------------------------------------


class VariantChoice(Struct, frozen=True):
    """A variant, and why it was chosen, as a sentence for people."""

    variant: ModelVariant
    reason: str = ""


def named_variant(repo: str, variants: Sequence[ModelVariant], wanted: str) -> ModelVariant:
    """The variant with this quantization, folder or file name."""
    name = wanted.lower().strip("/")
    matching = [v for v in variants if name in (v.label.lower(), *(file.lower() for file in v.files))]
    matching = matching or [v for v in variants if name in map(str.lower, PurePosixPath(v.files[0]).parts)]
    matching = matching or [v for v in variants if name == v.label.lower().removeprefix("ud-")]
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise NotFound(
            f"{repo} has no {wanted!r}; it has {format_variants(variants)}", code="unknown_quant", param="quant"
        )
    raise _ambiguous(repo, matching)


def choose_variant(
    repo: str, variants: Sequence[ModelVariant], budget: MemoryBudget, shape: KvShape | None = None, projector: int = 0
) -> VariantChoice:
    """The best variant for this machine. Raises if none fits, or if the repository has several models."""
    if len({variant.stem for variant in variants}) > 1 or _has_twins(variants):
        raise _ambiguous(repo, variants)
    ordered = sorted(variants, key=lambda v: (quality_rank(v.label), -v.size))

    def fitting(memory: int, best: int) -> list[ModelVariant]:
        fit = [v for v in ordered if needed_memory(v.size, shape, projector) <= memory]
        return [v for v in fit if quality_rank(v.label)[0] >= best] or fit[-1:]

    window = min(shape.trained or USEFUL_WINDOW, USEFUL_WINDOW) if shape is not None else USEFUL_WINDOW
    room = f"with the KV of {window} tokens"
    if found := fitting(budget.gpu, _BEST) if budget.gpu else fitting(budget.ram, _BEST):
        chosen = found[0]
        need = format_size(needed_memory(chosen.size, shape, projector))
        why = f"it takes {need} {room}, and {budget.describe()} may be used"
    elif budget.gpu and (found := fitting(budget.gpu + budget.ram, _BEST_SHARED)):
        chosen = found[0]
        why = f"nothing fits the {budget.describe()}, so it is shared between GPU and CPU"
    else:
        smallest = min(variants, key=lambda v: v.size)
        need = format_size(needed_memory(smallest.size, shape, projector))
        raise Unavailable(
            f"{repo} does not fit this machine: the smallest variant, {smallest.label}, takes {need} {room}, and "
            f"{format_size(budget.ram + budget.gpu)} may be used. To fetch it all the same, name it: "
            f"--quant {smallest.label}",
            code="model_too_large",
        )
    if len(variants) == 1:
        return VariantChoice(chosen, "")
    others = format_variants([v for v in variants if v is not chosen])
    return VariantChoice(chosen, f"{chosen.label} is the best that fits: {why}. Others with --quant: {others}")


def _has_twins(variants: Sequence[ModelVariant]) -> bool:
    return len({variant.label for variant in variants}) < len(variants)


def _ambiguous(repo: str, variants: Sequence[ModelVariant]) -> InvalidRequest:
    shown = [ModelVariant(v.files[0], v.files, v.size) for v in variants]
    return InvalidRequest(
        f"{repo} has {len(variants)} models: choose one with --quant: {format_variants(shown)}",
        code="ambiguous_quant",
        param="quant",
    )


def format_variants(variants: Sequence[ModelVariant]) -> str:
    ordered = sorted(variants, key=lambda variant: variant.size)
    return ", ".join(f"{variant.label} ({format_size(variant.size)})" for variant in ordered)


# F16 keeps the original's precision and is fast on every device; BF16 is slow on older ones, F32 only larger.
_PROJECTORS = ("F16", "BF16", "F32", "Q8_0")


class ProjectorChoice(Struct, frozen=True):
    file: str
    reason: str = ""


def choose_projector(sizes: Mapping[str, int], variant: ModelVariant) -> ProjectorChoice | None:
    """The image projector of a model, in its folder or, second, anywhere in the repository."""
    found = [name for name in sizes if _is_gguf(PurePosixPath(name)) and is_projector(name)]
    folder = PurePosixPath(variant.files[0]).parent
    found = [name for name in found if PurePosixPath(name).parent == folder] or found
    if not found:
        return None

    def rank(name: str) -> tuple[int, str]:
        label = _label(name.removesuffix(".gguf"))
        return _PROJECTORS.index(label) if label in _PROJECTORS else len(_PROJECTORS), name

    best = min(found, key=rank)
    if len(found) == 1:
        return ProjectorChoice(best)
    label = _label(best.removesuffix(".gguf"))
    others = ", ".join(sorted(_label(name.removesuffix(".gguf")) for name in found if name != best))
    return ProjectorChoice(best, f"the image projector in {label}, which is exact and fast everywhere (not {others})")


def choose_branch(repo: str, branches: Mapping[str, int], budget: MemoryBudget) -> tuple[str, str]:
    """Of an EXL3 repository with a branch per size (4.0bpw): the best that fits, up to 6 bits. `branches` has the total
    size of each. Returns the branch and the reason."""
    bits = {name: float(found[1]) for name in branches if (found := _BRANCH.fullmatch(name))}
    memory = budget.gpu or budget.ram
    fitting = [name for name in bits if needed_memory(branches[name], None) <= memory]
    shown = ", ".join(f"{name} ({format_size(branches[name])})" for name in sorted(bits, key=lambda n: bits[n]))
    if not fitting:
        raise Unavailable(
            f"{repo} does not fit this machine, which may use {budget.describe()}; it has {shown}. To fetch one all "
            "the same, name it with --quant",
            code="model_too_large",
        )
    best = max(fitting, key=lambda name: (bits[name] <= 6, bits[name] if bits[name] <= 6 else -bits[name]))
    return best, f"{best} is the best that fits the {budget.describe()}. Others with --quant: {shown}"


def sized_branches(names: Sequence[str]) -> list[str]:
    return [name for name in names if _BRANCH.fullmatch(name)]


# --- projectors on this machine ---------------------------------------------------------------------------------------


def projector_beside(model: Path) -> Path | None:
    """The projector in the model's folder; the best if there are several."""
    try:
        sizes = {file.name: file.stat().st_size for file in model.parent.glob("*.gguf")}
    except OSError:
        return None
    choice = choose_projector(sizes, ModelVariant("", (model.name,), 0))
    return model.parent / choice.file if choice else None


def locate_projector(setting: str | bool | None, model: Path) -> Path | None:
    """The file that the setting names; without a setting the one beside the model."""
    if isinstance(setting, str):
        return locate_model_file(setting)
    return None if setting is False else projector_beside(model)


def projector_kinds(projector: Path) -> tuple[str, ...]:
    """Of image and audio, those that it encodes; none if it is not a projector."""
    try:
        metadata, _ = read_contents(projector, lists="none")
    except (ModelyardError, OSError):
        return ()
    if metadata.get("general.architecture") != "clip":
        return ()
    keys = {"image": "clip.has_vision_encoder", "audio": "clip.has_audio_encoder"}
    return tuple(kind for kind, key in keys.items() if metadata.get(key))
