"""Which groups the layers of a cache form, how they lie in its memory, and how many bytes a block has: all before memory is taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from kvdock.cache.memory import aligned
from kvdock.cache.paged_options import PagedConfig
from kvdock.cache.pool import PagedPool
from kvdock.cache.uses import Use, use_of
from kvdock.errors import ArgumentValueError
from kvdock.layers.groups import GroupPlan, LayerGroup, plan_groups
from kvdock.layers.interface import Buffer, Part
from kvdock.layers.retention import KeepAll
from kvdock.layout import KVCacheLayout
from kvdock.rank import RankInfo
from kvdock.spec import KVSpec

__all__ = ["Grouping", "group_numbers", "grouping", "only_use", "places_in", "rank_parts", "used_parts"]

PLACE = 16
"""Bytes that the place of each buffer in a block is a multiple of, and so the block: kernels move 16 bytes at a time where they can."""


@attrs.frozen
class Grouping:
    """How the layers of a cache form groups.

    Args:
        plan: the groups, and bytes of a block.
        layout: the memory order.
        use: how all layers are used, where these are alike and lie in pools by equal layers; None where all lie in one memory.
    """

    plan: GroupPlan
    layout: KVCacheLayout
    use: type[Use] | None


def rank_parts(spec: KVSpec, config: PagedConfig, rank: RankInfo) -> list[tuple[Part, ...]]:
    """Return what each layer keeps on a rank, by the rules that a configuration wants.

    Raises:
        ArgumentValueError: heads and ranks do not divide, or two buffers of a layer have one name.
    """
    found = [layer.parts(rank.head_range, config.cache_dtype or spec.dtype) for layer in spec.layers]
    for index, parts in enumerate(found):
        names = Counter(buffer.name for part in parts for buffer in part.buffers)
        if doubled := [name for name, count in names.items() if count > 1]:
            expected, fix = "a name of its own for each buffer of a layer", "call them otherwise: a layer's buffers are found by name"
            raise ArgumentValueError(f"KVSpec: layers[{index}]", expected=expected, got=f"two called {doubled[0]!r}", fix=fix)
    if config.keep_all:
        return [tuple(part if part.retention.is_state else attrs.evolve(part, retention=KeepAll()) for part in parts) for parts in found]
    return found


def only_use(parts: Sequence[tuple[Part, ...]]) -> type[Use] | None:
    """Return how all layers are used, where it is one way, by one rule, and a layer keeps nothing else; otherwise None."""
    own = [found for found in parts if found]
    uses = {use_of(part) for found in own for part in found}
    rules = {part.retention for found in own for part in found}
    return uses.pop() if len(uses) == len(rules) == 1 and all(len(found) == 1 for found in own) else None


def grouping(spec: KVSpec, config: PagedConfig, rank: RankInfo, *, is_one_memory: bool = False) -> Grouping:
    """Choose groups, the order of memory, and the bytes of a block. They follow from the arguments alone, so that ranks agree.

    Args:
        spec: what the layers keep.
        config: what the user chose.
        rank: which share of the heads.
        is_one_memory: whether all is to lie in one memory of blocks, as in an engine's buffer.

    Raises:
        ArgumentValueError: heads and ranks do not divide, no layer keeps anything, bytes of groups cannot agree, or a layout that is
            not there for these layers.
    """
    parts = rank_parts(spec, config, rank)
    plan = plan_groups(parts, config.block_size, spec.max_positions, config.alignment)
    use = None if is_one_memory else only_use(parts)
    if use is not None:
        layout = config.layout or KVCacheLayout.LAYER_FIRST
        equal = Counter(plan.groups[0].parts)
        nbytes = sum(
            PagedPool.block_bytes(count, buffer.nbytes * config.block_size, layout, config.alignment)
            for part, count in equal.items()
            for buffer in part.buffers
        )
        return Grouping(GroupPlan(plan.groups, nbytes), layout, use)
    if config.layout is KVCacheLayout.LAYER_FIRST:
        kinds = ", ".join(sorted({f"{len(group.members)} of {group.retention}" for group in plan.groups}))
        raise ArgumentValueError(
            "PagedKVCacheConfig: layout",
            expected="PAGE_FIRST, or none: layers of several kinds or rules, and an engine's buffer, lie in one memory block by block",
            got=f"{config.layout} for layers {kinds}",
            fix="leave the layout out, or set keep_all=True where all layers have keys and values and none may be let go",
        )
    used = max(end for group in plan.groups for *_, end in places_in(group))
    nbytes = aligned(max(plan.block_bytes, used), max(config.alignment, PLACE))
    return Grouping(GroupPlan(plan.groups, nbytes), KVCacheLayout.PAGE_FIRST, None)


def places_in(group: LayerGroup) -> list[tuple[int, Part, Buffer, int, int]]:
    """Return layer, part, buffer, and first and last byte of each buffer's place in a block of a group."""
    found, at = [], 0
    for (layer, _), part in zip(group.members, group.parts, strict=True):
        for buffer in part.buffers:
            found.append((layer, part, buffer, at, at + buffer.nbytes * group.block_size))
            at = aligned(found[-1][4], PLACE)
    return found


def group_numbers(groups: Sequence[LayerGroup]) -> dict[int, dict[str, int]]:
    """Return of each layer that keeps something the number of the group that each of its buffers is in."""
    found: dict[int, dict[str, int]] = {}
    for number, group in enumerate(groups):
        for (layer, _), part in zip(group.members, group.parts, strict=True):
            found.setdefault(layer, {}).update((buffer.name, number) for buffer in part.buffers)
    return found


def used_parts(groups: Sequence[LayerGroup]) -> dict[int, tuple[Part, type[Use]]]:
    """Return of each layer that an op knows the first part that it does, and how that is used."""
    found: dict[int, tuple[Part, type[Use]]] = {}
    members = [member for group in groups for member in zip(group.members, group.parts, strict=True)]
    for (layer, _), part in sorted(members, key=lambda member: member[0]):
        if layer not in found and (use := use_of(part)) is not None:
            found[layer] = part, use
    return found
