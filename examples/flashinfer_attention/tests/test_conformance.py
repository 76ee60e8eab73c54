"""kvdock's conformance kit: one test for each requirement of core level. Skipped with the reason where there is no GPU."""

from kvdock_conformance.testing import conformance_tests

test_conformance = conformance_tests("flashinfer")
