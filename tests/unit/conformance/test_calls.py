"""What the checks of single calls notice: on backends that are functions, in host memory and as a device would behave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

import kvdock
from kvdock_conformance import reference
from kvdock_conformance.cases.copies import Copy
from kvdock_conformance.cases.paged import Gather, Write
from kvdock_conformance.checking.calls import check_range_error
from kvdock_conformance.checking.copies import check_copy_forms, check_pairs_refused, pair_name
from kvdock_conformance.checking.failure import NonconformanceError
from kvdock_conformance.checking.gathers import check_returned, check_returns_out, gathered_slot
from kvdock_conformance.checking.refusals import check_refusal
from kvdock_conformance.checking.repeated import check_called
from kvdock_conformance.requirements import load

HOST = torch.device("cpu")


@attrs.define
class Fake:
    """A target whose ops are a function, given op and arguments by name."""

    function: Callable[..., Any]
    must_raise: bool = False
    may_raise: bool = False
    count: int = 0
    device: torch.device = HOST
    name: str = "fake"

    def call(self, op: str, args: dict[str, Any]) -> Any:
        return self.function(self, op, args)

    def skipped(self) -> int:
        return self.count


def as_a_device(target: Fake, op: str, args: dict[str, Any]) -> Any:
    """Do as a device does: skip what is out of range, and count writes."""
    if op == "gather_paged" and "k_out" not in args:
        lead = tuple(args["slot_mapping"].shape)
        args = args | {f"{name}_out": args[f"{name}_cache"].new_empty((*lead, *args[f"{name}_cache"].shape[2:])) for name in "kv"}
    skipped = getattr(reference, op)(*args.values())
    target.count += len(skipped) if op != "gather_paged" else 0
    return (args["k_out"], args["v_out"]) if op == "gather_paged" else None


def counting_all(target: Fake, op: str, args: dict[str, Any]) -> Any:
    """Count tokens that were not read, too."""
    target.count += len(reference.gather_paged(*args.values()))
    return args["k_out"], args["v_out"]


def raising(target: Fake, op: str, args: dict[str, Any]) -> Any:
    """Do as a backend in host memory does."""
    twins = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in args.items()}
    name = pair_name if op == "copy_blocks_" else gathered_slot
    for place in getattr(reference, op)(*twins.values()):
        raise kvdock.IndexRangeError(f"{op}: {name(place)}")
    return as_a_device(target, op, args)


BEYOND = [
    (check_called, Write("x", [0, 24, 3, 30]).case().data),
    (check_called, Gather("x", [0, 24, 3, 30]).case().data),
    (check_returned, Gather("x", [0, 24, 3, 30]).case().data),
    (check_called, Copy("x", [(0, 1), (6, 2), (3, 99)]).case().data),
]


@pytest.mark.parametrize(("check", "data"), BEYOND)
def test_a_device_skips_what_is_beyond_and_a_host_raises(check: Any, data: Any) -> None:
    check(Fake(as_a_device), data)
    check(Fake(as_a_device, may_raise=True), data)
    if check is not check_returned:
        check(Fake(raising, may_raise=True, must_raise=True), data)
    with pytest.raises(NonconformanceError, match="out of range: expected IndexRangeError, got no error"):
        check(Fake(as_a_device, may_raise=True, must_raise=True), data)


@pytest.mark.parametrize(("check", "data"), BEYOND[:2] + BEYOND[3:])
def test_a_device_that_looks_at_indices_is_noticed(check: Any, data: Any) -> None:
    with pytest.raises(NonconformanceError, match="on cpu: expected no look at indices on a device"):
        check(Fake(raising), data)


def test_reads_are_not_counted_and_writes_are() -> None:
    with pytest.raises(NonconformanceError, match="gather_paged: writes counted as skipped: expected 0, got 2"):
        check_called(Fake(counting_all), BEYOND[1][1])

    def silent(target: Fake, op: str, args: dict[str, Any]) -> None:
        as_a_device(target, op, args)
        target.count = 0

    with pytest.raises(NonconformanceError, match="copy_blocks_: writes counted as skipped: expected 2, got 0"):
        check_called(Fake(silent), BEYOND[3][1])


def test_an_error_must_have_a_reason_and_name_the_first_place() -> None:
    host: Any = Fake(as_a_device, may_raise=True, must_raise=True)
    error = kvdock.IndexRangeError("op: slot_mapping[3]")
    check_range_error(host, "op", error, ["slot_mapping[3]", "slot_mapping[4]"])
    check_range_error(host, "op", None, [])
    with pytest.raises(NonconformanceError, match=r"the first bad place, op: slot_mapping\[2\], got op: slot_mapping\[3\]"):
        check_range_error(host, "op", error, ["slot_mapping[2]", "slot_mapping[3]"])
    with pytest.raises(NonconformanceError, match=r"the op and the first bad place, another_op: slot_mapping\[3\]"):
        check_range_error(host, "another_op", error, ["slot_mapping[3]"])
    with pytest.raises(NonconformanceError, match="op with every index in range: expected no error"):
        check_range_error(host, "op", error, [])
    assert pair_name((1,)) not in f"block_pairs{[10, 0]}", "pair 10 is not pair 1"
    assert pair_name((1,)) in f"block_pairs{[1, 0]}"
    assert gathered_slot((0, 3)) == "slot_mapping[0, 3]"


def returning(change: Callable[[torch.Tensor, dict[str, Any]], Any]) -> Fake:
    """Return a target that changes what comes back for keys."""

    def call(target: Fake, op: str, args: dict[str, Any]) -> Any:
        k, v = as_a_device(target, op, args)
        return change(k, args), v

    return Fake(call)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda k, a: k.float(), r"returned k: shape, dtype and device: expected .*torch.bfloat16.*got .*torch.float32"),
        (lambda k, a: k[:, :1], r"returned k: shape, dtype and device: expected \(\(3, 2, 8\).*got \(\(3, 1, 8\)"),
        (lambda k, a: k.to("meta"), r"got .*device\(type='meta'\)"),
        (lambda k, a: k.view(torch.int16).bitwise_not().view(k.dtype), r"returned k\[0, 0, 0\]: expected .*\(0x....\), got .*\(0x....\)"),
        (lambda k, a: a["k_cache"].flatten(0, 1)[2:5], r"a write to what was returned: k_cache\[0, 2, 0, 0\], the first of \d+ bytes"),
        (lambda k, a: None, "the result: expected a tuple of two tensors"),
        (lambda k, a: a["slot_mapping"].mul_(0), "slot_mapping"),
    ],
)
def test_what_is_returned_is_compared(change: Any, what: str) -> None:
    data = Gather("x", [2, 3, 4]).case().data
    check_returned(returning(lambda k, a: k), data)  # type: ignore[arg-type] # a function in place of a backend
    with pytest.raises(NonconformanceError, match=what):
        check_returned(returning(change), data)  # type: ignore[arg-type] # as above


def test_a_result_that_a_later_call_changes_is_noticed() -> None:
    case = next(case for case in load()["KVD-GATHER-027"].cases() if case.name == "the same at each call")
    kept: list[torch.Tensor] = []

    def used_again(k: torch.Tensor, args: dict[str, Any]) -> torch.Tensor:
        kept.append(k)
        return kept[0].copy_(k)

    with pytest.raises(NonconformanceError, match=r"gather_paged: returned k\[0, 0, 0\]"):
        check_returned(returning(used_again), case.data)  # type: ignore[arg-type] # a function in place of a backend


def test_given_outputs_must_come_back_themselves() -> None:
    data = Gather("x", [2, 3, 4]).case().data
    check_returns_out(Fake(as_a_device), data)  # type: ignore[arg-type] # a function in place of a backend
    with pytest.raises(NonconformanceError, match="what is returned for k_out: expected the tensor of out= itself, got another"):
        check_returns_out(returning(lambda k, a: k.clone()), data)  # type: ignore[arg-type] # as above
    with pytest.raises(NonconformanceError, match="the result: expected a tuple of two tensors"):
        check_returns_out(returning(lambda k, a: 3), data)  # type: ignore[arg-type] # as above


def copying(target: Fake, op: str, args: dict[str, Any]) -> None:
    """Copy, and refuse pairs as a list where one destination is there twice."""
    destinations = [int(pair[1]) for pair in args["block_pairs"]]
    if len(set(destinations)) < len(destinations):
        raise kvdock.ArgumentValueError("copy_blocks_: block_pairs[1]", expected="others", got="destination 5 twice", fix="drop it")
    reference.copy_blocks_(*args.values())


def only_tensors(target: Fake, op: str, args: dict[str, Any]) -> None:
    """Look at tensors only."""
    if isinstance(args["block_pairs"], torch.Tensor):
        copying(target, op, args)


def test_pairs_are_tried_in_each_form() -> None:
    good = Copy("x", [(0, 5), (-1, 2)]).case().data
    check_copy_forms(Fake(copying), good)  # type: ignore[arg-type] # a function in place of a backend
    with pytest.raises(NonconformanceError, match=r"copy_blocks_ with a list of pairs: k_cache\[5, 0, 0, 0\]"):
        check_copy_forms(Fake(only_tensors), good)  # type: ignore[arg-type] # as above
    texts = ["copy_blocks_: block_pairs[1]", "destination 5", "Fix: "]
    bad = Copy("x", [(0, 5), (1, 5)], host=True).case(error="ArgumentValueError", texts=texts).data
    check_pairs_refused(Fake(copying), bad)  # type: ignore[arg-type] # as above
    with pytest.raises(NonconformanceError, match="copy_blocks_: expected ArgumentValueError, got no error"):
        check_pairs_refused(Fake(only_tensors), bad)  # type: ignore[arg-type] # as above


def refusing(text: str, *, good_too: bool = True, spoil: bool = False) -> Fake:
    """Return a target that refuses an output of another dtype."""

    def call(target: Fake, op: str, args: dict[str, Any]) -> None:
        if args["v_out"].dtype == args["v_cache"].dtype:
            return as_a_device(target, op, args) if good_too else None
        if spoil:
            args["k_out"].zero_()
        raise kvdock.ArgumentTypeError(text)

    return Fake(call)


def test_a_refusal_says_what_it_must_and_changes_nothing() -> None:
    case = next(case for case in load()["KVD-GATHER-029"].cases() if case.name == "an output of another dtype")
    text = "gather_paged: v_out: expected bfloat16, got float32. Fix: convert it"
    check_refusal(refusing(text), case.data)  # type: ignore[arg-type] # a function in place of a backend
    with pytest.raises(NonconformanceError, match="text of the ArgumentTypeError: expected it says 'Fix: '"):
        check_refusal(refusing(text.removesuffix(" Fix: convert it")), case.data)  # type: ignore[arg-type] # as above
    with pytest.raises(NonconformanceError, match=r"gather_paged raised and wrote: k_out\[0, 0, 0\]"):
        check_refusal(refusing(text, spoil=True), case.data)  # type: ignore[arg-type] # as above
    with pytest.raises(NonconformanceError, match="gather_paged: expected ArgumentTypeError, got no error"):
        check_refusal(Fake(lambda target, op, args: None), case.data)  # type: ignore[arg-type] # as above
