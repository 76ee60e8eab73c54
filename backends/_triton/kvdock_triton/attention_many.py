"""Attention over paged caches as a Triton kernel, of any number of queries of each row: of parts, which `attention_join` joins.

A program serves a tile of rows, each a query and a query head that reads the program's head of the cache, and a part of the keys that
any of them sees.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdock_triton.attention_exact import attend_key_by_key, begin_rows
from kvdock_triton.attention_parts import LOG2E, attend_keys
from kvdock_triton.attention_results import count_bad, count_outside, store_rows
from kvdock_triton.attention_tiles import place_tile

__all__ = ["attend_many_kernel"]


@triton.jit
def attend_many_kernel(
    q,
    k_cache,
    v_cache,
    table,
    lens,
    cu,
    starts,
    sinks,
    out,
    lse,
    parts,
    sums,
    skipped,
    queries,
    batch,
    room,
    num_blocks,
    splits,
    q_token,
    q_head,
    table_row,
    table_column,
    lens_step,
    cu_step,
    starts_step,
    out_token,
    out_head,
    lse_token,
    lse_head,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    STARTS: tl.constexpr,
    SINKS: tl.constexpr,
    LSE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_BLOCK: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_WIDE: tl.constexpr,
    K_REST: tl.constexpr,
    V_WIDE: tl.constexpr,
    Q_UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SHARE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST: tl.constexpr,
    WITHIN: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attend from one tile of ``TILE`` queries and ``SHARE`` of the ``GROUP`` heads that read one head, to one split of the keys.

    ``program_id(0)`` runs over tiles and, within each, over heads; ``program_id(1)`` over splits. Sequences have as many tiles as they
    need.
    """
    SHARES: tl.constexpr = (GROUP + SHARE - 1) // SHARE  # noqa: N806 - a constant of Triton's
    tiles = tl.num_programs(0) // (HEADS * SHARES)
    number = tl.program_id(0) // (HEADS * SHARES)
    kv_head = tl.program_id(0) % (HEADS * SHARES) // SHARES
    share = tl.program_id(0) % SHARES
    split = tl.program_id(1)
    tile = tiles - 1 - number  # the last tiles of a causal sequence take longest, and begin first
    row, first, count, place, said, length, looked_from, _, used, split_begin, split_end = place_tile(
        tile,
        split,
        splits,
        batch,
        queries,
        room,
        lens,
        cu,
        starts,
        lens_step,
        cu_step,
        starts_step,
        CAUSAL,
        WINDOW,
        STARTS,
        TILE,
        KEYS,
        LEAST,
        1,
    )
    behind = tl.maximum(tl.load(cu + batch * cu_step).to(tl.int64), 0)

    r = tl.arange(0, ROWS)
    query = place * TILE + r // SHARE
    in_group = share * SHARE + r % SHARE
    is_head = (r < TILE * SHARE) & (in_group < GROUP)
    is_real = is_head & (query >= 0) & (query < count)
    head = (kv_head * GROUP + in_group).to(tl.int64)
    at = first + query
    position = length - count + query

    sink = tl.full([ROWS], float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + head, mask=is_head, other=0.0).to(tl.float32) * LOG2E
    v_dim = tl.arange(0, V_WIDE)
    # Queries that nobody serves: behind the last sequence.
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        if splits == 1:
            total = total + 1.0
    found = tl.zeros([ROWS, V_WIDE], tl.float32)
    for extra in range(behind + number, queries, tiles):
        store_rows(
            found,
            sink,
            total,
            extra + r.to(tl.int64) * 0,
            head,
            is_head & (r < SHARE),
            split,
            splits,
            splits,
            out,
            lse,
            parts,
            sums,
            out_token,
            out_head,
            lse_token,
            lse_head,
            v_dim,
            V_DIM=V_DIM,
            OUT_UNIT=OUT_UNIT,
            QUERY_HEADS=HEADS * GROUP,
            LSE=LSE,
        )
    if split >= used:  # at once, so that what is at work can take its place
        tl.store(sums + (at * (HEADS * GROUP) + head) * splits + split, tl.full([ROWS], float("-inf"), tl.float32), mask=is_real)
        return

    table += row.to(tl.int64) * table_row
    k_dim = tl.arange(0, K_WIDE)[None, :]
    q_at = (at * q_token + head * q_head) * Q_UNIT
    q_rows = tl.load(q + q_at[:, None] + k_dim, mask=is_real[:, None] & (k_dim < K_DIM), other=0.0)
    if WIDEN:
        q_rows = q_rows.to(tl.float32)
    q_rest = q_rows
    if K_REST > 0:
        rest = K_WIDE + tl.arange(0, K_REST)[None, :]
        q_rest = tl.load(q + q_at[:, None] + rest, mask=is_real[:, None] & (rest < K_DIM), other=0.0)
        if WIDEN:
            q_rest = q_rest.to(tl.float32)
    found, highest, total = begin_rows(sink, used, V_WIDE, ROWS, SINKS)
    k_head = k_cache + kv_head.to(tl.int64) * K_HEAD
    v_head = v_cache + kv_head.to(tl.int64) * V_HEAD
    masked_from = split_begin
    if WINDOW == 0:  # most tiles of keys are seen by all rows
        common = split_end
        if CAUSAL:
            common = tl.minimum(common, length - count + place * TILE + 1)
        masked_from = split_begin + tl.maximum(common - split_begin, 0) // KEYS * KEYS
        behind_those = (masked_from + BLOCK_SIZE - 1) // BLOCK_SIZE
        if count_outside(table, table_column, split_begin // BLOCK_SIZE, behind_those, num_blocks, tl.arange(0, 512)) > 0:
            masked_from = split_begin
    # The others first, while there is nothing yet that a value which some rows do not see could spoil.
    found, highest, total = attend_keys(
        q_rows,
        q_rest,
        found,
        highest,
        total,
        masked_from,
        split_end,
        position,
        k_head,
        v_head,
        table,
        table_column,
        num_blocks,
        SCALE,
        SOFTCAP,
        CAUSAL and TILE > 1,
        WINDOW * (TILE > 1),
        BLOCK_SIZE,
        K_BLOCK,
        K_SLOT,
        V_BLOCK,
        V_SLOT,
        K_DIM,
        V_DIM,
        K_WIDE,
        K_REST,
        V_WIDE,
        ROWS,
        KEYS,
        WITHIN,
        WIDEN,
        True,
        None,
    )
    spoilt = False
    if TILE > 1 and (CAUSAL or WINDOW > 0):  # 0 times what is no number is not 0: rows that do not see it are to be found without
        spoilt = tl.max((found != found).to(tl.int32)) > 0
    if WINDOW == 0:
        found, highest, total = attend_keys(
            q_rows,
            q_rest,
            found,
            highest,
            total,
            split_begin,
            masked_from,
            position,
            k_head,
            v_head,
            table,
            table_column,
            num_blocks,
            SCALE,
            SOFTCAP,
            False,
            0,
            BLOCK_SIZE,
            K_BLOCK,
            K_SLOT,
            V_BLOCK,
            V_SLOT,
            K_DIM,
            V_DIM,
            K_WIDE,
            K_REST,
            V_WIDE,
            ROWS,
            KEYS,
            WITHIN,
            WIDEN,
            False,
            None,
        )
    if TILE > 1 and (CAUSAL or WINDOW > 0):  # at the end, where fewest registers are taken
        if spoilt:
            found, highest, total = begin_rows(sink, used, V_WIDE, ROWS, SINKS)
            found, highest, total = attend_key_by_key(
                found,
                highest,
                total,
                q + q_at,
                is_real,
                tl.arange(0, 16),
                v_dim,
                split_begin,
                split_end,
                position,
                k_head,
                v_head,
                table,
                table_column,
                num_blocks,
                SCALE,
                SOFTCAP,
                CAUSAL,
                WINDOW,
                BLOCK_SIZE,
                K_BLOCK,
                K_SLOT,
                V_BLOCK,
                V_SLOT,
                K_DIM,
                V_DIM,
                K_WIDE + K_REST,
            )
    store_rows(
        found,
        highest,
        total,
        at,
        head,
        is_real,
        split,
        splits,
        used,
        out,
        lse,
        parts,
        sums,
        out_token,
        out_head,
        lse_token,
        lse_head,
        v_dim,
        V_DIM=V_DIM,
        OUT_UNIT=OUT_UNIT,
        QUERY_HEADS=HEADS * GROUP,
        LSE=LSE,
    )
    if (place == 0) & (kv_head + share + split == 0):
        past = (tl.minimum(said, room).to(tl.int32) + BLOCK_SIZE - 1) // BLOCK_SIZE  # not by the length, which would be kept until here
        count_bad(skipped, table, table_column, (said < 0) | (said > room), looked_from // BLOCK_SIZE, past, num_blocks, tl.arange(0, 512))
