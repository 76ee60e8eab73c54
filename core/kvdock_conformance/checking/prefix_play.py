"""Playing a case's calls twice: on a prefix cache, and on the slow one. What a requirement is about is compared at each step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from kvdock.errors import OutOfBlocksError, StaleHandleError
from kvdock.prefix import InsertResult, NaivePrefixCache, PrefixCache, PrefixHandle, PrefixMatch, PrefixStats
from kvdock_conformance.checking.containers import CONTAINERS, overwrite
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.prefix_bad import bad_call
from kvdock_conformance.checking.prefix_events import Replayed, where
from kvdock_conformance.checking.prefix_model import Block, SlowPrefixCache, slots_of

__all__ = ["Held", "Player", "namespace_of", "play", "tokens_of"]


@attrs.define(eq=False)
class Held:
    """A handle, and what it stands for.

    Args:
        handle: what the cache returned.
        path: its blocks in the slow cache.
        space: its namespace.
        epoch: how many resets came before it.
        locks: how often it is locked.
    """

    handle: PrefixHandle
    path: list[Block]
    space: tuple[Any, ...]
    epoch: int
    locks: int = 0


def namespace_of(parts: Sequence[Any]) -> tuple[Any, ...]:
    """Return the namespace that a case names: ``bytes:x`` is bytes, lists are tuples, all else is itself."""
    return tuple(
        namespace_of(part) if isinstance(part, list) else part[6:].encode() if str(part).startswith("bytes:") else part for part in parts
    )


def tokens_of(pieces: Sequence[int], rest: int, block_size: int, *, is_wide: bool = False) -> list[int]:
    """Return tokens: a block for each piece, all alike but for the first token or the last; then a rest shorter than a block."""
    found: list[int] = []
    for piece in pieces:
        block = [7] * block_size
        block[0 if piece % 2 else -1] = piece // 2
        if is_wide and piece == 5:
            block = [7] * (block_size - 1) + [2**32]  # piece 0, in the lower half
        found += block
    return found + [7] * (rest % block_size)


class Player:
    """Makes the calls of a case.

    Args:
        cache: the cache under test.
        model: the slow one.
        data: the case.
        other: makes another cache like it.
        about: what is compared: ``"match"``, ``"insert"``, ``"evict"``, ``"order"``, ``"discard"``, ``"reset"``, ``"partial"`` are the
            answers of these calls, ``"late"`` keeps what insertions return in `unread`, ``"locks"``, ``"sizes"``, ``"stats"``,
            ``"ages"``, ``"events"`` are looked at after each step, and ``"refused"`` is that bad calls raise and change nothing. All
            else is followed, and not judged.
    """

    def __init__(
        self,
        cache: PrefixCache,
        model: SlowPrefixCache,
        data: Mapping[str, Any],
        other: Callable[[int], PrefixCache],
        about: Collection[str],
    ) -> None:
        self.cache, self.model, self.other, self.about = cache, model, other, about
        self.block_size: int = data["block_size"]
        self.spaces = [namespace_of(space) for space in data["spaces"]]
        self.is_wide: bool = data.get("wide", False)
        self.free = list(range(1000))[::-1]
        self.held: list[Held] = []
        self.epoch = self.num_locks = self.seen_ages = 0
        self.seen_stats = PrefixStats()
        self.unread: list[tuple[InsertResult, list[int]]] = []
        """What insertions returned, with the blocks that it must name whenever it is asked."""
        self.answers: list[Any] = []
        """What the cache said, call by call."""
        self.observer = Replayed(self.block_size)
        if "events" in about:
            cache.subscribe(self.observer)

    def same(self, about: str, what: str, expected: object, got: object) -> None:
        """Compare, if the requirement is about this."""
        self.answers.append((what, got))
        if about in self.about and expected != got:
            raise NonconformanceError(what, expected=expected, got=got)

    def array(self, about: str, what: str, expected: list[int], got: Any) -> None:
        """Compare an array of int32, and overwrite it: it is the caller's own."""
        self.same(about, f"{what}: kind of array", "int32", str(got.dtype) if isinstance(got, np.ndarray) else type(got).__name__)
        self.same(about, what, expected, got.tolist())
        got[...] = -5

    def named(self, about: str, what: str, blocks: list[int], got: PrefixMatch | InsertResult) -> None:
        """Compare the blocks that an answer names, and their slots."""
        self.array(about, f"{what}: indices", slots_of(blocks, self.block_size), got.indices)
        self.array(about, f"{what}: blocks", blocks, got.blocks)

    def tokens(self, step: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a step."""
        return tokens_of(step["pieces"], step.get("rest", 0), self.block_size, is_wide=self.is_wide)

    def space(self, step: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the namespace of a step."""
        found: tuple[Any, ...] = self.spaces[step["space"] % len(self.spaces)]
        return found

    def hold(self, about: str, what: str, handle: PrefixHandle, path: list[Block], space: tuple[Any, ...]) -> None:
        """Keep a handle."""
        self.same(about, f"{what}: handle.cached_len", len(path) * self.block_size, handle.cached_len)
        self.held.append(Held(handle, path, space, self.epoch))

    def is_stale(self, held: Held) -> bool:
        """Whether what a handle stands for is gone."""
        return held.epoch != self.epoch or any(not block.is_stored for block in held.path)

    def match(self, step: Mapping[str, Any]) -> None:
        """Match, and let the caller use his memory again."""
        tokens, space = self.tokens(step), self.space(step)
        passed = CONTAINERS[step["form"]](tokens)
        found = self.cache.match_prefix(passed, space, record=step["record"])
        overwrite(passed)
        path = self.model.find(tokens, space)
        if step["record"]:
            self.model.record(path, len(tokens))
        self.named("match", "match_prefix", [block.number for block in path], found)
        self.hold("match", "match_prefix", found.handle, path, space)

    def partial(self, step: Mapping[str, Any]) -> None:
        """Look for a block that begins like some tokens."""
        tokens = self.tokens(step)[step["skip"] % self.block_size :]
        for held in self.chosen(step):
            if self.is_stale(held):
                call = functools.partial(self.cache.match_partial, held.handle, tokens)
                self.refused("match_partial of a stale handle", StaleHandleError, call)
                continue
            alike, found = self.model.alike(held.path, held.space, tokens), self.cache.match_partial(held.handle, tokens)
            best = max(alike.values(), default=None)
            self.same("partial", "match_partial: num_tokens", best, found and found.num_tokens)
            if found is not None:
                (block,) = [block for _, block in self.model.blocks() if block.number == found.block]
                self.same("partial", f"match_partial: tokens that block {found.block} begins with", best, alike.get(found.block))
                self.hold("partial", "match_partial", found.handle, block.path(), held.space)

    def record(self, step: Mapping[str, Any]) -> None:
        """Count a match later."""
        for held in self.chosen(step):
            count = step["tokens"] + held.handle.cached_len
            if self.is_stale(held):
                self.refused(
                    "record_match of a stale handle", StaleHandleError, functools.partial(self.cache.record_match, held.handle, count)
                )
            else:
                self.cache.record_match(held.handle, count)
                self.model.record(held.path, count)

    def chosen(self, step: Mapping[str, Any]) -> list[Held]:
        """Return the handle of a step; none where there is none yet."""
        return [self.held[step["handle"] % len(self.held)]] if self.held else []

    def lock(self, step: Mapping[str, Any], change: int = 1) -> None:
        """Lock a handle; one that is stale is refused."""
        for held in self.chosen(step):
            if self.is_stale(held) or held.locks + change < 0:
                state = "a stale handle" if self.is_stale(held) else "a handle that is not locked"
                what = f"lock_handle{'' if change > 0 else ' with unlock'} of {state}"
                self.refused(what, StaleHandleError, functools.partial(self.cache.lock_handle, held.handle, unlock=change < 0))
                continue
            self.cache.lock_handle(held.handle, unlock=change < 0)
            held.locks += change
            self.num_locks += change
            if held.path:
                held.path[-1].locks += change

    def unlock(self, step: Mapping[str, Any]) -> None:
        """Unlock a handle; one that is stale or not locked is refused."""
        self.lock(step, -1)

    def insert(self, step: Mapping[str, Any], behind: Held | None = None) -> None:
        """Insert; blocks that are stored already come with their own ids, or with others that stay the caller's."""
        before, space = (behind.path, behind.space) if behind else ([], self.space(step))
        tokens = self.tokens(step)
        whole = [token for block in before for token in block.tokens] + tokens
        known = [block.number for block in self.model.find(whole, space)[len(before) :]]
        fresh = [self.free.pop() for _ in step["pieces"]]
        numbers = [known[at] if at < len(known) and step["own"][at] else fresh[at] for at in range(len(fresh))]
        passed, blocks = CONTAINERS[step["form"]](tokens), CONTAINERS[step["blocks_form"]](numbers)
        options = {"behind": behind.handle} if behind else {}
        made = self.cache.insert_prefix(passed, blocks, space, priority=step["priority"], **options)
        overwrite(passed)
        overwrite(blocks)
        there, path = self.model.insert(whole, [*(block.number for block in before), *numbers], space, step["priority"])
        self.same("insert", "insert_prefix: cached_len", there * self.block_size, made.cached_len)
        canonical = [block.number for block in path[len(before) :]]
        if "late" in self.about:
            self.unread.append((made, canonical))
        else:
            self.named("insert", "insert_prefix", canonical, made)
        self.free.extend(number for number in fresh[::-1] if number not in canonical)
        self.hold("insert", "insert_prefix", made.handle, path, space)

    def behind(self, step: Mapping[str, Any]) -> None:
        """Insert behind a handle; one that is stale is refused."""
        for held in self.chosen(step):
            if self.is_stale(held):
                passed = [7] * self.block_size, self.free[-1:], held.space
                call = functools.partial(self.cache.insert_prefix, *passed, behind=held.handle)
                self.refused("insert_prefix behind a stale handle", StaleHandleError, call)
            else:
                self.insert(step, held)

    def append(self, step: Mapping[str, Any]) -> None:
        """Append a block behind each of some locked handles, which move; those for which it is not done stay as they were."""
        size, chosen = self.block_size, [held for held in self.held if held.locks and not self.is_stale(held)][: len(step["pieces"])]
        rows = [tokens_of([piece], 0, size) for piece in step["pieces"][: len(chosen)]]
        numbers, priority = [self.free.pop() for _ in chosen], step["priority"]
        passed = np.array(rows, dtype=np.int32).reshape(-1, size), np.array(numbers, dtype=np.int32), [priority] * len(chosen)
        stored = self.cache.append_blocks([held.handle for held in chosen], *passed).tolist()
        for held, row, number, is_stored in zip(chosen, rows, numbers, stored, strict=True):
            if is_stored:
                before, whole = held.path, [token for block in held.path for token in block.tokens]
                there, held.path = self.model.insert([*whole, *row], [*(one.number for one in before), number], held.space, priority)
                self.same("insert", "append_blocks: blocks that were there before", len(before), there)
                for blocks, change in ((before, -held.locks), (held.path, held.locks)):
                    for block in blocks[-1:]:
                        block.locks += change
            else:
                self.free.append(number)
            self.same("insert", "append_blocks: handle.cached_len", len(held.path) * size, held.handle.cached_len)

    def evict(self, step: Mapping[str, Any]) -> None:
        """Evict, and follow the cache's choice unless it is the order that matters."""
        possible = self.model.size_info().evictable_size // self.block_size
        count = step["count"] if "count" in step else int(step["share"] * possible)
        if count > possible:
            self.refused(f"evict({count}) with {possible} evictable blocks", OutOfBlocksError, lambda: self.cache.evict(count))
            return
        blocks = self.cache.evict(count)
        numbers = blocks.tolist()
        self.array("evict", f"evict({count})", numbers, blocks)
        self.same("evict", f"evict({count}): number of blocks, and of distinct ones", [count] * 2, [len(numbers), len(set(numbers))])
        if "order" in self.about:
            self.same("order", f"evict({count}): blocks", sorted(self.model.evict(count) or []), sorted(numbers))
        else:
            wrong = self.model.follow(numbers)
            if wrong:
                raise NonconformanceError(f"evict({count})", expected="ends of prefixes that nobody has locked", got=wrong)
        self.free.extend(numbers)

    def discard(self, step: Mapping[str, Any]) -> None:
        """Forget the end of a prefix."""
        keep = step["keep"]
        for held in self.chosen(step):
            if self.is_stale(held):
                call = functools.partial(self.cache.discard_prefix, held.handle, keep)
                self.refused("discard_prefix of a stale handle", StaleHandleError, call)
                continue
            numbers = self.model.discard(held.path, keep)
            blocks = self.cache.discard_prefix(held.handle, keep)
            self.same("discard", f"discard_prefix, all but {keep} blocks", sorted(numbers), sorted(blocks.tolist()))
            self.array("discard", "discard_prefix", blocks.tolist(), blocks)
            self.free.extend(numbers)

    def reset(self, step: Mapping[str, Any]) -> None:
        """Forget everything."""
        stored = sorted(block.number for _, block in self.model.blocks())
        self.array("reset", "reset: blocks, sorted", stored, self.cache.reset())
        self.free.extend(stored)
        self.model.reset()
        self.epoch += 1
        self.num_locks = 0

    def foreign(self, step: Mapping[str, Any]) -> None:
        """Pass a handle of another cache, or what is none."""
        others: dict[str, Callable[[], Any]] = {
            "equal": lambda: self.other(self.block_size).match_prefix([1]).handle,
            "naive": lambda: NaivePrefixCache(self.block_size).match_prefix([1]).handle,
            "none": lambda: (),
        }
        handle, whose = others[step["whose"]](), {"equal": "another cache's handle", "naive": "another kind's handle", "none": "a tuple"}
        calls: dict[str, Callable[[], object]] = {
            "lock_handle": lambda: self.cache.lock_handle(handle, unlock=step["unlock"]),
            "record_match": lambda: self.cache.record_match(handle, 100 * self.block_size),
            "discard_prefix": lambda: self.cache.discard_prefix(handle, 0),
            "insert_prefix": lambda: self.cache.insert_prefix([7] * self.block_size, self.free[-1:], behind=handle),
        }
        self.refused(f"{step['call']} of {whose[step['whose']]}", StaleHandleError, calls[step["call"]])

    def bad(self, step: Mapping[str, Any]) -> None:
        """Make a call with arguments that no cache takes."""
        tokens = tokens_of([*step["pieces"], 1], 0, self.block_size)
        found = bad_call(self.cache, self.model, step, tokens, self.free)
        if found is not None:
            errors, call = found
            self.refused(step["call"], errors, call)

    def refused(self, what: str, errors: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object]) -> None:
        """Make a call that must raise and change nothing."""
        before, events = self.observed(), len(self.observer.events)
        try:
            call()
        except errors:
            pass
        except Exception as error:
            if "refused" in self.about:
                raise NonconformanceError(what, expected=errors, got=repr(error)) from error
            raise
        else:
            if "refused" in self.about:
                raise NonconformanceError(what, expected=errors, got="no error")
            return
        self.same("refused", f"{what}: the cache after the error", before, self.observed())
        self.same("refused", f"{what}: events", events, len(self.observer.events))

    def observed(self) -> dict[str, object]:
        """Return all that the contract lets anybody see, but the order of use."""
        matches = []
        for space in self.spaces:
            for _, block in [entry for entry in self.model.blocks() if entry[0] == repr(space) and not entry[1].children]:
                tokens = [token for one in block.path() for token in one.tokens]
                matches.append(self.cache.match_prefix(tokens, space, record=False).blocks.tolist())
        cache = self.cache
        numbers = {"sizes": cache.size_info, "locks": cache.num_locks, "stats": cache.stats}
        return {**numbers, "blocks": cache.stored_blocks().tolist(), "matches": matches}

    def look(self) -> None:
        """Compare what can be seen after a step."""
        size, cache, model = self.model.size_info(), self.cache, self.model
        if "locks" in self.about:
            self.same("locks", "size_info: protected_size", size.protected_size, cache.size_info.protected_size)
            self.same("locks", "num_locks", self.num_locks, cache.num_locks)
        if "sizes" in self.about:
            cache.check_integrity()
            stored = sorted(block.number for _, block in model.blocks())
            self.array("sizes", "stored_blocks", stored, cache.stored_blocks())
            self.same("sizes", "stored_blocks again", stored, cache.stored_blocks().tolist())
            self.same("sizes", "size_info: total_size", len(stored) * self.block_size, cache.size_info.total_size)
            self.same("sizes", "size_info", size, cache.size_info)
        if "stats" in self.about:
            for name in ("lookups", "lookup_tokens", "hit_tokens", "inserted_tokens", "evicted_tokens"):
                self.same("stats", f"stats: {name}", getattr(model.stats(), name), getattr(cache.stats, name))
        if "ages" in self.about:
            self.look_at_ages()
        if "events" in self.about:
            self.same("events", "events that do not fit those before", [], self.observer.wrong)
            self.same("events", "what is stored, by the events", where(model), self.observer.where)

    def look_at_ages(self) -> None:
        """Compare ages. Which blocks of a call are one run is the cache's affair: from one run for all to one for each block."""
        stats, ages, before = self.cache.stats, self.model.block_ages, self.seen_stats
        fresh = ages[self.seen_ages :]
        self.seen_ages, self.seen_stats = len(ages), stats
        self.same("ages", "stats: age_max", max(ages, default=0), stats.age_max)
        for name, least, most in (("evictions", bool(fresh), len(fresh)), ("age_sum", max(fresh, default=0), sum(fresh))):
            got = getattr(stats, name) - getattr(before, name)
            self.same("ages", f"stats: {name}, {least} to {most} of this step", min(max(got, least), most), got)


def play(player: Player, steps: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Make steps one after the other; returns what the cache said.

    Raises:
        NonconformanceError: an answer is not the slow cache's; a note says at which step.
    """
    for number, step in enumerate(steps):
        try:
            getattr(player, step["do"])(step)
            player.look()
        except NonconformanceError as error:
            raise NonconformanceError(f"step {number}, {step['do']}: {error.what}", expected=error.expected, got=error.got) from error
        except Exception as error:
            error.add_note(f"at step {number}: {step}")
            raise
    return player.answers
