"""The tokens of images before a model is loaded: its own processor counts them in a process of vLLM's interpreter.

Only the processor's files are read, not the weights. Importing its libraries takes seconds, so the process stays for a
while, and an image that was counted is not counted again.
"""

from __future__ import annotations

import atexit
import base64
import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, Timer
from typing import Any

from modelyard.core.engine import Media
from modelyard.core.errors import InvalidRequest, Unavailable, Unimplemented, Unsupported
from modelyard.processes.parent_death import die_with_parent
from modelyard_vllm import processor_script
from modelyard_vllm.model_folder import find_folder
from modelyard_vllm.options import VllmOptions, processor_settings

_ANSWER_S = 120.0  # importing the libraries included, on a busy machine
_IDLE_S = 300.0
_MAX_COUNTS = 4096
_SCRIPT = Path(processor_script.__file__)


class ProcessorProcess:
    """Counts for one model. Calls come from any thread, one at a time."""

    def __init__(self, python: str, folder: Path, settings: dict[str, Any], *, trust: bool = False) -> None:
        arguments = json.dumps({"folder": str(folder), "settings": settings, "trust": trust})
        # As text: the folder of the file would be searched for the modules that its libraries import.
        self._command = [python, "-c", _SCRIPT.read_text("utf-8"), arguments]
        self._lock = Lock()
        self._process: subprocess.Popen[str] | None = None
        self._idle: Timer | None = None
        self._counts: OrderedDict[str, int] = OrderedDict()  # by hash, the most recently used last

    def count(self, images: Sequence[Media]) -> list[int]:
        with self._lock:
            new = {each.sha256: each.data for each in images if each.sha256 not in self._counts}
            if new:
                encoded = [base64.b64encode(data).decode() for data in new.values()]
                self._counts.update(zip(new, self._ask({"images": encoded}), strict=True))
            found = []
            for each in images:
                self._counts.move_to_end(each.sha256)
                found.append(self._counts[each.sha256])
            while len(self._counts) > _MAX_COUNTS:
                self._counts.popitem(last=False)
            return found

    def _ask(self, question: dict[str, Any]) -> list[int]:
        process = self._started()
        guard = Timer(_ANSWER_S, process.kill)
        guard.daemon = True
        guard.start()
        line = ""
        to, answers = process.stdin, process.stdout
        if to is not None and answers is not None:
            with suppress(OSError):  # it has ended, and may have said why
                to.write(json.dumps(question) + "\n")
                to.flush()
            line = answers.readline()
        guard.cancel()
        if not line:
            self._end()
            raise Unavailable("the image processor ended before it had counted the tokens")
        return self._checked(json.loads(line))

    def _checked(self, reply: dict[str, Any]) -> list[int]:
        if "counts" in reply:
            counts: list[int] = reply["counts"]
            return counts
        if reply["of"] == "image":
            raise InvalidRequest(reply["error"], code="invalid_image")
        self._end()
        raise Unimplemented(
            f"the tokens of images can be counted once the model is loaded: its image processor fails: {reply['error']}"
        )

    def _started(self) -> subprocess.Popen[str]:
        if self._idle is not None:
            self._idle.cancel()
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
            self._process = subprocess.Popen(  # noqa: S603 - the model's own interpreter
                die_with_parent(self._command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd="/",  # it is searched for modules
                env=environment,
            )
        self._idle = Timer(_IDLE_S, self.close)
        self._idle.daemon = True
        self._idle.start()
        return self._process

    def close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


_processes: dict[str, ProcessorProcess] = {}
_processes_lock = Lock()


def count_image_tokens(options: VllmOptions, media: Sequence[Media], python: str | None = None) -> list[int]:
    """The tokens that each image adds to a prompt that has its placeholder."""
    if any(each.kind != "image" for each in media):
        raise Unsupported("this engine reads text and images", code="modality_unsupported")
    folder = find_folder(options.model_name)
    if folder is None:
        raise Unimplemented(
            f"the tokens of images can be counted once {options.model_name!r} is loaded: it is not on this machine"
        )
    return _process_of(python or sys.executable, folder, options).count(media)


def _process_of(python: str, folder: Path, options: VllmOptions) -> ProcessorProcess:
    settings = processor_settings(options)
    key = json.dumps([python, str(folder), settings, options.vllm_trust_remote_code], sort_keys=True, default=str)
    with _processes_lock:
        if key not in _processes:
            _processes[key] = ProcessorProcess(python, folder, settings, trust=options.vllm_trust_remote_code)
        return _processes[key]


@atexit.register
def close_all() -> None:
    with _processes_lock:
        found = list(_processes.values())
        _processes.clear()
    for each in found:
        each.close()
