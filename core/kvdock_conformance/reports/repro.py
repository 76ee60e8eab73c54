"""A failure as a script that needs only torch, kvdock and the backend's package.

The check that failed is the script: its source, and that of everything in the kit that it refers to, is taken out of the
kit's modules and written in order into one file, behind which the case stands as data. So checks must be functions of a
module, and what they use must be imported by name (``from kvdock_conformance.x import y``, without ``as``).
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pprint
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from kvdock_conformance.checking.settings import unchanged
from kvdock_conformance.kinds import KINDS
from kvdock_conformance.requirement import Requirement
from kvdock_conformance.stand_ins import STAND_INS
from kvdock_conformance.verdict import CaseOutcome

__all__ = ["Extract", "script"]

_KIT = "kvdock_conformance"


@attrs.frozen
class _KitModule:
    """A module of the kit: the statements that define its names, and what it imports by which name."""

    definitions: dict[str, ast.stmt]
    imports: dict[str, tuple[str, str]]
    text: str


@functools.cache
def _source(module: str) -> _KitModule:
    text = inspect.getsource(importlib.import_module(module))
    source = _KitModule({}, {}, text)
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            source.imports.update({alias.asname or alias.name: _import(node, alias) for alias in node.names})
        for name in _names(node):
            source.definitions[name] = node
    return source


def _import(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> tuple[str, str]:
    """Return the module that an import takes something from, and the statement that takes it."""
    name = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
    if isinstance(node, ast.Import):
        return alias.name, f"import {name}"
    return str(node.module), f"from {node.module} import {name}"


def _names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement at the top of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


class Extract:
    """Source taken out of the kit: `take` functions, then read `imports` and `parts`."""

    def __init__(self) -> None:
        self.imports: set[str] = set()
        """Import statements of what is not the kit's."""
        self.parts: list[str] = []
        """Definitions, each behind those that it refers to."""
        self._seen: dict[str, str] = {}

    def take(self, function: Callable[..., Any]) -> str:
        """Take a function and all that it refers to; returns its name."""
        self._take(function.__module__, function.__name__)
        return function.__name__

    def _take(self, module: str, name: str) -> None:
        """Take a name of a module of the kit.

        Raises:
            ValueError: two modules of the kit use one name for different things.
        """
        if name in self._seen:
            if self._seen[name] != module:
                raise ValueError(f"{name} means something in {self._seen[name]} and in {module}: rename one, since repro.py holds both")
            return
        source = _source(module)
        self._seen[name] = module
        used, text = _definition(module, name)
        for each in used:
            self._use(module, source, each)
        self.parts.append(text)

    def _use(self, module: str, source: _KitModule, name: str) -> None:
        """Take what a name in a module stands for, if it stands for something outside the statement that uses it."""
        if name in source.definitions:
            self._take(module, name)
        elif name in source.imports:
            origin, statement = source.imports[name]
            if origin.split(".")[0] == _KIT:
                self._take(origin, name)
            else:
                self.imports.add(statement)


@functools.cache
def _definition(module: str, name: str) -> tuple[list[str], str]:
    """Return the names that a definition uses, and its source, with its decorators, and the docstring behind an assignment left out."""
    source = _source(module)
    node = source.definitions[name]
    used = dict.fromkeys(part.id for part in ast.walk(node) if isinstance(part, ast.Name))
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    return [*used], "\n".join(source.text.splitlines()[first - 1 : node.end_lineno])


_SCRIPT = '''"""{id}: {sentence}

Case: {case}
Wrong: {what}
Expected: {expected}
Got: {got}

Needs torch, kvdock and the package of {kind} {shown}{needs}. Ends with an error while the fault is there.
"""

from __future__ import annotations

{imports}

CASE = {data}

{parts}

if __name__ == "__main__":
    faulthandler.dump_traceback_later({limit:g}, exit=True)  # a hang is an error too
{setup}    target = {target}({arguments})
    with unchanged():
{main}
    print("passes now: {id}, {case}")
'''


def script(
    requirement: Requirement,
    case: CaseOutcome,
    *,
    name: str,
    setup: str | None = None,
    limit_s: float | None = None,
    device: str | None = None,
) -> str:
    """Return the text of ``repro.py`` for a case that failed.

    Args:
        requirement: the requirement.
        case: the case.
        name: name of the backend, or of what else was tested.
        setup: ``"module:function"`` that makes it known, if no entry point does.
        limit_s: time limit of the case in seconds in place of the requirement's own.
        device: on which of its devices; None for the first.
    """
    extract = Extract()
    extract.imports.add("import faulthandler")
    target = extract.take(KINDS[requirement.kind].target_class())
    extract.take(unchanged)
    main = _main(extract, requirement)
    failure = {key: _line(text) for key, text in (case.failure or {}).items()}
    setup_lines, needs = _setup(name, setup)
    return _SCRIPT.format(
        id=requirement.id,
        sentence=requirement.sentence,
        case=_line(case.name).replace('"', "'"),
        what=failure.get("what", ""),
        expected=failure.get("expected", ""),
        got=failure.get("got", ""),
        kind=requirement.kind,
        shown=_line(repr(name)),
        arguments=_arguments(requirement.kind, name, setup, device),
        target=target,
        needs=needs + _brought_by(requirement),
        imports="\n".join(sorted(extract.imports)),
        data=pprint.pformat(dict(case.data), width=220, compact=True, sort_dicts=False),
        parts="\n\n\n".join(extract.parts),
        limit=limit_s or requirement.limit_s,
        setup=setup_lines,
        main=main,
    )


def _main(extract: Extract, requirement: Requirement) -> str:
    check, needs = extract.take(requirement.check), requirement.needs
    if needs is None:
        return f"        {check}(target, CASE)"
    reasons, refused = extract.take(needs.reasons), extract.take(needs.refused)
    return (
        f"        reasons = {reasons}(target, CASE)\n        if reasons:\n            {refused}(target, CASE, reasons, {check})\n"
        f"        else:\n            {check}(target, CASE)"
    )


def _arguments(kind: str, name: str, setup: str | None, device: str | None) -> str:
    """Return the arguments that a target is made of; only a backend's takes a device."""
    given = [name, setup, device] if kind == "backend" else [name, setup]
    while given[-1] is None:
        given.pop()
    return ", ".join(map(repr, given))


def _setup(backend: str, setup: str | None) -> tuple[str, str]:
    if setup is None and backend not in STAND_INS:
        return "", ""
    module, _, function = (setup or f"{_KIT}.stand_ins:register").partition(":")
    argument = "" if setup else repr(backend)
    lines = f'    __import__("importlib").import_module({module!r}).{function}({argument})\n'
    return lines, f", made by {module}"


def _brought_by(requirement: Requirement) -> str:
    """Say what else must be installed: the plugin of an op that is not kvdock's."""
    return f", and the plugin that brings {requirement.area}" if "@" in requirement.id else ""


def _line(text: str) -> str:
    """Return a text that can stand in a docstring."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    return shown.replace("\\", "/").replace('"""', "'''").rstrip('"')
