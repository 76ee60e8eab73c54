"""The schema of an op: what each argument is, as data.

Everything that can be said about an op without its kernel stands in its `OpSchema`: which arguments it has, which of them
it writes, which sizes must agree, and which of those are known once (static) or change with every call (run-time). From
that `signature` builds the descriptor key and the checks of a call, and `validate` the errors. A new op is a new entry
in `catalog`, never a new branch here.

Sizes are written as words, one per dimension::

    "NB block Hk Dk"    four static sizes; all strides are static too
    "*b Hk *s Dk"       a star marks a run-time size. A tensor with one has run-time strides in all but the innermost dim
    "... Hk Dk"         leading run-time sizes: [T] or [B, S], the same for every argument that has them
    "*N 2"              a number is that size
    ""                  a tensor without dimensions

One word means one size, across all arguments.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from kvdock.errors import ArgumentValueError

__all__ = ["LEAD_RANKS", "Arg", "Dim", "OpSchema", "Relation", "Role", "parse_dims"]

LEAD_RANKS = (1, 2)
"""How many dimensions ``...`` may stand for: tokens in a row, or a batch of equally long rows."""


class Role(enum.Enum):
    """What an op does with an argument."""

    TENSOR = "tensor"
    """Read. May not overlap a mutated argument."""
    MUTATED = "mutated"
    """Written at the addressed places, and nowhere else."""
    RUNTIME_INT = "runtime int"
    """A host integer, or a tensor in its place, whose value never enters a key."""
    STATIC = "static"
    """A hashable value that selects the plan: part of the key."""


@attrs.frozen
class Dim:
    """One dimension of an argument: the word that names its size, and whether that is a run-time value."""

    name: str
    runtime: bool

    @property
    def literal(self) -> int | None:
        """The size itself where the schema fixes it."""
        return int(self.name) if self.name.isdigit() else None


def parse_dims(dims: str, lead: int) -> tuple[Dim, ...]:
    """Read one line of sizes, with ``...`` standing for ``lead`` dimensions."""
    words = dims.split()
    if words[:1] == ["..."]:
        words = [f"*lead{i}" for i in range(lead)] + words[1:]
    return tuple(Dim(word.lstrip("*"), word.startswith("*")) for word in words)


@functools.cache  # it is read at every new signature
def _shapes(lines: tuple[str, ...]) -> tuple[tuple[Dim, ...], ...]:
    ranks = LEAD_RANKS if any(line.startswith("...") for line in lines) else (0,)
    return tuple(parse_dims(line, lead) for line in lines for lead in ranks)


@attrs.frozen
class Arg:
    """One argument.

    Args:
        name: its name in the public function.
        role: what the op does with it.
        dims: its sizes in the language of this module; several lines when its rank may vary.
        dtypes: dtypes it may have.
        same_dtype: name of the argument whose dtype it must have, unless that is quantised and has its scale.
        optional: whether it may be None.
        host: whether it may lie in host memory, whatever the op's device. See `OpSchema.placing` for an op of which no pool need be
            elsewhere.
        scale_of: name of the quantised cache that it is the scale of. An error for a cache that is not quantised.
        since: version of the contract that it came with. A kernel of a plugin made for an older one never sees it.
        returned: whether the op returns it, made anew where it is None. Its dtype is that of ``same_dtype``, its sizes those of others.
        default: what stands for it in an example of a call, where it is no tensor.
        expects: given a static value, returns what is expected in its place; empty where it is good.
    """

    name: str
    role: Role
    dims: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    same_dtype: str | None = None
    optional: bool = False
    host: bool = False
    scale_of: str | None = None
    returned: bool = False
    since: tuple[int, int] = (1, 0)
    default: Any = None
    expects: Callable[[Any], str] | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor in most calls: a run-time int may be one where it has sizes."""
        return self.role in (Role.TENSOR, Role.MUTATED) or (self.role is Role.RUNTIME_INT and bool(self.dims))

    def shapes(self) -> tuple[tuple[Dim, ...], ...]:
        """Return every list of dimensions it may have."""
        return _shapes(self.dims)

    def dims_of_rank(self, rank: int) -> tuple[Dim, ...] | None:
        """Return its dimensions when it has ``rank`` of them, or None when it may not."""
        return next((dims for dims in self.shapes() if len(dims) == rank), None)


