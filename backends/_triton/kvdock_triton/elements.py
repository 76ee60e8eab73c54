"""In which elements bits are moved: what an alignment class allows."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvdock.plugin import TensorMeta, common_alignment

__all__ = ["Element", "chunk_for", "element_between", "element_for", "index_type"]


@attrs.frozen
class Element:
    """An integer to move bits in.

    Args:
        pointer: Triton type of a pointer to it.
        size: bytes of one.
        unit: elements in the alignment class: strides are counted in so many.
    """

    pointer: str
    size: int
    unit: int

    @property
    def is_aligned(self) -> bool:
        """Whether pointers are multiples of 16 bytes."""
        return self.size * self.unit == 16

    def units(self, stride: int, itemsize: int) -> int:
        """Return a stride, in items of a tensor, in units."""
        return stride * itemsize // (self.size * self.unit)

    def count(self, items: int, itemsize: int) -> int:
        """Return how many elements so many items of a tensor are."""
        return items * itemsize // self.size


_ELEMENTS = {
    16: Element("*i32", 4, 4),
    8: Element("*i64", 8, 1),
    4: Element("*i32", 4, 1),
    2: Element("*i16", 2, 1),
    1: Element("*i8", 1, 1),
}


def element_for(pool: TensorMeta, others: Iterable[TensorMeta] = ()) -> Element:
    """Return the element that divides every address and step of a pool, and of what moves to or from it.

    Args:
        pool: a pool: shape and strides known.
        others: tensors of rows; their alignment covers rows and steps.
    """
    return _ELEMENTS[common_alignment(pool, *others)]


def element_between(one: TensorMeta, other: TensorMeta) -> Element:
    """Return the element that divides every address and step of two pools."""
    return _ELEMENTS[min(common_alignment(one), common_alignment(other))]


def chunk_for(elements: int, most: int = 4096) -> int:
    """Return the power of two in which a row of so many elements is moved; never 1, on which Triton 3.6 fails to compile."""
    return min(1 << max(elements - 1, 1).bit_length(), most)


def index_type(meta: TensorMeta) -> str:
    """Return the Triton type of a pointer to an index tensor."""
    return f"*i{meta.dtype.itemsize * 8}"
