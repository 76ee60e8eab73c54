"""Proving that the blocks of units are whole."""

from __future__ import annotations

import numpy as np

from kvdock.errors import IntegrityError
from kvdock.prefix.interface import BlockIds
from kvdock.scheduler.rows import Index
from kvdock.scheduler.units import UnitBlocks

__all__ = ["check_units"]


def check_units(units: UnitBlocks, needs: Index, states: BlockIds) -> None:
    """Compare what is counted with what there is, in time that goes by the size of the pool.

    Args:
        units: the units.
        needs: places of what sequences and pins need, each as often as it is needed.
        states: blocks that are states of sequences.

    Raises:
        IntegrityError: they differ; the text says in what.
    """
    units.blocks.check_integrity()
    is_held, is_there = units.ids.ref_counts(np.arange(units.ids.num_blocks)) > 0, units.table >= 0
    owned = np.concatenate((units.table[is_there], states, [] if units.null_block is None else [units.null_block]))
    unneeded = units.passing & is_there & (units.needs == 0)
    idle = unneeded & (units.is_cached[:, None] | units.spared)
    facts = {
        "each block free, or of one unit or sequence": np.unique(owned).size == owned.size == units.blocks.num_used,
        "blocks of units that are held": not is_there[~is_held].any(),
        "lasting blocks of each unit": bool(is_there[is_held][:, ~units.passing].all()),
        "needs as sequences have them": bool((np.bincount(needs, minlength=units.needs.size) == units.needs.reshape(-1)).all()),
        "what is needed to be there": bool(is_there[units.needs > 0].all()),
        "as many idle blocks as are counted": int(idle.sum()) == units.num_idle,
        "spared blocks that nobody needs, of no cached unit": not (units.spared & (units.is_cached[:, None] | ~unneeded)).any(),
        "a turn for each idle block": units.waiting() >= set(np.flatnonzero(idle).tolist()),
        "cached units, and ends of prompts, to be held": not ((units.is_cached | units.is_end) & ~is_held).any(),
        "checkpoints of cached units, or needed": not (unneeded & ~units.is_cached[:, None])[:, units.states].any(),
    }
    wrong = ", ".join(what for what, holds in facts.items() if not holds)
    if wrong:
        raise IntegrityError("UnitBlocks", expected=wrong, got="something else", fix="report it with the calls before")
