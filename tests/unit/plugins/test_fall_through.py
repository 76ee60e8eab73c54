"""What the chosen backend refuses is served by the next that claims the device, and only then by portable kernels."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import kvdock
from kvdock.errors import AmbiguousBackendError, BackendError, KVDockWarning, PluginError, UnsupportedError
from kvdock.ops.portable import PORTABLE_KERNELS
from kvdock.plugin import Descriptor, Kernel, Priority, Request
from kvdock.plugins import discovery
from kvdock.plugins.entry_points import FoundEntryPoint, LoadingPlan
from kvdock.plugins.loading import Contribution, admit
from kvdock.plugins.records import PluginState
from kvdock.plugins.registry import Registry
from kvdock_conformance.checking.target import Target
from opskit import CountingKernel, active
from support_plugins import QUIET, InProcessBackend, plugin

OP = "paged_caching_"
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Only(CountingKernel):
    """A kernel for some dtypes, that notes what it writes besides writing it."""

    def __init__(self, *dtypes: torch.dtype, op: str = OP) -> None:
        super().__init__(PORTABLE_KERNELS[op])
        self._dtypes, self.asked = dtypes, 0

    def supports(self, request: Request) -> Sequence[str]:
        self.asked += 1
        dtype = request.tensor("k_cache").dtype
        return [] if dtype in self._dtypes else [f"made for {', '.join(map(str, self._dtypes))}, not {dtype}"]


class Backend(InProcessBackend):
    """A backend for the CPU that notes when its device is guarded and whether it is asked for a capture."""

    capturing = False
    skipped = 0

    def __init__(self, name: str, kernel: Kernel | None = None, priority: Priority = Priority.NORMAL, *, graphs: bool = False) -> None:
        kernels = {} if kernel is None else {OP: kernel}
        super().__init__(name, claims=("cpu",), devices=("cpu",), kernels=kernels, priority=priority)
        self._graphs = graphs

    def capabilities(self) -> kvdock.plugin.Capabilities:
        return kvdock.plugin.Capabilities(priority=self._priority, graph_capture=self._graphs)

    @contextlib.contextmanager
    def device_guard(self, device: torch.device) -> Iterator[None]:
        self.asked.append("guard")
        yield

    def is_capturing(self, device: torch.device) -> bool:
        self.asked.append("is_capturing")
        return self.capturing

    def skipped_writes(self, device: torch.device) -> int:
        return self.skipped


def three() -> tuple[dict[str, Only], list[Backend]]:
    """Return three backends, each with a kernel for one dtype more than those before it, by priority."""
    kernels = {"best": Only(BF16), "middle": Only(BF16, F32), "last": Only(BF16, F32, F16)}
    order = (Priority.SPECIALISED, Priority.NORMAL, Priority.FALLBACK)
    return kernels, [Backend(name, kernel, priority) for (name, kernel), priority in zip(kernels.items(), order, strict=True)]


def runtime(*backends: kvdock.plugin.Backend, environ: dict[str, str] | None = None, **configured: Any) -> kvdock.Runtime:
    registry = Registry(QUIET | (environ or {}), **configured)
    for backend in backends:
        registry.register(plugin(backend), f"plugin-{backend.name}")
    return kvdock.Runtime(registry)


def arguments(dtype: torch.dtype) -> tuple[Any, ...]:
    """Pools of eight tokens, three new tokens and their slots; no scales."""
    pools, rows = torch.zeros(2, 2, 4, 1, 8, dtype=dtype), torch.randn(2, 3, 1, 8).to(dtype)
    return (*pools, *rows, torch.tensor([5, 0, 3]), None, None)


def assert_written(args: tuple[Any, ...]) -> None:
    for pool, rows in zip(args[:2], args[2:4], strict=True):
        assert torch.equal(pool.view(8, 1, 8)[args[4]], rows)
        assert not pool.view(8, 1, 8)[[1, 2, 4, 6, 7]].any()


def served_by(made: kvdock.Runtime, dtype: torch.dtype, named: str | None = None) -> str:
    return made.dispatcher.explain(OP, arguments(dtype), named).served_by


EACH = {BF16: "best", F32: "middle", F16: "last", F64: "portable"}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_each_request_has_the_first_in_the_order_that_serves_it(order: tuple[int, ...]) -> None:
    kernels, backends = three()
    made = runtime(*(backends[index] for index in order))
    with active(made):
        for _, dtype in itertools.product(range(6), EACH):  # alternating, until calls are known again in every way
            args = arguments(dtype)
            kvdock.ops.paged_caching_(*args[:5])
            assert_written(args)
    assert {name: [request.tensor("k_cache").dtype for request in kernel.prepared] for name, kernel in kernels.items()} == {
        "best": [BF16],
        "middle": [F32],
        "last": [F16],
    }
    assert made.dispatcher.fallbacks == {(OP, "best"): 1}, "only what portable kernels serve is counted"
    assert {dtype: served_by(made, dtype) for dtype in EACH} == EACH


def test_hot_calls_ask_nobody() -> None:
    kernels, backends = three()
    with active(runtime(*backends)):
        args = arguments(F32)
        kvdock.ops.paged_caching_(*args[:5])
        before = [*(kernel.asked for kernel in kernels.values()), *(len(backend.asked) for backend in backends)]
        for _ in range(20):
            kvdock.ops.paged_caching_(*args[:5])
        assert before == [*(kernel.asked for kernel in kernels.values()), *(len(backend.asked) for backend in backends)]


def test_explain_lists_who_was_asked_before_with_reasons() -> None:
    _, backends = three()
    said = runtime(*backends).dispatcher.explain(OP, arguments(F16))
    assert (said.backend, said.served_by, said.kernel) == ("best", "last", f"{__name__}.Only")
    assert said.backend_reason.startswith("highest priority of the ready backends that claim cpu: ")
    assert said.rejected == [
        ("best", ["made for torch.bfloat16, not torch.float16"]),
        ("middle", ["made for torch.bfloat16, torch.float32, not torch.float16"]),
    ]


def test_what_nobody_serves_lists_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    _, backends = three()
    made = runtime(*backends)
    monkeypatch.setattr(PORTABLE_KERNELS[OP], "supports", lambda request: ["not today"], raising=False)
    with active(made), pytest.raises(UnsupportedError) as caught:
        kvdock.ops.paged_caching_(*arguments(F64)[:5])
    places = [str(caught.value).index(f"{name}: ") for name in ("best", "middle", "last", "portable")]
    assert places == sorted(places)


@pytest.mark.parametrize("name", ["best", "portable"])
def test_a_backend_that_is_named_is_not_left_for_another(name: str) -> None:
    kernels, backends = three()
    made = runtime(*backends)
    with active(made), kvdock.use_backend(name):
        args = arguments(F32)
        kvdock.ops.paged_caching_(*args[:5])
        assert_written(args)
    assert [kernel.prepared for kernel in kernels.values()] == [[], [], []]
    assert made.dispatcher.fallbacks == {(OP, "best"): 1}
    assert served_by(made, F32, name) == "portable"
    assert served_by(made, F32) == "middle", "and without the name it has a plan of its own"


def test_a_cache_keeps_to_the_backend_that_was_named_when_it_was_made() -> None:
    kernels, backends = three()
    spec = kvdock.KVSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=8, max_positions=8, dtype=F32)
    conf, rank = kvdock.PagedKVCacheConfig(num_blocks=2, block_size=4), kvdock.RankInfo("cpu")
    with active(runtime(*backends)) as made:
        free = kvdock.create_cache(spec, conf, rank)
        with kvdock.use_backend("best"):
            bound = kvdock.create_cache(spec, conf, rank)
        rows, slots = torch.randn(2, 3, 1, 8), torch.tensor([5, 0, 3])
        for cache, prepared, fallbacks in ((free, 1, 0), (bound, 1, 1)):
            for _ in range(6):
                cache.update(0, *rows, slots)
            assert torch.equal(cache.k_cache(0).view(8, 1, 8)[slots], rows[0])
            assert (len(kernels["middle"].prepared), made.dispatcher.fallbacks[OP, "best"]) == (prepared, fallbacks)


@pytest.mark.parametrize("configured", [{"environ": {"KVDOCK_BACKEND_ACME": "middle"}}, {"op_backends": {OP: "middle"}}])
def test_who_is_configured_comes_first_and_the_others_behind_it_by_priority(configured: dict[str, Any]) -> None:
    kernels, backends = three()
    kernels["best"]._dtypes = (BF16, F64)
    made = runtime(*backends, **configured)
    assert {dtype: served_by(made, dtype) for dtype in EACH} == {BF16: "middle", F32: "middle", F16: "last", F64: "best"}


def test_one_whose_plugin_knows_no_such_op_is_asked_after_the_next() -> None:
    kernel = Only(F32)
    made = runtime(Backend("best", None, Priority.SPECIALISED), Backend("other", kernel))
    assert made.dispatcher.explain(OP, arguments(F32)).rejected == [("best", ["it has no kernel for this op"])]
    assert served_by(made, F32) == "other"


@pytest.mark.parametrize("reverse", [False, True])
def test_a_tie_of_those_that_serve_a_request_is_an_error_and_decided_by_a_name(reverse: bool) -> None:
    _, (best, *_) = three()
    equals = [Backend("a", Only(F32, F16)), Backend("b", Only(F32)), Backend("c", None), Backend("below", Only(F32), Priority.FALLBACK)]
    made = runtime(*(equals[::-1] if reverse else equals), best)
    args = arguments(F32)
    with active(made):
        with pytest.raises(AmbiguousBackendError) as caught:
            kvdock.ops.paged_caching_(*args[:5])
        assert str(caught.value) == (
            "paged_caching_: several backends that claim cpu serve the request, and none is preferred: a (priority 10), b (priority 10); "
            "best does not (made for torch.bfloat16, not torch.float32); c does not (it has no kernel for this op). "
            "Fix: use kvdock.use_backend(name) for such calls, or leave out all but one with KVDOCK_BACKENDS_DENY"
        )
        assert not args[0].any()
        with kvdock.use_backend("b"):
            kvdock.ops.paged_caching_(*args[:5])
        assert_written(args)
    assert served_by(made, F16) == "a", "the only one of its equals that serves it"
    assert served_by(made, BF16) == "best", "whom the tie does not concern"
    assert made.dispatcher.explain(OP, arguments(F64)).rejected[1:] == [
        ("a", ["made for torch.float32, torch.float16, not torch.float64"]),
        ("b", ["made for torch.float32, not torch.float64"]),
        ("c", ["it has no kernel for this op"]),
        ("below", ["made for torch.float32, not torch.float64"]),
    ]


class Faulty(Only):
    """A kernel whose answer to one question the test decides."""

    def __init__(self, **answers: Callable[..., Any]) -> None:
        super().__init__(F32)
        for name, answer in answers.items():
            setattr(self, name, answer)


class Failing(Descriptor):
    def __call__(self, *args: Any) -> None:
        args[0][0] = 1
        raise OSError("card lost")


def raises(request: Request) -> Any:
    raise OSError("no compiler")


def test_errors_name_who_made_them() -> None:
    for fault, text in (({"supports": raises}, "supports() of its kernel"), ({"prepare": raises}, "prepare() of its kernel")):
        _, (best, *_) = three()
        with active(runtime(best, Backend("other", Faulty(**fault)))), pytest.raises(PluginError, match="no compiler") as caught:
            kvdock.ops.paged_caching_(*arguments(F32)[:5])
        assert str(caught.value).startswith(f"backend 'other': {text} for paged_caching_")


def test_a_call_that_raises_is_noted_as_its_own_and_never_retried_by_the_next() -> None:
    kernels, (best, *_) = three()
    last = Only(F32)
    made = runtime(best, Backend("other", Faulty(prepare=lambda request: Failing())), Backend("last", last, Priority.FALLBACK))
    with active(made), pytest.raises(OSError, match="card lost") as caught:
        kvdock.ops.paged_caching_(*arguments(F32)[:5])
    assert caught.value.__notes__ == [f"paged_caching_ was served by 'other', by a plan of {__name__}.Faulty"]
    assert (last.prepared, kernels["best"].prepared, dict(made.dispatcher.fallbacks)) == ([], [], {})


def test_the_backend_that_serves_guards_its_device_and_knows_of_captures() -> None:
    best, other = Backend("best", Only(BF16), Priority.SPECIALISED), Backend("other", Only(F32, F16), graphs=True)
    best.capturing = True
    with active(runtime(best, other)):
        kvdock.ops.paged_caching_(*arguments(F32)[:5])
        assert (best.asked.count("guard"), best.asked.count("is_capturing")) == (0, 0)
        assert other.asked.count("guard") == 1
        assert other.asked.count("is_capturing") == 2, "when it was prepared, and at the call, since it captures graphs"
        other.capturing = True
        with pytest.raises(BackendError, match="a new signature while a graph is captured"):
            kvdock.ops.paged_caching_(*arguments(F16)[:5])
        best.capturing = False
        kvdock.ops.paged_caching_(*arguments(F64)[:5])
        assert best.asked.count("guard") == 1, "a portable kernel runs for the one that was chosen"


def test_debug_mode_asks_the_one_that_serves_whether_values_can_be_read() -> None:
    best, other = Backend("best", Only(BF16), Priority.SPECIALISED), Backend("other", Only(F32))
    args = list(arguments(F32)[:5])
    args[4] = torch.tensor([1, 1, 2])
    with active(runtime(best, other)), kvdock.debug():
        with pytest.warns(KVDockWarning, match="slot"):
            kvdock.ops.paged_caching_(*args)
        other.capturing, best.capturing = True, False
        kvdock.ops.paged_caching_(*args)  # a warning would be an error


def test_skipped_writes_of_all_that_may_have_served_are_counted_and_of_a_named_one_alone() -> None:
    _, backends = three()
    made = runtime(*backends)
    for backend, count in zip(backends, (1, 10, 100), strict=True):
        backend.skipped = count
    own = made.skipped_writes("cpu") - 111
    with kvdock.use_backend("middle"):
        assert made.skipped_writes("cpu") == own + 10


def test_a_change_of_what_is_registered_behind_the_chosen_one_is_noticed() -> None:
    kernel = Only(F32)
    with active(runtime(Backend("best", Only(BF16), Priority.SPECIALISED), Backend("other"))) as made:
        for _ in range(5):
            kvdock.ops.paged_caching_(*arguments(F32)[:5])
        assert made.dispatcher.fallbacks == {(OP, "best"): 1}
        made.registry.register_kernel("other", OP, kernel)
        for _ in range(5):
            kvdock.ops.paged_caching_(*arguments(F32)[:5])
        assert (len(kernel.prepared), dict(made.dispatcher.fallbacks)) == (1, {(OP, "best"): 1})


def test_kernels_are_asked_for_when_they_are_needed_and_one_that_has_none_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (best, middle, last) = three()
    found = {backend.name: FoundEntryPoint(backend.name, f"{backend.name}-dist", "1.0", "m") for backend in (best, middle, last)}

    def load(item: FoundEntryPoint, watch: Any) -> Contribution:
        return admit(plugin({"best": best, "middle": middle, "last": last}[item.name]), item.record(PluginState.READY, ""), watch)

    def broken() -> Any:
        raise SystemExit("no compiler")

    monkeypatch.setattr(discovery, "collect", lambda: (list(found.values()), []))
    monkeypatch.setattr(discovery, "plan", lambda *_: LoadingPlan(tuple(found.values()), (), ()))
    monkeypatch.setattr(discovery, "load", load)
    monkeypatch.setattr(middle, "kernels", broken)
    made = kvdock.Runtime(Registry({}))
    assert served_by(made, BF16) == "best"
    assert "kernels" not in last.asked
    with pytest.warns(KVDockWarning, match=r"'middle' .*UNUSABLE: kernels\(\) raised SystemExit: no compiler"):
        assert served_by(made, F16) == "last"
    assert made.dispatcher.explain(OP, arguments(F16)).rejected == [("best", ["made for torch.bfloat16, not torch.float16"])]


def test_the_kit_asks_the_backend_under_test_though_another_would_serve() -> None:
    kernels, backends = three()
    with active(runtime(*backends)) as made:
        args = dict(zip(made.dispatcher.op(OP).schema.arg_names, arguments(F32), strict=True))
        Target("best").call(OP, {name: value for name, value in args.items() if value is not None})
    assert kernels["middle"].prepared == [], "what it refuses is certified as what portable kernels do"
