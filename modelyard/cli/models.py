"""`modelyard models`: the models of a configuration and the library of model files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from modelyard.cli.config import known_window, loaded_when
from modelyard.cli.console import (
    CommandGroup,
    ConfigOption,
    JsonOption,
    complete_library,
    err,
    load_or_exit,
    out,
    print_json,
    print_table,
    run_or_exit,
)
from modelyard.core.errors import NotFound

if TYPE_CHECKING:
    from modelyard.config.library_models import LibraryModel
    from modelyard.config.settings import Config
    from modelyard.library.model_files import LibraryEntry
    from modelyard.library.models import Converter, FileRow
    from modelyard.library.progress import ProgressReporter
    from modelyard.router.settings import ModelSettings

models_app = CommandGroup(help="The models of a configuration, and the library of model files.")


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
def list_models(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the models of the configuration and of the library: engine, size, quantization and windows.

    [bold]modelyard models show NAME[/bold] tells more about one.
    """
    from modelyard.library import models
    from modelyard.library.default_model import is_default
    from modelyard.server.can_run import unrunnable_models

    loaded = load_or_exit(config, quiet=as_json)
    catalog = loaded.config.router().catalog
    contexts: dict[str, list[dict[str, Any]]] = {}
    for cache in catalog.caches.values():
        found = {"id": cache.name, "window": known_window(cache, catalog), "parallel": cache.info.parallel}
        contexts.setdefault(cache.model, []).append(found)
    rows, faults = [], unrunnable_models(loaded.config, set_up=False)
    for m in catalog.models.values():
        if m.name in loaded.config.library_models:
            continue
        file, aliases = models.file_row(m.settings.path), ", ".join(m.settings.aliases)
        cannot = f"cannot run here: {faults[m.name]}" if m.name in faults else ""
        notes = (cannot or file.note, f"also {aliases}" if aliases else "", m.settings.description)
        rows.append(_ListedModel(m.name, m.backend, loaded_when(m), file, "; ".join(filter(None, notes))))
    reasons = {model.entry.name: model.reason for model in run_or_exit(_read_library) if model.table is None}
    for entry in run_or_exit(models.list_models):
        if entry.name in catalog.models and is_default(catalog.models[entry.name].settings.path):
            continue  # the demo is in the configuration
        file = models.file_row(entry.path)
        if entry.name in loaded.config.library_models:
            served = loaded.config.library_models[entry.name]
            engine, note = loaded.config.models[entry.name].backend or "", file.note
            if served.task == "chat" and not served.is_chat:
                note = "; ".join(filter(None, (note, "no chat template: bare prompts only")))
        else:
            engine, note = "", reasons.get(entry.name, "the configuration has its own use for the name")
            note = note if loaded.config.library else file.note
        rows.append(_ListedModel(entry.name, engine, "", file, note, entry.source))
    if as_json:
        print_json([row.as_json(contexts.get(row.name, [])) for row in rows])
        return
    for source, columns in (
        ("", ("model", "engine", "loaded", "size", "quant", "context", "")),
        ("library", ("library", "engine", "", "size", "quant", "context", "")),
    ):
        if shown := [row.as_row(contexts.get(row.name, [])) for row in rows if bool(row.source) == bool(source)]:
            print_table(columns, shown)


class _ListedModel(msgspec.Struct):
    """`source` is where a model of the library comes from; `engine` is empty if it is not served."""

    name: str
    engine: str
    loaded: str
    file: FileRow
    note: str
    source: str = ""

    def as_row(self, caches: list[dict[str, Any]]) -> tuple[str, ...]:
        context = ", ".join(f"{cache['parallel']} × {cache['window'] or 'unknown'}" for cache in caches)
        engine = self.engine or "not served"
        return (self.name, engine, self.loaded, self.file.size, self.file.quant, context, self.note)

    def as_json(self, caches: list[dict[str, Any]]) -> dict[str, Any]:
        about = {"id": self.name, "engine": self.engine or None, "loaded": self.loaded or None, "source": self.source}
        file = {"size_bytes": self.file.bytes or None, "quantization": self.file.quant}
        return {**about, **file, "caches": caches, "note": self.note}


@models_app.command("adopt")
def adopt(
    names: Annotated[list[str] | None, typer.Argument(help="What to add; default: only list what there is.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="Add everything that is found.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Offer the models that Ollama, LM Studio and the Hugging Face cache have on this machine, without copying them."""
    from modelyard.library import elsewhere

    found = elsewhere.find_models()
    for name in [model.name for model in found] if all_ else names or ():
        out.print(f"{escape(pull_model(name).name)} is in the library; its files stay where they are.", soft_wrap=True)
    if as_json:
        print_json(found)
    elif not found:
        out.print("Ollama, LM Studio and the Hugging Face cache have no models here.", highlight=False)
    elif not names and not all_:
        print_table(("model", "of", "file"), [(model.name, model.program, str(model.path)) for model in found])
        err.print("[dim]modelyard models adopt NAME adds one, --all adds all; nothing is copied[/dim]", highlight=False)


@models_app.command("search")
def search(
    words: Annotated[
        list[str] | None, typer.Argument(help="What to look for: a name, chat, code, vision, tools.")
    ] = None,
    hub: Annotated[bool, typer.Option("--hub", help="Search the Hugging Face hub as well.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Search the catalogue of models that are worth a first try, and which of them suit this machine."""
    from modelyard.config.library_models import machine_budget
    from modelyard.core.units import format_size
    from modelyard.library import catalogue
    from modelyard.library.hub import HubClient

    text, budget = " ".join(words or ()), machine_budget()
    found = catalogue.search(text)
    more = run_or_exit(lambda: HubClient().search(text, 20)) if hub else []
    suits = {model.name: [use for use in model.uses if catalogue.fits(model, use, budget)] for model in found}
    if as_json:
        rows = [{**msgspec.to_builtins(model), "suits": suits[model.name]} for model in found]
        print_json({"catalogue": rows, "hub": [msgspec.to_builtins(model) for model in more]})
        return
    if not found and not more:
        raise typer.Exit(run_or_exit(_nothing_found, text))
    if found:
        columns = ("name", "to fetch", "window", "for", "suits this machine for", "model")
        print_table(
            columns,
            [
                (m.name, format_size(m.size), f"{m.window:,}", ", ".join(m.uses), ", ".join(suits[m.name]), m.title)
                for m in found
            ],
        )
    if more:
        print_table(("on the hub", "downloads"), [(model.repo, f"{model.downloads:,}") for model in more])
    err.print("[dim]modelyard pull NAME fetches one[/dim]", highlight=False)


def _nothing_found(text: str) -> NoReturn:
    from modelyard.library.models import did_you_mean

    hint = did_you_mean(text, []) or ". The hub has more: modelyard models search --hub " + text
    raise NotFound(f"the catalogue has nothing for {text!r}{hint}")


@models_app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="A model's name or alias, or a name in the library.")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain one model: file, caches, chat template, output format, and where each comes from."""
    rows = run_or_exit(explain_model, load_or_exit(config, quiet=as_json).config, name)
    if as_json:
        print_json(dict(rows))
        return
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
    from modelyard import plugins
    from modelyard.library import models

    def run() -> LibraryEntry:
        converter: Converter = plugins.load("converters", to)
        return converter(name, out=target, quantization=quantization, progress=make_progress())

    entry = run_or_exit(run)
    out.print(f"{escape(entry.name)} is in the library: {escape(entry.path)}", soft_wrap=True)
    if to == "ct2":
        out.print("To serve it, add to modelyard.toml:")
        out.print(models.config_snippet(entry), markup=False, highlight=False, soft_wrap=True)
