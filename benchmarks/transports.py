"""Blocks from one process to another on one machine: transports against torch.distributed's gloo, in the same rounds, on one thread each.

    python benchmarks/transports.py --transports nixl mooncake --direct --out docs/benchmarks/transports.md
    python benchmarks/transports.py --small               # anywhere, in seconds: shows that it runs

It needs an environment with the examples of these names and their engines. 1,024 tokens move between pools of 8 layers with 8 heads of 128
elements in bfloat16, 32 MiB, in blocks of 16 at random places. *alike* is between pools with heads outermost. In *resharded* half of the
heads, 16 MiB, go from a pool with tokens outermost into one with heads outermost and blocks of 32: that is in runs of 256 bytes.

A round is from `expect` to the last byte in the pool, both sides polling with pauses of 0.1 ms, in which transports with
threads get on. Of each there are the median of the rounds and
the ratio of gloo's median to it. ``--direct`` adds one round of what kvdock does not do: the engine itself writes each run into the
peer's pool.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import multiprocessing
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import kvdock
from kvdock.transfer import PoolLayout, Spans, TicketState, create_transport, spans

GLOO = "torch.distributed"
TOKENS = 1024
Round = Callable[[Spans, int], float]
"""Runs and a tag; returns when it was over."""


class Pool:
    """A pool of one side, with blocks at random places."""

    def __init__(self, tokens: int, tp_size: int, block_size: int, heads: kvdock.HeadLayout) -> None:
        spec = kvdock.KVSpec.uniform(num_layers=8, num_kv_heads=8, head_dim=128, max_positions=tokens, dtype=torch.bfloat16)
        config = kvdock.PagedKVCacheConfig(num_blocks=2 * tokens // block_size, block_size=block_size, head_layout=heads)
        rank = kvdock.RankInfo("cpu", tp_size, 0)
        self.cache = kvdock.create_cache(spec, config, rank)
        self.layout = PoolLayout.of(self.cache, rank, "m")
        self.memory = self.cache.region_bytes()
        self.table = np.random.default_rng(block_size).permutation(config.num_blocks)[: tokens // block_size]


CASES = {
    "alike": ((1, 16, kvdock.HeadLayout.HND), (1, 16, kvdock.HeadLayout.HND)),
    "resharded": ((1, 16, kvdock.HeadLayout.NHD), (2, 32, kvdock.HeadLayout.HND)),
}


def through(name: str, is_source: bool, pool: Pool, other: PoolLayout, channel: Connection) -> Round:
    """Return what a round is with a transport."""
    transport = create_transport(name)
    channel.send(transport.register(pool.layout, pool.memory))
    transport.connect("peer", other, channel.recv())

    def go(runs: Spans, tag: int) -> float:
        if is_source:
            ticket = transport.push("peer", runs, tag, channel.recv())
        else:
            ticket = transport.expect("peer", runs, tag)
            channel.send(ticket.note)
        while ticket.poll() is TicketState.PENDING:
            transport.poll()
            time.sleep(1e-4)
        assert ticket.poll() is TicketState.DONE, ticket.error
        end = time.perf_counter()
        if is_source:
            channel.send("all writes have ended")
        else:
            while not channel.poll():  # which may need this side
                transport.poll()
            channel.recv()
        return end

    return go


def nixl_directly(is_source: bool, pool: Pool, channel: Connection) -> Round:
    """Return what a round is where an agent of NIXL writes each run into the peer's pool."""
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(f"direct-{is_source}", nixl_agent_config(enable_prog_thread=False))
    agent.register_memory(pool.memory)
    channel.send((agent.get_agent_metadata(), [memory.data_ptr() for memory in pool.memory]))
    metadata, bases = channel.recv()
    peer = agent.add_remote_agent(metadata).decode()

    def go(runs: Spans, tag: int) -> float:
        if is_source:
            here, there = addresses(runs, [memory.data_ptr() for memory in pool.memory], bases)
            columns = (np.stack([at, runs.nbytes, np.zeros_like(at)], 1).astype(np.uint64) for at in (here, there))
            handle = agent.initialize_xfer("WRITE", *(agent.get_xfer_descs(each, "DRAM") for each in columns), peer, b"%d" % tag)
            said = agent.transfer(handle)
            while said == "PROC":
                said = agent.check_xfer_state(handle)
            assert said == "DONE"
            agent.release_xfer_handle(handle)
        else:
            while not agent.get_new_notifs():
                pass
        return time.perf_counter()

    return go


