"""The conformance kit, as a third party runs it."""

from kvdock_conformance.testing import conformance_tests

test_conformance = conformance_tests("rocm")
