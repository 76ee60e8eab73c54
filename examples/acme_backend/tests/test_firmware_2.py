"""kvdock's conformance kit on the older firmware: what it does not do right is known, and nothing else may be wrong."""

from pathlib import Path

from kvdock_conformance.testing import conformance_tests

EXPECTED = Path(__file__).parents[1] / "expected-firmware-2.toml"

test_conformance = conformance_tests("acme", op="paged_caching_", expected=EXPECTED, environ={"ACME_FIRMWARE": "2"})
