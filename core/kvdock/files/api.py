"""Saving and loading prefixes and pools."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdock.cache.grouped import GroupedCache
from kvdock.errors import ArgumentTypeError, ArgumentValueError, FileContentError, OutOfBlocksError
from kvdock.files.container import Container
from kvdock.files.description import described
from kvdock.files.gather import gathered, with_checkpoints
from kvdock.files.holder import Beside, Holder
from kvdock.files.interface import Loaded, Progress, Saved
from kvdock.files.loading import Reading, load_path, opened
from kvdock.files.saving import save
from kvdock.prefix.inputs import as_integers, count_of, namespace_key
from kvdock.prefix.interface import Namespace, StoredPrefix
from kvdock.scheduler import CacheManager

__all__ = ["load_any", "load_pool", "load_prefix", "save_pool", "save_prefix"]

_MAX_FILE_BYTES = 2**30
_COMMIT = "compute and commit prompts first; where layers keep states, begin them with at_most, so that one is kept at the end of a chunk"


def save_prefix(
    path: str | os.PathLike[str],
    manager: CacheManager,
    cache: GroupedCache,
    tokens: npt.ArrayLike,
    namespace: Namespace = (),
    *,
    model: str = "",
    beside: Beside | None = None,
    max_file_bytes: int = _MAX_FILE_BYTES,
    progress: Progress | None = None,
) -> Saved:
    """Save what is cached of a prefix, in whole blocks, as far as every layer group can go on behind it.

    Takes no block, and counts as no use. Host memory for one part is needed.

    Args:
        path: where to; a file of that name is replaced once all is written. The folder must be there.
        manager: who has the blocks.
        cache: whose they are.
        tokens: token ids ``[n]``.
        namespace: where they are cached.
        model: what tells the weights from others, such as a name with a revision: only the same text loads the file.
        beside: who keeps states of the prefixes beside the pool.
        max_file_bytes: most bytes of contents in one file, though at least a block: more become several parts beside ``path``.
        progress: called with the bytes that are done and those in all.

    Raises:
        ArgumentTypeError, ArgumentValueError: a bad argument; nothing of the tokens is cached.
        UnsupportedError: safetensors is not installed; a prefix cache that stores nothing.
        FileAccessError: the file cannot be written. What was there is as it was; or, where the device fails once all is in place, the new
            file is there, whole.
        CapacityError: the host has no memory for a part.
    """
    subject = "save_prefix"
    where, holder, header = _checked(subject, path, manager, cache, beside, model, progress)
    ids = as_integers(f"{subject}: tokens", tokens).astype(np.int64)
    found = gathered(holder, [StoredPrefix(ids, namespace)])
    if not len(found.forest):
        raise ArgumentValueError(
            f"{subject}: tokens",
            expected=f"at least a block of {manager.block_size} tokens that are cached",
            got=f"{ids.size} tokens, of which none are",
            fix=_COMMIT,
        )
    return save(where, holder, found, {"kind": "prefix", **header}, _most(subject, max_file_bytes), progress)


def save_pool(
    path: str | os.PathLike[str],
    manager: CacheManager,
    cache: GroupedCache,
    *,
    model: str = "",
    beside: Beside | None = None,
    max_file_bytes: int = _MAX_FILE_BYTES,
    progress: Progress | None = None,
) -> Saved:
    """Save all prefixes that are cached, in all namespaces, and in which order they were used. What sequences have not committed is not.

    Of layers with windows each prefix has what its end needs, and of layers with states all of its checkpoints. The arguments, and what is
    raised, are those of `save_prefix`.

    Raises:
        ArgumentValueError: nothing is cached.
        UnsupportedError: the prefix cache does not list what it stores.
    """
    subject = "save_pool"
    where, holder, header = _checked(subject, path, manager, cache, beside, model, progress)
    found = gathered(holder, list(with_checkpoints(holder, manager.prefix.stored_prefixes())))
    if not len(found.forest):
        raise ArgumentValueError(f"{subject}: manager", expected="one that has cached something", got=repr(manager)[:200], fix=_COMMIT)
    return save(where, holder, found, {"kind": "pool", **header}, _most(subject, max_file_bytes), progress)


def load_prefix(
    path: str | os.PathLike[str],
    manager: CacheManager,
    cache: GroupedCache,
    *,
    namespace: Namespace | None = None,
    model: str = "",
    beside: Beside | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Load what `save_prefix` saved, so that prompts find it; all of it or nothing.

    Blocks that are cached already stay, and are not read again. The others are taken as a sequence's are: what nobody uses is evicted
    for them. The whole file is verified before anything is written. That a file is whole does not say that its keys and values are
    right: load those of people you trust.

    Args:
        path: the file.
        manager: hands out the blocks.
        cache: of the same layers, dtype and block size as the one that was saved; its layout, device and size may be others.
        namespace: the one that the file must be of; None for any.
        model: the text that was given when it was saved.
        beside: who gets the states that were beside the pool which was saved.
        progress: called with the bytes that are done and those in all.

    Raises:
        FileContentError: the file is none, damaged, or of another version, cache, model, rank or namespace.
        FileAccessError: it cannot be read.
        OutOfBlocksError: the pool has no room for it.
        ArgumentTypeError, ArgumentValueError, UnsupportedError: as `save_prefix`.
    """
    where, holder, expected = _checked("load_prefix", path, manager, cache, beside, model, progress)
    if namespace is not None:
        namespace_key("load_prefix: namespace", namespace)
    reading = opened(where, "prefix", holder, expected, progress)
    forest = reading.forest
    found = forest.namespace(forest.path(int(forest.ends[0])))
    if forest.ends.size != 1 or (namespace is not None and namespace_key("", found) != namespace_key("", namespace)):
        expects = f"one prefix, in namespace {namespace}" if namespace is not None else "one prefix"
        got = f"{forest.ends.size}, in {found}"
        raise FileContentError(f"{where}: namespaces", expected=expects, got=got[:200], fix="name the namespace that it was saved from")
    loaded = load_path(reading, forest.rows(), holder, int(forest.ends[0]))
    reading.meter.finish()
    return Loaded(1, 1, forest.tokens.size, loaded)


