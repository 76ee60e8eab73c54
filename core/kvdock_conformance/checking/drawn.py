"""Calls that were drawn, checked by what they are: repeated, without outputs of their own, or on quantised pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvdock_conformance.checking.gathers import check_dequantised, check_returned
from kvdock_conformance.checking.plans import elsewhere
from kvdock_conformance.checking.quantised import check_quantised
from kvdock_conformance.checking.repeated import PLACES, check_computed, check_repeated
from kvdock_conformance.checking.target import Target

__all__ = ["check_drawn"]


def check_drawn(target: Target, data: Mapping[str, Any]) -> None:
    """Check the calls of a case.

    Args:
        target: the backend.
        data: the case; ``returned`` says that outputs are not passed, and ``elsewhere`` that another thread makes the calls.

    Raises:
        NonconformanceError: a byte differs, or an index out of range was not told as it must be.
    """
    if data.get("elsewhere"):
        elsewhere(lambda: _check(target, data))
    else:
        _check(target, data)


def _check(target: Target, data: Mapping[str, Any]) -> None:
    """Check calls by what they are."""
    call = data["calls"][0]
    if "k_scale" in call["args"]:
        (check_dequantised if call["op"] == "gather_paged" else check_quantised)(target, data)
    elif call["op"] not in PLACES:
        check_computed(target, data)
    elif data.get("returned"):
        check_returned(target, data)
    else:
        check_repeated(target, data)
