"""The parent's end of a worker: asks it things with time limits, and turns a crash or a hang into an exception."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from kvdock.errors import KVDockError

__all__ = ["Child", "ChildEndedError"]

_POLL_S = 0.1
_TRACEBACK_S = 1.0  # how long a child that hangs gets to write where it hangs
_SHOWN = 6000  # characters of its output to keep
COMMAND = (sys.executable, "-P", "-m", "kvdock_conformance.worker")


class ChildEndedError(KVDockError):
    """A child crashed, ended itself, or took too long and was ended.

    Args:
        how: what happened: ``"crashed with SIGSEGV"``.
        output: the end of what it wrote to stdout and stderr.
    """

    def __init__(self, how: str, output: str) -> None:
        self.how = how
        self.output = output
        super().__init__(f"the child that ran the case {how}")


class Child:
    """One worker. Started at once; `close` it, or use it as a context.

    Args:
        command: what to run; the numbers of two file descriptors are added.
        environ: variables of its environment beside this process's own.
    """

    def __init__(self, command: Sequence[str] = COMMAND, environ: Mapping[str, str] | None = None) -> None:
        self._output: IO[bytes] = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - a file and not a pipe: nobody needs to read it
        from_parent, self._requests = os.pipe()
        self._answers, to_parent = os.pipe()
        self._buffer = b""
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [*command, str(from_parent), str(to_parent)],
                env={**os.environ, **(environ or {})},
                pass_fds=(from_parent, to_parent),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
            )
        finally:
            os.close(from_parent)
            os.close(to_parent)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(self, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Return the answer to a request.

        Args:
            request: as `kvdock_conformance.worker.Worker` takes it.
            limit_s: how long the answer may take in seconds. A child that takes longer is ended.

        Raises:
            ChildEndedError: there is no answer; the child is gone.
        """
        try:
            self._send(json.dumps(request).encode() + b"\n", limit_s)
            line = self._line(time.monotonic() + limit_s)
        except BrokenPipeError:
            line = b""
        if line is None:
            raise self._ended(f"did not end within {limit_s:g} s")
        if not line:
            raise self._ended("")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _send(self, content: bytes, limit_s: float) -> None:
        """Write a request; a child that does not read it within its time is found out when its answer is waited for."""
        deadline = time.monotonic() + limit_s
        os.set_blocking(self._requests, False)
        while content and time.monotonic() < deadline:
            _, ready, _ = select.select((), (self._requests,), (), _POLL_S)
            if ready:
                content = content[os.write(self._requests, content) :]

    def _line(self, deadline: float) -> bytes | None:
        """Return the next line; empty when the child is gone, None when it is late."""
        while b"\n" not in self._buffer:
            ready, _, _ = select.select((self._answers,), (), (), _POLL_S)
            if ready:
                part = os.read(self._answers, 1 << 16)
                if not part:
                    return b""
                self._buffer += part
            elif self._process.poll() is not None:  # a process that it left behind may hold the pipe open
                return b""
            elif time.monotonic() > deadline:
                return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _ended(self, how: str) -> ChildEndedError:
        """End the child, and say how it ended: by itself, unless ``how`` is given."""
        if how:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                self._process.send_signal(signal.SIGUSR1)  # it answers with the traceback of every thread
                self._process.wait(_TRACEBACK_S)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TRACEBACK_S)
        code = self._process.poll()
        self._kill()
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")[-_SHOWN:].strip()
        if not how and code is None:
            how = "closed its pipe and did not end"
        elif not how:
            how = f"crashed with {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"
        return ChildEndedError(how, text)

    def _kill(self) -> None:
        """End the child and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """End the child, and give back what it held. May be called more than once."""
        if self._output.closed:
            return
        self._kill()
        os.close(self._requests)
        os.close(self._answers)
        self._output.close()
