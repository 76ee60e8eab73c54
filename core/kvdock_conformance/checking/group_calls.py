"""Random calls of an engine on a manager of several layer groups."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kvdock.errors import ArgumentValueError, OutOfBlocksError
from kvdock_conformance.checking.group_engine import GroupEngine, must_be

__all__ = ["drive_engine"]

_ACTIONS = (
    *("begin", "begin", "begin", "step", "step", "step", "batch", "batch", "end", "end"),
    *("fork", "truncate", "draft", "pin", "unpin", "reset"),
)


def drive_engine(engine: GroupEngine, seed: int, steps: int, longest: int = 30) -> None:
    """Make random calls, and look at everything after each; then end all, and see that all blocks are back.

    Args:
        engine: the engine, new.
        seed: of chance.
        steps: how many calls.
        longest: tokens of the longest prompt.
    """
    rng, pins = random.Random(seed), list[Any]()  # noqa: S311 - the same in every run
    for _ in range(steps):
        action, one = rng.choice(_ACTIONS), rng.choice(engine.all) if engine.all else None
        if action == "begin" or one is None:
            _begin(engine, rng, longest)
        elif action == "step":
            engine.step(one, rng.choice([1, 1, 3, 9]))
        elif action == "batch":
            engine.batch(rng.sample(engine.all, rng.randint(1, len(engine.all))))
        elif action == "fork":
            # Not behind what is known: two would write tokens of their own to one place, which no call could tell them.
            most = min(one.seq.num_tokens, len(one.ids))
            engine.fork(one, rng.choice([most, rng.randint(0, most)]))
        elif action == "truncate":
            engine.truncate(one, rng.randint(0, min(one.seq.num_tokens, len(one.ids))))
        elif action == "draft":
            engine.draft(one, is_undone=rng.random() < 0.5)
        elif action == "end":
            engine.end(one, rng.choice(["keep", "keep", "drop", "abort"]))
        elif action == "pin":
            with suppress(ArgumentValueError, OutOfBlocksError):  # less than a block is cached, or promises need it
                pins.append(engine.manager.pin(one.ids[: one.seq.computed], one.namespace))
        elif action == "unpin" and pins:
            pins.pop(rng.randrange(len(pins))).release()
        elif action == "reset" and not pins and rng.random() < 0.1:
            engine.manager.reset(keep_open=True)
        engine.check()
    _end_all(engine, pins)


def _begin(engine: GroupEngine, rng: random.Random, longest: int) -> None:
    """Begin a prompt that begins like others and goes on at random: reserved, in chunks, or with a limit to what is cached of it."""
    length = rng.randint(1, longest)
    alike = rng.randint(0, length)
    ids = [int(rng.random() < 0.04) for _ in range(alike)] + [rng.randrange(3) for _ in range(alike, length)]
    how: dict[str, Any] = {"reserve": rng.choice([0, 0, 5])}
    if rng.random() < 0.5:
        how["at_most"] = rng.randint(1, 12)
    elif rng.random() < 0.2:
        how["max_cached_len"] = rng.randint(0, 20)
    engine.begin(ids, rng.choice([(), (), ("other",)]), partial=rng.random() < 0.3, **how)


def _end_all(engine: GroupEngine, pins: Sequence[Any]) -> None:
    for pin in pins:
        pin.release()
    while engine.all:
        engine.end(engine.all[-1], "keep")
        engine.check()
    everything = engine.manager.available_size
    engine.manager.reset()
    engine.check()
    must_be("tokens that there is room for, before all is forgotten and after", engine.manager.available_size, everything)
