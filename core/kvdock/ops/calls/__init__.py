"""The code of each op's call, written out from its schema by ``make calls``. See `kvdock.ops.calls.writer` for how to read it."""
