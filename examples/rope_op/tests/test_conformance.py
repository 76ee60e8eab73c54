"""The op checked by kvdock's conformance kit, on the CPU backend, where the portable kernel serves it."""

from kvdock_conformance.testing import conformance_tests

test_conformance = conformance_tests("cpu", op="rope_caching_")
