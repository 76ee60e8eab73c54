"""Faults of ``copy_blocks_`` before any kernel is asked: in the forms of pairs, and in what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import kvdock
from kvdock_conformance.checking.target import HOST
from kvdock_conformance.faults.fault import Faults

__all__ = ["FAULTS"]

FAULTS = Faults()
_OP = "copy_blocks_"
Op = Callable[[Any, Any, Any], None]


# Forms of pairs


@FAULTS.function(_OP, "copy-lists-dropped", "Lists are ignored.", "KVD-COPY-011", "KVD-COPY-006", "KVD-COPY-007", "KVD-COPY-008")
def _lists_dropped(function: Op) -> Op:
    return lambda k_cache, v_cache, pairs: None if isinstance(pairs, list) else function(k_cache, v_cache, pairs)


@FAULTS.function(_OP, "copy-array-strides-ignored", "An array of pairs is read as if it were dense.", "KVD-COPY-011")
def _array_strides_ignored(function: Op) -> Op:
    def call(k_cache: Any, v_cache: Any, pairs: Any) -> None:
        if isinstance(pairs, np.ndarray) and len(pairs):
            pairs = np.lib.stride_tricks.as_strided(pairs, strides=(2 * pairs.itemsize, pairs.itemsize))
            pairs = np.where(pairs >= len(k_cache), -1, pairs)
        function(k_cache, v_cache, pairs)

    return call


@FAULTS.function(_OP, "copy-host-pairs-refused", "A tensor of int32 pairs in host memory is refused.", "KVD-COPY-010")
def _host_pairs_refused(function: Op) -> Op:
    def call(k_cache: Any, v_cache: Any, pairs: Any) -> None:
        if isinstance(pairs, torch.Tensor) and pairs.device == HOST and pairs.dtype == torch.int32:
            raise kvdock.ArgumentValueError(f"{_OP}: block_pairs", expected="int64", got="int32")
        function(k_cache, v_cache, pairs)

    return call


# Refusals


@FAULTS.function(_OP, "copy-pools-of-unlike-blocks-taken", "Of a larger pool, the part is taken that the other one has.", "KVD-COPY-027")
def _unlike_blocks(function: Op) -> Op:
    def call(k_cache: Any, v_cache: Any, pairs: Any) -> None:
        blocks = min(len(k_cache), len(v_cache))
        both = (k_cache[:blocks], v_cache[:blocks]) if len(k_cache) != len(v_cache) and k_cache.dim() == 4 else (k_cache, v_cache)
        function(*both, pairs % blocks if isinstance(pairs, torch.Tensor) and both[0] is not k_cache else pairs)

    return call


@FAULTS.function(_OP, "copy-error-without-a-fix", "Errors do not say how to fix it.", "KVD-COPY-027", "KVD-COPY-006", "KVD-COPY-008")
def _without_a_fix(function: Op) -> Op:
    def call(k_cache: Any, v_cache: Any, pairs: Any) -> None:
        try:
            function(k_cache, v_cache, pairs)
        except (kvdock.ArgumentValueError, kvdock.ArgumentTypeError, kvdock.IndexRangeError) as error:
            raise type(error)(error.subject, expected=error.expected, got=error.got) from error

    return call
