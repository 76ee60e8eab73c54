"""Replaying a trace of requests against a `CacheManager`: integers only, no model and no device.

In the order of reading: `formats` reads a file into a `trace`, by way of `mooncake` and `azure`; `tokens` makes token ids of a
request; `pool` takes one request through the manager, and `times` says what that took; `arrivals` lets requests
come one by one or at their times; `bounds` says what could have been hit; `run` puts it together, and `plot` draws it.
"""

from kvdock.replay.arrivals import Rates
from kvdock.replay.formats import FORMATS, read_trace
from kvdock.replay.plot import plot_runs
from kvdock.replay.run import ReplayRun, ReplaySettings, replay
from kvdock.replay.trace import Trace, TraceFormat, TraceRequest

__all__ = ["FORMATS", "Rates", "ReplayRun", "ReplaySettings", "Trace", "TraceFormat", "TraceRequest", "plot_runs", "read_trace", "replay"]
