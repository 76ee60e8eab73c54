"""The conformance kit on the built-in prefix caches, as a third party runs it."""

from kvdock_conformance.testing import conformance_tests

test_radix = conformance_tests("radix", kind="prefix")
test_naive = conformance_tests("naive", kind="prefix")
