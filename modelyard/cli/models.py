"""`modelyard models`: the models of a configuration and the library of model files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from modelyard.cli.config import known_window, loaded_when
from modelyard.cli.console import ConfigOption, complete_library, err, load_or_exit, out, print_table, run_or_exit
from modelyard.core.errors import NotFound

if TYPE_CHECKING:
    from modelyard.config.library_models import LibraryModel
    from modelyard.config.settings import Config
    from modelyard.library.model_files import LibraryEntry
    from modelyard.library.progress import ProgressReporter
    from modelyard.router.settings import ModelSettings

models_app = typer.Typer(help="The models of a configuration, and the library of model files.", no_args_is_help=True)


ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A repository of the hub (owner/repo, owner/repo:Q4_K_M, hf.co/owner/repo or its URL), a GGUF file, a "
        "folder, or a name in the library.",
    ),
]


def pull(
    model: ModelArgument,
    quant: Annotated[
        str | None, typer.Option(help="The quantization, such as Q4_K_M; default: the best that fits the memory.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Its name; default: from its file or repository.")] = None,
) -> None:
    """Fetch a model from the Hugging Face hub, or add a local one to the library. Every server offers it at once."""
    entry = pull_model(model, quant=quant, name=name, update=True)
    out.print(f"{escape(entry.name)} is in the library. Try it: modelyard run {escape(entry.name)}", soft_wrap=True)
    if entry.projector and _lacks_libmtmd():
        out.print("For images in process, compile libmtmd once: modelyard setup --media", soft_wrap=True)
    for served in run_or_exit(_read_library):
        if served.entry.name == entry.name and served.table is None:
            err.print(f"[yellow]warning[/yellow] no engine here can run it: {escape(served.reason)}", soft_wrap=True)


models_app.command("add", help="The same as modelyard pull.")(pull)


def _lacks_libmtmd() -> bool:
    from modelyard import libmtmd

    return libmtmd.find_library() is None


def pull_model(source: str, *, quant: str | None = None, name: str | None = None, update: bool = False) -> LibraryEntry:
    """`library.models.pull` with a progress bar and the memory of this machine. Exits with one line on an error."""
    from modelyard.config.library_models import machine_budget
    from modelyard.library import models

    def work() -> LibraryEntry:
        return models.pull(
            source,
            name=name,
            quant=quant,
            progress=make_progress(),
            budget=machine_budget(),
            folder_budget=machine_budget(of_llama_cpp=False),
            update=update,
        )

    try:
        found: LibraryEntry = run_or_exit(work)
    except KeyboardInterrupt:
        err.print("stopped; what has arrived is kept, and the same command continues there", highlight=False)
        raise typer.Exit(130) from None
    return found


def make_progress() -> ProgressReporter:
    from modelyard.library.progress import ProgressReporter

    return ProgressReporter(err, lambda line: err.print(line, markup=False, highlight=False, soft_wrap=True))


def _read_library() -> list[LibraryModel]:
    from modelyard.config.library_models import read_library_models

    return read_library_models()


@models_app.command("list")
def list_models(config: ConfigOption = None) -> None:
    """List the models of the configuration and of the library: engine, size, quantization and windows.

    [bold]modelyard models show NAME[/bold] tells more about one.
    """
    from modelyard.library import models
    from modelyard.server.can_run import unrunnable_models

    loaded = load_or_exit(config)
    catalog = loaded.config.router().catalog
    contexts: dict[str, list[str]] = {}
    for cache in catalog.caches.values():
        window = known_window(cache, catalog) or "unknown"
        contexts.setdefault(cache.model, []).append(f"{cache.info.parallel} × {window}")
    configured, faults = [], unrunnable_models(loaded.config, set_up=False)
    for m in catalog.models.values():
        if m.name in loaded.config.library_models:
            continue
        file, aliases = models.file_row(m.settings.path), ", ".join(m.settings.aliases)
        cannot = f"cannot run here: {faults[m.name]}" if m.name in faults else ""
        notes = (cannot or file.note, f"also {aliases}" if aliases else "", m.settings.description)
        context = ", ".join(contexts.get(m.name, ()))
        note = "; ".join(filter(None, notes))
        configured.append((m.name, m.backend, loaded_when(m), file.size, file.quant, context, note))
    if configured:
        print_table(("model", "engine", "loaded", "size", "quant", "context", ""), configured)
    reasons = {model.entry.name: model.reason for model in run_or_exit(_read_library) if model.table is None}
    library = []
    for entry in run_or_exit(models.list_models):
        file, context = models.file_row(entry.path), ", ".join(contexts.get(entry.name, ()))
        if entry.name in loaded.config.library_models:
            served = loaded.config.library_models[entry.name]
            engine, note = loaded.config.models[entry.name].backend or "", file.note
            if served.task == "chat" and not served.is_chat:
                note = "; ".join(filter(None, (note, "no chat template: bare prompts only")))
        else:
            engine, note = "not served", reasons.get(entry.name, "the configuration has its own use for the name")
            note = note if loaded.config.library else file.note
        library.append((entry.name, engine, file.size, file.quant, context, note))
    if library:
        print_table(("library", "engine", "size", "quant", "context", ""), library)


@models_app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A model's name or alias, or a name in the library.")],
    config: ConfigOption = None,
) -> None:
    """Explain one model: file, caches, chat template, output format, and where each comes from."""
    rows = run_or_exit(explain_model, load_or_exit(config).config, name)
    table = Table(show_header=False, box=None)
    for label, value in rows:
        table.add_row(f"[bold]{label}[/bold]", escape(value))
    out.print(table)


def explain_model(config: Config, name: str) -> list[tuple[str, str]]:
    """Rows about a model of the configuration, else about one in the library."""
    from modelyard.library import models
    from modelyard.server.memory_estimate import available_memory, describe_memory, estimate_memory
    from modelyard.server.model_definition import define_model

    catalog = config.router().catalog
    if (cache := catalog.find(name)) is not None:
        entry = catalog.models[cache.model]
        rows = [("model", entry.name), ("engine", entry.backend), *models.describe_file(entry.settings.path)]
        if (of_library := config.library_models.get(entry.name)) is not None:
            rows += _library_rows(of_library, entry.settings)
        available = available_memory()
        rows.append(("memory", describe_memory(estimate_memory(entry, available), available)))
        return [*rows, *define_model(entry).notes]
    if (found := models.find_model(name)) is not None:
        return models.describe_entry(found)
    raise NotFound(f"no model {name!r}; there are {', '.join(catalog.names())}")


def _library_rows(model: LibraryModel, settings: ModelSettings) -> list[tuple[str, str]]:
    """What the file, the hub and the memory have decided."""
    decoding = settings.decoding.model_dump(exclude_none=True, exclude_defaults=True)
    sampling = [f"{name} {value:g}" for name, value in decoding.items() if isinstance(value, float | int)]
    rows = [
        ("from", model.entry.source),
        ("projector", model.entry.projector),
        ("quantization chosen", model.entry.choice),
        ("window", model.reason),
        ("sampling", ", ".join(sampling)),
    ]
    return [row for row in rows if row[1]]


@models_app.command("remove")
def remove(
    name: Annotated[str, typer.Argument(help="A name in the library.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove a model from the library. Only files that the library downloaded are deleted."""
    from modelyard.library import models

    entry = models.find_model(name)
    if entry is not None and not yes:
        what = f"Delete {entry.path}" if entry.owned else f"Remove {entry.path} (the file stays)"
        if not typer.confirm(f"{what}?", err=True):
            raise typer.Exit(1)
    run_or_exit(models.remove_model, name)
    out.print(f"{escape(name)} is no longer in the library.")


