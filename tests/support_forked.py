"""`subprocess.Popen` for scripts that import torch: they are forked from a process that has imported it.

`make test` starts more than a hundred scripts and commands in interpreters of their own, and torch takes each of them 1.3 s, more than
most take for all else. Here one process imports torch, and nothing of kvdock, and forks for each of them: a real child of whoever
starts it, with streams, a folder, an environment and an end as any has. `make test-all` starts them as users do.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

__all__ = ["Forked", "Server", "forking"]

_POPEN = subprocess.Popen
_BECOME_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
_SETTLED = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH", "CUDA_", "ATEN_")
"""What variables begin with that an interpreter, or torch, reads once."""

SERVER = """
import fcntl, gc, json, os, runpy, socket, sys, time, warnings
import torch
gc.collect()
gc.freeze()  # or each child's first collection would copy every page
channel = socket.socket(fileno=int(sys.argv[1]))

def wanted():
    while True:
        asked, files, _, _ = socket.recv_fds(channel, 1 << 20, 16)
        if not asked:
            os._exit(0)
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                return json.loads(asked), [fcntl.fcntl(file, fcntl.F_DUPFD, 1000) for file in files]
            channel.send(b"%d" % child)
            os._exit(0)  # which leaves the child to whoever asked
        for file in files:
            os.close(file)
        os.waitpid(between, 0)
        channel.send(b"it is yours")

start, files = wanted()
channel.detach()
os.closerange(3, 1000)
for file, number in zip(files, start["numbers"]):
    os.dup2(file, number)
    os.close(file)
if start["session"]:
    os.setsid()
os.chdir(start["folder"])
while os.getppid() != start["parent"]:
    time.sleep(0.001)
for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # those there are know what kind of file they had
    old = getattr(sys, name)
    new = open(old.fileno(), mode, 1 if name == "stderr" else -1, old.encoding, old.errors, closefd=False)
    setattr(sys, name, new)
    setattr(sys, f"__{name}__", new)
own = os.environ["PYTHONPATH"].split(os.pathsep)
os.environ.clear()
os.environ.update(start["environ"])
its_own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
kind, text = start["what"]
first = {"-c": "", "-m": os.getcwd(), "script": os.path.dirname(os.path.realpath(text))}[kind]
sys.path[:] = [*([] if start["is_safe"] else [first]), *filter(None, its_own), *(path for path in sys.path if path not in own)]
sys.argv[:] = [text if kind == "script" else "-c", *start["arguments"]]
if kind == "script":
    __file__ = os.path.abspath(text)
    with open(text, "rb") as file:
        text = file.read()
warnings._processoptions(start["warnings"])
sys.warnoptions.extend(start["warnings"])
for name in {*globals()} - {"kind", "runpy", "text"}:
    if not name.startswith("__"):
        del globals()[name]
if kind == "-m":
    runpy._run_module_as_main(text)
else:
    exec(compile(text, globals().get("__file__", "<string>"), "exec"))
"""


class Server:
    """The process that forks, once there is something to fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        # One thread for OpenBLAS, which cannot be asked for its number later: a process of several threads is not forked without a warning.
        self.environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}

    def start(self, wanted: Mapping[str, Any], files: Sequence[int]) -> int:
        """Start a child of this process; returns its number."""
        with self._lock:
            channel = self._channel = self._channel or self._begin()
            with _heir():
                socket.send_fds(channel, [json.dumps(wanted).encode()], files)
                child, is_ours = channel.recv(100), channel.recv(100)
        assert is_ours, "the process that forks is gone: what it said is on the stderr of this one"
        return int(child)

    def _begin(self) -> socket.socket:
        channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-c", SERVER, str(theirs.fileno())]
            self._process = _POPEN(command, env=self.environ, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        return channel

    def close(self) -> None:
        """End it."""
        if self._channel and self._process:
            self._channel.close()
            self._process.wait(60)


@contextlib.contextmanager
def _heir() -> Iterator[None]:
    """Make this process the parent of what processes leave behind that it has started."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_BECOME_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_BECOME_SUBREAPER, 0)


class Forked(subprocess.Popen[Any]):
    """Forks for a script (``-c``) or a module (``-m``) of this interpreter; anything else, and what wants other settings, is started."""

    server: Server | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, *others: Any) -> None:
        pass_fds, cwd, env, _, _, shell, *pipes = others[:12]
        *_, session, group = others
        what = None if shell or preexec_fn or executable or group != -1 or not close_fds else _python_of(args)
        environ = {**(os.environ if env is None else env)}
        own_ends = pipes[0], pipes[3], pipes[5]  # what it reads from, and writes to; -1 for what is inherited
        is_terminal = any(end != -1 and os.isatty(end) for end in own_ends[1:])
        if self.server is None or what is None or is_terminal or _settings_of(environ) != _settings_of(self.server.environ):
            super()._execute_child(args, executable, preexec_fn, close_fds, *others)  # type: ignore[misc] - private
            return
        streams = [end if end != -1 else number for number, end in enumerate(own_ends)]
        wanted = {
            **what,
            "environ": environ,
            "folder": os.path.abspath(cwd or "."),
            "parent": os.getpid(),
            "session": session,
            "numbers": [0, 1, 2, *pass_fds],
        }
        self.pid = self.server.start(wanted, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined] - private


def _python_of(command: Any) -> dict[str, Any] | None:
    """Return what a command for this interpreter runs, and how; None where it is another one, or has options that are not known here."""
    if isinstance(command, str) or [*command][:1] != [sys.executable]:
        return None
    rest, is_safe, warnings = [*map(os.fspath, command)][1:], False, []
    while rest[:1] in (["-P"], ["-W"]):
        if rest.pop(0) == "-P":
            is_safe = True
        else:
            warnings.append(rest.pop(0))
    if rest[:1] in (["-c"], ["-m"]):
        kind, text, *rest = rest
    elif rest and not rest[0].startswith("-"):
        kind, text = "script", rest.pop(0)
    else:
        return None
    return {"what": [kind, text], "is_safe": is_safe, "warnings": warnings, "arguments": rest}


def _settings_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that cannot be changed later."""
    left = ("PYTHONPATH", "OPENBLAS_NUM_THREADS")
    return {name: value for name, value in environ.items() if name.startswith(_SETTLED) and name not in left}


@contextlib.contextmanager
def forking(server: Server) -> Iterator[None]:
    """Let this process fork what it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forked, "server", server)
        patch.setattr(subprocess, "Popen", Forked)
        yield
