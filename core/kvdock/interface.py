"""What a backend brings, and what it is handed. The whole contract between core and plugins.

This module is a leaf: a plugin that imports it imports nothing else of kvdock but the errors.

A backend says which devices it serves and returns one `Kernel` per op, as data, once. A kernel says whether it
supports a `Request` and prepares a `Descriptor` for it; the descriptor is called for every later call of the same static
signature. Core has validated whatever the schema can express by then (see `kvdock.ops.schema`), so that a kernel only
does what its device needs.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch

__all__ = [
    "HOST",
    "HOST_INT",
    "KVDOCK_API",
    "Backend",
    "Capabilities",
    "Descriptor",
    "Kernel",
    "Mark",
    "Priority",
    "Probe",
    "ProbeState",
    "Request",
    "Stream",
    "TensorMeta",
]

KVDOCK_API = (1, 0)
"""Version of this contract. A plugin's module states the version it was made for under the same name."""

HOST = torch.device("cpu")
"""The device whose memory the host reads without a synchronisation."""

HOST_INT = "host int"
"""Stands in a `Request` for an argument that came as a host integer; its value is a run-time value."""


class ProbeState(enum.Enum):
    """What a backend found when it looked for its hardware."""

    READY = "ready"
    ABSENT = "absent"
    UNUSABLE = "unusable"


@attrs.frozen
class Probe:
    """Outcome of `Backend.probe`: ``Probe.ready()``, ``Probe.absent(reason)`` or ``Probe.unusable(reason)``."""

    state: ProbeState
    reason: str = ""

    @classmethod
    def ready(cls, detail: str = "") -> Probe:
        """The device is there and works. ``detail`` may say what was found."""
        return cls(ProbeState.READY, detail)

    @classmethod
    def absent(cls, reason: str) -> Probe:
        """There is no such hardware here. Normal, and quiet."""
        return cls(ProbeState.ABSENT, reason)

    @classmethod
    def unusable(cls, reason: str) -> Probe:
        """The hardware may be there, and something is broken. Loud: ``reason`` says what, and how to fix it."""
        return cls(ProbeState.UNUSABLE, reason)


class Priority(enum.IntEnum):
    """Who is taken when several ready backends claim one device and nobody was named. Equal priorities are an error."""

    FALLBACK = 0
    NORMAL = 10
    SPECIALISED = 20


@attrs.frozen
class Capabilities:
    """What a backend can do, beyond which ops it has.

    Args:
        dtypes: cache dtypes its kernels store; None when each kernel decides in `Kernel.supports`. An op on another
            dtype is served by others, as one that it lacks.
        priority: see `Priority`.
        graph_capture: whether its launches may be recorded into a graph and replayed.
        batch_invariant: whether what an op computes for a sequence has the same bits whatever else is in the batch.
    """

    dtypes: tuple[torch.dtype, ...] | None = None
    priority: Priority = Priority.NORMAL
    graph_capture: bool = False
    batch_invariant: bool = False


@attrs.frozen
class TensorMeta:
    """The static part of one tensor argument: all that a kernel may rely on from call to call.

    Args:
        dtype: dtype of the elements.
        shape: sizes; None where a size is a run-time value.
        strides: strides in elements, with 0 where a size is 1; None when all but the innermost are run-time values. The
            innermost stride is always 1, or its size is 1.
        alignment: largest power of two up to 16, in bytes, that divides the pointer and all run-time strides. A later
            call of the same descriptor never has less.
        is_on_host: whether a pool lies in host memory, where the op runs on another device. Kernels for such ops alone need look.
    """

    dtype: torch.dtype
    shape: tuple[int | None, ...]
    strides: tuple[int, ...] | None
    alignment: int
    is_on_host: bool = False


