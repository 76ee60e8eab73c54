"""The conformance kit on the Triton kernels under their interpreter, where there is no GPU to run them on."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from kvdock_conformance.testing import conformance_tests

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install 'kvdock[triton]'")

PATH = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])

ENVIRON = {"TRITON_INTERPRET": "1", "PYTHONPATH": PATH}

test_conformance = conformance_tests(
    "acme", setup="support_acme:register", environ=ENVIRON, limit_s=900
)  # seconds of it are minutes here, and more where others work too