@attrs.frozen
class Relation:
    """A condition on run-time sizes, checked at every call.

    Args:
        expression: Python over the words of the schema: ``"b <= B"``.
        arg: the argument to name when it does not hold.
        expected: what to say then, with sizes in braces: ``"at most {B} rows"``.
        fix: what to do about it.
        without: name of an optional argument whose presence lifts it.
    """

    expression: str
    arg: str
    expected: str
    fix: str
    without: str | None = None
    code: types.CodeType = attrs.field(init=False, eq=False, repr=False)
    """The expression, compiled. Its ``co_names`` are the words in it."""

    @code.default
    def _code(self) -> types.CodeType:
        return compile(self.expression, "<relation>", "eval")

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether it holds of sizes by word. One about sizes that are absent does."""
        try:
            return bool(eval(self.code, {"__builtins__": {}}, sizes))  # noqa: S307 - from the schema, never from a user
        except NameError:
            return True


@attrs.frozen
class OpSchema:
    """An op as data.

    Args:
        name: its public name; a trailing underscore says that it writes into an argument.
        args: its arguments, in the order descriptors take them.
        relations: further conditions on sizes.
        check_values: given the arguments as host values, raises if a value is out of range and returns what is doubtful
            (equal slots), as text. Host kernels call it before they write, debug mode on every device.
        instead: what to use where an input lies in what is written, if the op is the wrong one for that.
        when_empty: given the arguments of a valid call in which a run-time size is 0, writes what it comes to, so that no kernel meets
            such a call. Where it is None, a kernel serves those whose returned outputs have elements; the others have nothing to do.
    """

    name: str
    args: tuple[Arg, ...]
    relations: tuple[Relation, ...] = ()
    check_values: Callable[..., list[str]] | None = None
    instead: str = ""
    when_empty: Callable[[dict[str, Any]], None] | None = None

    def __attrs_post_init__(self) -> None:
        names = self.arg_names
        if len(set(names)) != len(names):
            raise ArgumentValueError(f"OpSchema {self.name}: args", expected="distinct names", got=", ".join(names))
        if not self.placing:
            expected = "a tensor that every call has, on the device where the op is to run"
            raise ArgumentValueError(f"OpSchema {self.name}: args", expected=expected, got=", ".join(names) or "none")
        late = [arg.name for arg in self.args if arg.since > self.since and not arg.optional]
        if late:  # a kernel of an older plugin could serve no call at all
            raise ArgumentValueError(
                f"OpSchema {self.name}: {late[0]}", expected="optional, since it came later than the op", got="required"
            )

    @functools.cached_property
    def placing(self) -> tuple[str, ...]:
        """Names of the tensors that say where the op runs: the first of them, or of pools that may be on the host the first elsewhere."""
        always = [arg for arg in self.args if arg.is_tensor and not arg.optional and not arg.returned and not arg.host]
        return tuple(arg.name for arg in always or self.static_args)

    @property
    def since(self) -> tuple[int, int]:
        """Version of the contract that the op came with."""
        return min(arg.since for arg in self.args)

    def known_to(self, version: tuple[int, int]) -> tuple[int, ...]:
        """Return the places of the arguments that a version of the contract has."""
        return tuple(place for place, arg in enumerate(self.args) if arg.since <= version)

    @functools.cached_property
    def arg_names(self) -> tuple[str, ...]:
        """Names of the arguments, in order."""
        return tuple(arg.name for arg in self.args)

    def arg(self, name: str) -> Arg:
        """Return an argument by name."""
        return self.args[self.arg_names.index(name)]

    @functools.cached_property
    def static_args(self) -> tuple[Arg, ...]:
        """Tensor arguments without any run-time size: pools. Their whole geometry is in the key."""
        tensors = [arg for arg in self.args if arg.role in (Role.TENSOR, Role.MUTATED) and not arg.optional]
        return tuple(arg for arg in tensors if not any(dim.runtime for dims in arg.shapes() for dim in dims))

    @functools.cached_property
    def mutated(self) -> tuple[Arg, ...]:
        """Arguments that are written."""
        return tuple(a for a in self.args if a.role is Role.MUTATED)

    def bind(self, values: tuple[Any, ...]) -> dict[str, Any]:
        """Pair values in the schema's order with their names."""
        return dict(zip(self.arg_names, values, strict=True))

    def is_empty(self, values: tuple[Any, ...]) -> bool:
        """Whether a run-time size of a valid call is 0, and no kernel is needed to fill what it returns."""
        pools, args = {arg.name for arg in self.static_args}, self.bind(values)
        filled = self.when_empty is not None or not any(arg.returned and args[arg.name].numel() for arg in self.args)
        return filled and any(isinstance(value, torch.Tensor) and name not in pools and value.numel() == 0 for name, value in args.items())
