"""Prefixes and pools in files: computed once, loaded by another process.

In the order of a call: `api` has the functions; `description` says what a file fits to; `holder` who has what is saved; `gather`
collects which blocks that are, as a `forest` of blocks by their tokens; `contents` copies blocks out of a cache and into one; `container`
is one safetensors file with checksums; `folder` puts files in place, whole or not at all; `saving` and `loading` are the two ways through
all of it.
"""

from kvdock.files.api import load_pool, load_prefix, save_pool, save_prefix
from kvdock.files.holder import Beside
from kvdock.files.interface import Loaded, Progress, Saved

__all__ = ["Beside", "Loaded", "Progress", "Saved", "load_pool", "load_prefix", "save_pool", "save_prefix"]
