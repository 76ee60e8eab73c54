"""What ranks do together, over process groups of torch's: `alike` compares what they decide, `context` shares the tokens of a sequence.

Which heads a rank has is `kvdock.RankInfo`'s to say. Nothing here is needed by a single process.
"""

from kvdock.distributed.alike import check_alike
from kvdock.distributed.context import ContextShare, gather_heads, merge_over_ranks

__all__ = ["ContextShare", "check_alike", "gather_heads", "merge_over_ranks"]
