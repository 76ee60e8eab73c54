"""The distributions that the packaging tests install, and a script that reports what kvdock makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvdock.plugins.records import PluginRecord
from support_plugins import source
from support_projects import Environment, Project, once

_HEAD = "import kvdock\nKVDOCK_API = (1, 0)\n"
_HOOK = "@kvdock.plugin.hookimpl\ndef "

FAULTS: Mapping[str, str] = {
    "import_error": "raise ImportError('libacme.so.7: cannot open shared object file')\n",
    "syntax_error": "def broken(:\n",
    "sys_exit": "import sys\nsys.exit('no licence found')\n",
    "base_exception": "class Odd(BaseException): pass\nraise Odd('very odd')\n",
    "stale": source("stale"),
    "other_major": source("other-major").replace("(1, 0)", "(2, 0)"),
    "newer_minor": source("newer-minor").replace("(1, 0)", "(1, 99)"),
    "no_version": source("no-version").replace("KVDOCK_API = (1, 0)", ""),
    "not_a_backend": _HEAD + _HOOK + "kvdock_backends():\n    return ['acme']\n",
    "misspelt": _HEAD + _HOOK + "kvdock_backend():\n    return []\n",
    "wrong_arguments": _HEAD
    + _HOOK
    + "kvdock_backends(config):\n    return []\n"
    + _HOOK
    + "kvdock_prefix_caches():\n    return {'half': dict}\n",
    "no_hook": _HEAD,
    "probe_raises": source("probe-raises", probe="raise OSError('/dev/acme0: permission denied')"),
    "probe_odd": source("probe-odd", probe="return kvdock.plugin.Probe('ready', OSError('as a text'))"),
    "probe_unusable": source(
        "probe-unusable", device_type="meta", probe="return kvdock.plugin.Probe.unusable('driver 3 is too old, needs 5')"
    ),
    "absent": source("absent", probe="return kvdock.plugin.Probe.absent('no acme card')"),
    "calls_an_op": "import kvdock\nimport torch\npool = torch.zeros(1, 1, 1, 1)\n"
    "kvdock.ops.copy_blocks_(pool, pool.clone(), torch.tensor([[0, 0]]))\n",
    "healthy": source("healthy"),
}

SLOW: Mapping[str, str] = {
    "crash_in_probe": source("crash-in-probe", probe="os.kill(os.getpid(), 11)"),
    "exit_in_import": "import os\nos._exit(3)\n",
    "hang_in_import": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])\n",
    "hang_in_probe": source("hang-in-probe", probe="import time; time.sleep(600)"),
    "sys_exit": FAULTS["sys_exit"],
    "opens_context": source("opens-context").replace(
        "KVDOCK_API", "torch.meta = type('meta', (), {'is_initialized': lambda: True})\nKVDOCK_API"
    ),
    "no_devices": source("no-devices").replace('[torch.device("meta")]', "[][0]"),
    "well": source("well"),
}


def _collection(name: str, modules: Mapping[str, str]) -> Project:
    """Return one distribution with one plugin per module."""
    package = name.replace("-", "_")
    files = {f"{package}/{module}.py": text for module, text in modules.items()}
    return Project(name, "1.0", {module: f"{package}.{module}" for module in modules}, {f"{package}/__init__.py": "", **files})


ACME = Project("kvdock-acme", "1.0", {"acme": "kvdock_acme"}, {"kvdock_acme/__init__.py": source("acme")})
RIVAL = Project("kvdock-rival", "2.0", {"acme": "kvdock_rival"}, {"kvdock_rival/__init__.py": source("rival")})
TWIN = Project("kvdock-twin", "3.0", {"acme": "kvdock_acme"}, {"kvdock_twin/__init__.py": ""})
FIRST = Project("kvdock-first", "1.0", {"first": "kvdock_first"}, {"kvdock_first/__init__.py": source("first")})
SECOND = Project("kvdock-second", "1.0", {"second": "kvdock_second"}, {"kvdock_second/__init__.py": source("second")})
SAME_NAME = Project("kvdock-same", "4.0", {"same": "kvdock_same"}, {"kvdock_same/__init__.py": source("first", device_type="same")})
EAGER = Project(
    "kvdock-eager",
    "1.0",
    {"eager": "kvdock_eager.entry"},
    {
        "kvdock_eager/__init__.py": "import os\nimport kvdock.runtime\n"
        "if 'EAGER' in os.environ:\n    kvdock.runtime.default().registry.records()\n",
        "kvdock_eager/entry.py": source("eager"),
    },
)
PROJECTS = (_collection("kvdock-faults", FAULTS), _collection("kvdock-slow", SLOW), ACME, RIVAL, TWIN, FIRST, SECOND, SAME_NAME, EAGER)


REPORT = """
import json, sys, warnings
import kvdock
early = sorted(name for name in sys.modules if name.startswith(("kvdock_", "triton")))
import torch
from kvdock.plugins.registry import Registry

