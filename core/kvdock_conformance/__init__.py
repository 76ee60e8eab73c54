"""kvdock's conformance kit: what every backend must do, and the means to check it.

`reference` is the meaning of each op, in plain loops. Importing this package does not import torch.
"""

from kvdock_conformance import reference

__all__ = ["reference"]
