"""llama.cpp's complaints reach the thread that asked, and nobody else."""

from __future__ import annotations

from threading import Thread

from modelyard.tokenizer import llama_log

ERROR, INFO, CONTINUED = 4, 2, 5


def test_first_complaint_is_the_reason_without_its_speaker() -> None:
    llama_log.forget()
    llama_log._listen(INFO, b"load: all fine\n", None)
    llama_log._listen(ERROR, b"llama_model_load: error loading model: unknown model architecture: 'x'\n", None)
    llama_log._listen(CONTINUED, b" more", None)
    llama_log._listen(ERROR, b"llama_model_load_from_file_impl: failed to load model\n", None)
    assert llama_log.reason() == "unknown model architecture: 'x'"


def test_what_was_forgotten_is_no_reason() -> None:
    llama_log._listen(ERROR, b"old: bad\n", None)
    llama_log.forget()
    assert llama_log.reason() == "llama.cpp gave no reason"


def test_threads_do_not_hear_each_other() -> None:
    llama_log.forget()
    other = Thread(target=lambda: llama_log._listen(ERROR, b"other: bad \xff\n", None))
    other.start()
    other.join()
    assert llama_log.reason() == "llama.cpp gave no reason"


def test_no_text_at_all_is_survived() -> None:
    llama_log.forget()
    llama_log._listen(ERROR, None, None)
    assert llama_log.reason() == "llama.cpp gave no reason"
