"""The kit proves itself: each seeded fault is noticed, by each requirement that should, and each requirement can fail."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest
import torch

import kvdock
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock_conformance import faults
from kvdock_conformance.checking.target import Target
from kvdock_conformance.faults.fault import Args, BackendCall, BackendSeed, Fault, Faults, FunctionSeed, KernelSeed
from kvdock_conformance.faults.ops import FAULTS as OP_FAULTS
from kvdock_conformance.prove import Proof, prove, prove_one, requirements_of
from kvdock_conformance.requirement import Level, Requirements
from kvdock_conformance.requirements import load
from kvdock_conformance.session import ConformancePlan, Session
from support_conformance import CHILD, plan, requirement

EVERY = load()
UNDRAWN = [attrs.evolve(item, cases=tuple) for item in EVERY if "@" in item.id]
"""What is asked of ops by their schemas, without its cases: to draw them takes seconds in every process that collects this module."""

FAULTS = {**faults.load(), **faults.of_ops(UNDRAWN)}
# Of these ops cases have negative indices, which only drawing tells; a slow test draws all, and compares.
SHOWN_IN_SOME = ("op-padding-written", "op-error-kept", "op-negatives-cleared-for-the-call")
LATER = [OP_FAULTS[name].of(op) for name in SHOWN_IN_SOME for op in ("mla_caching_", "mla_gather")]
LATER += [OP_FAULTS[name].of("swap_blocks_") for name in SHOWN_IN_SOME[1:]]
LATER += [attrs.evolve(OP_FAULTS["op-padding-written"], killers=("KVD-OP-001",)).of("swap_blocks_")]  # it repeats no call with padding
FAULTS |= {fault.name: fault for fault in LATER}

SAMPLE = {
    "attn-split-forgotten",
    "copy-keys-into-values",
    "copy-padding-ends-the-call",
    "desc-supports-changes-the-request",
    "device-gather-waits-for-the-device",
    "error-lengths-rounded",
    "error-reinterpreted",
    "fuzz-main-thread-only",
    "gather-beyond-the-pool-silent",
    "gather-off-by-one-at-a-block-border",
    "hygiene-call-changes-the-locale",
    "hygiene-claims-are-no-bools",
    "mla-rotary-part-in-front",
    "mlaread-parts-swapped-when-equal",
    "op-refuses-now-and-then@paged_attention",
    "prefix-duplicates-not-canonical",
    "prefix-protected-counted-twice",
    "reads-a-pair-behind-the-last",
    "resource-scratch-for-each-signature",
    "static-lengths-checked-without-new-positions",
    "static-rows-behind-a-smaller-batch",
    "swap-last-pair-dropped",
    "thread-copies-write-all-back",
    "write-error-after-a-partial-write",
    "write-slot-zero-is-padding",
}
"""What `make test` seeds: of each area, what is noticed in a fraction of a second. `make test-all` seeds all."""


TESTED = {"backend": "cpu", "prefix": "radix"}
"""By kind, what the faults are seeded into here."""

ELSEWHERE = {
    "device-copy-on-the-default-stream",
    "device-current-one-changed",
    "device-gather-waits-for-the-device",
    "device-launch-on-the-default-stream",
    "device-lengths-of-the-recording",
    "device-never-capturing",
    "device-slots-of-the-recording",
    "device-waits-for-the-device",
}
"""Faults that make no sense on a host; `kvdock conformance --prove` seeds them where there is more."""


@pytest.fixture(scope="module")
def sessions() -> Iterator[dict[str, Session]]:
    opened = {kind: Session(ConformancePlan(name, EVERY, kind=kind)) for kind, name in TESTED.items()}
    yield opened
    for one in opened.values():
        one.close()


@pytest.fixture(scope="module")
def session(sessions: dict[str, Session]) -> Session:
    return sessions["backend"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.slow]) for name in sorted(FAULTS)])
def test_a_fault_is_noticed_by_each_requirement_that_should(sessions: dict[str, Session], name: str) -> None:
    fault = FAULTS[name]
    proof = prove_one(sessions[fault.kind], fault, EVERY)
    if name in ELSEWHERE:
        assert proof.verdict == "not seeded"
        assert any(EVERY[killer].hardware for killer in fault.killers), "nothing but hardware is a reason not to be seeded here"
    else:
        assert proof.verdict == "killed", f"{name}: {proof.verdict} by {proof.missed} {proof.reason}"


def test_what_else_there_is_runs_where_no_killer_notices(session: Session) -> None:
    fault = FAULTS["write-pool-strides-ignored"]
    assert prove_one(session, fault, EVERY).killed_by == fault.killers
    elsewhere = attrs.evolve(fault, killers=("KVD-WRITE-001",))
    proof = prove_one(session, elsewhere, Requirements(item for item in EVERY if item.id in ("KVD-WRITE-001", *fault.killers)))
    assert (proof.verdict, proof.killed_by) == ("missed", fault.killers)


def test_no_requirement_is_without_a_fault_that_is_seeded_here() -> None:
    here = {name: fault for name, fault in FAULTS.items() if name not in ELSEWHERE}
    named = {killer for fault in here.values() for killer in fault.killers}
    assert {item.id for item in EVERY} == named, "a requirement that nothing has been shown to fail may check nothing"


def test_what_needs_hardware_has_a_fault_for_it_and_one_for_its_refusal() -> None:
    for item in EVERY:
        killers = {name for name, fault in FAULTS.items() if item.id in fault.killers}
        if item.hardware:
            assert item.needs is not None, f"{item.id}: on a host its refusal is verified"
            assert killers - ELSEWHERE, f"{item.id}: its refusal has a fault"
    on_hardware = {killer for name in ELSEWHERE for killer in FAULTS[name].killers}
    assert {item.id for item in EVERY if item.hardware} - on_hardware == {"KVD-DEVICE-005"}, "a miss under capture: see its claim's fault"


def test_faults_are_of_the_kind_of_their_killers() -> None:
    assert {fault.kind for fault in FAULTS.values()} == set(TESTED)
    for fault in FAULTS.values():
        assert {EVERY[name].kind for name in fault.killers} == {fault.kind}, fault.name


@pytest.mark.slow
def test_the_faults_of_a_tree_are_not_seeded_into_another_cache() -> None:
    with Session(ConformancePlan("naive", EVERY, kind="prefix")) as naive:
        assert naive.seed("prefix-threads-unnoticed") == "the faults of prefix caches are the radix tree's, and naive is none"


def test_without_the_faults_all_is_well_again(session: Session) -> None:
    # The faults of this module were seeded into the same child.
    item = EVERY["KVD-WRITE-001"]
    session.seed("write-last-token-dropped")
    assert session.requirement(item, Level.CORE).failed
    session.seed(None)
    assert not session.requirement(item, Level.CORE).failed


@pytest.mark.slow
def test_a_new_child_has_the_fault_too(session: Session) -> None:
    session.seed("write-last-token-dropped")
    session.close()
    assert session.requirement(EVERY["KVD-WRITE-001"], Level.CORE).failed
    session.seed(None)


def test_a_fault_says_what_is_wrong_and_names_requirements_of_its_area() -> None:
    for name, fault in FAULTS.items():
        assert name == fault.name == fault.name.lower().replace(" ", "-")
        assert fault.sentence.endswith("."), name
        assert fault.killers, name
        assert {EVERY[killer].area for killer in fault.killers} == {fault.area}, name
        assert len(set(fault.killers)) == len(fault.killers), name


def test_a_fault_of_each_area_is_seeded_in_make_test() -> None:
    assert {FAULTS[name].area for name in SAMPLE} == {fault.area for fault in FAULTS.values()}


@pytest.mark.slow  # draws the cases
def test_the_faults_of_ops_are_those_that_their_cases_show() -> None:
    assert {name: fault for name, fault in FAULTS.items() if "@" in name}.keys() == faults.of_ops(EVERY).keys()


def test_what_runs_on_a_fault_is_its_killers_and_the_core_of_its_area() -> None:
    every = Requirements([requirement(n, level=level) for n, level in ((1, Level.CORE), (2, Level.EXTENDED), (3, Level.EXTENDED))])
    every.add(requirement(4, area="other"))
    fault = Fault("x", "X.", "paged_caching_", ("KVD-TEST-003",), FunctionSeed("paged_caching_", lambda function: function))
    killers, others = requirements_of(fault, every)
    assert ([item.id for item in killers], [item.id for item in others]) == (["KVD-TEST-003"], ["KVD-TEST-001"])
    with pytest.raises(kvdock.ArgumentValueError, match="KVD-TEST-009"):
        requirements_of(attrs.evolve(fault, killers=("KVD-TEST-009",)), every)


def fault(killers: tuple[str, ...] = ("KVD-TEST-001",)) -> Fault:
    return Fault("x", "X.", "paged_caching_", killers, FunctionSeed("paged_caching_", lambda function: function))


@pytest.mark.parametrize(
    ("killed", "reason", "verdict", "missed"),
    [
        (("KVD-TEST-001", "KVD-TEST-002"), "", "killed", ()),
        (("KVD-TEST-002",), "", "missed", ("KVD-TEST-001",)),
        ((), "", "survived", ("KVD-TEST-001",)),
        ((), "no kernel", "not seeded", ()),
    ],
)
def test_the_verdict_on_a_fault(killed: tuple[str, ...], reason: str, verdict: str, missed: tuple[str, ...]) -> None:
    proof = Proof(fault(), killed, reason)
    assert (proof.verdict, proof.missed) == (verdict, missed)
    assert proof.as_dict()["verdict"] == verdict


def test_a_fault_may_show_in_what_is_refused_only() -> None:
    killers = ("KVD-TEST-001", "KVD-TEST-002")
    refused = Proof(fault(killers), ("KVD-TEST-001",), refused=("KVD-TEST-002",))
    assert (refused.verdict, refused.missed, refused.as_dict()["refused"]) == ("out of reach", ("KVD-TEST-002",), ["KVD-TEST-002"])
    assert attrs.evolve(refused, refused=()).verdict == "missed"
    assert attrs.evolve(refused, killed_by=(), refused=()).verdict == "survived"
    assert attrs.evolve(refused, killed_by=killers).verdict == "killed"


@pytest.mark.slow
def test_what_a_backend_refuses_is_no_proof_against_it() -> None:
    def proof_on(backend: str) -> Proof:
        with Session(plan(backend, EVERY)) as session:
            return prove_one(session, FAULTS["write-pool-strides-ignored"], EVERY)

    dense_only = proof_on("dense-only")
    assert (dense_only.verdict, dense_only.killed_by) == ("out of reach", ())
    assert "KVD-WRITE-016" in dense_only.refused
    assert proof_on("good").verdict == "killed"


@pytest.mark.slow
def test_a_harmless_fault_survives(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "seed", lambda self, name: "")
    with Session(plan("good", EVERY)) as good:
        proof = prove_one(good, fault(("KVD-WRITE-008",)), Requirements([EVERY["KVD-WRITE-008"]]))
    assert (proof.verdict, proof.missed) == ("survived", ("KVD-WRITE-008",))


def test_what_fails_without_the_fault_too_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "seed", lambda self, name: self.open() or "")
    with Session(plan("raises", EVERY)) as broken:
        proof = prove_one(broken, fault(("KVD-WRITE-001",)), Requirements([EVERY["KVD-WRITE-001"]]))
    assert (proof.verdict, proof.killed_by, proof.always, proof.missed) == ("unclear", (), ("KVD-WRITE-001",), ())
    assert proof.as_dict()["always"] == ["KVD-WRITE-001"]


def test_what_is_known_without_a_fault_is_not_asked_again(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    own = Session.case
    monkeypatch.setattr(Session, "case", lambda self, item, case: asked.append(case.name) or own(self, item, case))
    session.sound.clear()
    counts = []
    for _ in range(2):
        asked.clear()
        assert prove_one(session, FAULTS["write-keys-into-values"], EVERY).verdict == "killed"
        counts.append(len(asked))
    assert counts[0] == 2 * counts[1]


def test_killers_run_without_the_fault_up_to_where_they_failed_with_it(session: Session) -> None:
    item = EVERY["KVD-WRITE-003"]
    names = [case.name for case in item.selected(Level.CORE)]
    assert [case.name for case in session.requirement(item, Level.CORE, last=names[2]).cases] == names[:3]
    assert [case.name for case in session.requirement(item, Level.CORE, last="none of that name").cases] == names


class MaySkip:
    """A backend whose device skips what is out of range."""

    name = "acme"
    must_raise = False


class MustRaise(MaySkip):
    must_raise = True


@pytest.mark.parametrize(
    ("host_only", "reason"),
    [((), ""), (("KVD-TEST-001",), ""), (("KVD-TEST-001", "KVD-TEST-002"), "it shows in errors for indices out of range")],
)
def test_a_fault_that_cannot_show_on_a_device_is_not_seeded_there(host_only: tuple[str, ...], reason: str) -> None:
    made = attrs.evolve(fault(("KVD-TEST-001", "KVD-TEST-002")), host_only=host_only)
    assert made.why_not(MustRaise()) == ""
    assert made.why_not(MaySkip()).startswith(reason)
    assert bool(made.why_not(MaySkip())) == bool(reason)
    assert made.killers_where(must_raise=True) == made.killers
    assert made.killers_where(must_raise=False) == tuple(name for name in made.killers if name not in host_only)


def test_what_shows_on_the_host_only_is_named_by_its_fault() -> None:
    for made in FAULTS.values():
        assert set(made.host_only) <= set(made.killers), made.name
        assert not made.host_only or made.kind == "backend", "other things have no devices"


NOTHING_THERE = {
    "attn-size-by-the-batch": "out of reach",  # portable attention does not claim batch_invariant
    "attn-many-rows-in-other-bits": "out of reach",
    "attn-many-chunks-in-other-bits": "out of reach",
    "desc-fixed-calls-in-a-byte": "survived",  # nothing repeats calls that name their backend
    "resource-repeat-keeps-views": "survived",  # portable plans repeat nothing
    "resource-stage-that-nobody-tells": "survived",  # portable copies say that they take as much and more
    "resource-stage-of-the-longest": "survived",  # likewise
    "mla-rows-joined-first": "missed",  # likewise of latents, as the next
    "mlaread-rows-read-whole-first": "survived",
    "swap-locks-in-the-order-of-pools": "survived",  # a portable swap that checks nothing has no step of Python in its middle
    "thread-attends-through-one-buffer": "survived",  # likewise
}
"""Faults that make no difference to portable kernels, or none that shows."""


@pytest.mark.slow
def test_every_fault_is_noticed_where_indices_out_of_range_are_skipped() -> None:
    with Session(ConformancePlan("skips", EVERY, setup="support_conformance:register_skipping", command=CHILD)) as skipping:
        proofs = [prove_one(skipping, made, EVERY) for made in FAULTS.values() if made.kind == "backend"]
    left = {proof.fault.name: proof.verdict for proof in proofs if proof.verdict not in ("killed", "not seeded")}
    assert left.items() <= NOTHING_THERE.items()  # memory that was there before may be found all the same
    reasons = {proof.fault.name for proof in proofs if proof.verdict == "not seeded"} - ELSEWHERE
    assert reasons == {made.name for made in FAULTS.values() if made.host_only and set(made.host_only) == set(made.killers)}


@pytest.mark.parametrize("method", ["devices", "claims"])
def test_what_was_chosen_by_a_faulty_answer_is_chosen_anew(method: str) -> None:
    from kvdock import runtime
    from kvdock_conformance.stand_ins import register

    register("reference")
    target, registry = Target("reference"), runtime.default().registry
    before = registry.epoch
    with BackendSeed(method, lambda inner: inner).seeded(target):
        assert registry.epoch > before
        within = registry.epoch
    assert registry.epoch > within


def test_faults_of_an_area_alone_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "seed", lambda self, name: "not here")
    heard: list[Proof] = []
    two = {"x": fault(), "y": attrs.evolve(fault(), name="y", area="other")}
    assert [proof.fault.name for proof in prove(plan("good", EVERY), two, heard.append)] == ["x", "y"]
    assert [proof.fault.name for proof in prove(plan("good", EVERY, area="paged_caching_"), two)] == ["x"]
    assert heard[0].reason == "not here"


def test_a_fault_whose_seeding_crashes_or_is_interrupted_is_unclear(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvdock.errors import BackendUnavailableError
    from kvdock_conformance.child import ChildEndedError

    errors = iter(
        [ChildEndedError("crashed with SIGSEGV", ""), BackendUnavailableError("it is off", got="unusable"), None, KeyboardInterrupt()]
    )

    def seed(self: Session, name: str | None) -> str:
        error = next(errors)
        if error is not None:
            raise error
        return "not here"

    monkeypatch.setattr(Session, "seed", seed)
    every = {name: attrs.evolve(fault(), name=name) for name in "abcde"}
    heard: list[Proof] = []
    proofs = prove(plan("good", EVERY), every, heard.append)
    assert [proof.fault.name for proof in proofs] == list("abcde"), "each is accounted for"
    assert [proof.verdict for proof in proofs] == ["unclear", "unclear", "not seeded", "unclear", "unclear"]
    said = [proof.as_dict()["reason"] for proof in proofs]
    assert said[:3] == ["seeding it crashed with SIGSEGV", "the backend could not be opened: it is off", "not here"]
    assert said[3:] == ["interrupted", "interrupted"]
    assert all(proof.missed == () for proof in proofs)
    assert heard == [*proofs[:3], proofs[4]]


def test_a_fault_in_a_kernel_that_the_backend_lacks_is_not_seeded() -> None:
    from kvdock_conformance.stand_ins import StandIn, register_backend

    register_backend(StandIn("bare", {}))
    target = Target("bare")
    assert KernelSeed("paged_caching_", lambda inner: inner).why_not(target) == "bare has no kernel for paged_caching_"
    assert FunctionSeed("paged_caching_", lambda function: function).why_not(target) == ""
    assert BackendSeed("skipped_writes", lambda method: method).why_not(target) == ""


def test_a_fault_in_dtypes_that_the_backend_does_not_declare_is_not_seeded() -> None:
    from kvdock_conformance.stand_ins import StandIn, register_backend

    class Declares(StandIn):
        def capabilities(self) -> kvdock.plugin.Capabilities:
            return kvdock.plugin.Capabilities(dtypes=(torch.bfloat16, torch.int8) if "int8" in self.name else (torch.bfloat16,))

    class Faulty:
        about = (torch.int8, torch.float8_e5m2)

        def __call__(self, inner: kvdock.plugin.Kernel) -> kvdock.plugin.Kernel:
            return inner

    for name, reason in (("declares", "declares declares which dtypes it stores"), ("declares-int8", "")):
        register_backend(Declares(name, PORTABLE_KERNELS))
        assert KernelSeed("paged_caching_", Faulty()).why_not(Target(name)).startswith(reason)
        assert bool(KernelSeed("paged_caching_", Faulty()).why_not(Target(name))) == bool(reason)
    assert "torch.int8, torch.float8_e5m2" in KernelSeed("paged_caching_", Faulty()).why_not(Target("declares"))
    assert KernelSeed("paged_caching_", lambda inner: inner).why_not(Target("declares")) == "", "it shows with any dtype"


def test_seeds_are_taken_out_again_whatever_happens() -> None:
    from kvdock import runtime
    from kvdock_conformance.stand_ins import register

    register("reference")
    target = Target("reference")
    kernels = runtime.default().registry.loaded

    def kernel_of() -> kvdock.plugin.Kernel:
        return kernels()["reference"].kernels["paged_caching_"]

    own, function = kernel_of(), kvdock.ops.paged_caching_
    made: list[Args] = []
    collected = Faults()

    @collected.call("paged_caching_", "a", "A.", "KVD-WRITE-001")
    def _call(run: BackendCall, args: Args) -> None:
        made.append(args)
        run(args)

    @collected.function("paged_caching_", "b", "B.", "KVD-WRITE-001")
    def _function(inner: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: made.append({"args": args}) or inner(*args)

    @collected.backend("paged_caching_", "skipped_writes", "c", "C.", "KVD-WRITE-001")
    def _backend(inner: Callable[..., int]) -> Callable[..., int]:
        return lambda device: inner(device) + 41

    class Reluctant(kvdock.plugin.Kernel):
        def __init__(self, inner: kvdock.plugin.Kernel) -> None:
            self.inner = inner

        def supports(self, request: kvdock.plugin.Request) -> Sequence[str]:
            return ["not today"]

        def prepare(self, request: kvdock.plugin.Request) -> kvdock.plugin.Descriptor:
            return self.inner.prepare(request)

    collected.kernel("paged_caching_", "d", "D.", "KVD-WRITE-001")(Reluctant)
    assert [fault.name for fault in collected] == ["a", "b", "c", "d"]
    item = EVERY["KVD-WRITE-001"]
    case, skipped = item.selected(Level.CORE)[0], target.skipped()
    for fault in collected:
        with contextlib.suppress(KeyError), fault.seeded(target):
            if fault.name == "c":
                assert target.skipped() == skipped + 41
            elif fault.name == "d":
                assert kernel_of() is not own
                assert item.needs is not None
                assert list(item.needs.reasons(target, case.data)) == ["not today"]
            else:
                count = len(made)
                item.check(target, case.data)
                assert len(made) == count + 1
            raise KeyError("whatever happens")
        assert kernel_of() is own
        assert kvdock.ops.paged_caching_ is function
        assert target.skipped() == skipped


def test_two_faults_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "AREAS", ("paged_caching", "paged_caching"))
    with pytest.raises(kvdock.ArgumentValueError, match="expected a name that no other fault has"):
        faults.load.__wrapped__()