@attrs.frozen
class Request:
    """The static signature of a call: what `Kernel.supports` and `Kernel.prepare` decide on.

    Args:
        op: name of the op.
        device: device of its tensors, with its index.
        args: by argument name: a `TensorMeta`, `HOST_INT`, the value of a static argument, or None where absent.
    """

    op: str
    device: torch.device
    args: Mapping[str, Any]

    def tensor(self, name: str) -> TensorMeta:
        """Return the metadata of a tensor argument that is present.

        Raises:
            TypeError: the argument is no tensor in this request.
        """
        meta = self.args[name]
        if not isinstance(meta, TensorMeta):
            raise TypeError(f"{self.op}: {name}: expected a tensor in this request, got {meta!r}")
        return meta


class Descriptor(ABC):
    """A prepared and validated plan for one op and one static signature.

    It belongs to the thread and the device it was made for, and may be called any number of times.
    """

    workspace_bytes: int = 0
    """Bytes of scratch memory a call takes from torch's caching allocator; where that goes by what it moves, a call says what it took."""

    uses_autograd: bool = True
    """Whether a call uses torch operations that autograd would record. Core then takes care that it does not. A descriptor
    that moves memory by address, or takes care itself, says False and saves the check."""

    notes_capture: bool = False
    """Whether the descriptor takes care of capture itself: a call that is captured into a graph sets `pinned` if a replay needs
    what the descriptor holds; if it needs nothing of it, such as a kernel that the process keeps anyway, nothing is to be done.
    Otherwise core asks `Backend.is_capturing` at each call, where `Capabilities.graph_capture` says that there may be graphs,
    and keeps what was captured."""

    pinned: bool = False
    """Whether it must stay for the life of the process, since a replay of a graph needs what it holds. Set by the descriptor
    itself, if at all; see `notes_capture`. Core keeps a note of its own about the others."""

    @abstractmethod
    def __call__(self, *args: Any) -> None:
        """Run the op.

        Args:
            args: the arguments in the order of the op's schema, None where absent. Their leading shapes agree, and
                sources do not overlap destinations: core has checked both. Outputs are arguments too, always there.

        Raises:
            IndexRangeError: on host memory, a value in an index tensor is out of range; nothing was written.
        """

    def fix(self, *args: Any) -> Callable[..., None] | None:
        """Return a function that repeats this call on other addresses and run-time sizes, or None to be called as usual.

        Asked only where a call of the descriptor is all that core would do: it does without core's care for autograd
        (`uses_autograd`), and takes care of capture itself (`notes_capture`) unless its backend captures nothing.

        Args:
            args: as for a call.

        Returns:
            A function of the addresses of the required tensors, in the schema's order; then the run-time sizes, each once, in the
            order in which tensors have them (``T``, or ``B`` and ``S``; of `static_update_` the rows and new positions of ``k``,
            and how many lengths there are where they have a dimension); then the host integers in place of tensors. It is called
            instead of the descriptor when strides, dtypes, devices and all other sizes are those of ``args``, and each tensor is as
            aligned as its rows allow; core has checked the rest as for any call. No size is 0, and one that is 1 in ``args`` is 1
            then. It must do all that a call would: one that is captured sets `pinned` where a call would have set it, and what a
            replay needs is held by the descriptor, since core drops the function with it.
        """
        return None

    def destroy(self) -> None:  # noqa: B027 - most descriptors hold nothing that needs it
        """Release what the descriptor holds. Called once, under `Backend.device_guard`; never called again after."""


class Kernel(ABC):
    """One op of one backend. Stateless as seen from outside, shared by all threads."""

    @abstractmethod
    def supports(self, request: Request) -> Sequence[str]:
        """Return the reasons against serving this request; empty means yes. Changes nothing, and is cheap."""

    @abstractmethod
    def prepare(self, request: Request) -> Descriptor:
        """Make the plan for a request that `supports` had nothing against: choose tiles, compile, precompute."""


class Mark(ABC):
    """A point in what a `Stream` was given."""

    @abstractmethod
    def reached(self) -> bool:
        """Whether all before it is done. Does not wait."""

    @abstractmethod
    def wait(self) -> None:
        """Let the device's current stream wait for it. The host goes on."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for it on the host."""


