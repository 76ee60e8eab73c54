"""What the interpreter refuses."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from opskit import Target


def test_memory_that_is_not_the_hosts_is_refused(target: Target) -> None:
    """With TRITON_INTERPRET=1 left set on a machine with a GPU, its addresses would crash the process."""
    from kvdock_triton.launch import launcher_for

    spec: Any = None
    with pytest.raises(ValueError, match=r"TRITON_INTERPRET=1 interprets kernels on host memory, and this is cuda:0: unset it"):
        launcher_for(spec, torch.device("cuda", 0), lambda device: contextlib.nullcontext())
