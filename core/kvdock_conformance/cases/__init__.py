"""Cases as data: memory, tensors and calls as what JSON can hold. Nothing here knows torch.

`drawing` describes tensors in memory, `layouts` pools and sources in the memory orders that engines use, `paged` whole
calls of the paged ops.
"""
