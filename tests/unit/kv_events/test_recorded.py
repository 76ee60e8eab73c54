"""Batches as vLLM and SGLang wrote them, byte for byte: recorded with their own structs and msgspec, and read without either."""

from __future__ import annotations

import msgpack
import pytest

import kvdock
from kvdock.integrations.kv_events import AllBlocksCleared, BlockIndex, BlockRemoved, BlockStored, KVEventBatch, read_batch
from kvdock.integrations.kv_events.wire import Writer

VLLM_0_33 = bytes.fromhex(
    "93cb41d954fc4020000094de000ca474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392cf01b69b4ba630f34ecfffffffffffffffff"
    "b1706172656e745f626c6f636b5f6861736807a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f72615f696403a66d656469756da3"
    "475055a96c6f72615f6e616d65a26672aa65787472615f6b6579739293a2667292a3696d67fea473616c74c0a967726f75705f69647800b26b765f63616368"
    "655f737065635f6b696e64ae66756c6c5f617474656e74696f6eaa73657373696f6e5f6964a27331de000ca474797065ab426c6f636b53746f726564ac626c"
    "6f636b5f68617368657391c4206e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6eb1706172656e745f626c6f636b5f68617368"
    "c0a9746f6b656e5f69647392ce0001117005aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c0a967"
    "726f75705f69647801b26b765f63616368655f737065635f6b696e64ae736c6964696e675f77696e646f77bc6b765f63616368655f737065635f736c696469"
    "6e675f77696e646f77cc80a86c6f63616c697479a54c4f43414c84a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739107a66d65"
    "6469756da3475055a967726f75705f6964780081a474797065b0416c6c426c6f636b73436c656172656401"
)
SGLANG_0_5_23 = bytes.fromhex(
    "93cb40280000000000009289a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392fb06b1706172656e745f626c6f636b5f68617368"
    "c0a9746f6b656e5f696473920102aa626c6f636b5f73697a6501a76c6f72615f6964c0a66d656469756da3475055aa63616368655f73616c74a174a96c6f72"
    "615f6e616d65a2667283a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391fba66d656469756daa4350555f50494e4e4544c0"
)
SGLANG_0_4 = bytes.fromhex(
    "92cb40080000000000009396ab426c6f636b53746f726564910b0a92010202c092ac426c6f636b52656d6f766564910b91b0416c6c426c6f636b73436c6561726564"
)


def test_vllm_with_groups_a_salt_an_image_and_a_session() -> None:
    batch = read_batch(VLLM_0_33)
    assert (batch.ts, batch.data_parallel_rank) == (1700000000.5, 1)
    first, second, removed, cleared = batch.events
    assert first == BlockStored(
        [123456789012345678, 2**64 - 1],
        7,
        [1, 2, 3, 4],
        2,
        lora_id=3,
        medium="GPU",
        lora_name="fr",
        extra_keys=[("fr", ("img", -2), "salt"), None],
        group_idx=0,
    )
    assert second == BlockStored([b"n" * 32], None, [70000, 5], 2, medium="CPU", group_idx=1)
    assert removed == BlockRemoved([7], "GPU", group_idx=0)
    assert cleared == AllBlocksCleared()


def test_sglang_with_negative_hashes_and_a_salt() -> None:
    batch = read_batch(SGLANG_0_5_23)
    assert batch == KVEventBatch(
        12.0,
        [
            BlockStored([-5, 6], None, [1, 2], 1, medium="GPU", lora_name="fr", cache_salt="t"),
            BlockRemoved([-5], "CPU_PINNED"),
        ],
        None,
    )


def test_arrays_of_two_elements_from_before() -> None:
    assert read_batch(SGLANG_0_4) == KVEventBatch(3.0, [BlockStored([11], 10, [1, 2], 2), BlockRemoved([11]), AllBlocksCleared()], None)


