"""The sources of this repository, parsed."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core"
BACKENDS = ROOT / "backends"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@attrs.frozen
class Module:
    """A module: its dotted name, and where it is."""

    name: str
    path: Path

    @functools.cached_property
    def text(self) -> str:
        """Its source."""
        return self.path.read_text(encoding="utf-8")

    @property
    def is_written(self) -> bool:
        """Whether ``make calls`` wrote it: its lengths and names follow from schemas, and tests compare it with what is written."""
        return self.text.startswith('"""The quick path of `') and "Written by ``make calls``" in self.text

    @functools.cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text, str(self.path))

    @property
    def where(self) -> str:
        """Its path from the root of the repository."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def package(self) -> str:
        """The package that a relative import in it starts from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    def imports(self) -> Iterator[tuple[int, str]]:
        """Yield line and dotted name of everything that it imports, inside functions too."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                yield from ((node.lineno, base if alias.name == "*" else f"{base}.{alias.name}") for alias in node.names)

    def _base(self, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module that an import takes from."""
        if node.level == 0:
            return node.module or ""
        parent = self.package.split(".")
        return ".".join([*parent[: len(parent) - node.level + 1], *([node.module] if node.module else [])])

    def functions(self) -> Iterator[Function]:
        """Yield every function and method, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def public(self) -> Iterator[tuple[str, Definition]]:
        """Yield what has no underscore before its name: functions and classes of the module, and methods of such classes."""
        for node in self.tree.body:
            if isinstance(node, Definition) and not node.name.startswith("_"):
                yield node.name, node
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from ((f"{node.name}.{item.name}", item) for item in node.body if isinstance(item, Function) and item.name[0] != "_")


@functools.cache
def modules_below(folder: Path) -> tuple[Module, ...]:
    """Return the modules below a folder that holds packages."""
    found = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        found.append(Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    assert found, f"no modules below {folder}"
    return tuple(found)


def kvdock_modules() -> tuple[Module, ...]:
    """Return the modules of the package ``kvdock``."""
    return tuple(module for module in modules_below(CORE) if module.name.partition(".")[0] == "kvdock")


def resolve(name: str, known: frozenset[str]) -> str:
    """Return the module that a dotted name of ``from x import y`` is, or is in."""
    return name if name in known else name.rpartition(".")[0]


def circle(modules: Iterable[Module], but: frozenset[tuple[str, str]] = frozenset()) -> dict[str, list[str]]:
    """Return modules that import one another, with what each imports of the others; empty if there are none.

    Imports for type checkers and inside functions count too. ``but`` lists imports, from and to, that do not.
    """
    named = {module.name: module for module in modules}
    edges = {name: {resolve(other, frozenset(named)) for _, other in module.imports()} - {name} for name, module in named.items()}
    left = {name: {other for other in others if other in named and (name, other) not in but} for name, others in edges.items()}
    while free := {name for name, others in left.items() if not others & set(left)}:
        left = {name: others for name, others in left.items() if name not in free}
    return {name: sorted(others & set(left)) for name, others in left.items()}
