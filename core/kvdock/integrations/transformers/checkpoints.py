"""States behind prefixes, so that a prompt can go on where another one with the same beginning was.

Keys and values of a prefix can be cut anywhere; a state is only where somebody kept it. It is kept where two things end:

::

    prompt 1    s s s s s s s s q q q q|q         its last whole block, see `Checkpoints.places`
    prompt 2    s s s s s s s s|r r r r|r         what it found of keys and values: others may begin so, too
    prompt 3    s s s s s s s s + t t t t|t       goes on from there
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvdock.errors import UnsupportedError
from kvdock.files import Beside
from kvdock.integrations.transformers.measure import Measurement
from kvdock.integrations.transformers.prompts import Prompts
from kvdock.integrations.transformers.states import StateLayer, StateLayers
from kvdock.prefix.interface import Namespace

__all__ = ["Checkpoints", "Kept"]

Ids = npt.NDArray[np.int64]

Kept = dict[tuple[int, int], StateLayers]
"""States by the number of a prompt of a batch, and the place in it, padding included."""


class Checkpoints(Beside):
    """The states that are kept. Those that were used longest ago make room for others.

    Args:
        block_size: tokens of a block; states are kept at multiples of it, as keys and values are.
        most_bytes: of all states together.
        found: what was measured of the model.

    Attributes:
        nbytes: of the states that are there.
    """

    def __init__(self, block_size: int, most_bytes: int, found: Measurement) -> None:
        self._block_size, self._most_bytes, self._device = block_size, most_bytes, found.device
        self.group, self._numbers = found.state_group, [number for number in found.states if number]
        self._kept: OrderedDict[tuple[Namespace, bytes], StateLayers] = OrderedDict()
        self._lengths: dict[int, int] = {}  # how many there are of each
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def lengths(self, ids: Ids, namespace: Namespace) -> Iterator[int]:
        """Yield the lengths of prefixes of a sequence whose states are there."""
        yield from (length for length in self._lengths if length <= ids.size and _key(ids[:length], namespace) in self._kept)

    def find(self, ids: Ids, namespace: Namespace) -> StateLayers:
        """Return the states behind a sequence, which are there, see `lengths`."""
        self.use(ids, namespace)
        return self._kept[_key(ids, namespace)]

    def use(self, tokens: Ids, namespace: Namespace) -> None:
        """Let states that are there be those that were used last."""
        self._kept.move_to_end(_key(tokens, namespace))

    @property
    def unused(self) -> int:
        """Bytes that there is room for."""
        return self._most_bytes - self.nbytes

    def get(self, tokens: Ids, namespace: Namespace) -> Mapping[str, torch.Tensor]:
        """Return the states behind a sequence, by what files name them.

        Raises:
            UnsupportedError: they are not as one token left them, when the model was measured.
        """
        found, parts = self._kept[_key(tokens, namespace)], self.group.parts
        for states, part in zip(found.named(), parts, strict=True):
            want = {buffer.name: ((1, *buffer.shape), buffer.dtype) for buffer in part.buffers}
            if (got := {name: (tuple(state.shape), state.dtype) for name, state in states.items()}) != want:
                fix = "let such prefixes be computed anew"
                subject = "PagedCacheForTransformers.save: states"
                raise UnsupportedError(subject, expected=f"those of one token: {want}", got=repr(got), fix=fix)
        return {f"layers.{at}.{name}": state[0] for at, states in enumerate(found.named()) for name, state in states.items()}

    def put(self, tokens: Ids, namespace: Namespace, states: Mapping[str, torch.Tensor]) -> None:
        """Keep states behind a sequence, which came out of a file."""
        layers = [
            StateLayer.of_row(number, {buffer.name: states[f"layers.{at}.{buffer.name}"] for buffer in part.buffers}, self._device)
            for at, (number, part) in enumerate(zip(self._numbers, self.group.parts, strict=True))
        ]
        self._store(tokens, namespace, StateLayers(layers))

    def store(self, prompts: Prompts, kept: Kept) -> None:
        """Let states be found from now on.

        Args:
            prompts: the batch whose they are.
            kept: the states.
        """
        for (index, place), states in kept.items():
            self._store(prompts.row(index)[: place - prompts.pads[index]], prompts.namespace, states)

    def _store(self, ids: Ids, namespace: Namespace, states: StateLayers) -> None:
        key = _key(ids, namespace)
        if key not in self._kept and states.nbytes <= self._most_bytes:
            self._kept[key] = states
            self._count(ids.size, states.nbytes, 1)
        while self.nbytes > self._most_bytes:
            (_, old), gone = self._kept.popitem(last=False)
            self._count(len(old) // ids.itemsize, gone.nbytes, -1)

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
        self._lengths.clear()
        self.nbytes = 0

    def places(self, prompts: Prompts, found: Sequence[int], past: int) -> dict[int, list[int]]:
        """Return where states of a batch are to be kept: places, ascending, each with the prompts whose states these are.

        Args:
            prompts: the batch.
            found: tokens of each prompt whose keys and values are cached.
            past: where the batch goes on.
        """
        made: dict[int, list[int]] = {}
        pads, size = prompts.pads.tolist(), self._block_size
        for index, pad in enumerate(pads):
            for length in {found[index], (prompts.length - 1 - pad) // size * size}:
                # Padding goes through a model together with the first of what is behind it, or a state has seen it.
                if length and pad + length > max(past, *pads):
                    made.setdefault(pad + length, []).append(index)
        return dict(sorted(made.items()))

    def _count(self, length: int, nbytes: int, change: int) -> None:
        self.nbytes += change * nbytes
        self._lengths[length] = self._lengths.get(length, 0) + change
        if not self._lengths[length]:
            del self._lengths[length]


def _key(ids: Ids, namespace: Namespace) -> tuple[Namespace, bytes]:
    return namespace, ids.tobytes()
