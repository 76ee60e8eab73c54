"""One process of a prefill side and a decode side, each of which shares a model's heads over its own number of ranks.

``prefill_decode.py PORT RANK PREFILL DECODE SCENE TRANSPORT``, run by `support_two_sides`. Prompts are computed on the prefill
side; their keys and values move, and the decode side goes on. Its tokens are compared with those of one process with the whole model.
Where layers have windows, the decode side then begins longer prompts behind what came, and all is compared with passes without a cache.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "engine"))

from tiny_engine.model import Decoder

import kvdock
from integration import zoo
from kvdock.errors import TransferError
from kvdock.scheduler import BatchTables
from kvdock.transfer import Exchange, Limits, Transfer, create_transport

PROMPTS = [list(range(3, 40)), [5] * 20 + [6], list(range(50, 20, -1))]
NEW = 12
LIMITS = Limits(deadline=60, silence=20, beat=0.5, grace=2)
IMPATIENT = attrs.evolve(LIMITS, silence=8)
KEY = b"for this test only"
WINDOWS = {"windows": (14, 16, 8), "windows in larger blocks": (10, 8, 16)}
"""Of scenes the window, and the blocks of both sides: windows begin within blocks, and these with blocks of the other side, or not."""


class Share(Decoder):
    """A rank's share of a decoder: some heads, and as much of the MLPs."""

    def __init__(self, model: Any, config: kvdock.PagedKVCacheConfig, rank: kvdock.RankInfo, group: Any) -> None:
        super().__init__(model, config, rank)
        self.group, (heads, keys, values), size, at = group, self.heads, rank.tp_size, rank.tp_rank
        mine, shared = range(at * heads // size, (at + 1) * heads // size), rank.head_range(keys)
        rows = [slice(part.start * self.dim, part.stop * self.dim) for part in (mine, shared)]
        for layer in self.layers:
            q, k, v = layer.qkv[0].split([count * self.dim for count in (heads, keys, values)])
            layer.qkv = [torch.cat([q[rows[0]], k[rows[1]], v[rows[1]]]), None]
            layer.out = [layer.out[0][:, rows[0]], None]
            gate, up = (half.chunk(size)[at] for half in layer.gate_up[0].chunk(2))
            layer.gate_up, layer.down = [torch.cat([gate, up]), None], [layer.down[0].chunk(size, 1)[at], None]
        self.heads = [len(mine), len(shared), len(shared)]

    def _joined(self, rows: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(rows, group=self.group)
        return rows


class Engine:
    """A decoder with a manager, for one sequence at a time."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.cache = decoder, decoder.cache
        self.manager = kvdock.CacheManager(self.cache.num_blocks, groups=self.cache.groups)
        self.tables = BatchTables(self.manager, 1, 32, max_tokens=128, device="cpu")

    def compute(self, seq: Any) -> int:
        """Compute what is missing of a sequence, and return the likeliest next token."""
        count = seq.num_tokens - seq.computed
        self.tables.update([seq], [count])
        logits = self.decoder(self.tables.first(1, count), torch.from_numpy(seq.tokens[-count:].copy()), count)
        return int(logits[0].argmax())

    def go_on(self, seq: Any) -> list[int]:
        """Generate tokens behind a prompt, and end the sequence."""
        found: list[int] = []
        while len(found) < NEW:
            found.append(self.compute(seq))
            self.manager.commit([seq], [[found[-1]]], computed=[seq.num_tokens])
            self.manager.extend([seq], [1])
        self.manager.finish(seq)
        return found


class Side:
    """A rank of one side, with channels to the ranks of the other."""

    def __init__(self, engine: Engine, channels: dict[str, Connection], scene: str, transport: str) -> None:
        self.engine, self.channels = engine, channels
        limits = IMPATIENT if scene == "prefill hangs" else LIMITS
        self.exchange = Exchange(engine.manager, engine.cache, create_transport(transport), model="random llama", limits=limits)
        for channel in channels.values():
            channel.send_bytes(self.exchange.hello)
        for peer, channel in channels.items():
            self.exchange.connect(peer, channel.recv_bytes(1 << 20))

    def until_over(self, transfers: list[Transfer]) -> None:
        """Carry messages until transfers are over, at most so long as they may take."""
        self._until(lambda: all(transfer.is_over for transfer in transfers), f"still open: {transfers}")

    def until_alone(self) -> None:
        """Stay until the peers have left: what is pushed may be on its way."""
        self._until(lambda: not self.exchange.peers, "a peer stays")

    def _until(self, is_done: Callable[[], bool], otherwise: str) -> None:
        end = time.monotonic() + LIMITS.deadline + LIMITS.silence
        while not is_done():
            assert time.monotonic() < end, otherwise
            self.exchange.poll()
            outgoing = self.exchange.outgoing()
            for peer in list(self.exchange.peers):
                try:
                    for _, message in (item for item in outgoing if item[0] == peer):
                        self.channels[peer].send_bytes(message)
                    while self.channels[peer].poll(0.002):
                        self.exchange.take(peer, self.channels[peer].recv_bytes(1 << 24))
                except (EOFError, OSError):
                    self.exchange.drop(peer, "its process is gone")

    def end(self) -> None:
        """Check that no block is lost, and leave."""
        self.engine.manager.check_integrity()
        assert self.engine.manager.num_sequences == self.exchange.num_open == 0
        assert self.engine.manager.available_size == self.engine.cache.num_blocks * self.engine.cache.block_size
        self.exchange.close()
        for channel in self.channels.values():
            channel.close()


def prefill(engine: Engine, channels: dict[str, Connection], scene: str, transport: str) -> None:
    """Compute prompts and offer them."""
    side, offers = Side(engine, channels, scene, transport), []
    for number, prompt in enumerate(PROMPTS):
        if scene == "prefill dies" and number == 1:
            side.until_over(offers)
            os._exit(9)
        if scene == "prefill hangs" and number == 1:
            side.until_over(offers)
            os.kill(os.getpid(), signal.SIGSTOP)
        seq = engine.manager.begin(prompt)
        engine.compute(seq)
        engine.manager.commit(seq, [], computed=len(prompt))
        offers.append(side.exchange.offer(f"r{number}", seq, sorted(channels)))
    side.until_over(offers)
    side.until_alone()
    errors = {str(offer.error) for offer in offers} - {"None"}
    assert bool(errors) == (scene == "decode dies"), errors
    side.end()
    print("prefill", *sorted(errors), flush=True)


def decode(engine: Engine, channels: dict[str, Connection], scene: str, transport: str, group: Any) -> list[list[int]]:
    """Ask for prompts, and generate. What does not come is computed here."""
    side, found = Side(engine, channels, scene, transport), []
    for number, prompt in enumerate(PROMPTS):
        if scene == "decode dies" and number == 1:
            os._exit(9)
        seq, comes = engine.manager.begin(prompt), len(side.exchange.peers) == len(channels)
        if comes:  # all but the last token: computing that one tells the next
            try:
                transfer = side.exchange.ask(f"r{number}", seq, sorted(channels), num_tokens=len(prompt) - 1, start=0)
                side.until_over([transfer])
                error = transfer.error
            except TransferError as broken:  # the connection is known to be gone before the channel is
                error = broken
            comes = error is None
            print(f"decode r{number}: {error}", flush=True)
        all_come = torch.tensor(int(comes))
        dist.all_reduce(all_come, dist.ReduceOp.MIN, group=group)  # ranks go the same way
        if not all_come:
            if seq.is_open:
                engine.manager.abort(seq)
            seq = engine.manager.begin(prompt)
        found.append(engine.go_on(seq))
        if scene in WINDOWS:
            longer = engine.manager.begin(again(prompt, found[-1]))
            print(f"decode r{number}: {longer.cached_len} of {longer.num_tokens} cached", flush=True)
            found.append(engine.go_on(longer))
    side.end()
    return found


def again(prompt: list[int], found: list[int]) -> list[int]:
    """Return a prompt that begins with another and a part of what was found behind it."""
    return [*prompt, *found[:2], 9, 8]


def uncached(model: Any, prompt: list[int]) -> list[int]:
    """Return the likeliest tokens, each of a pass over everything before it."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def main(port: int, rank: int, prefills: int, decodes: int, scene: str, transport: str) -> None:
    """Set up both sides, play the scene, and compare."""
    store = dist.TCPStore("127.0.0.1", port, prefills + decodes, is_master=rank == 0, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=prefills + decodes, timeout=timedelta(seconds=120))
    groups = [dist.new_group(range(prefills)), dist.new_group(range(prefills, prefills + decodes))]
    window, *sizes = WINDOWS.get(scene, (None, 16, 8))
    family, options = ("Mistral", {"sliding_window": window}) if window else ("Llama", {})
    is_prefill, model = rank < prefills, zoo.build(family, {"num_key_value_heads": 2, "vocab_size": 64, **options})
    place = kvdock.RankInfo("cpu", *((prefills, rank) if is_prefill else (decodes, rank - prefills)))
    config = kvdock.PagedKVCacheConfig(num_blocks=40, block_size=sizes[not is_prefill], head_layout=list(kvdock.HeadLayout)[is_prefill])
    engine = Engine(Share(model, config, place, groups[not is_prefill]))
    channels = {}
    if is_prefill:
        with Listener(("127.0.0.1", 0), authkey=KEY) as listener:
            store.set(f"p{rank}", str(listener.address[1]))
            for _ in range(decodes):
                channel = listener.accept()
                channels[channel.recv_bytes(16).decode()] = channel
        prefill(engine, channels, scene, transport)
        return
    for number in range(prefills):
        channels[f"p{number}"] = Client(("127.0.0.1", int(store.get(f"p{number}"))), authkey=KEY)
        channels[f"p{number}"].send_bytes(f"d{place.tp_rank}".encode())
    found = decode(engine, channels, scene, transport, groups[1])
    if window:
        expected = []
        for prompt in PROMPTS:
            expected.append(uncached(model, prompt))
            expected.append(uncached(model, again(prompt, expected[-1])))
    else:
        alone = Engine(Decoder(model, config))
        expected = [alone.go_on(alone.manager.begin(prompt)) for prompt in PROMPTS]
    assert found == expected, (found, expected)
    print("decode", sum(map(len, found)), "tokens are right", len({*map(tuple, found)}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), *sys.argv[5:])