def answer(registry, device, named):
    try:
        choice = registry.choose("copy_blocks_", torch.device(device), named)
        return {"backend": choice.backend.name, "text": choice.reason}
    except kvdock.KVDockError as error:
        return {"error": type(error).__name__, "text": str(error)}

def report(environ, questions):
    registry = Registry(environ) if environ else kvdock.runtime.default().registry
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = registry.records()
    return {
        "early": early,
        "records": [record.as_dict() for record in records],
        "notes": registry.notes(),
        "warnings": [[item.category.__name__, str(item.message)] for item in caught],
        "answers": [answer(registry, *question) for question in questions],
        "loaded": sorted(registry.loaded()),
        "caches": {name: sorted(caches) for name, caches in registry.prefix_caches().items()},
        "imported": sorted(name for name in sys.modules if name.startswith("kvdock_")),
    }

environs, questions = json.loads(sys.argv[1])
print(json.dumps([report(environ, questions) for environ in environs]))
"""
"""A script that prints what became of every plugin, and whom it chooses for questions ``[device, named]``.

Once for each environment that it is given, one after the other in one process; an empty one is the process's own.
"""

Question = tuple[str, str | None]


@attrs.frozen
class Report:
    """What REPORT printed for one environment."""

    early: list[str]
    records: tuple[PluginRecord, ...]
    notes: list[str]
    warnings: list[tuple[str, str]]
    answers: list[dict[str, str]]
    loaded: list[str]
    caches: dict[str, list[str]]
    imported: list[str]

    @classmethod
    def of_dict(cls, data: dict[str, Any]) -> Report:
        """Read what the script printed."""
        records = tuple(PluginRecord.from_dict(item) for item in data["records"])
        return cls(**{**data, "records": records, "warnings": [tuple(item) for item in data["warnings"]]})

    def of(self, name: str) -> PluginRecord:
        """Return the record of the only plugin of a name."""
        found = [item for item in self.records if item.name == name]
        assert len(found) == 1, found
        return found[0]

    @property
    def states(self) -> dict[str, str]:
        """The state of each plugin, without those of kvdock's own distribution."""
        return {f"{item.name}@{item.distribution}": item.state.name for item in self.records if item.distribution != "kvdock"}


def reports(environment: Environment, environs: Sequence[Mapping[str, str]], *questions: Question, **own: str) -> list[Any]:
    """Run REPORT for several environments of variables; ``own`` are the process's. Returns what JSON can hold."""
    answer: list[Any] = environment.json(REPORT, json.dumps([environs, questions]), environ=own)
    return answer


def report(environment: Environment, *questions: Question, **environ: str) -> Report:
    """Run REPORT with the process's own environment."""
    return Report.of_dict(reports(environment, [{}], *questions, **environ)[0])


class Environments:
    """Makes an environment for a set of projects, once."""

    def __init__(self, shared: Path, wheels: Mapping[str, Path]) -> None:
        self._shared = shared
        self._wheels = wheels

    def with_projects(self, *names: str) -> Environment:
        """Return the environment that holds these projects."""

        def make(folder: Path) -> str:
            Environment.create(folder / "env").install(*(self._wheels[name] for name in names))
            return str(folder / "env")

        return Environment(Path(once(self._shared, "-".join(names), make)))

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returns, through JSON; one worker makes it for all."""
        return once(self._shared, name, lambda _: make())
