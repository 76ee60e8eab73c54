"""Attention over paged caches as a Triton kernel, where a row of the batch has few queries: as in decoding, one.

A program serves all queries of a row and the query heads that read one head of the cache, for the keys that
`kvdock_triton.attention_shares` gives it. `kvdock_triton.attention_join.join_few_kernel` joins parts of what was shared.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvdock_triton.attention_exact import attend_key_by_key, begin_rows
from kvdock_triton.attention_mapped import attend_mapped
from kvdock_triton.attention_parts import LN2, LOG2E, attend_keys
from kvdock_triton.attention_results import OPENER, count_bad, results_of, store_nothing, store_opener
from kvdock_triton.attention_shares import LEAST_KEYS, find_units, program_of, queries_of, share_out, units_from, units_of

__all__ = ["attend_few_kernel"]


@triton.jit
def attend_few_kernel(
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
    openers,
    skipped,
    queries,
    batch,
    room,
    num_blocks,
    each,
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
    k_map,
    v_map,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    RAGGED: tl.constexpr,
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
    UNIT: tl.constexpr,
    LEAST: tl.constexpr,
    LANES: tl.constexpr,
    WITHIN: tl.constexpr,
    WIDEN: tl.constexpr,
    MAPPED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attend from ``TILE`` queries of each row at most, and ``SHARE`` of the ``GROUP`` heads that read one head.

    To one of the pieces of one of the chunks of keys, as the grid has them, ``each`` of a segment where there are enough. With ``MAPPED``,
    tiles of keys come by the maps of the caches. With ``EARLY``, what joins parts may be launched at once: it waits.
    """
    SHARES: tl.constexpr = (GROUP + SHARE - 1) // SHARE  # noqa: N806 - a constant of Triton's
    SEGMENTS: tl.constexpr = HEADS * SHARES  # noqa: N806 - likewise
    rows = (lens, cu, starts, lens_step, cu_step, starts_step, queries, room)
    batch = batch.to(tl.int32)
    first_units = units_from(batch * 0, batch, rows, CAUSAL, WINDOW, RAGGED, STARTS, TILE, UNIT, LANES)
    place = tl.program_id(0)
    wanted = tl.num_programs(0)
    piece = tl.program_id(1)
    pieces = tl.num_programs(1)
    programs = wanted * pieces
    program = place * pieces + piece
    r = tl.arange(0, ROWS)
    query = r // SHARE
    k_dim = tl.arange(0, K_WIDE)[None, :]
    if RAGGED:
        _store_others(
            program,
            programs,
            batch,
            rows,
            sinks,
            out,
            lse,
            out_token,
            out_head,
            lse_token,
            lse_head,
            HEADS * GROUP,
            V_DIM,
            V_WIDE,
            OUT_UNIT,
            LSE,
            SINKS,
            CAUSAL,
            WINDOW,
            STARTS,
            TILE,
        )

    by_program = batch * SEGMENTS > programs  # so many openers there is room for: of each segment, or of each program
    if by_program:
        tl.store(openers + OPENER * program, 0)  # no part of a segment that others go on with, until there is one
    each = each.to(tl.int32)
    chunk, longest, everything = share_out(
        first_units, wanted, each, batch, rows, SEGMENTS, CAUSAL, WINDOW, RAGGED, STARTS, TILE, UNIT, LEAST
    )
    left, within, row, segment, offset = find_units(
        place, piece, pieces, each, chunk, longest, everything, batch, rows, SEGMENTS, CAUSAL, WINDOW, RAGGED, STARTS, TILE, UNIT, LANES
    )
    if (left <= 0) & (pieces > 1):  # what joins goes over it
        tl.store(sums + 2 * program.to(tl.int64) * ROWS + r, tl.full([ROWS], float("-inf"), tl.float32))
    while left > 0:
        first, count, said, length, begin, end = queries_of(row, row < batch, rows, CAUSAL, WINDOW, RAGGED, STARTS, TILE)
        own = tl.where(longest > 0, longest, units_of(begin, end, UNIT))
        taken = tl.minimum(own - offset, left)
        is_whole = taken == own
        used = tl.where(is_whole, 1, 2)
        kv_head = segment // SHARES
        in_group = segment % SHARES * SHARE + r % SHARE
        is_real = (r < TILE * SHARE) & (in_group < GROUP) & (query < count)
        head = (kv_head * GROUP + in_group).to(tl.int64)
        at = first + query
        position = length - count + query
        chunk_begin = begin // LEAST_KEYS * LEAST_KEYS + offset * UNIT
        chunk_end = tl.minimum(chunk_begin + taken * UNIT, end)

        sink = tl.full([ROWS], float("-inf"), tl.float32)
        if SINKS:
            sink = tl.load(sinks + head, mask=in_group < GROUP, other=0.0).to(tl.float32) * LOG2E
        row_table = table + row.to(tl.int64) * table_row
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
        if EARLY:  # not at the beginning, which what joins would delay
            tl.extra.cuda.gdc_launch_dependents()
        is_left = True
        if MAPPED:
            found, highest, total = attend_mapped(
                q_rows,
                found,
                highest,
                total,
                chunk_begin,
                chunk_end,
                begin,
                position,
                k_map,
                v_map,
                kv_head,
                row_table,
                table_column,
                num_blocks,
                SCALE,
                SOFTCAP,
                STARTS or WINDOW > 0,
                CAUSAL and TILE > 1,
                WINDOW * (TILE > 1),
                BLOCK_SIZE,
                K_WIDE,
                V_WIDE,
                KEYS,
                UNIT // KEYS,
                WIDEN,
            )
            is_left = tl.max((found != found).to(tl.int32)) > 0  # 0 times what is no number is not 0: it may be of a key that is not seen
        if is_left:
            found, highest, total = begin_rows(sink, used, V_WIDE, ROWS, SINKS)
            found, highest, total = attend_keys(
                q_rows,
                q_rest,
                found,
                highest,
                total,
                tl.maximum(chunk_begin, begin),
                chunk_end,
                position,
                k_head,
                v_head,
                row_table,
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
                1 if MAPPED else None,
            )
            if TILE > 1 and (CAUSAL or WINDOW > 0):  # likewise, of a key that some rows do not see
                if tl.max((found != found).to(tl.int32)) > 0:
                    found, highest, total = begin_rows(sink, used, V_WIDE, ROWS, SINKS)
                    found, highest, total = attend_key_by_key(
                        found,
                        highest,
                        total,
                        q + q_at,
                        is_real,
                        tl.arange(0, 16),
                        tl.arange(0, V_WIDE),
                        tl.maximum(chunk_begin, begin),
                        chunk_end,
                        position,
                        k_head,
                        v_head,
                        row_table,
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
        v_dim = tl.arange(0, V_WIDE)[None, :]
        inside = is_real[:, None] & (v_dim < V_DIM)
        values, logarithm = results_of(found, highest, total)
        if is_whole:
            tl.store(out + ((at * out_token + head * out_head) * OUT_UNIT)[:, None] + v_dim, values.to(out.dtype.element_ty), mask=inside)
            if LSE:
                tl.store(lse + at * lse_token + head * lse_head, logarithm * LN2, mask=is_real)
        else:
            part = (2 * program.to(tl.int64) + tl.where(offset == 0, 1, 0)) * ROWS + r
            tl.store(sums + part, logarithm)  # of all rows, so that no sector is written in part, and read from memory to be joined
            tl.store(parts + part[:, None] * V_DIM + v_dim, values, mask=inside & (total > 0)[:, None])
        if (offset == 0) & ((not is_whole) | (not by_program)):
            number = tl.where(is_whole, 1, program_of(within + own - 1, chunk, pieces) - piece + 1)
            opener = openers + OPENER * tl.where(by_program, program, row * SEGMENTS + segment)
            store_opener(opener, number, program, segment, first.to(tl.int32), count)
        if segment == 0:  # each part of it the blocks that begin there: all of them would keep one program, and the step, waiting
            opens = offset == 0
            column = tl.where(opens, begin // BLOCK_SIZE, (chunk_begin + BLOCK_SIZE - 1) // BLOCK_SIZE)
            behind = (chunk_end + BLOCK_SIZE - 1) // BLOCK_SIZE
            count_bad(skipped, row_table, table_column, opens & (said != length), column, behind, num_blocks, tl.arange(0, 4 * LANES))
        left -= taken
        within += taken
        offset += taken
        if offset == own:
            offset = offset * 0
            segment += 1
            if segment == SEGMENTS:
                segment = segment * 0
                row += 1


@triton.jit
def _store_others(
    program,
    programs,
    batch,
    rows,
    sinks,
    out,
    lse,
    out_token,
    out_head,
    lse_token,
    lse_head,
    QUERY_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_WIDE: tl.constexpr,
    OUT_UNIT: tl.constexpr,
    LSE: tl.constexpr,
    SINKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    STARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the results of queries that nobody serves: behind the last row, or more of a row than max_query_len said."""
    behind = tl.maximum(tl.load(rows[1] + batch * rows[4]).to(tl.int64), 0)
    for query in range(behind + program, rows[6], programs):
        store_nothing(query, sinks, out, lse, out_token, out_head, lse_token, lse_head, QUERY_HEADS, V_DIM, V_WIDE, OUT_UNIT, LSE, SINKS)
    for number in range(program, batch, programs):
        row = (program * 0 + number).to(tl.int32)  # which the interpreter has as an int
        first, count, _, _, _, _ = queries_of(row, row < batch, rows, CAUSAL, WINDOW, True, STARTS, TILE)
        for surplus in range(TILE, count):
            store_nothing(
                first + surplus,
                sinks,
                out,
                lse,
                out_token,
                out_head,
                lse_token,
                lse_head,
                QUERY_HEADS,
                V_DIM,
                V_WIDE,
                OUT_UNIT,
                LSE,
                SINKS,
            )
