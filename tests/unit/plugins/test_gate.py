from __future__ import annotations

import os
import threading

import pytest

from kvdock.errors import DiscoveryReentryError, PluginError
from kvdock.plugins.gate import Gate


def test_same_thread_may_hold_it_twice_but_not_while_plugins_are_loaded() -> None:
    gate = Gate(1.0, lambda: None)
    with gate.held(), gate.held():
        pass
    with gate.held(), gate.loading():
        gate.watch("import", "acme")
        with pytest.raises(DiscoveryReentryError, match=r"while they are being loaded \(import of acme\)"), gate.held():
            pytest.fail("it let the thread in")
    with gate.held():
        pass


def test_other_thread_waits_and_then_says_so() -> None:
    gate, texts = Gate(0.05, lambda: None), []

    def ask() -> None:
        with pytest.raises(PluginError) as caught, gate.held():
            pytest.fail("it let the thread in")
        texts.append(str(caught.value))

    with gate.held(), gate.loading():
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert texts[0].startswith("another thread has been loading plugins for 0.05 s; it is at: start. Fix: `kvdock doctor`")


def test_what_raises_while_loading_leaves_it_open() -> None:
    gate = Gate(1.0, lambda: None)
    with pytest.raises(ZeroDivisionError), gate.held(), gate.loading():
        raise ZeroDivisionError
    with gate.held():
        pass


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_child_of_a_fork_inside_it_can_unwind_and_come_in_again() -> None:
    told: list[int] = []
    gate = Gate(0.5, lambda: told.append(os.getpid()))
    with gate.held(), gate.loading():
        child = os.fork()
    if child == 0:
        with gate.held():
            os._exit(0 if told == [os.getpid()] else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert told == [], "the parent's is left alone"
