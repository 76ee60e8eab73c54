"""The child: loads the backend under test, and runs the cases that it is told to, one after the other.

Run as ``python -m kvdock_conformance.worker IN OUT`` with the numbers of two open file descriptors. Each line on ``IN`` is a
number and a request, each line on ``OUT`` that number and the answer, as JSON; what the backend prints goes to the child's own
stdout and cannot get in between. See `Worker` for the requests.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from kvdock_conformance.checking.settings import ProcessSettings

__all__ = ["Worker", "main", "serve"]

_SHOWN = 8000  # characters of a traceback to keep


class Worker:
    """Answers requests. Each request is a mapping of one key, the name of a method, to its argument."""

    def __init__(self) -> None:
        self._target: Any = None
        self._fault = ExitStack()
        self._settings: ProcessSettings | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return what to answer to a request."""
        ((name, argument),) = request.items()
        methods: dict[str, Callable[[Any], dict[str, Any]]] = {"open": self.open, "ops": self.ops, "fault": self.fault, "case": self.case}
        return methods[name](argument)

    def open(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Load what is tested.

        Args:
            wanted: ``kind``, a name in `kvdock_conformance.kinds.KINDS`; ``name`` of the one that is wanted; ``setup``,
                ``"module:function"`` to call before, or None.

        Returns:
            ``about``: what it says of itself; or ``error``, with the ``state`` it is in: ``"unknown"``, or as in
            `kvdock.plugins.records.PluginState`.
        """
        from kvdock.errors import BackendUnavailableError
        from kvdock_conformance.kinds import KINDS

        if wanted.get("setup"):
            module, _, function = wanted["setup"].partition(":")
            getattr(importlib.import_module(module), function)()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other plugins may be broken; this one's state is in the answer
            try:
                self._target, about = KINDS[wanted["kind"]].open(wanted["name"], wanted.get("setup"), wanted.get("device"))
                json.dumps(about)
            except BackendUnavailableError as error:
                return {"error": error.subject, "state": error.got}
            except BaseException as error:  # noqa: BLE001 - whatever the backend raises is why it cannot be opened
                return {"error": f"opening it raised {_text(error)}\n{_traceback(error)}", "state": "unusable"}
        gc.freeze()  # what was imported stays, and takes the collector long to look through
        return {"about": about}

    def ops(self, name: str | None) -> dict[str, Any]:
        """Return the names of the ops that plugins bring; given one, its cases by requirement, or why they cannot be drawn."""
        from kvdock.runtime import default
        from kvdock_conformance.requirements.ops import drawn

        brought = default().registry.brought_ops()
        if name is None:
            return {"ops": sorted(brought)}
        try:
            return {"cases": drawn(brought[name])}
        except BaseException as error:  # noqa: BLE001 - the plugin's own code
            return {"error": _text(error)}

    def fault(self, name: str | None) -> dict[str, Any]:
        """Seed a fault by name in place of the one before; None for none. See `kvdock_conformance.faults`."""
        from kvdock_conformance.faults import find

        self._fault.close()
        self._settings = None  # kvdock's own functions may be others now
        if name is None:
            return {"reason": ""}
        fault = find(name)
        reason = fault.why_not(self._target)
        if not reason:
            self._fault.enter_context(fault.seeded(self._target))
        return {"reason": reason}

    def case(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Run one case.

        Args:
            wanted: ``requirement``, its id, and ``data`` of the case.

        Returns:
            ``verdict``, ``seconds``, and ``failure`` or ``reason``; ``spoilt`` with why, where this process cannot go on.
        """
        from kvdock_conformance.checking.settings import ProcessSettings, renewed

        start = time.perf_counter()
        # Between two cases, nothing is done here that could change a setting: what comes by itself is seen behind the next one.
        before, self._settings = renewed(self._settings) if self._settings else ProcessSettings(), None
        found = _run(self._target, wanted["requirement"], wanted["data"], before)
        if found["verdict"] != "failed":
            self._settings = before
        spoilt = self._target.spoilt() if found["verdict"] == "failed" else ""
        return {**found, "seconds": time.perf_counter() - start, **({"spoilt": spoilt} if spoilt else {})}


def _run(target: Any, requirement_id: str, data: Mapping[str, Any], before: ProcessSettings | None = None) -> dict[str, Any]:
    """Check one case, or the refusal if the backend does not claim it."""
    from kvdock_conformance.checking.failure import NonconformanceError
    from kvdock_conformance.checking.settings import unchanged
    from kvdock_conformance.requirements import find

    requirement = find(requirement_id)
    try:
        with unchanged(before=before):
            reasons = list(requirement.needs.reasons(target, data)) if requirement.needs else []
            if reasons and requirement.needs:
                requirement.needs.refused(target, data, reasons, requirement.check)
                return {"verdict": "unsupported", "reason": "; ".join(reasons)}
            requirement.check(target, data)
    except NonconformanceError as error:
        return {"verdict": "failed", "failure": error.as_dict()}
    except BaseException as error:  # noqa: BLE001 - whatever the backend raises is its failure, an exit too
        failure = {"what": "the check", "expected": "no such error", "got": _text(error), "details": _traceback(error)}
        return {"verdict": "failed", "failure": failure}
    return {"verdict": "passed"}


def _text(error: BaseException) -> str:
    """Return an error's type and text, also where it cannot be told."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException as other:  # noqa: BLE001 - the backend's own code
        return f"{type(error).__name__}, whose text cannot be told: its str() raises {type(other).__name__}"


def _traceback(error: BaseException) -> str:
    """Return the end of an error's traceback, also where the error cannot be told."""
    try:
        return "".join(traceback.format_exception(error))[-_SHOWN:]
    except BaseException:  # noqa: BLE001 - the backend's own code
        return "".join(traceback.format_tb(error.__traceback__))[-_SHOWN:]


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Answer requests until there are no more."""
    worker, process = Worker(), os.getpid()
    for line in requests:
        number, request = json.loads(line)
        answer = worker.answer(request)
        if os.getpid() != process:
            _end_as_a_copy(process)
        answers.write(json.dumps([number, answer]) + "\n")
        answers.flush()


def _end_as_a_copy(process: int) -> NoReturn:
    """End both processes where the backend forked and let the copy come back: each would go on with the kit's work."""
    os.write(2, b"a process that the backend forked came back from the case, as a second one beside the first\n")
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGABRT)
    os._exit(1)


def _be_first_to_go() -> None:
    """Ask the system to end this process, and not the parent, when memory runs out."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # where there is one
        file.write("1000")


def main() -> None:
    """Serve the parent on the descriptors that the command line names."""
    from kvdock_conformance.requirements import load_alone

    _be_first_to_go()
    faulthandler.enable(all_threads=True)  # a crash leaves the stack of every thread on stderr
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # and so does the parent's question where it hangs
    requests, answers = (int(number) for number in sys.argv[1:3])
    # What the backend starts must not hold the pipes open: their end is how the parent knows that this process is gone.
    os.set_inheritable(requests, False)
    os.set_inheritable(answers, False)
    load_alone()  # with torch, before anybody asks: the parent may have as much to load
    with open(requests, encoding="utf-8") as source, open(answers, "w", encoding="utf-8") as sink:
        serve(source, sink)


if __name__ == "__main__":
    main()
