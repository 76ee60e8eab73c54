"""The extended level, on the CPU."""

import pytest

from kvdock_conformance.testing import conformance_tests

pytestmark = pytest.mark.slow

test_conformance = conformance_tests("cpu", level="extended")
