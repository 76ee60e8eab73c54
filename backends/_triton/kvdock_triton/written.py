"""Launches that are written out as source: collecting arguments in tuples costs as much as half of what there is to save."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

from kvdock_triton.tensor_maps import MapMaker

__all__ = ["Launch"]


class Launch:
    """A compiled kernel, ready to be launched on the current stream of its device.

    Args:
        names: the kernel's run-time parameters, in order.
        lines: the source of a launch, with ``{grid}`` and ``{arguments}`` where they go.
        scope: what the lines refer to.
        maps: what makes the arguments of each parameter that is a map: see `kvdock_triton.tensor_maps`.

    Attributes:
        run: ``run(grid_x, grid_y, *run-time arguments)``, pointers as addresses.
    """

    def __init__(
        self, names: Sequence[str], lines: Sequence[str], scope: Mapping[str, Any], maps: Mapping[str, MapMaker] | None = None
    ) -> None:
        self.maps = maps or {}
        self._names, self._lines, self._scope = list(names), lines, scope
        self._makers: dict[str, Callable[..., Callable[..., None]]] = {}
        self.run = self.fix(["grid_x", "grid_y", *names], "grid_x", "grid_y", {})

    def fix(self, parameters: Sequence[str], grid_x: str, grid_y: str, values: Mapping[str, int | str]) -> Callable[..., None]:
        """Return a function of some parameters that launches with what is settled of the others.

        The first time it is written and compiled; after that, other numbers for the same names take neither. So whoever is asked
        for it in the middle of calls asks for it when it is prepared, too.

        Args:
            parameters: names of its parameters. Those of the kernel's that are among them are passed on.
            grid_x: number of programs, as an expression in parameters and values.
            grid_y: likewise.
            values: the kernel's other arguments by name: numbers, or expressions in the parameters; empty for those that the one
                before brings, ``*ids``. Others may be named for the grid.
        """
        texts = {name: value if isinstance(value, str) else name for name, value in values.items()}
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        arguments = ", ".join(text for name in self._names if (text := texts.get(name, name)))
        body = [line.format(grid=f"{grid_x}, {grid_y}", arguments=arguments) for line in self._lines]
        launch = [f"def launch({', '.join(parameters)}):", *(f"    {line}" for line in body), "return launch"]
        source = "\n".join([f"def make({', '.join(numbers)}):", *(f"    {line}" for line in launch)])
        make = self._makers.get(source)
        if make is None:
            namespace = dict(self._scope)
            exec(_compiled(source), namespace)  # noqa: S102 - made from the names of parameters and our own expressions
            make = self._makers[source] = namespace["make"]
        return make(**numbers)


@functools.cache  # many calls differ in numbers only, and compiling takes longer than all else here
def _compiled(source: str) -> CodeType:
    return compile(source, "<kvdock_triton launch>", "exec")
