"""Attention over paged caches of any number of queries of each row, for GPUs whose matrix units read shared memory by themselves.

Warps have work of their own, as in FlashAttention-3 (https://arxiv.org/abs/2407.08608): one loads tiles of keys and values, and two
groups of four attend, each from half of the rows. While matrix units multiply a group's queries by one tile of keys, and its weights by
the values of the tile before, the other group makes weights of products. The last keys come first: those that rows see differently are
looked at before there is anything that a value which some do not see could spoil.

In Gluon, since Triton's own language does not say which warp does what, nor how a tile of several blocks lies in shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from kvdock_triton.attention_boxes import BOX_KEYS, TILE_LAYOUT, load_tiles, settled
from kvdock_triton.attention_exact import attend_key_by_key
from kvdock_triton.attention_parts import LOG2E, bend, peak_of, weigh
from kvdock_triton.attention_results import count_bad, count_outside, store_rows
from kvdock_triton.attention_tiles import place_tile

__all__ = ["attend_specialised_kernel"]

_GROUPS = gl.constexpr(2)
_ATTENDING, _LOADING = gl.constexpr(232), gl.constexpr(40)
"""Registers of each lane of a group, and of the warp that loads: together what a processor has."""

_ROWS_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
_COLUMNS_LAYOUT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_COLUMNS = gl.constexpr(512)


@gluon.jit
def _rows_of(group, tile, C: gl.constexpr, LAYOUT: gl.constexpr):
    """Return of a group's rows each one's query, its place in the row of the batch, its head, which are real, and which have a head."""
    first, count, place, _, kv_head, share = tile
    r = group * C.ROWS + gl.arange(0, C.ROWS, gl.SliceLayout(1, LAYOUT))
    query = place * C.TILE + r // C.SHARE
    in_group = share * C.SHARE + r % C.SHARE
    is_head = (r < C.TILE * C.SHARE) & (in_group < C.GROUP)
    return first + query, query, (kv_head * C.GROUP + in_group).to(gl.int64), is_head & (query < count), is_head


@gluon.jit
def _begin_rows(sinks, used, head, is_head, C: gl.constexpr):
    """Return the highest logit and the sum of weights of rows that have looked at no key."""
    highest = gl.where(is_head, float("-inf"), float("-inf"))
    total = gl.where(is_head, 0.0, 0.0)
    if C.SINKS:
        if used == 1:  # a key of each head whose value is nothing
            highest = gl.load(sinks + head, mask=is_head, other=0.0).to(gl.float32) * LOG2E
            total = total + 1.0
    return highest, total


@gluon.jit
def _store(found, highest, total, at, head, is_real, used, splits, outputs, C: gl.constexpr, LAYOUT: gl.constexpr):
    """Store what rows found, whose queries are at ``at`` of all."""
    out, lse, parts, sums, out_token, out_head, lse_token, lse_head = outputs
    split, number = splits
    store_rows(
        found,
        highest,
        total,
        at,
        head,
        is_real,
        split,
        number,
        used,
        out,
        lse,
        parts,
        sums,
        out_token,
        out_head,
        lse_token,
        lse_head,
        gl.arange(0, C.V_WIDE, gl.SliceLayout(0, LAYOUT)),
        C.QUERY_HEADS,
        C.V_DIM,
        C.OUT_UNIT,
        C.LSE,
    )


@gluon.jit
def _attend_exactly(group, inputs, tile, span, splits, outputs, C: gl.constexpr):
    """Attend from a group's rows key by key."""
    q, k_head, v_head, table, sinks, q_token, q_head, table_column, num_blocks = inputs
    _, count, _, length, _, _ = tile
    _, _, begin, end, used = span
    at, query, head, is_real, is_head = _rows_of(group, tile, C, _ROWS_LAYOUT)
    highest, total = _begin_rows(sinks, used, head, is_head, C)
    found, highest, total = attend_key_by_key(
        gl.zeros([C.ROWS, C.V_WIDE], gl.float32, _ROWS_LAYOUT),
        highest,
        total,
        q + (at * q_token + head * q_head) * C.Q_UNIT,
        is_real,
        gl.arange(0, 16, gl.SliceLayout(0, _ROWS_LAYOUT)),
        gl.arange(0, C.V_WIDE, gl.SliceLayout(0, _ROWS_LAYOUT)),
        begin,
        end,
        length - count + query,
        k_head,
        v_head,
        table,
        table_column,
        num_blocks,
        C.SCALE,
        C.SOFTCAP,
        C.CAUSAL,
        C.WINDOW,
        C.BLOCK_SIZE,
        C.K_BLOCK,
        C.K_SLOT,
        C.V_BLOCK,
        C.V_SLOT,
        C.K_DIM,
        C.V_DIM,
        C.K_WIDE,
    )
    _store(found, highest, total, at, head, is_real, used, splits, outputs, C, _ROWS_LAYOUT)


