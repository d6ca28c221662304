"""`modelyard import`: a configuration of another program becomes one of Modelyard's, and says what is different.

Llama-Bridge, Infer Server, llm-pool   TOML or JSON        `seeds`
llama-swap                             config.yaml         `llama_swap`
LiteLLM                                config.yaml         `litellm`
Ollama, LM Studio                      Modelfile, folder   `ollama`
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from modelyard.cli.console import err, fail, out, print_problem
from modelyard.core.errors import Conflict, InvalidRequest, ModelyardError, NotFound

if TYPE_CHECKING:
    from modelyard_import.draft import Draft

_COLOURS = {"changed": "yellow", "dropped": "yellow", "to do": "red"}


def import_config(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE…", help="The files of one program, or Ollama's or LM Studio's folder.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("modelyard.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write a Modelyard file from the configuration of another program.

    It reads Llama-Bridge, Infer Server, llm-pool, llama-swap, LiteLLM, Ollama (a Modelfile or its models folder) and
    LM Studio (its models folder). It prints each setting whose meaning changes or that has no counterpart. Secrets are
    not copied, and model files are used where they are.
    """
    from modelyard.config.load import load_config
    from modelyard.config.problems import ConfigError

    try:
        if output.exists() and not force:
            raise Conflict(f"{output} exists: --force replaces it, --output FILE writes another one")
        kind, draft = read(files)
        text = write(kind, files, draft)
        given = dict.fromkeys(draft.variables, "given later")  # what they miss is said above
        loaded = load_config(output, env=given, drafts={Path.cwd() / output: text})
    except ConfigError as error:
        for problem in error.problems:
            print_problem(problem)
        raise typer.Exit(1) from None
    except ModelyardError as error:
        fail(error)
    output.write_text(text, "utf-8")
    for remark in draft.remarks:
        colour = _COLOURS[remark.kind]
        out.print(f"[{colour}]{remark.kind}[/] {escape(f'{remark.setting}: {remark.text}')}", soft_wrap=True)
    for problem in loaded.problems:
        print_problem(problem)
    models = len(loaded.config.models)
    done = f"{escape(str(output))}: {models} model{'s' * (models != 1)} of {kind}; next: modelyard check {output}"
    err.print(done, soft_wrap=True)


def read(files: Sequence[Path]) -> tuple[str, Draft]:
    """The program, by the content of its files, and what they say."""
    from modelyard_import import litellm, llama_swap, ollama, seeds

    for file in files:
        if not file.exists():
            raise NotFound(f"there is no file or folder {str(file)!r}")
    first = files[0]
    if all(file.suffix.lower() in (".toml", ".json") and file.is_file() for file in files):
        return seeds.read_seeds(files)
    if len(files) > 1:
        raise InvalidRequest("several files are read only for Llama-Bridge, Infer Server and llm-pool")
    if first.is_dir():
        return ollama.read_folder(first)
    if first.suffix.lower() in (".yaml", ".yml"):
        table = _read_yaml(first)
        if litellm.is_litellm(table):
            return "LiteLLM", litellm.read_litellm(table)
        if llama_swap.is_llama_swap(table):
            return "llama-swap", llama_swap.read_llama_swap(table)
        raise InvalidRequest(f"{first} has neither LiteLLM's model_list nor llama-swap's models with their cmd")
    if ollama.is_modelfile(first.read_text("utf-8", errors="replace")):
        return "Ollama", ollama.read_modelfile(first)
    raise InvalidRequest(
        f"{first} is no configuration that can be imported: .toml, .json, .yaml, a Modelfile or a folder"
    )


def _read_yaml(file: Path) -> dict[str, object]:
    import yaml

    try:
        table = yaml.safe_load(file.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} is not valid YAML: {error}") from error
    if not isinstance(table, dict):
        raise InvalidRequest(f"{file} must be a table of settings")
    return table


def write(kind: str, files: Sequence[Path], draft: Draft) -> str:
    """The file's text: the remarks come first, as comments."""
    import tomlkit

    names = ", ".join(file.name for file in files)
    lines = [f"# Written by modelyard import from {kind}: {names}", *(f"# {remark}" for remark in draft.remarks)]
    return "\n".join(lines) + "\n\n" + tomlkit.dumps(draft.data)
