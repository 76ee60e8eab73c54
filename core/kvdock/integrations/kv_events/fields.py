"""What of a namespace routers can read.

| in the namespace | on the wire |
|---|---|
| ``("lora", name)`` | ``lora_name`` |
| ``("lora_id", number)`` | ``lora_id`` |
| ``("salt", text)`` | ``cache_salt``, and the text itself in ``extra_keys`` of the first block of a prefix |
| anything else | ``kvdock:`` and how Python writes it, at the same place |

Names of blocks have all of it in them, tags included: here a router that hashes token ids itself finds what it needs. SGLang writes
``cache_salt``; in ``extra_keys`` the text has no tag, since vLLM's has none.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvdock.prefix import Namespace

__all__ = ["WireFields"]


@attrs.frozen
class WireFields:
    """What `BlockStored` says of a namespace.

    Args:
        lora_id: number of the adapter.
        lora_name: its name.
        salt: the salt.
        extra: what the first block of a prefix says in ``extra_keys``.
    """

    lora_id: int | None
    lora_name: str | None
    salt: str | None
    extra: tuple[str, ...]

    @classmethod
    def of(cls, namespace: Namespace) -> WireFields:
        """Return the fields of a namespace; of a tag that is there twice the first counts."""
        taken = dict[str, Any]()
        extra = []
        for part in namespace:
            tag, value = part if isinstance(part, tuple) and len(part) == 2 else (None, None)
            if isinstance(tag, str) and tag not in taken and _is_plain(tag, value):
                taken[tag] = value
                extra += [str(value)] if tag == "salt" else []
            else:
                extra.append(f"kvdock:{part!a}")
        return cls(taken.get("lora_id"), taken.get("lora"), taken.get("salt"), tuple(extra))


def _is_plain(tag: str, value: object) -> bool:
    """Whether a field has a place of its own and fits there: an unsigned integer of 64 bits, or text that UTF-8 can write."""
    if tag == "lora_id":
        return type(value) is int and 0 <= value < 2**64
    # Python's text may have halves of surrogate pairs, which no UTF-8 has.
    return tag in ("lora", "salt") and isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
