"""What a manager's prefix cache stores and evicts, for routers: events in the wire format that vLLM and SGLang write.

For example::

    from kvdock.integrations.kv_events import KVEventPublisher

    publisher = KVEventPublisher(manager, endpoint="tcp://*:5557", replay_endpoint="tcp://*:5558")

Dynamo, Ray Serve's routers, llm-d, AIBrix and others read it; `KVEventSubscriber` is a reader in Python. In the order of an event:
`ledger` gives blocks their names, `wire` has the messages and how they are written, `fields` what of a namespace routers can read,
`publisher` numbers them, `outlet` sends them from a thread of its own, `reading` checks every byte of what comes, `subscriber` notices
what is missing and asks for it again, and `index` knows which rank has which blocks.
"""

from kvdock.integrations.kv_events.index import BlockIndex
from kvdock.integrations.kv_events.publisher import KVEventPublisher
from kvdock.integrations.kv_events.reading import read_batch
from kvdock.integrations.kv_events.subscriber import KVEventSubscriber
from kvdock.integrations.kv_events.wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEventBatch

__all__ = [
    "AllBlocksCleared",
    "BlockHash",
    "BlockIndex",
    "BlockRemoved",
    "BlockStored",
    "KVEventBatch",
    "KVEventPublisher",
    "KVEventSubscriber",
    "read_batch",
]