def mooncake_directly(is_source: bool, pool: Pool, channel: Connection) -> Round:
    """Return what a round is where an engine of Mooncake does; it does not tell the other side, so the channel does."""
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    for memory in pool.memory:
        assert engine.register_memory(memory.data_ptr(), memory.numel()) == 0
    channel.send((f"127.0.0.1:{engine.get_rpc_port()}", [memory.data_ptr() for memory in pool.memory]))
    peer, bases = channel.recv()

    def go(runs: Spans, tag: int) -> float:
        if is_source:
            here, there = addresses(runs, [memory.data_ptr() for memory in pool.memory], bases)
            for first in range(0, len(runs), 512):  # it refuses a batch of some thousands
                batch = (each[first : first + 512].tolist() for each in (here, there, runs.nbytes))
                assert engine.batch_transfer_sync_write(peer, *batch) == 0
            channel.send(tag)
        else:
            channel.recv()
        return time.perf_counter()

    return go


DIRECT = {"nixl": nixl_directly, "mooncake": mooncake_directly}


def addresses(runs: Spans, mine: Sequence[int], theirs: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return where runs begin on both sides."""
    return runs.source + np.array(mine)[runs.source_region], runs.target + np.array(theirs)[runs.target_region]


def side(is_source: bool, case: str, options: argparse.Namespace, port: int, channel: Connection, told: Connection) -> None:
    """Be one of both processes; the target tells how long rounds took."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=is_source, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=int(is_source), world_size=2)
    pools = [Pool(options.tokens, *each) for each in CASES[case]]
    pool, other = (pools[0], pools[1]) if is_source else (pools[1], pools[0])
    for memory in pool.memory if is_source else ():
        memory.random_(0, 256, generator=torch.Generator().manual_seed(1))
    runs = spans(pools[0].layout, pools[1].layout, [pools[0].table], [pools[1].table], [[(0, options.tokens)]])
    ways = {name: through(name, is_source, pool, other.layout, channel) for name in (GLOO, *options.transports)}
    if options.direct:
        ways |= {f"{name}, each run by itself": DIRECT[name](is_source, pool, channel) for name in options.transports}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds + 1):
        for name, go in ways.items():
            if turn > 1 and name not in (GLOO, *options.transports):
                continue  # one round of those is enough, and long
            channel.send("ready")
            channel.recv()
            before = time.perf_counter()
            times[name].append(go(runs, turn) - before)
    if not is_source:
        told.send((len(runs), runs.total, {name: statistics.median(took[1:]) for name, took in times.items()}))
    channel.send("over")  # whoever leaves first would end the other's connections
    channel.recv()
    os._exit(0)  # threads of the engines may still wait for one another


def measured(case: str, options: argparse.Namespace) -> tuple[int, int, dict[str, float]]:
    """Run both processes."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ends, (answer, told) = context.Pipe(), context.Pipe(duplex=False)
    both = [context.Process(target=side, args=(bool(which), case, options, port, ends[which], told)) for which in range(2)]
    for process in both:
        process.start()
    told.close()
    try:
        assert answer.poll(options.limit), f"nothing was measured in {options.limit} s"
        found_here: tuple[int, int, dict[str, float]] = answer.recv()
    finally:
        for process in both:
            process.join(5)
            process.kill()
    return found_here


def table(options: argparse.Namespace) -> str:
    """Measure all, and return it as text."""
    versions = [f"torch {torch.__version__}"]
    for name in ("nixl", "nixl-cu12", "mooncake-transfer-engine-non-cuda"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    lines = [
        "# Transports on one machine\n",
        f"{', '.join(versions)}, Python {platform.python_version()}, {os.cpu_count()} cores, UCX_TLS={os.environ.get('UCX_TLS', 'unset')}. "
        f"{options.rounds} rounds, while {os.getloadavg()[0]:.0f} processes wanted to run; see `benchmarks/transports.py`. "
        "A ratio above 1 is quicker than gloo.\n",
        "| case | way | median, ms | MB/s | ratio to gloo |",
        "|---|---|---|---|---|",
    ]
    for case in CASES:
        count, nbytes, medians = measured(case, options)
        for name, median in medians.items():
            said = f"{case}: {nbytes / 2**20:.0f} MiB in {count} runs"
            lines.append(f"| {said} | {name} | {median * 1e3:.1f} | {nbytes / median / 1e6:.0f} | {medians[GLOO] / median:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and print or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transports", nargs="*", default=[], choices=sorted(DIRECT), help="beside gloo")
    parser.add_argument("--direct", action="store_true", help="also let the engines write into the pool")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit", type=float, default=300, help="seconds for a case")
    parser.add_argument("--small", action="store_true", help="few tokens, one round")
    parser.add_argument("--out", type=Path, help="where to write the table")
    options = parser.parse_args()
    options.tokens, options.rounds = (64, 1) if options.small else (TOKENS, options.rounds)
    text = table(options)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
