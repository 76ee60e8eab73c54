"""kvdock as the cache of Hugging Face Transformers, 5.14 and newer.

For example::

    from kvdock.integrations.transformers import PagedCacheForTransformers

    cache = PagedCacheForTransformers.for_model(model, kvdock.PagedKVCacheConfig(num_blocks=512, block_size=16))
    out = model.generate(**cache.bind(**inputs))

With a prefix cache, prompts are computed only as far as no earlier call has::

    cache = PagedCacheForTransformers.for_model(model, kvdock.PagedKVCacheConfig(num_blocks=512, block_size=16), prefix="radix")
    out = model.generate(**cache.bind(**inputs))
    cache.commit(out)

In the order of a call: `cache` is what ``generate`` sees, `layer` what each attention layer sees, `state` the batch and the
pool that all layers share (`lengths`: how far each layer is; `tables`: what its step reads and writes; `slots`: where all tokens
are), `measure` how a model is asked what it caches, `compat` what differs between versions. Which blocks there are is
`kvdock.scheduler`'s to say, here as everywhere.

Where attention reads pages: `probe` tries whether a model's can, `reading` says which passes do, `passes` which are under way,
`switching` makes the model call `attention` in them, and `masks` says which masks are known. `latent` attends to latents without
expanding them. `explanation` says what came of that, and
`configured` tries it for a configuration, for the command line. `decoding` keeps everything in one place,
for compiled steps.

Where prefixes are reused: `prompts` reads what is bound, `reuse` begins its rows, `bound` is the batch meanwhile,
`hook` makes each forward pass fit to it (`watch` puts it on a model), `plain` says whether a pass may be stored and `seen`
remembers that, `sharing` says what of a model can be shared, and `commit` which tokens were computed.
"""

import kvdock.integrations.transformers.attention  # noqa: F401 - registers it with Transformers
from kvdock.integrations.transformers.cache import CacheUsage, PagedCacheForTransformers

__all__ = ["CacheUsage", "PagedCacheForTransformers"]
