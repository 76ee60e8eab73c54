"""Making a prefix cache by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvdock.errors import ArgumentTypeError, ArgumentValueError, KVDockError, PluginError
from kvdock.prefix.inputs import MAX_SLOTS
from kvdock.prefix.interface import PrefixCache
from kvdock.prefix.naive import NaivePrefixCache
from kvdock.prefix.radix import RadixPrefixCache
from kvdock.process import process_runtime

__all__ = ["create_prefix_cache", "prefix_cache_of_pool"]

_BUILT_IN: Mapping[str, Callable[..., PrefixCache]] = {"naive": NaivePrefixCache, "radix": RadixPrefixCache}


def create_prefix_cache(name: str = "radix", *, block_size: int = 16, **options: Any) -> PrefixCache:
    """Make a prefix cache.

    Args:
        name: ``"radix"``, ``"naive"``, or what a plugin's ``kvdock_prefix_caches`` calls it. Plugins are found only when the
            name is not one of the first two.
        block_size: tokens in a block, 1 to 512.
        options: what else its class takes, such as ``policy="lfu"`` for ``"radix"``.

    Raises:
        ArgumentTypeError: a name that is no str, an option that the class does not take.
        ArgumentValueError: nobody brings it; or several plugins do.
        PluginError: a plugin's class lacks methods of the contract, or made something that is no `PrefixCache`.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError("create_prefix_cache: name", expected="a str", got=repr(name)[:80])
    factory = _BUILT_IN.get(name) or _of_plugin(name)
    missing = getattr(factory, "__abstractmethods__", None)
    if missing:
        fix = "implement kvdock.plugin.PrefixCache of the installed version; `kvdock conformance --prefix` says what else is asked"
        raise PluginError(
            f"prefix cache {name!r}", expected="every method of PrefixCache", got=f"a class without {sorted(missing)}", fix=fix
        )
    try:
        made = factory(block_size=block_size, **options)
    except (KVDockError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a plugin may raise anything
        if isinstance(error, TypeError) and options:
            fix = f"pass what {getattr(factory, '__name__', 'its class')} takes beside block_size"
            raise ArgumentTypeError(
                f"create_prefix_cache: {name!r}", expected="options that its class takes", got=str(error), fix=fix
            ) from error
        got = f"{type(error).__name__}: {error}"
        raise PluginError(f"prefix cache {name!r}", expected="a PrefixCache", got=got, fix="report it to the plugin's author") from error
    if not isinstance(made, PrefixCache):
        raise PluginError(f"prefix cache {name!r}", expected="a PrefixCache", got=repr(made)[:80], fix="report it to the plugin's author")
    return made


def prefix_cache_of_pool(
    subject: str, prefix: str | PrefixCache, *, num_blocks: int, block_size: int, options: Mapping[str, Any]
) -> PrefixCache:
    """Return the prefix cache of a pool, made by name or passed.

    Args:
        subject: what to call the caller in an error.
        prefix: a name, see `create_prefix_cache`; or an empty prefix cache of the same block size that nobody else uses.
        num_blocks: blocks of the pool.
        block_size: tokens in a block.
        options: what else a prefix cache made by name takes.

    Raises:
        ArgumentTypeError: neither a name nor a prefix cache; options that are not taken.
        ArgumentValueError: nobody brings it; another block size; something is in it; more slots than a prefix cache can name.
    """
    made = create_prefix_cache(prefix, block_size=block_size, **options) if isinstance(prefix, str) else prefix
    if not isinstance(made, PrefixCache):
        raise ArgumentTypeError(f"{subject}: prefix", expected="a name or a PrefixCache", got=repr(prefix)[:80])
    if made is prefix and options:
        raise ArgumentTypeError(subject, expected="no options beside a prefix cache that is made", got=", ".join(options))
    if num_blocks * block_size > MAX_SLOTS:
        raise ArgumentValueError(f"{subject}: num_blocks", expected=f"at most {MAX_SLOTS // block_size}: 2**31 slots", got=num_blocks)
    if made.block_size != block_size or made.size_info.total_size or made.num_locks:
        raise ArgumentValueError(
            f"{subject}: prefix",
            expected=f"an empty prefix cache in blocks of {block_size}",
            got=f"one in blocks of {made.block_size} with {made.size_info.total_size} tokens",
        )
    return made


def _of_plugin(name: str) -> Callable[..., PrefixCache]:
    found = process_runtime().registry.prefix_caches()
    owners = sorted(plugin for plugin, caches in found.items() if name in caches)
    if len(owners) > 1:
        raise ArgumentValueError(
            "create_prefix_cache: name",
            expected="one plugin that brings it",
            got=f"{name!r} from {', '.join(owners)}",
            fix="deny all but one with KVDOCK_BACKENDS_DENY",
        )
    if not owners:
        known = sorted({*_BUILT_IN, *(key for caches in found.values() for key in caches)})
        fix = "install the plugin that brings it; `kvdock backends` says what became of those that are installed"
        raise ArgumentValueError("create_prefix_cache: name", expected=f"one of {', '.join(known)}", got=repr(name), fix=fix)
    factory: Callable[..., PrefixCache] = found[owners[0]][name]
    return factory
