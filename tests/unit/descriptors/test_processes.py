"""The interpreter exits, with and without threads that still run, and processes that fork."""

from __future__ import annotations

import pytest

from support_scripts import Interpreters

HEAD = """
import atexit, json, os, sys, threading, time
import kvdock
from kvdock.descriptors import lifetimes
from kvdock.descriptors.manager import DescriptorCacheManager
from support_descriptors import Ledger, Nap, Pool, Watched, WatchingBackend, dispatcher_of, in_thread

atexit.unregister(lifetimes.close_all)

def report(ledger):
    faults = [fault for fault in ledger.faults if not fault.endswith("destroyed by another thread")]
    print(json.dumps([len(ledger.made), len(ledger.destroyed), len(ledger.faults) - len(faults), faults]), flush=True)
"""
TAIL = """
atexit.register(report, ledger)  # runs after the next
atexit.register(lifetimes.close_all)
report(ledger)
"""


class TestExit:
    def test_everything_is_destroyed_once(self, interpreters: Interpreters) -> None:
        code = """
backend = WatchingBackend()
ledger = backend.ledger
dispatcher = dispatcher_of(backend)
pools = [Pool(device, heads) for device in ("cpu", "privateuseone:0", "privateuseone:1") for heads in (1, 2)]
work = lambda: [pool.write(dispatcher, 1.0) for pool in pools]
assert all(work() + in_thread(work) + work() + work())
lru = kvdock.LRUDescriptorCache(5, Watched.destroy)
manager = DescriptorCacheManager()
manager.declare("add", Watched.destroy)
for number in range(3):
    lru.put(number, Watched(ledger, "lru"))
    manager.cache("add", number).put(0, Watched(ledger, "add", pinned=number == 1))
"""
        before, after = interpreters.answers(HEAD + code + TAIL)
        assert before == [18, 6, 0, []]
        assert after == [18, 18, 0, []]

    def test_also_through_sys_exit_in_a_call(self, interpreters: Interpreters) -> None:
        code = """
ledger = Ledger()
lru = kvdock.LRUDescriptorCache(5, Watched.destroy)
lru.put(1, Watched(ledger, "lru"))
def leave():
    with lru.get(1).in_use():
        sys.exit()
"""
        before, after = interpreters.answers(HEAD + code + TAIL + "leave()")
        assert (before, after) == ([1, 0, 0, []], [1, 1, 0, []])

    def test_what_is_called_even_later_works(self, interpreters: Interpreters) -> None:
        """A handler that was registered before kvdock's runs after it. What it prepares ends with the process."""
        code = """
backend = WatchingBackend()
ledger = backend.ledger
dispatcher = dispatcher_of(backend)
pool = Pool()
assert pool.write(dispatcher, 1.0)
atexit.register(lambda: report(ledger))
atexit.register(lambda: print(json.dumps(all(pool.write(dispatcher, 2.0 + n) for n in range(4)))))
"""
        before, first, worked, second = interpreters.answers(HEAD + code + TAIL)
        assert (before, first, worked) == ([1, 0, 0, []], [1, 1, 0, []], True)
        assert second == [2, 1, 0, []]

    def test_a_destroyer_that_raises_is_reported_and_the_others_are_destroyed(self, interpreters: Interpreters) -> None:
        code = """
import json, kvdock
def destroyer(value):
    print(json.dumps(value), flush=True)
    if value == "b":
        raise ValueError("not now")
lru = kvdock.LRUDescriptorCache(5, destroyer)
for name in "abc":
    lru.put(name, name)
"""
        destroyed, errors = interpreters.run(code)
        assert sorted(destroyed) == ["a", "b", "c"]
        assert errors.startswith("destroying descriptor 'b' raised;")
        assert errors.count("ValueError: not now") == 1

    def test_what_a_traceback_holds_is_destroyed_too(self, interpreters: Interpreters) -> None:
        """Of a call that raised, and that nobody goes on with: in this thread, and in one that has ended."""
        code = """
backend = WatchingBackend({"paged_caching_": Nap()})
ledger, kept = backend.ledger, []
dispatcher = dispatcher_of(backend)
def refuse(*args):
    raise RuntimeError("as planned")
Nap.rest = refuse
def work():
    try:
        Pool().write(dispatcher, 1.0)
    except RuntimeError as error:
        kept.append(error)
work()
in_thread(work)
"""
        before, after = interpreters.answers(HEAD + code + TAIL)
        assert (before, after) == ([2, 0, 0, []], [2, 2, 1, []])


