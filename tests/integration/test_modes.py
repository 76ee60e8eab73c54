"""Under inference mode, with torch.compile, from a worker thread, and without a word of Transformers in kvdock itself."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from integration import zoo


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("used_inside", [False, True])
def test_inference_mode_may_come_and_go(made_inside: bool, used_inside: bool) -> None:
    made = zoo.model("llama-gqa")
    with torch.inference_mode(made_inside):
        cache = zoo.paged(made)
    expected = made.generate(**zoo.prompt(5, 9), **zoo.GREEDY)
    for inside in (used_inside, not used_inside):
        with torch.inference_mode(inside):
            got = made.generate(**cache.bind(**zoo.prompt(5, 9)), **zoo.GREEDY)
            assert torch.equal(expected, got)
        with torch.inference_mode(not inside), torch.no_grad():
            made(input_ids=torch.full((2, 3), 7), **{zoo.CACHE_KEYWORD: cache})
            cache.batch_repeat_interleave(2)
            made(input_ids=torch.full((4, 3), 7), **{zoo.CACHE_KEYWORD: cache})
        cache.reset()


def test_generate_does_not_try_to_compile() -> None:
    cache = zoo.paged(zoo.model("llama-gqa"))
    assert cache.is_compileable is False
    assert getattr(cache, "is_croppable", True) is True, "older versions do not ask"
    assert cache.is_sliding == [False, False]
    assert zoo.paged(zoo.model("gemma3")).is_sliding == zoo.dynamic(zoo.model("gemma3")).is_sliding == [True, False]


@pytest.mark.slow
def test_a_compiled_model_gets_the_same_tokens() -> None:
    """The cache itself stays outside the graph. The eager backend shows that without a compiler."""
    made = zoo.build("Llama", {})
    ids = zoo.prompt(7)["input_ids"]
    expected = made.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
    compiled = torch.compile(made, backend="eager")
    cache = zoo.paged(made)
    new = ids
    with torch.no_grad():
        for _ in range(expected.shape[1] - ids.shape[1]):
            logits = compiled(input_ids=new, **{zoo.CACHE_KEYWORD: cache}).logits
            new = logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, new], dim=1)
    assert torch.equal(expected, ids)
    torch.compiler.reset()


def test_generation_in_a_worker_thread() -> None:
    """As with a streamer: the cache is made here, filled there, and used on here."""
    made = zoo.model("llama-gqa")
    cache = zoo.paged(made)
    results: list[Any] = []
    inputs = zoo.prompt(6)
    thread = threading.Thread(target=lambda: results.append(made.generate(**cache.bind(**inputs), **zoo.GREEDY)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], made.generate(**inputs, **zoo.GREEDY))
    cache.truncate(4)
    assert torch.equal(results[0], made.generate(**cache.bind(**inputs), **zoo.GREEDY))


def test_kvdock_itself_does_not_import_transformers() -> None:
    code = "import sys, kvdock; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_an_older_transformers_is_refused_by_name() -> None:
    code = (
        "from transformers import cache_utils\n"
        "del cache_utils.CacheLayerMixin.get_max_length\n"
        "try:\n    import kvdock.integrations.transformers\n"
        "except NotImplementedError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "expected transformers 5.14 or newer, got transformers 5." in done.stdout
    assert "Fix: pip install 'kvdock[transformers]'" in done.stdout
