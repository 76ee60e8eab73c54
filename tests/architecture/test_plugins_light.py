"""Entry modules are light: importing one imports nothing but itself, and touches no device."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRY_POINTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["kvdock.backends"]

# Audit hooks see every file that is opened and every library that is loaded, whoever does it.
CODE = """
import json, sys
import kvdock
for public in kvdock.__all__:  # which are imported when they are asked for: kvdock.plugin, which plugins import, is one
    getattr(kvdock, public)
early = [name for name in sys.modules if name.split(".")[0] == "triton" or name.split(".")[0] in sys.argv[2:]]
before, touched = set(sys.modules), []
def audit(event, args):
    if event == "ctypes.dlopen" or (event == "open" and str(args[0]).startswith("/dev/")):
        touched.append([event, str(args[0])])
sys.addaudithook(audit)
__import__(sys.argv[1])
print(json.dumps({"early": early, "imported": sorted(set(sys.modules) - before), "touched": touched}))
"""


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_entry_module_imports_only_itself_and_touches_no_device(name: str) -> None:
    module = ENTRY_POINTS[name]
    if not list((ROOT / "backends").glob(f"*/{module}")):
        pytest.skip("backends/ is not part of this tree")
    command = [sys.executable, "-c", CODE, module, *ENTRY_POINTS.values()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout) == {"early": [], "imported": [module], "touched": []}
