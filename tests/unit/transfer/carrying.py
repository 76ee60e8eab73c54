"""One process of two that exchange blocks through torch.distributed; run by `test_torch_distributed`.

``carrying.py PORT RANK SCENE DEVICE``: rank 0 owns, rank 1 asks. Messages go over a socket.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener

import torch
import torch.distributed as dist

import kvdock
from kvdock.integrations.torch_distributed import TorchDistributed
from kvdock.transfer import Exchange, Limits, Transfer
from support_transfer import Rank, holds

SPEC = kvdock.KVSpec((kvdock.LayerSpec(4, 4, 2, 2), kvdock.LayerSpec(4, 2, 3, 5)), 256, torch.bfloat16)
PROMPTS = [list(range(3, 40)), list(range(50, 60)), [7] * 25]
LIMITS = Limits(deadline=30, silence=6, beat=0.2, grace=1)
KEY = b"for this test only"


class Process(Rank):
    """A rank over a process group."""

    def __init__(self, name: str, part_bytes: int, **config: object) -> None:
        super().__init__(name, SPEC, time.monotonic, limits=LIMITS, **config)
        self.carrier = TorchDistributed(part_bytes=part_bytes)
        self.exchange = Exchange(self.manager, self.cache, self.carrier, model="m", limits=LIMITS)

    def until_over(self, channel: Connection, transfers: list[Transfer], most: float = 25) -> None:
        """Carry messages until transfers are over. A channel that is closed is a peer that is gone."""
        end, peer = time.monotonic() + most, "asker" if self.name == "owner" else "owner"
        while not all(transfer.is_over for transfer in transfers):
            assert time.monotonic() < end, f"still open: {transfers}"
            self.exchange.poll()
            try:
                for _, message in self.exchange.outgoing():
                    channel.send_bytes(message)
                while channel.poll(0.005):
                    self.exchange.take(peer, channel.recv_bytes(1 << 24))
            except (EOFError, OSError):
                if peer in self.exchange.peers:
                    self.exchange.drop(peer, "its channel is closed")
                time.sleep(0.01)


def owner(scene: str, device: str, channel: Connection) -> None:
    """Compute and offer."""
    me = Process("owner", 64 if scene == "parts" else 1 << 20, device=device)
    channel.send_bytes(me.exchange.hello)
    me.exchange.connect("asker", channel.recv_bytes(1 << 20))
    if scene == "nobody closes":
        return
    transfers: list[Transfer] = []
    for number, prompt in enumerate(PROMPTS):
        if scene == "owner dies" and number == 1:
            me.until_over(channel, transfers)
            os._exit(9)
        transfers.append(me.exchange.offer(f"r{number}", me.computed(prompt), ["asker"]))
    me.until_over(channel, transfers)
    errors = [str(transfer.error) for transfer in transfers]
    assert (errors == ["None"] * len(PROMPTS)) == (scene not in ("asker dies", "other parts")), errors
    me.check()
    print("owner:", *errors, sep="\n", flush=True)
    me.exchange.close()


def asker(scene: str, device: str, channel: Connection) -> None:
    """Ask, in another order than is offered, and compare."""
    me = Process(
        "asker", {"parts": 64, "other parts": 32}.get(scene, 1 << 20), block_size=8, head_layout=kvdock.HeadLayout.HND, device=device
    )
    channel.send_bytes(me.exchange.hello)
    me.exchange.connect("owner", channel.recv_bytes(1 << 20))
    if scene == "nobody closes":
        return
    if scene == "asker dies":
        me.until_over(channel, [me.exchange.ask("r2", me.manager.begin(PROMPTS[2]), ["owner"])])
        os._exit(9)
    transfers = {number: me.exchange.ask(f"r{number}", me.manager.begin(PROMPTS[number]), ["owner"]) for number in (2, 0, 1)}
    started = time.monotonic()
    me.until_over(channel, list(transfers.values()))
    for number, transfer in transfers.items():
        if transfer.error is None:
            assert holds(me, transfer.seq, PROMPTS[number])
            me.manager.finish(transfer.seq)
        print(f"asker: r{number}: {transfer.error}", flush=True)
    me.check()
    me.exchange.close()
    print(f"asker: {time.monotonic() - started:.1f} s", flush=True)


def main(port: int, rank: int, scene: str, device: str) -> None:
    """Set up, play the scene, and leave."""
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
    groups = "gloo"
    if device == "cuda":
        groups, device = "cpu:gloo,cuda:nccl", f"cuda:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group(groups, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    if rank == 0:
        with Listener(("127.0.0.1", 0), authkey=KEY) as listener:
            store.set("channel", str(listener.address[1]))
            channel = listener.accept()
        owner(scene, device, channel)
    else:
        asker(scene, device, Client(("127.0.0.1", int(store.get("channel"))), authkey=KEY))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
