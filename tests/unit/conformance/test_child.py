"""Children that crash, hang, end, print and leave processes behind."""

from __future__ import annotations

import os
import sys
import time

import pytest

from kvdock_conformance.child import Child, ChildEndedError

ECHO = """
import json, sys
requests, answers = open(int(sys.argv[1])), open(int(sys.argv[2]), "w")
for line in requests:
    {what}
    answers.write(json.dumps({{"echo": json.loads(line)}}) + "\\n"); answers.flush()
"""


def child(what: str = "pass") -> Child:
    return Child((sys.executable, "-I", "-c", ECHO.format(what=what)))


def test_questions_are_answered_in_order() -> None:
    with child() as one:
        for number in range(3):
            assert one.ask({"n": number}, 10) == {"echo": {"n": number}}


def test_a_request_longer_than_a_pipe_goes_through() -> None:
    with child() as one:
        text = "x" * 300_000
        assert one.ask({"text": text}, 10) == {"echo": {"text": text}}


def test_what_a_child_prints_is_no_answer() -> None:
    with child("print('{\"echo\": 1}', flush=True); sys.stderr.write('noise')") as one:
        assert one.ask({"n": 1}, 10) == {"echo": {"n": 1}}


@pytest.mark.parametrize(
    ("what", "how"),
    [
        ("import os; os.kill(os.getpid(), 11)", "crashed with SIGSEGV"),
        ("import os; os._exit(3)", "ended with exit code 3"),
        ("sys.exit()", "ended with exit code 0"),
        ("raise OSError('libacme.so')", "ended with exit code 1"),
        ("import os; answers.close(); os.close(requests.fileno()); import time; time.sleep(60)", "closed its pipe and did not end"),
    ],
)
def test_how_a_child_ended_is_said_with_its_output(what: str, how: str) -> None:
    with child(f"print('before it', flush=True); {what}") as one, pytest.raises(ChildEndedError) as caught:
        one.ask({"n": 1}, 20)
    assert caught.value.how == how
    assert caught.value.output.startswith("before it")
    assert str(caught.value) == f"the child that ran the case {how}"


def test_a_child_that_hangs_is_ended_in_time_and_says_where() -> None:
    stack = "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1); time.sleep(60)"
    start = time.monotonic()
    with child(stack) as one, pytest.raises(ChildEndedError, match="did not end within 1 s") as caught:
        one.ask({"n": 1}, 1)
    assert time.monotonic() - start < 10
    assert 'File "<string>"' in caught.value.output, "where it hangs"


def test_a_child_that_reads_nothing_is_ended_in_time() -> None:
    with Child((sys.executable, "-I", "-c", "import time; time.sleep(60)")) as one, pytest.raises(ChildEndedError, match="within 1 s"):
        one.ask({"text": "x" * 300_000}, 1)


def test_a_process_left_behind_holds_nobody_up() -> None:
    # It keeps the pipes and the group: the child's own end is what counts.
    what = "import os; pid = os.fork(); (__import__('time').sleep(60) if pid == 0 else os._exit(4))"
    start = time.monotonic()
    with child(what) as one, pytest.raises(ChildEndedError, match="ended with exit code 4"):
        one.ask({"n": 1}, 30)
    assert time.monotonic() - start < 10


def test_closing_ends_the_child_gives_back_its_descriptors_and_may_be_repeated() -> None:
    before = set(os.listdir("/proc/self/fd"))
    one = child()
    pid = one.ask({"n": 1}, 10) and one._process.pid
    one.close()
    one.close()
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