def test_an_index_of_vllm_knows_the_first_group_of_a_rank() -> None:
    index = BlockIndex()
    whole = read_batch(VLLM_0_33)
    index.apply(KVEventBatch(whole.ts, whole.events[:2], whole.data_parallel_rank))
    assert index.ranks == (1,)
    assert index.parents(1) == {123456789012345678: 7, 2**64 - 1: 123456789012345678}
    index.apply(whole)
    assert index.parents(1) == {}, "cleared at its end"


def test_an_index_of_sglang_and_of_before() -> None:
    index = BlockIndex()
    index.apply(read_batch(SGLANG_0_5_23))
    assert index.parents() == {6: -5}, "its removal from another medium is one: there is no second place here"
    other = BlockIndex()
    other.apply(KVEventBatch(0.0, read_batch(SGLANG_0_4).events[:1]))
    assert other.parents() == {11: 10}


@pytest.mark.parametrize("payload", [VLLM_0_33, SGLANG_0_5_23, SGLANG_0_4], ids=["vllm", "sglang", "before"])
def test_a_message_that_is_cut_anywhere_is_refused(payload: bytes) -> None:
    for stop in range(len(payload)):
        with pytest.raises(kvdock.ArgumentValueError, match=r"^KV events: message"):
            read_batch(payload[:stop])
    with pytest.raises(kvdock.ArgumentValueError, match="expected the end of a batch, got 1 bytes behind it"):
        read_batch(payload + b"\x00")


@pytest.mark.parametrize("payload", [VLLM_0_33, SGLANG_0_5_23, SGLANG_0_4], ids=["vllm", "sglang", "before"])
def test_a_message_of_which_any_byte_is_another_is_read_or_refused(payload: bytes) -> None:
    refused = 0
    for place in range(len(payload)):
        for value in (0x00, 0x90, 0xC1, 0xDF, 0xFF):
            try:
                BlockIndex().apply(read_batch(payload[:place] + bytes([value]) + payload[place + 1 :]))
            except kvdock.ArgumentValueError:
                refused += 1
    assert len(payload) < refused < 5 * len(payload)


BATCH = KVEventBatch(
    12.0,
    [
        BlockStored([b"\x01" * 32], b"\x02" * 32, [5, 300], 2, lora_id=1, lora_name="fr", extra_keys=[("s",)], cache_salt="s"),
        BlockRemoved([b"\x03" * 32]),
        AllBlocksCleared(),
    ],
    2,
)


@pytest.mark.parametrize(
    ("writer", "expected"),
    [
        (
            Writer(),
            [
                12.0,
                [
                    {
                        "type": "BlockStored",
                        "block_hashes": [0x0101010101010101],
                        "parent_block_hash": 0x0202020202020202,
                        "token_ids": [5, 300],
                        "block_size": 2,
                        "lora_id": 1,
                        "medium": "GPU",
                        "lora_name": "fr",
                        "extra_keys": [["s"]],
                        "cache_salt": "s",
                    },
                    {"type": "BlockRemoved", "block_hashes": [0x0303030303030303], "medium": "GPU"},
                    {"type": "AllBlocksCleared"},
                ],
                2,
            ],
        ),
        (
            Writer(arrays=True, whole_names=True, medium=None),
            [
                12.0,
                [
                    ["BlockStored", b"\x01" * 32, b"\x02" * 32, [5, 300], 2, 1, None, "fr", [["s"]]],
                    ["BlockRemoved", b"\x03" * 32, None],
                    ["AllBlocksCleared"],
                ],
                2,
            ],
        ),
    ],
    ids=["maps", "arrays"],
)
def test_what_is_written_is_as_others_read_it(writer: Writer, expected: list[object]) -> None:
    found = msgpack.unpackb(writer.payload(BATCH))
    if writer.arrays:
        for event in found[1][:2]:
            event[1] = event[1][0]
    assert found == expected
    assert list(found[1][0]) == list(expected[1][0]), "in this order"  # type: ignore[index]


def test_frames_of_an_answer() -> None:
    assert Writer().answer(b"kv", b"12345678", b"p") == (b"kv", b"12345678", b"p")
    assert Writer(arrays=True).answer(b"kv", b"12345678", b"p") == (b"12345678", b"p")
