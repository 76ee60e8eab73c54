"""The conformance kit on the backends that it brings itself: what certifies others must pass itself."""

import pytest

from kvdock_conformance.testing import conformance_tests

pytestmark = pytest.mark.slow

test_reference = conformance_tests("reference")
test_portable = conformance_tests("portable-kernels")
