"""What the kernels share: moving rows of bits between a tensor of new tokens and a cache.

Keys and values are moved as integers, never as floats: NaN payloads and -0 arrive as they came, and no unit can flush or
quieten anything. The element follows from the alignment class (`kvdock_triton.elements`); at 16 bytes it is a 4-byte
integer, and strides are counted in units of four (``UNIT``), from which the compiler sees that every access may be 16 bytes
wide. No argument is specialised on its value: a stride or a token count that changes never compiles anything.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["count_skipped", "move_rows"]


@triton.jit
def move_rows(
    source,
    source_head,
    to,
    to_head,
    read,
    write,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
    STORE: tl.constexpr,
):
    """Copy rows of ``HEADS x DIM`` elements from ``source`` to ``to``, ``[tile]`` pointers each, where ``write``.

    What is written but not to be read (``read`` is False) is written as zeros. Heads lie ``source_head`` and ``to_head``
    units apart.
    """
    for start in tl.static_range(0, HEADS * DIM, CHUNK):
        element = start + tl.arange(0, CHUNK)
        head = (element // DIM).to(tl.int64)
        place = element % DIM
        from_at = source[:, None] + (head * source_head * UNIT + place)[None, :]
        to_at = to[:, None] + (head * to_head * UNIT + place)[None, :]
        if HEADS * DIM % CHUNK == 0:
            bits = tl.load(from_at, mask=read[:, None], other=0)
            tl.store(to_at, bits, mask=write[:, None], cache_modifier=STORE)
        else:
            inside = (element < HEADS * DIM)[None, :]
            bits = tl.load(from_at, mask=read[:, None] & inside, other=0)
            tl.store(to_at, bits, mask=write[:, None] & inside, cache_modifier=STORE)


@triton.jit
def count_skipped(skipped, beyond):
    """Add how many of ``beyond`` are set to the device's count, if any are."""
    number = tl.sum(beyond.to(tl.int64))
    if number > 0:
        tl.atomic_add(skipped, number, sem="relaxed")
