"""An op that is none of kvdock's, made by a plugin, through the same caches: a real rms_norm."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm

import kvdock
from kvdock import ArgumentValueError
from kvdock.descriptors.manager import DescriptorCacheManager
from kvdock.ops.dispatcher import OpDispatcher
from kvdock.ops.schema import Arg, OpSchema, Role
from support_descriptors import dispatcher_of, in_thread
from support_plugins import InProcessBackend

FLOATS = (torch.bfloat16, torch.float32)
RMS_NORM = OpSchema(
    "rms_norm",
    (
        Arg("out", Role.MUTATED, ("*T D",), FLOATS, same_dtype="weight"),
        Arg("x", Role.TENSOR, ("*T D",), FLOATS, same_dtype="weight"),
        Arg("weight", Role.TENSOR, ("D",), FLOATS),
        Arg("eps", Role.STATIC),
    ),
)


class RmsNorm(kvdock.plugin.Descriptor):
    """`rms_norm`, prepared for a width, a dtype and an epsilon."""

    destroyed = 0

    def __init__(self, width: int, dtype: torch.dtype, eps: float) -> None:
        self.width = width
        self.dtype = dtype
        self.eps = eps

    def __call__(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        assert (x.shape[-1], x.dtype, eps) == (self.width, self.dtype, self.eps)
        out.copy_(rms_norm(x, (self.width,), weight, self.eps))

    def destroy(self) -> None:
        type(self).destroyed += 1


class RmsNormKernel(kvdock.plugin.Kernel):
    def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
        return ()

    def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
        weight = request.tensor("weight")
        return RmsNorm(int(weight.shape[0] or 0), weight.dtype, request.args["eps"])


@pytest.fixture
def dispatcher() -> OpDispatcher:
    RmsNorm.destroyed = 0
    backend = InProcessBackend("norms", claims=("cpu",), devices=("cpu",), kernels={"rms_norm": RmsNormKernel()})
    return dispatcher_of(backend, 2, {"rms_norm": RMS_NORM})


def norm(dispatcher: OpDispatcher, tokens: int, width: int, eps: float = 1e-6, dtype: torch.dtype = torch.float32) -> None:
    """Run it and compare."""
    x, weight = torch.randn(tokens, width, dtype=dtype), torch.randn(width, dtype=dtype)
    out = torch.full_like(x, float("nan"))
    dispatcher.op("rms_norm").call(out, x, weight, eps)
    assert torch.equal(out, rms_norm(x, (width,), weight, eps))


def test_through_the_dispatcher(dispatcher: OpDispatcher) -> None:
    for tokens in (1, 5, 700, 5):
        norm(dispatcher, tokens, 64)
    stats = dispatcher.descriptors.stats()["rms_norm"][None]
    assert (stats.hits, stats.misses, stats.size) == (3, 1, 1), "token counts prepare nothing"
    for width, eps, dtype in ((64, 1e-5, torch.float32), (32, 1e-5, torch.float32), (64, 1e-6, torch.bfloat16)):
        norm(dispatcher, 3, width, eps, dtype)
    stats = dispatcher.descriptors.stats()["rms_norm"][None]
    assert (stats.misses, stats.evictions, stats.destroyed, stats.size) == (4, 2, 2, 2)
    assert RmsNorm.destroyed >= 2, "of this dispatcher, and of earlier ones that are collected meanwhile"


def test_from_threads(dispatcher: OpDispatcher) -> None:
    for _ in range(3):
        in_thread(norm, dispatcher, 4, 16)
    stats = dispatcher.descriptors.stats()["rms_norm"][None]
    assert (stats.misses, stats.destroyed, stats.size) == (3, 3, 0)
    assert RmsNorm.destroyed >= 3, "of this dispatcher, and of earlier ones that are collected meanwhile"


def test_its_arguments_are_checked_like_any_ops(dispatcher: OpDispatcher) -> None:
    x = torch.randn(4, 8)
    with pytest.raises(ArgumentValueError, match=r"rms_norm: weight: expected shape .*D=8.* got shape"):
        dispatcher.op("rms_norm").call(torch.empty(4, 8), x, torch.ones(9), 1e-6)
    with pytest.raises(ArgumentValueError, match="rms_norm: x: expected memory outside out"):
        dispatcher.op("rms_norm").call(x, x, torch.ones(8), 1e-6)


def test_by_hand_without_a_schema() -> None:
    """A plugin that has no use for the dispatcher keeps its own keys."""
    destroyed: list[tuple[int, Any]] = []
    manager = DescriptorCacheManager({"rms_norm": 1})
    manager.declare("rms_norm", lambda norm: destroyed.append((norm.width, threading.get_ident())))

    def run(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        cache = manager.cache("rms_norm", x.device)
        key = (x.dtype, x.shape[-1], eps)
        found = cache.get(key)
        if found is None:
            found = RmsNorm(x.shape[-1], x.dtype, eps)
            cache.put(key, found)
        out = torch.empty_like(x)
        found(out, x, weight, eps)
        return out

    for width in (8, 8, 16, 16, 8):
        x, weight = torch.randn(3, width), torch.randn(width)
        assert torch.equal(run(x, weight, 1e-6), rms_norm(x, (width,), weight, 1e-6))
    assert destroyed == [(8, threading.get_ident()), (16, threading.get_ident())]
    stats = manager.stats()["rms_norm"][torch.device("cpu")]
    assert (stats.hits, stats.misses, stats.evictions) == (2, 3, 2)
