"""`modelyard optimize` from its options to the written file: plan, run, save, print, apply.

Of the user's configuration files only the keys that change are written, with a backup beside them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape

from modelyard.config import sources
from modelyard.config.file_editor import SetValue, decode, edit_text, write_with_backup
from modelyard.config.load import EMBEDDED_DEFAULTS, load_config
from modelyard.config.normalize import normalize_layer
from modelyard.config.problems import ConfigLayer, ConfigPath, format_path, path_exists
from modelyard.config.settings import LoadedConfig
from modelyard.core.engine import AvailableMemory
from modelyard.core.errors import Conflict, InvalidRequest, NotFound, Unavailable
from modelyard.core.knobs import Value
from modelyard.library.cache_dir import cache_dir
from modelyard.server.memory_estimate import available_memory
from modelyard_bench import drawing
from modelyard_bench.results import parse_duration
from modelyard_optimize import goals, report
from modelyard_optimize.optimizer import Optimizer, OptimizerPlan, QualityBounds, TrialHistory, fingerprint
from modelyard_optimize.report import Report, TerminalReport, plot
from modelyard_optimize.search import SearchResult
from modelyard_optimize.tuned_model import TunedModel, option_aliases

# --- writing a recommendation -----------------------------------------------------------------------------------------

KeyPath = tuple[str, ...]


def write_recommendation(
    loaded: LoadedConfig, changes: Mapping[ConfigPath, Value], backends: Mapping[str, str | None]
) -> dict[Path, Path]:
    """The changed files, each with its backup. A file is replaced only after its new text was read back."""
    files = writable_files(loaded)
    layers = [normalize_layer(str(file), sources.read_file(file))[0] for file in files]
    edits: dict[Path, dict[KeyPath, Any]] = {}
    for path, value in changes.items():
        file, key_path = _location(files, layers, path, backends)
        edits.setdefault(file, {})[key_path] = value
    if edits and not any(layer.data.get("models") for layer in layers):
        edits[files[-1]] = {**_embedded_defaults(), **edits[files[-1]]}
    return {file: _write(file, wanted) for file, wanted in edits.items()}


def writable_files(loaded: LoadedConfig) -> list[Path]:
    files = [source for source in loaded.sources if isinstance(source, Path)]
    if not files:
        raise Conflict(
            "there is no configuration file to write to: leave --apply out and save the recommendation as "
            "modelyard.toml, or name a file with --config"
        )
    return files


def overridden(path: Path | None, changes: Mapping[ConfigPath, Value], backends: Mapping[str, str | None]) -> list[str]:
    """The written values that do not take effect, because the environment has priority."""
    config = load_config(path).config.model_dump(exclude_unset=True)
    found = []
    for loc, value in changes.items():
        paths = [option_path for option_path in _alternative_paths(loc, backends) if path_exists(config, option_path)]
        if not paths or _value_at(config, paths[0]) != value:
            found.append(format_path(loc))
    return found


def _location(
    files: Sequence[Path], layers: Sequence[ConfigLayer], path: ConfigPath, backends: Mapping[str, str | None]
) -> tuple[Path, KeyPath]:
    """The file that has the key, else the one that has its section, else the last; and the path as spelled there."""
    newest_first = list(zip(files, layers, strict=True))[::-1]
    for file, layer in newest_first:
        for other in _alternative_paths(path, backends):
            if layer.has(other):
                return file, tuple(map(str, layer.original_path(other)))
    for file, layer in newest_first:
        if layer.has(path[:-1]):
            return file, tuple(map(str, layer.original_path(path)))
    return files[-1], tuple(map(str, path))


def _alternative_paths(path: ConfigPath, backends: Mapping[str, str | None]) -> list[ConfigPath]:
    """An engine's option may have another of its names in the file, or be under `options`."""
    section, name, key = path
    if section != "models":
        return [path]
    names = [str(key), *sorted(option_aliases(backends.get(str(name)), str(key)) - {str(key)})]
    return [option_path for n in names for option_path in ((section, name, n), (section, name, "options", n))]


def _embedded_defaults() -> dict[KeyPath, Any]:
    """The complete built-in model: a file that names a model replaces all of the built-in configuration."""
    flat: dict[KeyPath, Any] = {}
    for section in ("models", "caches"):
        for name, table in EMBEDDED_DEFAULTS[section].items():
            flat |= {(section, name, key): value for key, value in table.items()}
    return flat | {("routes",): EMBEDDED_DEFAULTS["routes"]}


def _write(file: Path, edits: Mapping[KeyPath, Any]) -> Path:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise Unavailable(f"{file} cannot be read: {error.strerror}") from error
    text = edit_text(file.suffix.lower(), decode(content), [SetValue(path, value) for path, value in edits.items()])
    return write_with_backup(file, text, content) or file


def _value_at(table: Any, path: ConfigPath) -> Any:
    for key in path:
        table = table[key]
    return table


# --- the command ------------------------------------------------------------------------------------------------------

_MIB = 2**20
_INTERRUPTED, _NOTHING_MEASURED = 130, 1
_BUSY = 0.5  # programs per processor in the last minute
_MEMORY_SHARE = 0.9  # of the free memory that one trial may use