def rm(
    models: Annotated[list[str], typer.Argument(help="Names in the library.", autocompletion=complete_library)],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove models from the library. Only files that the library downloaded are deleted."""
    for name in models:
        remove(name, yes)


@models_app.command("convert")
def convert(
    name: Annotated[str, typer.Argument(help="A GGUF model: a name in the library, or a path.")],
    to: Annotated[str, typer.Option(help="The kind of folder: hf for Hugging Face, ct2 for CTranslate2.")],
    target: Annotated[Path | None, typer.Option("--out", help="The folder to create; default: in the library.")] = None,
    quantization: Annotated[
        str | None, typer.Option(help="Number format of the weights; default: int8 for ct2, bfloat16 for hf.")
    ] = None,
) -> None:
    """Convert a GGUF model to a Hugging Face or CTranslate2 folder, and add it to the library."""
    from modelyard.library import models
    from modelyard.library.convert import convert as convert_model

    entry = run_or_exit(
        lambda: convert_model(name, to, out=target, quantization=quantization, progress=make_progress())
    )
    out.print(f"{escape(entry.name)} is in the library: {escape(entry.path)}", soft_wrap=True)
    if to == "ct2":
        out.print("To serve it, add to modelyard.toml:")
        out.print(models.config_snippet(entry), markup=False, highlight=False, soft_wrap=True)
