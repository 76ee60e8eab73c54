"""Children that crash, hang, end, print and leave processes behind."""

from __future__ import annotations

import os
import sys
import time

import pytest

from kvdock_conformance.child import _OUTPUT, Child, ChildEndedError, _how

ECHO = """
import json, sys
requests, answers = open(int(sys.argv[1])), open(int(sys.argv[2]), "w")
for line in requests:
    {what}
    number, request = json.loads(line)
    answers.write(json.dumps([number, {{"echo": request}}]) + "\\n"); answers.flush()
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


@pytest.mark.parametrize(("given", "meant"), [(None, "passive"), ("active", "active")])
def test_threads_that_wait_leave_the_processors_to_others_unless_the_user_says_so(
    given: str | None, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    # Its answer has what a line of its own adds to the question.
    with child("import os; line = line.replace('?', os.environ['OMP_WAIT_POLICY'])") as one:
        assert one.ask({"policy": "?"}, 10) == {"echo": {"policy": meant}}


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


@pytest.mark.parametrize(
    "answer",
    [
        '{"echo": 1}',  # no number
        '[7, {"echo": 1}]',  # another question's
        '[1, "passed"]',
        "[1, {}, {}]",
        "no JSON",
        "\\xff\\xfe",
        "",
    ],
)
def test_what_is_no_answer_is_not_taken_for_one(answer: str) -> None:
    with child(f"answers.write('{answer}' + chr(10)); answers.flush()") as one, pytest.raises(ChildEndedError, match="wrote to the kit's"):
        one.ask({"n": 1}, 20)


def test_what_stands_behind_an_answer_is_not_the_next_one() -> None:
    twice = "answers.write(line[:3] + '{}]' + chr(10))"
    with child(twice) as one:
        assert one.ask({"n": 1}, 20) == {}, "the first of two"
        with pytest.raises(ChildEndedError, match=r"wrote to the kit's own pipe: '\[1, \{"):
            one.ask({"n": 2}, 20)


@pytest.mark.parametrize("what", ["while True: answers.write('x' * 65536)", "answers.write('x'); answers.flush(); time.sleep(60)"])
def test_an_answer_without_an_end_is_none(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    with child(f"import time; {what}" if "while" not in what else f"exec({what!r})") as one, pytest.raises(ChildEndedError) as caught:
        one.ask({"n": 1}, 2)
    assert caught.value.how in ("did not end within 2 s", "wrote to the kit's own pipe: '" + "x" * 200 + "'")
    assert time.monotonic() - start < 15


def test_half_a_letter_in_an_answer_becomes_a_question_mark() -> None:
    with child() as one:
        assert one.ask({"text": "a \udc80 \u20ac \U0001f600"}, 10) == {"echo": {"text": "a ? \u20ac \U0001f600"}}, "reports can be written"


def test_output_does_not_fill_the_disk_and_its_end_is_kept() -> None:
    much = "(sys.stdout.write('x' * (40 << 20) + 'the end'), sys.stdout.flush())"
    with child(f"json.loads(line)[0] == 1 and {much}; json.loads(line)[0] == 2 and sys.exit(5)") as one:
        one.ask({"n": 1}, 30)
        on_disk = os.fstat(one._output.fileno()).st_blocks * 512
        # A file system may set megabytes aside behind the end of a file that grows, and counts them as the file's.
        assert on_disk < _OUTPUT, "cut behind the first answer, though 40 MiB were written"
        with pytest.raises(ChildEndedError, match="ended with exit code 5") as caught:
            one.ask({"n": 2}, 30)
    assert caught.value.output.endswith("xxxthe end")
    assert len(caught.value.output) <= 6000


def test_what_a_child_writes_while_its_output_is_cut_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdock_conformance.child._OUTPUT", 1 << 16)
    count = "import itertools, os\nfor n in itertools.count(): os.write(1, b'%d\\n' % n)"
    with Child((sys.executable, "-I", "-c", count)) as one:
        cuts, deadline = 0, time.monotonic() + 20
        while cuts < 50 and time.monotonic() < deadline:
            one._cut_output()
            cuts += os.fstat(one._output.fileno()).st_size > 1 << 16
            numbers = [int(line) for line in one._end_of_output().split(b"\n")[1:-1]]  # the first and the last may be cut
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    assert cuts == 50


@pytest.mark.parametrize(
    ("code", "how"),
    [
        (None, "closed its pipe and did not end"),
        (0, "ended with exit code 0"),
        (-11, "crashed with SIGSEGV"),
        (-9, "crashed with SIGKILL, as when memory runs out"),
        (-40, "crashed with signal 40"),
    ],
)
def test_every_end_has_words(code: int | None, how: str) -> None:
    assert _how(code) == how


def test_workers_that_are_ended_as_soon_as_they_are_started_are_ended() -> None:
    start = time.monotonic()
    for _ in range(20):
        Child().close()
    assert time.monotonic() - start < 20


def test_closing_ends_the_child_gives_back_its_descriptors_and_may_be_repeated() -> None:
    before = set(os.listdir("/proc/self/fd"))
    one = child()
    pid = one.ask({"n": 1}, 10) and one._process.pid
    one.close()
    one.close()
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
