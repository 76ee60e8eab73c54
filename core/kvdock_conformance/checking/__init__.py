"""Checking cases on a target, with torch: what runs in the child, and in ``repro.py``.

`memory` makes described tensors real and compares bytes, `target` is the backend under test, `calls` runs an op and the
reference, `served` is what a backend claims about a call, `failure` what a check raises.
"""
