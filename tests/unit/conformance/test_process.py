"""How a process that has used a backend ends, and what it leaves behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvdock_conformance.checking import fresh, process
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.fresh import check_ending, check_import_is_light, check_settings_of_import, check_without_assertions
from kvdock_conformance.checking.target import Target


@pytest.fixture(scope="module")
def target() -> Target:
    return Target("cpu")


def running(words: str) -> bool:
    """Whether a process has such a command line."""
    found = subprocess.run(["pgrep", "-f", words], capture_output=True, text=True, check=False).stdout.split()
    return bool(found)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param("atexit.register(os._exit, 7)", "expected exit code 0, got exit code 7: the last line", marks=pytest.mark.slow),
        pytest.param("atexit.register(os.abort)", "expected exit code 0, got exit code -6: the last line", marks=pytest.mark.slow),
        pytest.param(
            "threading.Thread(target=time.sleep, args=(600,)).start()", "expected an end within 20 s, got none", marks=pytest.mark.slow
        ),
        (
            "if __name__ == '__main__': subprocess.Popen(['sleep', '613'], start_new_session=True)",
            "processes that it leaves behind, 0.2 s after its end: expected none, got sleep 613",
        ),
    ],
)
def test_a_process_that_does_not_end_well(target: Target, monkeypatch: pytest.MonkeyPatch, line: str, said: str) -> None:
    monkeypatch.setattr(fresh, "SEEDED", [line, "atexit.register(print, 'the last line')"])
    for module in (fresh, process):
        monkeypatch.setattr(module, "GRACE_S", 0.2)
        monkeypatch.setattr(module, "LIMIT_S", 20.0 if "Thread" in line else 150.0)
    check_import_is_light(target, {})  # which is asked of the same process, and has its answer
    with pytest.raises(NonconformanceError) as caught:
        check_ending(target, {})
    assert said in str(caught.value)
    assert not running("sleep 613"), "what was left behind is ended"


@pytest.mark.slow
def test_a_process_that_ends_well_may_leave_helpers_a_moment(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "SEEDED", ["subprocess.Popen(['sleep', '2.5'], start_new_session=True)"])
    check_ending(target, {})


@pytest.mark.slow
def test_what_is_wrong_with_the_call_is_for_others_to_say(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "SEEDED", ["def wrong(*args, **kwargs): raise OSError('no')", "kvdock.ops.paged_caching_ = wrong"])
    check_ending(target, {})
    with pytest.raises(NonconformanceError, match="paged_caching_ raised OSError"):
        check_without_assertions(target, {})


def test_an_interpreter_that_ends_before_it_knows_says_what_it_said(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "SEEDED", ["sys.exit('not today')"])
    with pytest.raises(NonconformanceError, match="a fresh interpreter that loads the backend: expected no error, got not today"):
        check_ending(target, {})


def test_changes_at_import_are_told_with_both_values(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "facts_of", lambda target: {"changes": [["torch.get_default_dtype()", "torch.float32", "torch.float16"]]})
    with pytest.raises(NonconformanceError, match=r"torch.get_default_dtype\(\) after import and probe\(\): expected torch.float32, got"):
        check_settings_of_import(target, {})
    monkeypatch.setattr(fresh, "facts_of", lambda target: {"changes": []})
    check_settings_of_import(target, {})


def test_marks_are_found_in_the_environment_only(tmp_path: Path) -> None:
    assert process._marked("a mark that no process has") == {}
    with subprocess.Popen(["sleep", "60"], env={process.MARK: "this one"}) as one:
        while not (found := process._marked("this one")):
            assert one.poll() is None
        assert found == {one.pid: "sleep 60"}
        process._end(found)
        assert one.wait(10) == -9
    process._end({one.pid: "gone"})
