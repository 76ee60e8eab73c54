"""What every transport is asked, of NIXL's agent: two of them in this process."""

import pytest

from kvdock.transfer import create_transport
from kvdock_conformance.transports import transport_tests

pytest.importorskip("nixl", reason="NIXL is not installed", exc_type=ImportError)

test_transport = transport_tests(lambda: create_transport("nixl", part_bytes=100_000, lanes=2))
