"""The parent's end of a worker: asks it things with time limits, and turns a crash or a hang into an exception."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
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
_SHOWN = 6000  # bytes of its output to keep
_OUTPUT = 1 << 25  # bytes of its output on disk, above which all but the end is dropped
_QUOTED = 200  # bytes to show of what is no answer
_LONGEST = 1 << 24  # bytes of an answer; more without an end of line is none
_BLOCK = 512  # what `st_blocks` counts
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2), which has no name in `os`
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
        self._output: IO[bytes] = tempfile.TemporaryFile("w+b", buffering=0)  # noqa: SIM115 - a file: nobody needs to read it
        # Both stdout and stderr write at its end, also behind what a process that was left behind has written.
        fcntl.fcntl(self._output, fcntl.F_SETFL, fcntl.fcntl(self._output, fcntl.F_GETFL) | os.O_APPEND)
        self._asked = 0
        from_parent, self._requests = os.pipe()
        self._answers, to_parent = os.pipe()
        self._buffer = b""
        own_end = _opened_again(self._output)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [*command, str(from_parent), str(to_parent)],
                # Children run side by side, and so do their threads: those that wait must not keep a processor from those that work.
                env={"OMP_WAIT_POLICY": "passive", **os.environ, **(environ or {})},
                pass_fds=(from_parent, to_parent),
                stdin=subprocess.DEVNULL,
                stdout=own_end,
                stderr=self._output,
                # A process group of its own, so that `kill` reaches whatever the backend starts.
                start_new_session=True,
            )
        finally:
            os.close(from_parent)
            os.close(to_parent)
            os.close(own_end)

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
            ChildEndedError: there is no answer, or something that is none; the child is gone.
        """
        self._asked += 1
        deadline = time.monotonic() + limit_s
        try:
            self._send(json.dumps([self._asked, request]).encode() + b"\n", deadline)
            line = self._line(deadline)
        except BrokenPipeError:
            line = b""
        if line is None:
            raise self._ended(f"did not end within {limit_s:g} s")
        if not line:
            raise self._ended("")
        return self._answer(line)

    def _answer(self, line: bytes) -> dict[str, Any]:
        """Read an answer. It has the number of its question, so that nothing else on the pipe is taken for it."""
        try:
            number, answer = json.loads(line)
            if b"\\ud" in line:  # half of a surrogate pair, maybe, which no report could be written with
                answer = json.loads(json.dumps(answer, ensure_ascii=False).encode(errors="replace"))
            if number == self._asked and isinstance(answer, dict):
                return answer
        except (ValueError, TypeError):
            pass
        raise self._ended(f"wrote to the kit's own pipe: {line[:_QUOTED].decode(errors='replace')!r}")

    def _send(self, content: bytes, deadline: float) -> None:
        """Write a request; a child that does not read it within its time is found out when its answer is waited for."""
        # A child that hangs does not read, and a write that blocks would make the parent hang with it.
        os.set_blocking(self._requests, False)
        while content and time.monotonic() < deadline and self._process.poll() is None:
            _, ready, _ = select.select((), (self._requests,), (), _POLL_S)
            if ready:
                content = content[os.write(self._requests, content) :]

    def _line(self, deadline: float) -> bytes | None:
        """Return the next line; empty when the child is gone, None when it is late."""
        while b"\n" not in self._buffer and len(self._buffer) < _LONGEST:
            ready, _, _ = select.select((self._answers,), (), (), _POLL_S)
            if ready:
                part = os.read(self._answers, 1 << 16)
                if not part:
                    return b""
                self._buffer += part
            elif self._process.poll() is not None:  # a process that it left behind may hold the pipe open
                return b""
            if time.monotonic() > deadline and b"\n" not in self._buffer:
                return None
            self._cut_output()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line or b"\n"

    def _cut_output(self) -> None:
        """Give back to the disk what it has written, but the end, which stays where it is: the child goes on writing behind it."""
        status = os.fstat(self._output.fileno())
        if status.st_blocks * _BLOCK > _OUTPUT:
            _punch(self._output.fileno(), status.st_size - _SHOWN)

    def _end_of_output(self) -> bytes:
        start = max(os.fstat(self._output.fileno()).st_size - _SHOWN, 0)
        return os.pread(self._output.fileno(), _SHOWN, start)

    def _ended(self, how: str) -> ChildEndedError:
        """End the child, and report how it ended: by itself, unless ``how`` is given."""
        if how:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                self._process.send_signal(signal.SIGUSR1)  # it answers with the traceback of every thread
                self._process.wait(_TRACEBACK_S)
        else:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TRACEBACK_S)
        code = self._process.poll()
        self.kill()
        return ChildEndedError(how or _how(code), self._end_of_output().decode(errors="replace").strip())

    def kill(self) -> None:
        """End the child and whatever it started. Another thread may ask for it: whoever waits for an answer gets a `ChildEndedError`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # one that was started just now may have no group yet, and would be waited for for ever
        self._process.wait()

    def close(self) -> None:
        """End the child, and release what it held. May be called more than once."""
        if self._output.closed:
            return
        self.kill()
        os.close(self._requests)
        os.close(self._answers)
        self._output.close()


def _opened_again(file: IO[bytes]) -> int:
    """Return a descriptor of the same file with a place of its own, which tells what was written to stdout alone; else a plain copy."""
    try:
        return os.open(f"/proc/self/fd/{file.fileno()}", os.O_WRONLY | os.O_APPEND)
    except OSError:  # another system
        return os.dup(file.fileno())


def _punch(file: int, length: int) -> None:
    """Free the disk below the first bytes of a file, and change neither its length nor what is behind them."""
    # A file system that cannot do that keeps it all: to cut and copy by hand would lose what is written in between.
    ctypes.CDLL(None).fallocate(file, _PUNCH_HOLE | _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(length))


def _how(code: int | None) -> str:
    if code is None:
        return "closed its pipe and did not end"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
    return f"crashed with {name}" + (", as when memory runs out" if name == "SIGKILL" else "")
