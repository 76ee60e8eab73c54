"""An engine in a thread of its own, so that requests come and go (cancellation) while it computes."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from tiny_engine.engine import Engine
from tiny_engine.request import Request


class Worker:
    """Runs an engine that nobody else uses; any thread may call it. What a request emits comes from the worker's thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._calls = engine, SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def call(self, method: Callable[[Request], None], request: Request) -> None:
        """Call `Engine.add` to have a request answered, or `Engine.cancel` where nobody waits for it any more."""
        self._calls.put((method, request))

    def close(self) -> None:
        """Cancel what there is, and wait for the thread to end."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            while not (self.engine.is_busy and self._calls.empty()):  # waits only where there is nothing to compute
                call = self._calls.get()
                if call is None:
                    return self._cancel_all("cancelled", "the engine was closed")
                call[0](call[1])
            try:
                self.engine.step()
            except Exception as error:  # noqa: BLE001 - whoever waits is told, and the next request is served
                self._cancel_all("error", f"{type(error).__name__}: {error}")

    def _cancel_all(self, reason: str, error: str) -> None:
        for request in [*self.engine.batcher.running, *self.engine.batcher.waiting]:
            self.engine.cancel(request, reason, error)
        self.engine.manager.hand_over()