@gluon.jit
def _weigh(scores, highest, total, start, seen, C: gl.constexpr, MASKED: gl.constexpr):
    """Return the weights of a tile of keys, by what those before fade, the highest logit and the sum of weights."""
    scores = bend(scores, C.SCALE, C.SOFTCAP)
    if MASKED:
        first_seen, last_seen, places, table, table_column, num_blocks, end, is_outside = seen
        key = (start + places)[None, :]
        shown = key <= last_seen[:, None]
        if C.STARTS or C.WINDOW > 0:
            shown = shown & (key >= first_seen[:, None])
        scores = gl.where(shown, scores, float("-inf"))
        if is_outside:  # keys of blocks outside of the pool are zeros, instead of nothing
            ids = gl.load(table + (start + places) // C.BLOCK_SIZE * table_column, mask=start + places < end, other=0)
            scores = gl.where(((ids >= 0) & (ids < num_blocks))[None, :], scores, float("-inf"))
    before = highest
    highest = gl.maximum(before, peak_of(scores, C.SCALE, C.SOFTCAP))
    level = gl.where(highest == float("-inf"), 0.0, highest)  # of -inf and -inf there is no difference
    weights = weigh(scores, level, C.SCALE, C.SOFTCAP)
    faded = gl.exp2(before - level)
    return weights, faded, highest, total * faded + gl.sum(weights, 1)


@gluon.jit
def _step(i, span, queries, keys, values, bars, weights, found, highest, total, seen, nothing, C: gl.constexpr, MASKED: gl.constexpr):
    """Look at the keys of tile ``i``, and add the values of the tile before by their weights."""
    k_ready, v_ready, k_free, v_free = bars
    stage = i % C.STAGES
    before = (i - 1) % C.STAGES
    mbarrier.wait(k_ready.index(stage), i // C.STAGES & 1)
    scores = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), (i - 1) // C.STAGES & 1)
    found = warpgroup_mma(weights, values.index(before), found, is_async=True)
    scores = warpgroup_mma_wait(1, [scores])
    mbarrier.arrive(k_free.index(stage))
    new, faded, highest, total = _weigh(scores, highest, total, span[0] + (span[1] - 1 - i) * C.KEYS, seen, C, MASKED)
    found = warpgroup_mma_wait(0, [found])
    mbarrier.arrive(v_free.index(before))
    found = found * gl.convert_layout(faded, gl.SliceLayout(1, found.type.layout))[:, None]
    return gl.convert_layout(new.to(weights.dtype), weights.type.layout), found, highest, total


@gluon.jit
def _attend(group: gl.constexpr, inputs, tile, span, splits, outputs, queries, keys, values, bars, C: gl.constexpr):
    """Attend from a group's rows of a tile."""
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.KEYS, 16])
    found_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C.V_WIDE, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, found_layout, 2)
    q, _, _, table, sinks, q_token, q_head, table_column, num_blocks = inputs
    _, count, place, length, _, _ = tile
    base, number, begin, end, used = span
    mine = queries.index(group)
    at, _, head, is_real, _ = _rows_of(group, tile, C, _ROWS_LAYOUT)
    k_dim = gl.arange(0, C.K_WIDE, gl.SliceLayout(0, _ROWS_LAYOUT))[None, :]
    q_at = (at * q_token + head * q_head) * C.Q_UNIT
    mine.store(gl.load(q + q_at[:, None] + k_dim, mask=is_real[:, None] & (k_dim < C.K_DIM), other=0.0))
    fence_async_shared()

    _, query, head, _, is_head = _rows_of(group, tile, C, scores_layout)
    position = length - count + query
    first_seen = gl.maximum(position * 0, begin)
    last_seen = gl.maximum(position * 0, end) - 1
    if C.CAUSAL:
        last_seen = gl.minimum(last_seen, position)
    if C.WINDOW > 0:
        first_seen = gl.maximum(first_seen, position - C.WINDOW + 1)
    places = gl.arange(0, C.KEYS, gl.SliceLayout(0, scores_layout))
    columns = gl.arange(0, _COLUMNS, _COLUMNS_LAYOUT)
    last_column = (end + C.BLOCK_SIZE - 1) // C.BLOCK_SIZE
    is_outside = count_outside(table, table_column, begin // C.BLOCK_SIZE, last_column, num_blocks, columns) > 0
    seen = (first_seen, last_seen, places, table, table_column, num_blocks, end, is_outside)
    highest, total = _begin_rows(sinks, used, head, is_head, C)
    found = gl.zeros([C.ROWS, C.V_WIDE], gl.float32, found_layout)

    # All rows see the whole of each tile from ``masked`` on, but for those from ``whole`` on. One more is looked at as if they did not:
    # the values of a tile are added with the keys of the next.
    masked = number
    whole = number
    if C.WINDOW == 0:
        common = end
        if C.CAUSAL:
            common = gl.minimum(common, length - count + place * C.TILE + 1)
        masked = gl.minimum(gl.maximum(number - gl.maximum(common - base, 0) // C.KEYS, 1) + 1, number)
        if C.STARTS:
            whole = gl.maximum(number - (begin > base).to(gl.int32), masked)
        masked = gl.where(is_outside, number, masked)
        whole = gl.where(is_outside, number, whole)
    mbarrier.wait(bars[0].index(0), 0)
    nothing = gl.zeros([C.ROWS, C.KEYS], gl.float32, scores_layout)
    scores = warpgroup_mma(mine, keys.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    mbarrier.arrive(bars[2].index(0))
    weights, _, highest, total = _weigh(scores, highest, total, base + (number - 1) * C.KEYS, seen, C, True)
    weights = gl.convert_layout(weights.to(q.dtype.element_ty), weights_layout)
    for i in range(1, masked):
        weights, found, highest, total = _step(i, span, mine, keys, values, bars, weights, found, highest, total, seen, nothing, C, True)
    # 0 times what is no number is not 0: rows that do not see it are to be found without.
    is_spoilt = gl.max(gl.max((found != found).to(gl.int32), 1), 0) > 0
    for i in range(masked, whole):
        weights, found, highest, total = _step(i, span, mine, keys, values, bars, weights, found, highest, total, seen, nothing, C, False)
    if C.STARTS and C.WINDOW == 0:
        for i in range(whole, number):
            weights, found, highest, total = _step(
                i, span, mine, keys, values, bars, weights, found, highest, total, seen, nothing, C, True
            )
    stage = (number - 1) % C.STAGES
    mbarrier.wait(bars[1].index(stage), (number - 1) // C.STAGES & 1)
    found = warpgroup_mma(weights, values.index(stage), found, is_async=True)
    found = warpgroup_mma_wait(0, [found])
    if masked == number:
        is_spoilt |= gl.max(gl.max((found != found).to(gl.int32), 1), 0) > 0

    to, _, to_head, is_stored, _ = _rows_of(group, tile, C, found_layout)
    if is_spoilt:
        _attend_exactly(group, inputs, tile, span, splits, outputs, C)
    else:
        peak = gl.convert_layout(highest, gl.SliceLayout(1, found_layout))
        mass = gl.convert_layout(total, gl.SliceLayout(1, found_layout))
        _store(found, peak, mass, to, to_head, is_stored, used, splits, outputs, C, found_layout)


@gluon.jit
def attend_specialised_kernel(
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
    k_map,
    v_map,
    SCALE: gl.constexpr,
    SOFTCAP: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    STARTS: gl.constexpr,
    SINKS: gl.constexpr,
    LSE: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    K_BLOCK: gl.constexpr,
    K_SLOT: gl.constexpr,
    K_HEAD: gl.constexpr,
    V_BLOCK: gl.constexpr,
    V_SLOT: gl.constexpr,
    V_HEAD: gl.constexpr,
    K_DIM: gl.constexpr,
    V_DIM: gl.constexpr,
    K_WIDE: gl.constexpr,
    V_WIDE: gl.constexpr,
    Q_UNIT: gl.constexpr,
    OUT_UNIT: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SHARE: gl.constexpr,
    TILE: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    LEAST: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Attend from one tile of queries to one split of the keys, as `kvdock_triton.attention_many.attend_many_kernel` does."""
    C: gl.constexpr = settled(  # noqa: N806 - constants of Triton's
        SCALE,
        SOFTCAP,
        CAUSAL,
        WINDOW,
        STARTS,
        SINKS,
        LSE,
        BLOCK_SIZE,
        K_BLOCK,
        K_SLOT,
        V_BLOCK,
        V_SLOT,
        K_DIM,
        V_DIM,
        K_WIDE,
        V_WIDE,
        Q_UNIT,
        OUT_UNIT,
        HEADS * GROUP,
        GROUP,
        SHARE,
        TILE,
        ROWS // _GROUPS,
        KEYS,
        STAGES,
    )
    SHARES: gl.constexpr = (GROUP + SHARE - 1) // SHARE  # noqa: N806 - likewise
    tiles = gl.num_programs(0) // (HEADS * SHARES)
    number = gl.program_id(0) // (HEADS * SHARES)
    kv_head = gl.program_id(0) % (HEADS * SHARES) // SHARES
    share = gl.program_id(0) % SHARES
    split = gl.program_id(1)
    row, first, count, place, said, length, looked_from, begin, used, base, end = place_tile(
        tiles - 1 - number,  # the last tiles of a causal row take longest, and begin first
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
        BOX_KEYS,
    )
    table += row.to(gl.int64) * table_row
    tile = (first, count, place, length, kv_head, share)
    outputs = (out, lse, parts, sums, out_token, out_head, lse_token, lse_head)
    behind = gl.maximum(gl.load(cu + batch * cu_step).to(gl.int64), 0)
    for group in gl.static_range(_GROUPS):
        at, _, head, is_real, is_head = _rows_of(group, tile, C, _ROWS_LAYOUT)
        if split >= used:
            gl.store(sums + (at * C.QUERY_HEADS + head) * splits + split, float("-inf"), mask=is_real)
        if group * C.ROWS < SHARE:
            is_first = is_head & (group * C.ROWS + gl.arange(0, C.ROWS, gl.SliceLayout(1, _ROWS_LAYOUT)) < SHARE)
            highest, total = _begin_rows(sinks, splits, head, is_head, C)
            nothing = gl.zeros([C.ROWS, V_WIDE], gl.float32, _ROWS_LAYOUT)
            for extra in range(behind + number, queries, tiles):  # queries that nobody serves: behind the last row
                _store(nothing, highest, total, extra + at * 0, head, is_first, splits, (split, splits), outputs, C, _ROWS_LAYOUT)

    if (split < used) & (place >= 0) & (place * TILE < count):
        keys = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, KEYS, K_WIDE], TILE_LAYOUT)
        values = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, KEYS, V_WIDE], TILE_LAYOUT)
        shared_queries = gl.allocate_shared_memory(q.dtype.element_ty, [_GROUPS, C.ROWS, K_WIDE], TILE_LAYOUT)
        k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(k_ready.index(i), count=1)
            mbarrier.init(v_ready.index(i), count=1)
            mbarrier.init(k_free.index(i), count=_GROUPS)
            mbarrier.init(v_free.index(i), count=_GROUPS)
        mbarrier.init(loaded, count=1)
        bars = (k_ready, v_ready, k_free, v_free)
        span = (base, gl.maximum((end - base + KEYS - 1) // KEYS, 1), gl.maximum(begin, base), end, used)
        k_head = k_cache + kv_head.to(gl.int64) * K_HEAD
        v_head = v_cache + kv_head.to(gl.int64) * V_HEAD
        inputs = (q, k_head, v_head, table, sinks, q_token, q_head, table_column, num_blocks)
        numbers = (split, splits)
        gl.warp_specialize(
            [
                (_attend, (0, inputs, tile, span, numbers, outputs, shared_queries, keys, values, bars, C)),
                (_attend, (1, inputs, tile, span, numbers, outputs, shared_queries, keys, values, bars, C)),
                (load_tiles, (k_map, v_map, table, table_column, kv_head, span, keys, values, bars, loaded, C)),
            ],
            [4, 1],
            [_ATTENDING, _LOADING],
        )
    if (place == 0) & (kv_head + share + split == 0):
        past = (gl.minimum(said, room).to(gl.int32) + BLOCK_SIZE - 1) // BLOCK_SIZE
        columns = gl.arange(0, _COLUMNS, _COLUMNS_LAYOUT)
        count_bad(skipped, table, table_column, (said < 0) | (said > room), looked_from // BLOCK_SIZE, past, num_blocks, columns)
