"""Scratch environments with real distributions in them, made once for all workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from support_distributions import PROJECTS, Environments
from support_projects import Environment, build, build_kvdock, once


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def wheels(shared: Path) -> dict[str, Path]:
    """The wheel of each project, by its name."""
    built = once(shared, "wheels", lambda folder: {name: str(path) for name, path in build(PROJECTS, folder).items()})
    return {name: Path(path) for name, path in built.items()}


@pytest.fixture(scope="session")
def environments(shared: Path, wheels: dict[str, Path]) -> Environments:
    """Environments by the projects in them."""
    return Environments(shared, wheels)


@pytest.fixture(scope="session")
def kvdock_wheel(shared: Path) -> Path:
    """The wheel of this repository."""
    return Path(once(shared, "kvdock-wheel", build_kvdock))


@pytest.fixture(scope="session")
def stranger(shared: Path, kvdock_wheel: Path) -> Callable[..., Environment]:
    """Makes an environment as a stranger has it, with kvdock's wheel and others, by a name."""

    def with_wheels(name: str, *wheels: Path) -> Environment:
        def make(folder: Path) -> str:
            made = Environment.stranger(folder / "env", kvdock_wheel)
            if wheels:
                made.install(*wheels)
            return str(made.root)

        return Environment(Path(once(shared, name, make)), is_strangers=True)

    return with_wheels