def load_any(path: str | os.PathLike[str], manager: CacheManager, cache: GroupedCache, **options: Any) -> Loaded:
    """Load what `save_prefix` or `save_pool` saved, with the options of `load_prefix` or `load_pool`."""
    where, _, _ = _checked("load", path, manager, cache, options.get("beside"), options.get("model", ""), options.get("progress"))
    load = load_pool if Container(where).header.get("kind") == "pool" else load_prefix
    return load(where, manager, cache, **options)


def load_pool(
    path: str | os.PathLike[str],
    manager: CacheManager,
    cache: GroupedCache,
    *,
    model: str = "",
    beside: Beside | None = None,
    progress: Progress | None = None,
) -> Loaded:
    """Load as many prefixes of what `save_pool` saved as there is room for without evicting any, those that were used last first.

    Each is loaded whole or not at all, and they are evicted in the order in which they would have been. How often each was used, and
    priorities, are not saved. The rest is as for `load_prefix`.

    Returns:
        What was loaded: ``num_prefixes`` of ``num_saved``.
    """
    where, holder, expected = _checked("load_pool", path, manager, cache, beside, model, progress)
    reading = opened(where, "pool", holder, expected, progress)
    fits = _load_fitting(reading, holder)
    forest = reading.forest
    paths = [forest.path(end) for end in fits]
    for blocks in reversed(paths):
        holder.use(forest.tokens[blocks].reshape(-1), forest.namespace(blocks))
    reading.meter.finish()
    count = len(np.unique(np.concatenate(paths))) if paths else 0
    return Loaded(len(fits), forest.ends.size, count * manager.block_size, sum(fits.values()))


def _load_fitting(reading: Reading, holder: Holder) -> dict[int, int]:
    """Load what there is room for; return the ends of it, and how many tokens were read for each."""
    forest, rows, fits = reading.forest, reading.forest.rows(), dict[int, int]()
    for end in forest.ends.tolist():
        blocks = forest.path(end)
        if not holder.has_room(forest.tokens[blocks].reshape(-1), forest.namespace(blocks)):
            continue
        try:
            fits[end] = load_path(reading, rows, holder, end)
        except OutOfBlocksError:  # room was left for nothing else than what it lets go on the way
            continue
    return fits


def _checked(
    subject: str, path: Any, manager: Any, cache: Any, beside: Any, model: Any, progress: Any
) -> tuple[Path, Holder, dict[str, Any]]:
    """Return the path, who holds what is saved or loaded, and what a file says of that; or raise."""
    where = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(where, str) or not where:
        raise ArgumentTypeError(f"{subject}: path", expected="a path", got=repr(path)[:80])
    if "\0" in where or not Path(where).name:
        fix = "name a file in a folder, without a zero byte"
        raise ArgumentValueError(f"{subject}: path", expected="the name of a file", got=repr(where)[:80], fix=fix)
    if not isinstance(model, str):
        fix = "pass a text that names the weights, such as a repository and its revision"
        raise ArgumentTypeError(f"{subject}: model", expected="a str", got=repr(model)[:80], fix=fix)
    if progress is not None and not callable(progress):
        raise ArgumentTypeError(f"{subject}: progress", expected="a function of two numbers, or None", got=repr(progress)[:80])
    holder = Holder(subject, manager, cache, beside)
    return Path(where), holder, described(manager, cache, holder.groups, model)


def _most(subject: str, max_file_bytes: object) -> int:
    return count_of(f"{subject}: max_file_bytes", max_file_bytes, 1)
