"""The kinds of containers in which callers pass integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["CONTAINERS", "overwrite"]

CONTAINERS: Mapping[str, Callable[[list[int]], Any]] = {
    "int32": lambda values: np.array(values, dtype=np.int32 if max(map(abs, values), default=0) < 2**31 else np.int64),
    "int64": lambda values: np.array(values, dtype=np.int64),
    "uint64": lambda values: np.array(values, dtype=np.uint64 if min(values, default=0) >= 0 else np.int64),
    "big-endian": lambda values: np.array(values, dtype=">i8"),
    "strided": lambda values: np.array([values, values], dtype=np.int64).T.copy()[:, 0],
    "row of a tensor": lambda values: torch.tensor([values, values], dtype=torch.int64)[1],
    "torch int32": lambda values: torch.tensor(values, dtype=torch.int32 if max(map(abs, values), default=0) < 2**31 else torch.int64),
    "list": list,
    "tuple": tuple,
}
"""Ways to pass integers, by name."""


def overwrite(values: Any) -> None:
    """Do what a caller does who uses his buffer again."""
    if isinstance(values, np.ndarray | torch.Tensor):
        values[...] = 77
    elif isinstance(values, list):
        values[:] = [77] * len(values)
