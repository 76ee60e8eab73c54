"""Publishers and readers in processes of their own, as engines and routers are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvdock
from kvdock.integrations.kv_events import KVEventPublisher, KVEventSubscriber
from support_kv_events import inproc, store, until

ENGINE = """
import sys, time
import kvdock
from kvdock.integrations.kv_events import KVEventPublisher
from support_kv_events import store

manager = kvdock.CacheManager(256, 4)
publisher = KVEventPublisher(manager, endpoint=sys.argv[1], replay_endpoint=sys.argv[2])
print("ready", flush=True)
for line in sys.stdin:
    start = int(line)
    if start < 0:
        break
    store(manager, range(start, start + 9))
    print(manager.prefix.size_info.total_size, flush=True)
"""


@contextmanager
def engine(folder: Path) -> Iterator[tuple[subprocess.Popen[str], KVEventSubscriber]]:
    """An engine that stores the prompts whose beginnings it is told, and a reader of its events."""
    ends = [f"ipc://{folder}/{name}" for name in ("events", "replay")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", ENGINE, *ends], env=env, **pipes) as process, KVEventSubscriber(*ends) as reader:
        assert process.stdout
        try:
            assert process.stdout.readline() == "ready\n"
            yield process, reader
        finally:
            process.kill()


def tell(process: subprocess.Popen[str], *starts: int) -> None:
    assert process.stdin
    assert process.stdout
    for start in starts:
        process.stdin.write(f"{start}\n")
        process.stdin.flush()
        if start >= 0:
            assert process.stdout.readline()


@pytest.mark.slow
def test_an_engine_in_another_process(tmp_path: Path) -> None:
    with engine(tmp_path) as (process, reader):
        tell(process, 0, 100)
        until(reader, lambda: reader.index.cached_len(range(100, 120)) == 8, 30)
        assert reader.index.cached_len(range(50)) == 8
        assert (reader.num_missed, reader.index.is_complete()) == (0, True)


@pytest.mark.slow
def test_an_engine_that_exits_sends_what_waits(tmp_path: Path) -> None:
    with engine(tmp_path) as (process, reader):
        tell(process, 0)
        until(reader, lambda: reader.index.cached_len(range(9)) == 8, 30)
        tell(process, 200, -1)
        assert process.wait(30) == 0
        until(reader, lambda: reader.index.cached_len(range(200, 209)) == 8, 30)


@pytest.mark.slow
def test_an_engine_that_is_killed_and_one_in_its_place(tmp_path: Path) -> None:
    with engine(tmp_path) as (process, reader):
        tell(process, *range(0, 500, 50))
        until(reader, lambda: reader.index.cached_len(range(450, 460)) == 8, 30)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        before = dict(reader.index.parents())
        assert reader.poll(0.1) == []
        assert reader.index.parents() == before, "nobody says that the engine is gone"
        ends = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
        manager = kvdock.CacheManager(64, 4)
        with KVEventPublisher(manager, endpoint=ends[0], replay_endpoint=ends[1]):
            end = time.monotonic() + 30
            while reader.index.cached_len(range(900, 930)) != 8:  # the reader connects again
                assert time.monotonic() < end
                manager.reset()
                store(manager, range(900, 909))
                reader.poll(0.1)
            assert reader.index.cached_len(range(450, 460)) == 0


def test_a_forked_child_publishes_nothing() -> None:
    manager = kvdock.CacheManager(64, 4)
    with KVEventPublisher(manager, endpoint=inproc()) as publisher, KVEventSubscriber(publisher.endpoint) as reader:
        store(manager, range(8))
        until(reader, lambda: bool(reader.index.parents()))
        child = os.fork()
        if not child:
            store(manager, range(100, 108))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert reader.poll(0.05) == []
        store(manager, range(200, 208))
        until(reader, lambda: reader.index.cached_len(range(200, 208)) == 8)
        assert reader.index.cached_len(range(100, 108)) == 0


def test_a_router_on_events_finds_more_than_one_that_goes_in_turns() -> None:
    """Twenty lines of router over two replicas, on conversations that come back."""
    conversations = [list(range(1000 * user, 1000 * user + 200)) for user in range(14)]
    turns = [(user, length) for length in range(32, 200, 24) for user in range(14)]

    def hits(by_events: bool) -> float:
        managers = [kvdock.CacheManager(120, 8) for _ in range(2)]
        publishers = [KVEventPublisher(manager, endpoint=inproc()) for manager in managers]
        readers = [KVEventSubscriber(publisher.endpoint) for publisher in publishers]
        load, found, asked = [0, 0], 0, 0
        for number, (user, length) in enumerate(turns):
            prompt = conversations[user][:length]
            chosen = (number // 3) % 2
            if by_events:
                for reader in readers:
                    reader.poll(0.002)
                chosen = min((0, 1), key=lambda place: (-readers[place].index.cached_len(prompt), load[place]))
            load[chosen] += 1
            found += managers[chosen].plan(prompt).cached_len
            asked += length
            store(managers[chosen], prompt)
        for each in (*readers, *publishers):
            each.close()
        assert min(load) > len(turns) // 4
        return found / asked

    in_turns, by_events = hits(False), hits(True)
    assert by_events > 1.15 * in_turns, f"{by_events:.3f} and {in_turns:.3f}"
