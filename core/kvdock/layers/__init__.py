"""Kinds of layers as data: what each keeps, which of it a sequence still needs, and how kinds share one pool."""

from kvdock.layers.attention import LayerSpec
from kvdock.layers.chunked import ChunkedLayerSpec
from kvdock.layers.groups import GroupPlan, LayerGroup, plan_groups
from kvdock.layers.hybrid import HybridLayerSpec
from kvdock.layers.interface import Buffer, LayerKind, Part
from kvdock.layers.latent import MLALayerSpec
from kvdock.layers.opaque import OpaqueLayerSpec
from kvdock.layers.retention import KeepAll, KeepChunk, KeepState, KeepWindow, Retention
from kvdock.layers.shared import SharedLayerSpec
from kvdock.layers.state import StateLayerSpec

__all__ = [
    "Buffer",
    "ChunkedLayerSpec",
    "GroupPlan",
    "HybridLayerSpec",
    "KeepAll",
    "KeepChunk",
    "KeepState",
    "KeepWindow",
    "LayerGroup",
    "LayerKind",
    "LayerSpec",
    "MLALayerSpec",
    "OpaqueLayerSpec",
    "Part",
    "Retention",
    "SharedLayerSpec",
    "StateLayerSpec",
    "plan_groups",
]
