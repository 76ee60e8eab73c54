"""Core names no vendor, asks no device for its type, and lists no backend."""

from __future__ import annotations

import ast
import re
import tomllib

import pytest

from support_sources import CORE, ROOT, Module, modules_below

VENDOR_WORDS = frozenset(
    """
    cuda cudnn cublas cutlass nccl nvcc nvidia nvml ptx hopper ampere blackwell rocm rccl hip hipify amd radeon instinct gfx miopen
    triton gluon xpu intel sycl gaudi habana hpu npu ascend cann mps metal apple tpu xla mlu cambricon musa maca metax moore
    neuron trainium inferentia tenstorrent graphcore ipu vulkan opencl directml
    """.split()  # noqa: SIM905 - a list of sixty quoted words is harder to read
)
"""Words that only a backend may know."""

ALLOWED: dict[tuple[str, str], str] = {
    ("core/kvdock/interface.py", '"npu"'): "an example of what a vendor writes in `device_type`; no code reads it",
    ("core/kvdock_conformance/checking/fresh.py", 'HEAVY = ("triton"'): "what importing any plugin must not import",
    ("core/kvdock_conformance/requirements/hygiene.py", '_TYPES = ("cpu"'): "every backend is asked alike whether it claims these",
}
"""The lines that may hold such a word, by a part of them, and why."""

MODULES = modules_below(CORE)
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def vendor_words(line: str) -> set[str]:
    """Return the vendor words in a line, also as parts of names: ``CudaBackend``, ``is_cuda``, ``KVDOCK_CUDA``."""
    words = re.findall(r"[a-z]+", CAMEL.sub(" ", line).lower())
    return VENDOR_WORDS.intersection(words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("if torch.version.hip:", {"hip"}),
        ("class CudaBackend:", {"cuda"}),
        ("x.is_cuda and KVDOCK_BACKEND_ROCM", {"cuda", "rocm"}),
        ('torch.device("xpu:0")', {"xpu"}),
        ("input, ownership, dumps, relationship, metallic, camps", set()),
    ],
)
def test_the_check_sees_words_and_not_their_neighbours(line: str, words: set[str]) -> None:
    assert vendor_words(line) == words


@pytest.mark.parametrize("module", MODULES, ids=[module.where for module in MODULES])
def test_core_names_no_vendor(module: Module) -> None:
    for number, line in enumerate(module.text.splitlines(), 1):
        words = vendor_words(line)
        excused = any(where == module.where and part in line for where, part in ALLOWED)
        assert not words or excused, f"{module.where}:{number} says {sorted(words)}: {line.strip()}"


def test_every_exemption_is_still_needed() -> None:
    for where, part in ALLOWED:
        lines = [line for line in (ROOT / where).read_text(encoding="utf-8").splitlines() if part in line]
        assert lines, f"{where} no longer has a line with {part}"
        assert any(vendor_words(line) for line in lines), f"{where}: {part} needs no exemption"


def is_device_type(node: ast.expr) -> bool:
    """Whether an expression is ``something.type`` or ``something.device_type``."""
    return isinstance(node, ast.Attribute) and node.attr in ("type", "device_type")


def names_a_type(node: ast.expr) -> bool:
    """Whether an expression holds text, such as ``"cpu"`` or ``("cpu", "meta")``."""
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(node))


def device_questions(tree: ast.AST) -> list[int]:
    """Return the lines that decide by the name of a device's type."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            asks = any(map(is_device_type, sides)) and any(map(names_a_type, sides))
        elif isinstance(node, ast.Match):
            asks = is_device_type(node.subject)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asks = is_device_type(node.func.value)  # device.type.startswith(...)
        elif isinstance(node, ast.Subscript):
            asks = is_device_type(node.slice) and isinstance(node.value, ast.Dict)
        else:
            asks = isinstance(node, ast.Attribute) and re.fullmatch(r"is_(cpu|meta|[a-z]{2,4}u|cuda|mps)", node.attr) is not None
        if asks:
            found.append(node.lineno)  # type: ignore[attr-defined] - all of these have lines
    return found


@pytest.mark.parametrize(
    ("code", "asks"),
    [
        ('device.type == "cpu"', True),
        ('"cpu" != x.device.type', True),
        ('tensor.device.type in ("cpu", "meta")', True),
        ("tensor.is_cpu", True),
        ("tensor.is_xpu", True),
        ('device.type.startswith("c")', True),
        ('{"cpu": 1}[device.type]', True),
        ("match device.type:\n    case other: pass", True),
        ("one.type == other.type", False),
        ("device == HOST", False),
        ('kind == "cpu"', False),
        ("backend.is_capturing(device)", False),
    ],
)
def test_the_check_sees_questions_about_a_type(code: str, asks: bool) -> None:
    assert bool(device_questions(ast.parse(code))) == asks


@pytest.mark.parametrize("module", MODULES, ids=[module.where for module in MODULES])
def test_core_asks_no_device_for_its_type(module: Module) -> None:
    lines = device_questions(module.tree)
    assert not lines, f"{module.where}: lines {lines}: ask a backend what it can do, or compare devices"


def test_core_lists_no_backend() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    modules = set(project["entry-points"]["kvdock.backends"].values())
    assert {"kvdock_cpu", "kvdock_cuda", "kvdock_rocm"} <= modules
    for module in MODULES:
        for name in (*modules, "kvdock_triton"):
            assert name not in module.text, f"{module.where} knows {name}"


def test_built_in_backends_enter_by_the_same_door() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]
    assert set(points["kvdock.backends"]) == {"cpu", "cuda", "rocm"}
    assert "pytest11" not in points, "the kit is no pytest plugin"
    from kvdock.plugins import entry_points

    assert "kvdock.backends" in vars(entry_points).values(), "the group that discovery reads is the one in pyproject.toml"
