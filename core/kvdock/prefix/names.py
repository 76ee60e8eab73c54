"""Names of blocks that follow from what they hold, so that processes which share no memory agree on them.

A name is a SHA-256 digest over the name of the block before and the token ids, as in vLLM's and SGLang's prefix caches; the first
one of a chain begins with what every block below it has in common. Computed from tokens alone, outside any tree, so that tiers,
files, transports and routers call a block the same whichever prefix cache holds it.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Any

from kvdock.errors import ArgumentTypeError, ArgumentValueError
from kvdock.prefix.inputs import as_integers, check_block_size, namespace_key
from kvdock.prefix.interface import Namespace

__all__ = ["NAME_BYTES", "block_names", "namespace_text", "root_name", "tagged_namespace"]

NAME_BYTES = 32
"""Length of a name."""

_ROOT, _BLOCK = b"kvdock root 1\0", b"kvdock block 1\0"
"""What is hashed begins with what it is, and with the version of this scheme: a root is never taken for a block."""


def root_name(block_size: int, namespace: Namespace = ()) -> bytes:
    """Return the name that stands before the first block of a namespace, 32 bytes.

    Args:
        block_size: tokens in a block: blocks of other sizes never share a name.
        namespace: as in prefix caches. Its parts go in with their types, so that ``("1",)``, ``(1,)`` and ``(("1",),)`` differ.

    Raises:
        ArgumentTypeError, ArgumentValueError: a bad block size or namespace.
    """
    size = check_block_size("root_name", block_size)
    namespace_key("root_name: namespace", namespace)
    text = namespace_text("root_name: namespace", namespace)
    return hashlib.sha256(b"%s%d\0%s" % (_ROOT, size, text.encode())).digest()


def namespace_text(subject: str, namespace: Namespace) -> str:
    """Return a text that is unlike that of every other namespace, and alike in every Python.

    Raises:
        ArgumentValueError: integers that are too long to be written.
    """
    try:
        return ascii(namespace)  # of the types that a namespace may have it writes each value in a way of its own
    except ValueError as error:
        fix = "put a digest there instead"
        raise ArgumentValueError(subject, expected="integers of at most 4,300 digits", got=str(error), fix=fix) from error


def block_names(tokens: Any, block_size: int, namespace: Namespace = (), *, parent: bytes | None = None) -> list[bytes]:
    """Return the names of the whole blocks of a prefix, 32 bytes each.

    The name of a block is the SHA-256 of a tag, the name of the block before it and its token ids as int64, little-endian.

    Args:
        tokens: ids ``[n]``; what is behind the last whole block has no name.
        block_size: tokens in a block, 1 to 512.
        namespace: where the prefix is; two namespaces never share a name.
        parent: name of the block that ``tokens`` follow; None at the beginning of a prefix. The namespace is in it already.

    Raises:
        ArgumentTypeError: no integers; a parent that is not bytes.
        ArgumentValueError: a parent of another length; a bad block size or namespace.
    """
    name = root_name(block_size, namespace)
    if parent is not None:
        if not isinstance(parent, bytes):
            raise ArgumentTypeError(
                "block_names: parent", expected="bytes", got=repr(parent)[:80], fix="pass a name that block_names returned"
            )
        if len(parent) != NAME_BYTES:
            raise ArgumentValueError("block_names: parent", expected=f"{NAME_BYTES} bytes", got=f"{len(parent)} bytes")
        name = parent
    ids = as_integers("block_names: tokens", tokens)
    data = ids.astype("<i8").tobytes()
    step = 8 * block_size
    names = []
    for begin, end in pairwise(range(0, len(data) + 1, step)):
        name = hashlib.sha256(b"".join((_BLOCK, name, data[begin:end]))).digest()
        names.append(name)
    return names


def tagged_namespace(**fields: str | bytes | int | None) -> Namespace:
    """Return a namespace of fields, each with its tag: ``(("lora", "a"), ("salt", "b"))``.

    So an adapter and a salt of the same text never share a block, and their order does not matter. Events for routers have places
    for ``lora`` (a name), ``lora_id`` and ``salt``: see `kvdock.integrations.kv_events`.

    Args:
        fields: values by tag; one that is None is as if it were not there.

    Raises:
        ArgumentTypeError: a value of another type.
    """
    tagged = tuple((tag, fields[tag]) for tag in sorted(fields) if fields[tag] is not None)
    for tag, value in tagged:
        if type(value) not in (str, bytes, int):
            raise ArgumentTypeError(f"tagged_namespace: {tag}", expected="str, bytes, int or None", got=repr(value)[:80])
    return tagged
