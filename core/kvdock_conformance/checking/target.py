"""The backend under test, on one of its devices, reached as any user reaches it: by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import kvdock
from kvdock import runtime
from kvdock.ops.catalog import CATALOG
from kvdock.ops.dispatcher import call_op
from kvdock.ops.selection import own_reasons
from kvdock.ops.validate import validate

__all__ = ["HOST", "Target"]

HOST = torch.device("cpu")


class Target:
    """A backend by name, on one of its devices.

    Args:
        name: name of the backend, as ``kvdock backends`` lists it.
        setup: ``"module:function"`` that makes it known in a fresh interpreter, if no entry point does; called with ``name``
            where it is the kit's own.
        device: one of its devices as text, ``"acme:1"``; None for the first.

    Raises:
        ArgumentValueError: it has no such device, or none at all; says which it has.
        BackendUnavailableError: there is no such backend, or it is not ready.
    """

    def __init__(self, name: str, setup: str | None = None, device: str | None = None) -> None:
        self.name, self.setup = name, setup
        self.backend = runtime.default().registry.backend(name)
        self.device = torch.empty(0, device=self._listed(device)).device  # with its index

    def _listed(self, device: str | None) -> torch.device:
        """Return one of the backend's devices by its text, where the first has the index 0 if it has none."""
        listed = {str(item): item for item in self.backend.devices()}
        wanted = (device, f"{device}:0", str(device).removesuffix(":0")) if device is not None else tuple(listed)
        for text in wanted:
            if text in listed:
                return listed[text]
        raise kvdock.ArgumentValueError(
            "device", expected=f"one of {', '.join(listed) or 'those in devices(), which is empty'}", got=device
        )

    @property
    def kernels(self) -> Mapping[str, kvdock.plugin.Kernel]:
        """Its kernels by op, with what was registered over them."""
        return runtime.default().registry.loaded()[self.name].kernels

    def using(self, op: str, values: tuple[Any, ...] | None = None) -> AbstractContextManager[None]:
        """Return a block in which an op is served by this backend or portable kernels.

        It is an ordinary call, which may be repeated as a user's is, where no other backend may serve it: of arguments in the schema's
        order, any is that the backend serves itself.
        """
        usual = self.is_chosen(op) and (self._is_alone or (values is not None and self._serves(op, values)))
        return nullcontext() if usual else kvdock.use_backend(self.name)

    def _serves(self, op: str, values: tuple[Any, ...]) -> bool:
        try:
            return not self.reasons_against(op, values)
        except kvdock.KVDockError:  # a mistake, which the call itself is asked about
            return False

    def is_chosen(self, op: str) -> bool:
        """Return whether calls of an op that name no backend go to this one first."""
        try:
            return runtime.default().dispatcher.choose(op, self.device, None).backend is self.backend
        except kvdock.BackendError:  # another one is configured, and cannot be had
            return False

    @functools.cached_property
    def _is_alone(self) -> bool:
        """Whether nobody else claims the device."""
        return runtime.default().registry.claimants(self.device) == [self.backend]

    def call(self, op: str, args: dict[str, Any]) -> Any:
        """Call an op with arguments by name: one of `kvdock.ops` with scales and outputs as keywords.

        A plugin's goes by `call_op`, and so does one with an output that may be absent, which no keyword brings, or that is always
        there, as its public function makes it.
        """
        schema = runtime.default().dispatcher.op(op).schema
        values = tuple(args.get(name) for name in schema.arg_names)
        made = [arg for arg in schema.mutated if arg.name.endswith("_out") and not arg.returned]
        if op not in CATALOG or made or any(arg.optional for arg in schema.mutated):
            with self.using(op, values):
                return call_op(op, *values)
        keywords = {name: value for name, value in args.items() if name.endswith("_scale")}
        outputs = [value for name, value in args.items() if name.endswith("_out")]
        others = [value for name, value in args.items() if name not in keywords and not name.endswith("_out")]
        if outputs:
            keywords["out"] = tuple(outputs)
        with self.using(op, values):
            return getattr(kvdock.ops, op)(*others, **keywords)

    def skipped(self) -> int:
        """Return how many writes were skipped so far, by its kernels and by the portable ones that stand in for them."""
        with kvdock.use_backend(self.name):
            return runtime.default().skipped_writes(self.device)

    def reasons_against(self, op: str, values: tuple[Any, ...]) -> Sequence[str]:
        """Return why the backend does not serve a call itself; empty when it does.

        Args:
            op: name of the op.
            values: its arguments in the schema's order, None where absent.
        """
        dispatcher = runtime.default().dispatcher
        schema = dispatcher.op(op).schema
        return own_reasons(validate(schema, values), dispatcher.choose(op, self.device, self.name), schema)

    def spoilt(self) -> str:
        """Return why its device is of no more use to this process; empty when it is. A device's error may stay with whom it met."""
        try:
            for device in (self.device, *self.backend.devices()):
                if device.type == self.device.type:
                    torch.ones(1, device=device).add_(1).item()  # reading it waits for all that was begun
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing else can be tried here
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        return ""

    @property
    def must_raise(self) -> bool:
        """Whether an index out of range must raise: in host memory, for the backend whose own memory that is."""
        return self.may_raise and self.backend.device_type == self.device.type

    @property
    def may_raise(self) -> bool:
        """Whether an index out of range may raise. On a device that would take a synchronisation: it is skipped and counted."""
        return self.device == HOST
