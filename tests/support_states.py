"""A model with one layer of states, as it is measured: a convolution of two channels and three inputs, and a state of five numbers."""

from __future__ import annotations

import torch

import kvdock
from kvdock.integrations.transformers.measure import Measurement
from kvdock.layers import Buffer
from kvdock.layers.groups import LayerGroup
from kvdock.layers.interface import Part
from kvdock.layers.retention import KeepState

__all__ = ["FOUND"]

FOUND = Measurement(
    kvdock.KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=8, max_positions=64, dtype=torch.float32),
    (None,),
    (True, False),
    (0, 1),
    LayerGroup(
        ((0, 0),),
        (Part((Buffer("conv.0", (2, 3), torch.float32), Buffer("recurrent.0", (5,), torch.float32)), KeepState()),),
        KeepState(),
        1,
    ),
    torch.device("cpu"),
)
"""It has a layer with keys and values, too."""
