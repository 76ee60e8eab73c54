"""What must be so before any test imports torch."""

import os

# Waiting threads must sleep: pytest-xdist runs as many processes as there are cores, and tests with two torch threads in each
# take twenty times as long when OpenMP's threads spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