class TestDaemons:
    """Threads that nobody waits for may be anywhere when the interpreter exits."""

    def test_one_that_waits(self, interpreters: Interpreters) -> None:
        code = """
backend = WatchingBackend()
ledger = backend.ledger
dispatcher, ready = dispatcher_of(backend), threading.Event()
def work():
    assert all(Pool(device, heads).write(dispatcher, 1.0) for device in ("cpu", "privateuseone:1") for heads in (1, 2))
    ready.set()
    threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
assert ready.wait(50)
"""
        before, after = interpreters.answers(HEAD + code + TAIL)
        assert (before, after) == ([4, 0, 0, []], [4, 4, 4, []])

    @pytest.mark.parametrize("capacity", [1, 9], ids=["evicting", "all found"])
    def test_some_that_call_without_a_pause(self, interpreters: Interpreters, capacity: int) -> None:
        """What each held is destroyed between two of its calls; what it prepares after that ends with the process."""
        code = """
backend = WatchingBackend()
ledger = backend.ledger
dispatcher, ready, rounds = dispatcher_of(backend, int(sys.argv[1])), threading.Semaphore(0), 20
def work():
    pools = [Pool(device, heads) for device in ("cpu", "privateuseone:1") for heads in (1, 2)]
    for number in range(10**9):
        for pool in pools:
            if not pool.write(dispatcher, number % 100 + 1.0):
                ledger.faults.append("wrong result")
        if number == rounds:
            ready.release()
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
for _ in range(3):
    assert ready.acquire(timeout=80)
atexit.register(os._exit, 0)  # at the very end: torch ends a process in which CPython stops a thread in the middle of an operation
"""
        _before, (made, destroyed, _elsewhere, faults) = interpreters.answers(HEAD + code + TAIL, str(capacity))
        assert faults == []
        assert 12 <= destroyed <= made

    def test_one_that_never_comes_back_from_a_call(self, interpreters: Interpreters) -> None:
        code = """
backend = WatchingBackend({"paged_caching_": Nap()})
ledger = backend.ledger
dispatcher = dispatcher_of(backend)
def work():
    for heads in (1, 2, 3, 2):
        Nap.forever = len(ledger.made) == 3
        Pool("cpu", heads).write(dispatcher, 1.0)
threading.Thread(target=work, daemon=True).start()
assert Nap.naps.wait(50)
atexit.register(lambda: print(json.dumps(time.monotonic() - begin)))
"""
        before, after, seconds = interpreters.answers(HEAD + code + TAIL + "begin = time.monotonic()")
        assert (before, after) == ([3, 0, 0, []], [3, 2, 2, []]), "what runs is left alone"
        assert 0.9 < seconds < 20, "it is waited for, and not for long"


FORK = """
import warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
backend = WatchingBackend()
ledger = backend.ledger
dispatcher, ready, done = dispatcher_of(backend), threading.Event(), threading.Event()
pools = [Pool(device, heads) for device in ("cpu", "privateuseone:0") for heads in (1, 2)]
ended = []

class Handle(Watched):
    "Something whose memory must not even be given back in a child."
    def __del__(self):
        ended.append(os.getpid())

lru = kvdock.LRUDescriptorCache(5, Watched.destroy)
lru.put(1, Handle(ledger, "handle"))
lru.put(2, Handle(ledger, "pinned handle", pinned=True))
gone = kvdock.LRUDescriptorCache(5, Watched.destroy)
gone.put(1, Handle(ledger, "pinned handle of a cache that has ended", pinned=True))
gone.close()

def other():
    assert all(pool.write(dispatcher, 1.0) for pool in pools)
    ready.set()
    done.wait()

def work(numbers):
    assert all(pool.write(dispatcher, number) for number in numbers for pool in pools)

work((1.0, 2.0, 3.0))
thread = threading.Thread(target=other)
thread.start()
assert ready.wait(50)
"""


