"""Loads of whole tiles by a unit of the GPU's own, which spares a program the addresses: Triton's tensor descriptors, CUDA's tensor maps.

A map says where a tensor lies, how it is laid out, and what a tile of it is. It is made by the host for one address, and handed to a
launch with the sizes and strides. A kernel's parameter of this kind has a type of its own, `map_type`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["MAP_ALIGNMENT", "MapMaker", "driver_maps", "interpreted_map", "is_map", "map_type", "spelled"]

MAP_ALIGNMENT = 16
"""Bytes of which addresses and strides are multiples."""

MapMaker = Callable[[int, Sequence[int], Sequence[int]], tuple[Any, ...]]
"""From an address, sizes and strides in elements: all that a launch takes for a map."""


def map_type(element: str, tile: Sequence[int]) -> str:
    """Return the type of a parameter: tiles of some elements, ``"bf16"``, of tensors of as many dimensions, the last one dense."""
    return f"tensordesc<{element}[{','.join(map(str, tile))}]>"


def is_map(type_name: str) -> bool:
    """Whether a parameter of a type is a map."""
    return type_name.startswith("tensordesc")


def _tile(type_name: str) -> list[int]:
    """Return the sizes of a tile."""
    return [int(size) for size in type_name[type_name.index("[") + 1 : type_name.index("]")].split(",")]


def spelled(types: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return run-time parameters as a launch takes them: a map, and behind it each size and each stride."""
    found = []
    for name, type_name in types:
        if is_map(type_name):
            places = range(len(_tile(type_name)))
            found += [(name, "nvTmaDesc"), *((f"{name}_size{i}", "i32") for i in places), *((f"{name}_step{i}", "i64") for i in places)]
        else:
            found.append((name, type_name))
    return found


def driver_maps(kernel: Any, types: Sequence[tuple[str, str]]) -> Mapping[str, MapMaker]:
    """Return what makes the maps of a compiled kernel, by parameter: the driver's own encoding, as the compiler laid tiles out.

    Args:
        kernel: what `triton.compile` returned for an NVIDIA GPU.
        types: its run-time parameters.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
    from triton.runtime import driver

    def maker(meta: Mapping[str, Any]) -> MapMaker:
        layout = meta["swizzle"], meta["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]], meta["block_size"]

        def make(address: int, sizes: Sequence[int], strides: Sequence[int]) -> tuple[Any, ...]:
            return driver.active.utils.fill_tma_descriptor(address, *layout, list(sizes), list(strides), 0), *sizes, *strides

        return make

    names = [name for name, type_name in types if is_map(type_name)]
    return {name: maker(meta) for name, meta in zip(names, getattr(kernel.metadata, "tensordesc_meta", None) or [], strict=True)}


def interpreted_map(type_name: str, argument: Callable[[str, int], Any], values: Sequence[int]) -> Any:
    """Return a map for Triton's interpreter.

    Args:
        type_name: of the parameter.
        argument: makes an argument of a type and a number.
        values: an address, sizes and strides.
    """
    from triton.runtime.interpreter import interpreter_semantic

    tile, element = _tile(type_name), type_name[type_name.index("<") + 1 : type_name.index("[")]
    address, *numbers = values
    sizes = [argument("i32", number) for number in numbers[: len(tile)]]
    strides = [argument("i64", number) for number in numbers[len(tile) : -1]]
    return interpreter_semantic.make_tensor_descriptor(argument(f"*{element}", address), sizes, [*strides, 1], tile)
