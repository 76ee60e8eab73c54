"""Which flash attention torch runs, and whether that one reads blocks."""

from __future__ import annotations

import inspect

import torch

__all__ = ["PAGED", "lacking"]

PAGED = {"FA3": 9, "FA4": 10}
"""Implementations that read blocks, and the major compute capability of the GPUs on which they do."""


def lacking() -> str:
    """Return why torch's `varlen_attn` cannot read blocks in this process; empty if it can. Asks no device."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn. Fix: install torch 2.13 or newer"
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        return f"varlen_attn of torch {torch.__version__} takes no block table. Fix: install torch 2.13 or newer"
    from torch.nn.attention import current_flash_attention_impl  # newer than varlen_attn itself

    active = current_flash_attention_impl()
    if active not in PAGED:
        name = "torch's own flash attention (FA2)" if active is None else active
        fix = 'install flash-attn-3 and call torch.nn.attention.activate_flash_attention_impl("FA3") before kvdock is first used'
        return f"{name} reads no blocks, {' and '.join(PAGED)} do. Fix: {fix}"
    return ""
