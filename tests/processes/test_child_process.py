"""Child processes: output, exit, signals and orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.processes.child_process import ChildProcess, OutputTail, describe_exit, last_words


def test_only_the_last_lines_are_kept() -> None:
    tail = OutputTail(max_lines=2)
    tail.feed(b"a\nb\nc\nd\n")
    assert tail.lines() == ["c", "d"]


def test_an_unfinished_line_comes_last() -> None:
    tail = OutputTail(max_lines=2)
    tail.feed(b"one\ntwo\nerror: no mem")
    assert tail.lines() == ["one", "two", "error: no mem"]
    tail.feed(b"ory\n")
    assert tail.tail(1) == "error: no memory"


def test_a_long_line_is_cut_and_the_next_one_is_complete() -> None:
    tail = OutputTail(max_line=5)
    for _ in range(1000):
        tail.feed(b"xyz")
    tail.feed(b"\nnext\n")
    assert tail.lines() == ["xyzxy", "next"]


def test_carriage_returns_are_stripped_and_invalid_utf8_is_replaced() -> None:
    tail = OutputTail()
    tail.feed(b"windows\r\n\xff\xfe\n\n")
    assert tail.lines() == ["windows", "\ufffd\ufffd", ""]


def test_an_empty_tail_is_empty() -> None:
    tail = OutputTail()
    tail.feed(b"a\n")
    assert (tail.tail(0), OutputTail().tail(5)) == ("", "")


@given(st.lists(st.binary(max_size=12), max_size=12))
@settings(deadline=None, max_examples=100)
def test_the_chunking_of_the_bytes_makes_no_difference(bits: list[bytes]) -> None:
    cut, whole = OutputTail(3, 6), OutputTail(3, 6)
    for bit in bits:
        cut.feed(bit)
    whole.feed(b"".join(bits))
    assert cut.lines() == whole.lines()


PYTHON = [sys.executable, "-I", "-S", "-c"]  # starts in a fraction of the time
WAITS = "import signal, sys; print('up', flush=True); signal.pause()"
IGNORES_SIGTERM = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile 1: signal.pause()"
)


async def started(code: str) -> ChildProcess:
    return await ChildProcess.start([*PYTHON, code])


async def until_up(child: ChildProcess) -> None:
    async with asyncio.timeout(60):
        while "up" not in child.log.lines():  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(0.001)


async def test_output_and_exit_code_are_available_after_the_exit() -> None:
    child = await started("import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)")
    assert await child.ended == 3
    assert sorted(child.log.lines()) == ["one", "two"]


async def test_the_child_gets_exactly_the_given_environment() -> None:
    child = await ChildProcess.start(
        [*PYTHON, "import os; print(os.environ.get('A'), os.environ.get('HOME'))"], {"A": "b"}
    )
    await child.ended
    assert child.log.lines() == ["b None"]


async def test_stop_sends_sigterm_and_is_idempotent() -> None:
    child = await started(WAITS)
    await until_up(child)
    assert await child.stop() == -signal.SIGTERM
    assert await child.stop() == -signal.SIGTERM
    assert not psutil.pid_exists(child.pid)


async def test_stop_kills_a_child_that_ignores_sigterm() -> None:
    child = await started(IGNORES_SIGTERM)
    await until_up(child)
    assert await child.stop(grace=0.01) == -signal.SIGKILL


async def test_a_death_resolves_ended() -> None:
    child = await started(WAITS)
    await until_up(child)
    os.kill(child.pid, signal.SIGKILL)
    assert await child.ended == -signal.SIGKILL
    assert repr(child) == f"<ChildProcess {child.pid} ended>"


WITH_GRANDCHILD = """
import subprocess, sys
argv = [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]
grandchild = subprocess.Popen(argv, start_new_session={new_session})
print(grandchild.pid, flush=True)
print("up", flush=True)
"""


async def test_grandchildren_in_the_group_are_killed() -> None:
    child = await started(WITH_GRANDCHILD.format(new_session=False) + "import signal; signal.pause()")
    await until_up(child)
    grandchild = psutil.Process(int(child.log.lines()[0]))
    os.kill(child.pid, signal.SIGKILL)
    assert await child.ended == -signal.SIGKILL
    await asyncio.to_thread(grandchild.wait, 60)


async def test_a_grandchild_that_holds_the_output_open_does_not_delay_the_exit_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("modelyard.processes.child_process._DRAIN_S", 0.05)
    child = await started(WITH_GRANDCHILD.format(new_session=True))
    assert await child.ended == 0
    grandchild = psutil.Process(int(child.log.lines()[0]))
    try:
        assert grandchild.is_running()
    finally:
        grandchild.kill()
        await asyncio.to_thread(grandchild.wait, 60)


async def test_a_missing_program_is_reported_in_the_output() -> None:
    child = await ChildProcess.start(["/no/such/program"])
    assert await child.ended == 1
    assert child.log.lines() == ["cannot start /no/such/program: No such file or directory"]


async def test_cancelling_a_wait_does_not_cancel_ended() -> None:
    child = await started(WAITS)
    waiting = asyncio.create_task(asyncio.wait({child.ended}))
    await asyncio.sleep(0)
    waiting.cancel()
    assert await child.stop() < 0


async def test_a_failed_assertion_of_llama_cpp_is_reported_by_its_own_line() -> None:
    """Without GGML_NO_BACKTRACE a debugger would write its own output behind it."""
    program = """
from ctypes import c_char_p, c_int
from modelyard import libllama
abort = libllama.load().raw.ggml_abort
abort.argtypes = [c_char_p, c_int, c_char_p, c_char_p]
abort(b"/build/ggml/src/ggml.c", 7, b"GGML_ASSERT(%s) failed", b"n_seqs > 0")
"""
    child = await ChildProcess.start([sys.executable, "-c", program], dict(os.environ))
    assert await child.ended == -signal.SIGABRT
    assert last_words(child.log.lines(), 20) == "ggml.c:7: GGML_ASSERT(n_seqs > 0) failed"
    assert len(child.log.lines()) <= 2


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-9, "was killed by SIGKILL"),
        (-99, "was killed by signal 99"),
    ],
)
def test_exit_codes_are_described(code: int, words: str) -> None:
    assert describe_exit(code) == words


PARENT = f"""
import asyncio, sys
from modelyard.processes.child_process import ChildProcess

async def main():
    child = await ChildProcess.start([sys.executable, "-I", "-S", "-c", {WAITS!r}])
    while "up" not in child.log.lines():
        await asyncio.sleep(0.001)
    print(child.pid, flush=True)
    await child.ended

asyncio.run(main())
"""


def test_a_child_dies_with_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(60)
