"""What a file says of the cache that it was saved from, and whether another one is like it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvdock.cache.grouped import GroupedCache
from kvdock.errors import ArgumentTypeError, ArgumentValueError, FileContentError, UnsupportedError
from kvdock.layers.groups import LayerGroup
from kvdock.scheduler import CacheManager
from kvdock.scheduler.cached import block_sizes, has_tables_of, num_blocks

__all__ = ["ORDER", "check_fits", "check_pool", "described"]

ORDER = "block, token, then what a buffer keeps of it"
"""In which contents are stored, whatever the layout of the cache."""

_MANAGER = "make it with CacheManager(cache.num_blocks, groups=cache.groups)"

_FIXES = {
    "model": "load it for the model that it was saved for, or save it anew; model= is compared as it is written",
    "rank": "let each rank load the file that it saved itself, in a group of the same size",
    "block_size": "make the cache with the block size that the file was saved with, or save it anew",
    "dtype": "make the cache with the dtype that the file was saved with, or save it anew",
    "groups": "make the cache for the same layers and with the same configuration, or save it anew",
    "order": "load it with the version of kvdock that saved it",
}


def check_pool(subject: str, manager: object, cache: object) -> None:
    """Check that a manager hands out the blocks of a cache, and that what it keeps can be in files.

    Raises:
        ArgumentTypeError, ArgumentValueError: they are no manager and no cache in blocks, or not of one another.
        UnsupportedError: a prefix cache that stores nothing.
    """
    if not isinstance(manager, CacheManager):
        raise ArgumentTypeError(f"{subject}: manager", expected="a CacheManager", got=repr(manager)[:80])
    if not isinstance(cache, GroupedCache):
        expected, fix = "a cache in blocks, such as a PagedKVCache", "pass what create_cache made of a PagedKVCacheConfig"
        raise ArgumentTypeError(f"{subject}: cache", expected=expected, got=repr(cache)[:80], fix=fix)
    if not manager.prefix.can_store:
        expected, fix = "a prefix cache that stores something", 'make the manager with prefix="radix"'
        raise UnsupportedError(f"{subject}: manager", expected=expected, got=repr(manager.prefix)[:80], fix=fix)
    sizes, found = tuple(group.block_size for group in cache.groups), block_sizes(manager)
    has_tokens = not all(group.retention.is_state for group in cache.groups)
    if not has_tables_of(manager, cache.groups) or (has_tokens and manager.block_size != math.lcm(*sizes)):
        expected = f"the manager of this cache, with blocks of {', '.join(map(str, sizes))} tokens"
        got = f"one with blocks of {', '.join(map(str, found))} tokens"
        raise ArgumentValueError(f"{subject}: manager", expected=expected, got=got, fix=_MANAGER)
    if (blocks := num_blocks(manager)) > cache.num_blocks:
        raise ArgumentValueError(
            f"{subject}: manager", expected=f"at most the {cache.num_blocks} blocks of the cache", got=blocks, fix=_MANAGER
        )


def described(manager: CacheManager, cache: GroupedCache, of: Sequence[LayerGroup], model: str) -> dict[str, Any]:
    """Return what a cache must have in common with one that loads its files, as JSON has it."""
    groups = [
        {
            "keeps": repr(group.retention),
            "block_size": group.block_size,
            "buffers": [
                [layer, buffer.name, list(buffer.shape), str(buffer.dtype)]
                for (layer, _), part in zip(group.members, group.parts, strict=True)
                for buffer in part.buffers
            ],
        }
        for group in of
    ]
    return {
        "model": model,
        "rank": [cache.rank.tp_size, cache.rank.tp_rank],
        "block_size": manager.block_size,
        "dtype": str(cache.dtype),
        "groups": groups,
        "order": ORDER,
    }


def check_fits(path: object, header: dict[str, Any], expected: dict[str, Any]) -> None:
    """Raise a FileContentError that names the first thing in which a file is of another cache."""
    for name, value in expected.items():
        found = header.get(name)
        if found != value or _kinds(found) != _kinds(value):
            wanted, got = _difference(value, found)
            raise FileContentError(f"{path}: {name}", expected=wanted, got=got, fix=_FIXES[name])


def _difference(wanted: Any, found: Any) -> tuple[str, str]:
    """Return what two values differ in: of lists and dicts the first part, since all of a model's layers are more than anybody reads."""
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        return next((_difference(*both) for both in zip(wanted, found, strict=True) if both[0] != both[1]), (repr(wanted), repr(found)))
    if isinstance(wanted, dict) and isinstance(found, dict):
        return next((_difference(wanted[key], found.get(key)) for key in wanted if wanted[key] != found.get(key)), ("nothing more", "more"))
    return repr(wanted)[:200], repr(found)[:200]


def _kinds(value: Any) -> Any:
    """Return the types in a value: to Python 1, 1.0 and True are equal."""
    if isinstance(value, dict):
        return {key: _kinds(part) for key, part in value.items()}
    return [_kinds(part) for part in value] if isinstance(value, list) else type(value)
