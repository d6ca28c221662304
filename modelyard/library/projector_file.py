"""The projector of a GGUF model (mmproj): where it is, and what it encodes. Nothing is loaded."""

from __future__ import annotations

from pathlib import Path

from modelyard.core.errors import ModelyardError
from modelyard.library import variants
from modelyard.library.gguf import read_contents
from modelyard.library.model_files import locate_model_file


def beside(model: Path) -> Path | None:
    """The projector in the model's folder; the best if there are several."""
    try:
        sizes = {file.name: file.stat().st_size for file in model.parent.glob("*.gguf")}
    except OSError:
        return None
    choice = variants.choose_projector(sizes, variants.ModelVariant("", (model.name,), 0))
    return model.parent / choice.file if choice else None


def locate(setting: str | bool | None, model: Path) -> Path | None:
    """The file that the setting names; without a setting the one beside the model."""
    if isinstance(setting, str):
        return locate_model_file(setting)
    return None if setting is False else beside(model)


def encoded_kinds(projector: Path) -> tuple[str, ...]:
    """Of image and audio, those that it encodes; none if it is not a projector."""
    try:
        metadata, _ = read_contents(projector, lists="none")
    except (ModelyardError, OSError):
        return ()
    if metadata.get("general.architecture") != "clip":
        return ()
    keys = {"image": "clip.has_vision_encoder", "audio": "clip.has_audio_encoder"}
    return tuple(kind for kind, key in keys.items() if metadata.get(key))
