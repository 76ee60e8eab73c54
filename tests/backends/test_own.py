"""The conformance kit on the backends that it brings itself: what certifies others must pass itself."""

import pytest

from kvdock_conformance.testing import conformance_tests

test_portable = conformance_tests("portable-kernels")
test_reference = pytest.mark.slow(conformance_tests("reference"))