class OptimizeOptions(Struct, frozen=True, kw_only=True):
    """The command's options as typed."""

    config: Path | None = None
    model: str | None = None
    goal: str = "chat"
    budget: str = "10m"
    apply: bool = False
    streams: int | None = None
    slack: str = "5%"
    loss: str = "1%"
    memory: int | None = None
    fresh: bool = False
    seed: int = 0
    json: bool = False
    plot: Path | None = None


def optimize(
    loaded: LoadedConfig, options: OptimizeOptions, out: Console, err: Console, folder: Path | None = None
) -> int:
    """The exit code."""
    folder = folder or cache_dir() / "tune"
    plan = make_plan(options)
    if options.apply:  # fail now, not after the run
        writable_files(loaded)
    if options.plot is not None:
        drawing.check_file(options.plot)
    available = available_memory()
    model = TunedModel(loaded.config, _model_name(loaded, options.model), plan.goal, available)
    if plan.memory is None:
        plan = replace(plan, memory=int(_MEMORY_SHARE * available.ram_free))
    history = _history(model, plan, available, folder, fresh=options.fresh)
    if len(history):
        err.print(f"resuming an earlier run: {len(history)} trials are known (--fresh starts over)", soft_wrap=True)
    load = psutil.getloadavg()[0] / (psutil.cpu_count() or 1)
    plan = replace(plan, crowding=max(1.0, load))
    if load > _BUSY:
        busy = f"the machine is busy: {load:.1f} programs want each of its processors"
        err.print(f"[yellow]warning[/yellow] {busy}, so that more rounds are needed", soft_wrap=True)
    terminal = TerminalReport(plan.goal, model.current, plan.budget_s, out, err)
    run = Optimizer(model, plan, history, terminal)
    try:
        with terminal.progress:
            result, finished = asyncio.run(run.run()), True
    except KeyboardInterrupt:  # the running trial has ended with all its processes
        result, finished = run.interim_result(), False
    found = report.make_report(run, result, finished=finished)
    file = report.save(found, folder)
    _show(found, file, options, terminal, err)
    try:
        if options.apply and finished:
            report.write(replace(found, applied=_apply(loaded, options, model, result, found, err)), file)
    finally:
        if options.json:  # last, because it also contains what was written
            out.print(file.read_text("utf-8"), markup=False, highlight=False, soft_wrap=True, end="")
    if not finished:
        err.print("run the same command again to resume; --fresh starts over", soft_wrap=True)
    return _INTERRUPTED if not finished else 0 if run.measurements else _NOTHING_MEASURED


def make_plan(options: OptimizeOptions) -> OptimizerPlan:
    rise = parse_share(options.loss)
    return OptimizerPlan(
        goal=goals.parse_goal(options.goal),
        budget_s=parse_duration(options.budget),
        slack=parse_share(options.slack),
        streams=options.streams,
        seed=options.seed,
        memory=None if options.memory is None else options.memory * _MIB,
        bounds=QualityBounds(rise, 2 * rise),
    )


def parse_share(text: str) -> float:
    """`5%` and `0.05` are the same."""
    stripped = text.strip()
    try:
        value = float(stripped.removesuffix("%")) / (100 if stripped.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise InvalidRequest(f"{text!r} is not a share such as 5% or 0.05")
    return value


def _model_name(loaded: LoadedConfig, name: str | None) -> str:
    models = loaded.config.models
    if (name := name or loaded.first_model) is None:
        raise NotFound("the configuration has no models")
    found = loaded.config.router().catalog.find(name)
    if found is None:
        raise NotFound(f"there is no model {name!r}; there are {', '.join(models)}")
    return found.model


def _history(
    model: TunedModel, plan: OptimizerPlan, available: AvailableMemory, folder: Path, *, fresh: bool
) -> TrialHistory:
    """One file for everything that outcomes depend on; another budget or quality bound continues the same file."""
    key = fingerprint(
        model.trial_config(model.current),
        msgspec.to_builtins(goals.trial_load(plan.goal, plan.streams)),
        [plan.goal, plan.seed, psutil.cpu_count(), sorted(available.gpus)],
    )
    history = TrialHistory(folder / f"{key}.jsonl")
    if fresh:
        history.clear()
    return history


def _apply(
    loaded: LoadedConfig, options: OptimizeOptions, model: TunedModel, result: SearchResult, found: Report, err: Console
) -> tuple[str, ...]:
    """The files that were written."""
    if not result.better:
        err.print(f"[yellow]nothing is written:[/yellow] {escape(found.verdict)}", soft_wrap=True)
        return ()
    changes = model.changes(result.best)
    backends = {name: settings.backend for name, settings in loaded.config.models.items()}
    backups = write_recommendation(loaded, changes, backends)
    for file, backup in backups.items():
        err.print(f"written to {escape(str(file))}; backup: {escape(str(backup))}", soft_wrap=True)
    for path in overridden(options.config, changes, backends):
        err.print(f"[yellow]warning[/yellow] {escape(path)} is also set in the environment, which wins", soft_wrap=True)
    return tuple(map(str, backups))


def _show(found: Report, file: Path, options: OptimizeOptions, terminal: TerminalReport, err: Console) -> None:
    chart = plot(found)
    drawing.save(chart, file.with_suffix(".svg"))
    if not options.json:
        terminal.show(found)
    if options.plot is not None:
        drawing.save(chart, options.plot)
    err.print(f"[dim]saved in {escape(str(file))}[/dim]", soft_wrap=True)
