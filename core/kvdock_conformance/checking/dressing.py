"""Other kinds of tensors in the same memory, as users pass them: parameters, and what was made in inference mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

__all__ = ["Dress", "all_of_inference", "of_inference", "parameters"]

Dress = Callable[[torch.Tensor, bool], torch.Tensor]
"""Makes another kind of tensor of one, in the same memory where it is written to."""


@contextlib.contextmanager
def parameters(device: torch.device) -> Iterator[Dress]:
    """What a module holds: pools that move with it."""
    yield lambda tensor, _: torch.nn.Parameter(tensor, requires_grad=False)


@contextlib.contextmanager
def of_inference(device: torch.device) -> Iterator[Dress]:
    """What a model computed in inference mode, and is read behind it."""

    def dress(tensor: torch.Tensor, is_written: bool) -> torch.Tensor:
        with torch.inference_mode():
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            return tensor if is_written else made.copy_(tensor)

    yield dress


@contextlib.contextmanager
def all_of_inference(device: torch.device) -> Iterator[Dress]:
    """A cache and outputs that were made in inference mode, and are used behind it, and so all else."""

    def dress(tensor: torch.Tensor, _: bool) -> torch.Tensor:
        with torch.inference_mode():
            try:
                return torch.utils.dlpack.from_dlpack(tensor)
            except (BufferError, RuntimeError, ValueError):  # torch hands over no memory of such a device
                return tensor

    yield dress
