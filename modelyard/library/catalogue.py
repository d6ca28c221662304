"""The catalogue: short names such as `qwen3:8b` for models that are worth a first try, and which suit a machine.

The models are data, in `catalogue.toml`. A name without a tag, or with `:latest`, means its family's default. It says
where a model is and what it is for; what a repository really has is read from the hub when it is fetched.
"""

from __future__ import annotations

import tomllib
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Literal

import msgspec
from msgspec import Struct, field

from modelyard.library.hub import HubReference
from modelyard.library.variants import AGENT_WINDOW, MemoryBudget, needed_memory

Use = Literal["chat", "code", "vision", "embedding"]

_GB = 10**9
_QUICK_ON_CPU = 5.0  # billions of weights for each token: above, a CPU writes slower than one reads
_AGENT_ON_CPU = 4.0  # an agent's prompts are long, and reading them is what takes the time


class CatalogueModel(Struct, frozen=True, forbid_unknown_fields=True):
    """`catalogue.toml` explains the fields."""

    title: str
    repo: str
    sizes: dict[str, float]
    window: int
    kv: int
    active: float
    uses: tuple[Use, ...]
    format: str
    tools: bool = False
    thinking: Literal["", "switch", "always"] = ""
    default: bool = False
    tried: str = ""
    sampling: dict[str, int | float] = field(default_factory=dict)
    name: str = ""

    @property
    def size(self) -> int:
        """Bytes of the smallest quantization that is listed: four bits, which lose little."""
        return int(min(self.sizes.values()) * _GB)

    def needs(self, use: Use) -> int:
        """Bytes of memory with the KV that the use needs."""
        window = min(self.window, AGENT_WINDOW) if use == "code" else 0
        return max(needed_memory(self.size, None), self.size + self.kv * 1024 * window)


@cache
def catalogue() -> dict[str, CatalogueModel]:
    """All models by name, in the order of recommendation."""
    text = files("modelyard.library").joinpath("catalogue.toml").read_text(encoding="utf-8")
    found = msgspec.convert(tomllib.loads(text), dict[str, CatalogueModel])
    return {name: msgspec.structs.replace(model, name=name) for name, model in found.items()}


def find(name: str) -> CatalogueModel | None:
    """By its name or its family's, in any case; None for anything else."""
    wanted = name.lower().removesuffix(":latest")
    if (model := catalogue().get(wanted)) is not None or ":" in wanted:
        return model
    tags = [model for model in catalogue().values() if model.name.partition(":")[0] == wanted]
    return next((model for model in tags if model.default), tags[0] if tags else None)


def find_reference(text: str) -> HubReference | None:
    """The repository that a name means. Its quantization may follow as a second tag: `qwen3:8b:Q8_0`."""
    if (model := find(text)) is not None:
        return HubReference(model.repo)
    name, _, quant = text.rpartition(":")
    model = find(name) if ":" in name else None
    return HubReference(model.repo, quant) if model is not None and quant else None


def of_repo(repo: str) -> CatalogueModel | None:
    return next((model for model in catalogue().values() if model.repo == repo), None)


def similar(name: str, known: list[str], limit: int = 3) -> list[str]:
    """Names that somebody who typed `name` may have meant: of `known` and of the catalogue."""
    lower = {each.lower(): each for each in (*catalogue(), *known)}
    found = get_close_matches(name.lower().removesuffix(":latest"), lower, limit, 0.6)
    return [lower[each] for each in found]


def fits(model: CatalogueModel, use: Use, budget: MemoryBudget) -> bool:
    """Whether this machine runs it well: within the memory of the GPU, or on the CPU at a speed that one can follow."""
    need = model.needs(use)
    if budget.gpu and need <= budget.gpu:
        return True
    limit = _AGENT_ON_CPU if use == "code" else _QUICK_ON_CPU
    return need <= budget.ram and model.active <= limit


def suggest(use: Use, budget: MemoryBudget) -> CatalogueModel | None:
    """The model to begin with; None if none suits this machine."""
    return next((model for model in catalogue().values() if use in model.uses and fits(model, use, budget)), None)


def search(words: str, use: Use | None = None) -> list[CatalogueModel]:
    """Models whose name, title or uses contain every word."""
    wanted = words.lower().split()

    def text(model: CatalogueModel) -> str:
        features = ("tools" if model.tools else "", "thinking" if model.thinking else "")
        return " ".join((model.name, model.title, model.repo, *model.uses, *features)).lower()

    found = [model for model in catalogue().values() if use is None or use in model.uses]
    return [model for model in found if all(word in text(model) for word in wanted)]
