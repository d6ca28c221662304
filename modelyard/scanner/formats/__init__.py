"""The output formats: one file per model family, with its raw formats in the docstring and its markers as data.

A family file lists its formats in `FORMATS`. A file with one format has the name of that format.
"""

from __future__ import annotations

from functools import cache

from modelyard import plugins
from modelyard.core.output_format import OutputFormat

# The formats of all other files: a format is found without importing every family.
FAMILIES: dict[str, tuple[str, ...]] = {
    "cohere": ("cohere_command", "cohere_command4"),
    "deepseek": ("deepseek_r1", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4"),
    "functionary": ("functionary_v32",),
    "gemma": ("functiongemma", "gemma4"),
    "generic": ("plain", "think"),
    "glm": ("glm45", "glm47", "ling3", "poolside_v1", "spark"),
    "granite": ("granite", "granite4", "granite_20b_fc"),
    "hunyuan": ("hunyuan", "hunyuan_a13b", "hy_v3"),
    "kimi": ("kimi_k2", "kimi_k3"),
    "llama": ("llama3_json", "llama4_pythonic", "pythonic"),
    "minimax": ("minimax_m1", "minimax_m2", "minimax_m3"),
    "nemotron": ("nemotron_v2", "nemotron_v3"),
    "phi4mini": ("firefunction_v2", "phi4mini"),
    "qwen": ("hermes", "qwen3_coder", "step3p5"),
}


@cache
def _family_of() -> dict[str, str]:
    """Format name → file."""
    return {name: file for file in plugins.names("scanner.formats") for name in FAMILIES.get(file, (file,))}


@cache
def load(name: str) -> OutputFormat:
    """The format of that name. An unknown name is an error that lists the known ones."""
    if name not in _family_of():
        raise plugins.unknown("output formats", name, names())
    found = plugins.load("scanner.formats", _family_of()[name])
    if isinstance(found, OutputFormat):  # of another package
        return found
    formats: tuple[OutputFormat, ...] = found.FORMATS
    return next(form for form in formats if form.name == name)


@cache
def names() -> tuple[str, ...]:
    return tuple(sorted(_family_of()))