class TestFork:
    def test_a_child_abandons_and_prepares_its_own(self, interpreters: Interpreters) -> None:
        code = """
def stats():
    found = dispatcher.descriptors.stats()["paged_caching_"].values()
    return [sum(getattr(s, name) for s in found) for name in ("hits", "misses", "destroyed", "size")]

child = os.fork()
if child == 0:
    print(json.dumps([stats(), len(ledger.made), len(ledger.destroyed), len(lru), lru.get(1)]))
    work((4.0, 5.0))
    lru.put(1, Watched(ledger, "of the child"))
    assert lru.get(1).name == "of the child"
    print(json.dumps(stats()))
    print(json.dumps([len(ledger.made), len(ledger.destroyed), ledger.faults]), flush=True)
    atexit.register(lambda: print(json.dumps([len(ledger.destroyed), ledger.faults, ended]), flush=True))
    atexit.register(lifetimes.close_all)
    sys.exit()
os.waitpid(child, 0)
work((6.0,))
done.set()
thread.join()
print(json.dumps(stats()), flush=True)
"""
        answers = interpreters.answers(HEAD + FORK + code + TAIL)
        in_child, counted, before, at_exit, in_parent, parent_before, parent_after = answers
        assert in_child == [[0, 0, 0, 0], 11, 0, 0, None], "it begins with nothing"
        assert counted == [4, 4, 0, 4]
        assert before == [16, 0, []]
        assert at_exit == [5, [], []], "its own, once, and nothing of its parent's"
        assert in_parent == [12, 8, 4, 4], "the parent goes on with what it has"
        assert parent_before == [11, 4, 0, []]
        assert parent_after == [11, 11, 0, []]

    def test_a_childs_last_clearing_up_deallocates_nothing_of_its_parents(self, interpreters: Interpreters) -> None:
        """A descriptor that gives its handle back when it is deallocated must not be, though its interpreter takes everything apart."""
        code = """
read, write = os.pipe()
Handle.__del__ = lambda self: os.write(write, b"x")
child = os.fork()
if child == 0:
    lru.put(3, Handle(ledger, "of the child"))
    atexit.register(lifetimes.close_all)
    sys.exit()
os.waitpid(child, 0)
os.set_blocking(read, False)
print(json.dumps(len(os.read(read, 100))), flush=True)
done.set()
thread.join()
"""
        count, *_ = interpreters.answers(HEAD + FORK + code + TAIL)
        assert count == 1, "its own"

    def test_a_child_that_another_thread_forks(self, interpreters: Interpreters) -> None:
        code = """
def fork():
    child = os.fork()
    if child == 0:
        work((4.0, 5.0))
        lifetimes.close_all()
        print(json.dumps([len(ledger.made), len(ledger.destroyed), ledger.faults]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
in_thread(fork)
done.set()
thread.join()
"""
        in_child, before, after = interpreters.answers(HEAD + FORK + code + TAIL)
        assert in_child == [15, 4, []]
        assert (before, after) == ([11, 4, 0, []], [11, 11, 0, []])

    def test_children_of_multiprocessing(self, interpreters: Interpreters) -> None:
        code = """
import multiprocessing
def child(queue):
    work((4.0, 5.0))
    queue.put([len(ledger.made), len(ledger.destroyed), ledger.faults])
context = multiprocessing.get_context("fork")
queue = context.Queue()
children = [context.Process(target=child, args=(queue,)) for _ in range(3)]
for process in children:
    process.start()
print(json.dumps([queue.get(timeout=50) for _ in children]), flush=True)
for process in children:
    process.join()
assert [process.exitcode for process in children] == [0, 0, 0]
done.set()
thread.join()
"""
        in_children, before, after = interpreters.answers(HEAD + FORK + code + TAIL)
        assert in_children == [[15, 0, []]] * 3
        assert (before, after) == ([11, 4, 0, []], [11, 11, 0, []])

    @pytest.mark.parametrize("way", ["os.fork", "a C library's fork"])
    def test_a_child_in_the_middle_of_a_call(self, interpreters: Interpreters, way: str) -> None:
        """The frame that runs a plan is the last to let go of it, in the child as well: there that must do nothing.

        A descriptor that has left the cache in its parent is in no cache that the child could empty.
        """
        code = """
import ctypes
read, write = os.pipe()
backend = WatchingBackend()
ledger = backend.ledger
dispatcher = dispatcher_of(backend, 1)
first, second = Pool("cpu", 1), Pool("cpu", 2)
class Handle(Watched):
    def __del__(self):
        os.write(write, b"x")
kernel = backend.own["paged_caching_"]
children = []
def fork_in_a_call(descriptor):
    run = descriptor.run
    def fork(*args):
        if not children:
            children.append(None)
            assert second.write(dispatcher, 1.0)  # evicts what runs
            children.append(os.fork() if sys.argv[1] == "os.fork" else ctypes.PyDLL(None).fork())
        run(*args)
    descriptor.run, descriptor.watched = fork, Handle(ledger, "handle")
    return descriptor
prepare = type(kernel).prepare
type(kernel).prepare = lambda self, request: fork_in_a_call(prepare(self, request))
assert first.write(dispatcher, 1.0)
if children[1] == 0:
    dispatcher.descriptors.clear()
    lifetimes.close_all()
    print(json.dumps([len(ledger.destroyed), ledger.faults]), flush=True)
    sys.exit()
os.waitpid(children[1], 0)
os.set_blocking(read, False)
try:
    print(json.dumps(len(os.read(read, 100)) - len(ledger.destroyed)), flush=True)
except BlockingIOError:
    print(json.dumps("nothing"), flush=True)
"""
        in_child, deallocated, before, after = interpreters.answers(HEAD + code + TAIL, way)
        assert in_child == [0, []]
        assert deallocated == 0, "what the parent destroyed, and nothing by the child"
        assert before[1:] == [1, 0, []], "in the parent the first ended with its call"
        assert after[1:] == [2, 0, []]