class Stream(ABC):
    """A queue of a device's work beside those that are current elsewhere."""

    @abstractmethod
    def follow(self) -> None:
        """Let what it is given from now on wait for all that the device's current stream was given so far."""

    @abstractmethod
    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which it is the device's current stream."""

    @abstractmethod
    def mark(self) -> Mark:
        """Return a mark behind all that it was given so far."""


class Backend(ABC):
    """A plugin's door: which devices it serves, and its kernels. All methods may be called from any thread."""

    name: str
    """Name to ask for it by, unique among the installed backends: ``"acme"``."""

    device_type: str
    """Kind of device it is for, in lower case: ``"npu"``. Forms the name of the variable KVDOCK_BACKEND_<DEVICE_TYPE>."""

    @abstractmethod
    def probe(self) -> Probe:
        """Look for the hardware, without opening a context on any device (a forked child could not use it then)."""

    @abstractmethod
    def claims(self, device: torch.device) -> bool:
        """Whether this backend serves tensors on ``device``. Asked only when it is ready."""

    @abstractmethod
    def devices(self) -> Sequence[torch.device]:
        """Return the devices it runs on, with index where the type has one. Asked only when it is ready.

        A backend chosen by name may run on a device that it does not claim, as long as it is listed here.
        """

    @abstractmethod
    def kernels(self) -> Mapping[str, Kernel]:
        """Return its kernels by op name. Asked once, when one is first needed. An op it lacks is served by others, or portable kernels."""

    def device_guard(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return a context in which ``device`` is the current device."""
        return nullcontext()

    def capabilities(self) -> Capabilities:
        """Return what it can do. Asked once."""
        return Capabilities()

    def notes(self) -> Sequence[str]:
        """Return lines for ``kvdock backends`` and ``kvdock doctor``, such as which of two ways it launches kernels.

        Asked only when it is ready, and not by any op. Must not open a context on any device.
        """
        return ()

    def skipped_writes(self, device: torch.device) -> int:
        """Return how many writes its kernels skipped on ``device`` because a slot or position was out of range.

        May synchronise. Padding (negative slots) does not count.
        """
        return 0

    def is_capturing(self, device: torch.device) -> bool:
        """Whether the current stream of ``device`` records a graph right now."""
        return False

    def side_stream(self, device: torch.device) -> Stream | None:
        """Return a new stream of a device, for work aside; None where all is done when a call returns. Asked under `device_guard`."""
        return None

    def pin(self, memory: torch.Tensor, device: torch.device) -> Callable[[], None] | None:
        """Let kernels on a device read and write host memory themselves: lock its pages.

        Asked under `device_guard`, perhaps in another thread than the device's other work, while that goes on.

        Args:
            memory: bytes in host memory that begin and end at pages.
            device: one of `devices`.

        Returns:
            A function that undoes it, to be called once nobody swaps blocks with this memory any more and before it is freed; None
            where there is no such thing. Then memory of the host is staged.

        Raises:
            BackendError: the system does not lock so much.
        """
        return None

    def capture(self, device: torch.device, steps: Sequence[Callable[[], Any]]) -> Sequence[Callable[[], Any]]:
        """Make each step one call that repeats what it launches, on a device that records graphs; by default the steps themselves.

        Asked under `device_guard`, outside of any graph. A step reads and writes tensors that stay where they are, and what
        it returns stays where the first call has put it, until the next call of any of them.

        Args:
            device: device of all tensors.
            steps: each was called once, on the current stream. Call each at least once more before any is recorded, away from
                the current stream: what a first call prepares cannot be recorded. What libraries keep for a stream, such as room to
                work in, must be the graph's own: others free it. The step that takes the most memory comes first, and the
                others may share its memory: never two of them run at a time.

        Returns:
            A function for each step, without arguments, which launches on the stream that is current then and returns what
            the step returned. It holds what a replay needs, but for tensors that steps were given: core keeps the steps.
        """
        return steps
