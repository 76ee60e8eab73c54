"""A plugin as it was written for version 1.0 of the contract: named parameters, names from the old places. Never brought up to date.

Its kernel writes on the host, row by row, and counts its calls.
"""

import torch

import kvdock
from kvdock.ops.hostcheck import slots_in_range

KVDOCK_API = (1, 0)

CALLS = []


class Plan(kvdock.Descriptor):
    """Writes rows; its parameters are all that 1.0 had."""

    uses_autograd = False

    def __call__(self, k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale):
        slots_in_range("paged_caching_", slot_mapping, k_cache.shape[0] * k_cache.shape[1])
        self.write(k_cache, v_cache, k, v, slot_mapping)
        CALLS.append("call")

    def write(self, k_cache, v_cache, k, v, slot_mapping):
        """Write row by row."""
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                for cache, rows in ((k_cache, k), (v_cache, v)):
                    cache[slot // cache.shape[1], slot % cache.shape[1]] = rows[token]

    def fix(self, k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale):
        CALLS.append("fix")


class Write(kvdock.Kernel):
    """Knows exactly the arguments of 1.0."""

    def supports(self, request):
        known = {"k_cache", "v_cache", "k", "v", "slot_mapping", "k_scale", "v_scale"}
        return [f"what is {name}?" for name in sorted(set(request.args) - known)]

    def prepare(self, request):
        assert len(request.args) == 7, request.args
        return Plan()


class OldBackend(kvdock.Backend):
    """Runs on the host, asked for by name."""

    name, device_type = "old", "old"

    def probe(self):
        return kvdock.Probe.ready()

    def claims(self, device):
        return False

    def devices(self):
        return [torch.device("cpu")]

    def kernels(self):
        return {"paged_caching_": Write()}


@kvdock.hookimpl
def kvdock_backends():
    """Return the backend."""
    return [OldBackend()]
