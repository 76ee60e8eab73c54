"""One rank of a model that is split over processes: it generates on the paged cache and on Transformers' own, and compares.

Run by `test_tensor_parallel`, with torch's launcher.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import kvdock
from integration import zoo
from kvdock.integrations.transformers.compat import CACHE_KEYWORD

GREEDY = {"do_sample": False, "max_new_tokens": 9, "min_new_tokens": 9, "return_dict_in_generate": True, "output_logits": True}


def main(folder: str) -> None:
    """Compare, also with what one process generated, and say which heads a rank has."""
    made = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    inputs = {name: value.to(made.device) for name, value in zoo.prompt(4, 9).items()}
    one = torch.load(Path(folder) / "one.pt", map_location=made.device, weights_only=True)
    place = kvdock.RankInfo.from_process_group(made.device)
    expected = made.generate(**inputs, **GREEDY, **{CACHE_KEYWORD: zoo.dynamic(made)})
    for attention in ("pages", "gather"):
        cache = zoo.paged(made, attention=attention)
        got = made.generate(**cache.bind(**inputs), **GREEDY)
        assert torch.equal(expected.sequences, got.sequences)
        assert torch.equal(one, got.sequences), "and as one process does"
        assert all(torch.allclose(left, right, rtol=1e-3, atol=1e-4) for left, right in zip(expected.logits, got.logits, strict=True))
        assert cache.state.odd == ("" if attention == "pages" else "as chosen")
    heads = cache.state.pool.k_cache(0).shape[2]
    assert len(place.head_range(made.config.num_key_value_heads)) == heads or heads == 1
    print(f"rank {place.tp_rank} of {place.tp_size} with {heads} heads is right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
