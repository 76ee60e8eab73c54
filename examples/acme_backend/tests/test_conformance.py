"""kvdock's conformance kit: one test for each requirement of core level."""

from kvdock_conformance.testing import conformance_tests

test_conformance = conformance_tests("acme")
