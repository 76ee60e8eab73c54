"""What a process has once, for everybody in it, and what no plugin may change for the others."""

from __future__ import annotations

import hashlib
import os
import random
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.memory import Memory
from kvdock_conformance.checking.target import Target

__all__ = ["check_calls_are_quiet_neighbours", "shared_state"]


def shared_state() -> dict[str, str]:
    """Return it as texts by name."""
    return {
        "torch's default dtype": str(torch.get_default_dtype()),
        "torch's default device": str(torch.get_default_device()),
        "torch's number of threads": str(torch.get_num_threads()),
        "whether gradients are recorded": str((torch.is_grad_enabled(), torch.is_inference_mode_enabled())),
        "whether torch is deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "torch's precision of float32": str(torch.get_float32_matmul_precision()),
        "torch's random numbers": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
        "Python's random numbers": hashlib.sha256(repr(random.getstate()).encode()).hexdigest(),
        "the environment": repr(sorted(os.environ.items())),
        "the filters of warnings": repr(warnings.filters),
        "the working directory": os.getcwd(),
    }


def check_calls_are_quiet_neighbours(target: Target, data: Mapping[str, Any]) -> None:
    """Make the calls of a case, and look at what everybody shares after each.

    Raises:
        NonconformanceError: something has changed.
    """
    memory, before = Memory(data["arenas"], target.device), shared_state()
    for call in data["calls"]:
        target.call(call["op"], {name: memory.tensor(spec) for name, spec in call["args"].items()})
        for name, value in shared_state().items():
            if value != before[name]:
                raise NonconformanceError(f"{name} after {call['op']}", expected=before[name], got=value)
