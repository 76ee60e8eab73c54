"""kvdock's conformance kit: one test for each requirement of core level. Skipped with the reason where there is no GPU."""

from pathlib import Path

from kvdock_conformance.testing import conformance_tests

test_conformance = conformance_tests("varlen", expected=Path(__file__).parents[1] / "expected.toml")
