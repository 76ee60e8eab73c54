"""The quick path of `swap_blocks_`. Written by ``make calls`` from its schema: see `kvdock.ops.calls.writer`, and do not edit it."""

from kvdock.ops.signatures import EMPTY, FastCall

__all__ = ["make"]


def make(op):
    """Return the op as a function of all its arguments, and as one of a `BoundOp` and the rest."""
    is_compiling, recording, is_intercepted, trace = op.is_compiling, op.recording, op.is_intercepted, op.trace
    get_mode, enter = op.get_mode, op.enter
    recent, chooser, settings, schema = op.recent, op.chooser, op.settings, op.schema
    find, prepare, slow, blame = op.find, op.prepare, op.run_slowly, op.blame

    def body0(recent, pools, src_cache, dst_cache, block_pairs, named):
        key = (named, 0, ())
        signature = recent.signature0
        try:
            known = pools is not None and signature.pools is pools and signature.key == key and signature.guard(block_pairs)
        except TypeError:  # what is no tensor
            known = False
        if not known:
            signature = find(recent, key, (src_cache, dst_cache, block_pairs))
            if signature is None:  # nothing that can be known by a guard, such as an int of a class of its own
                return slow((src_cache, dst_cache, block_pairs), named)
            pools = signature.pools
        block_pairs_size, block_pairs_full = signature.numbers
        N, block_pairs_n1 = block_pairs.shape
        block_pairs_t0, block_pairs_t1 = block_pairs.stride()
        block_pairs_ptr = block_pairs.data_ptr()
        block_pairs_end = block_pairs_ptr + (1 + (N - 1) * block_pairs_t0 + (block_pairs_n1 - 1) * block_pairs_t1) * block_pairs_size
        block_pairs_bits = block_pairs_ptr | block_pairs_full
        if N > 1:
            block_pairs_bits |= block_pairs_t0 * block_pairs_size
        src_cache_extent, dst_cache_extent = pools.extents
        src_cache_ptr = src_cache.data_ptr()
        src_cache_end = src_cache_ptr + src_cache_extent
        dst_cache_ptr = dst_cache.data_ptr()
        dst_cache_end = dst_cache_ptr + dst_cache_extent
        low = dst_cache_ptr
        high = dst_cache_end
        if (
            not N
            or dst_cache_ptr < 4194304
            or (src_cache_ptr < high and (src_cache_ptr < 4194304 or low < src_cache_end))
            or (block_pairs_ptr < high and (block_pairs_ptr < 4194304 or low < block_pairs_end))
        ):
            return slow((src_cache, dst_cache, block_pairs), named, pools)
        is_full = not ((src_cache_ptr | dst_cache_ptr) & 15 or block_pairs_bits & (block_pairs_full - 1))
        if is_full:
            classes, entry = None, signature.full
        else:
            classes = (
                (src_cache_ptr | 16) & -(src_cache_ptr | 16),
                (dst_cache_ptr | 16) & -(dst_cache_ptr | 16),
                block_pairs_bits & -block_pairs_bits,
            )
            entry = signature.entries.get(classes, EMPTY)
        plan = entry.value  # held until it has run, whatever becomes of the entry
        if plan is None:
            entry, plan = prepare(signature, (src_cache, dst_cache, block_pairs), classes, named)
        else:
            cache = signature.cache
            entry.used = cache.clock = cache.clock + 1
        if is_full and named == recent.own_name:
            strides = (block_pairs_t0 if N > 1 else -1, block_pairs_t1)
            fast = signature.fast.get(strides)
            if fast.__class__ is not FastCall or fast.entry is not entry:
                fast = None
                if signature.is_due(strides):
                    numbers = (
                        int(N > 1),
                        block_pairs_n1,
                        block_pairs_t0 * block_pairs_size,
                        (1 + (block_pairs_n1 - 1) * block_pairs_t1 - block_pairs_t0) * block_pairs_size,
                        max((1 + (block_pairs_n1 - 1) * block_pairs_t1 - block_pairs_t0) * block_pairs_size, 0),
                        max(block_pairs_t0 * block_pairs_size, 0),
                    )
                    fast = signature.settle(schema, entry, strides, numbers, (src_cache, dst_cache, block_pairs))
            if fast is not None:
                recent.adopt(0, fast)
                if fast.launch is not None:
                    return fast.launch(src_cache_ptr, dst_cache_ptr, block_pairs_ptr, N)
        return plan.run(src_cache, dst_cache, block_pairs)

    def call(src_cache, dst_cache, block_pairs):
        try:
            if is_compiling():
                return trace((src_cache, dst_cache, block_pairs), None)
            if recording._is_fx_tracing_flag and is_intercepted((src_cache, dst_cache, block_pairs)):
                return trace((src_cache, dst_cache, block_pairs), None)
            mode = get_mode()
            epoch, generation, pools, fast_calls = recent.state0
            if not (epoch == chooser.epoch and generation == settings.generation):
                pools = None
            elif fast_calls and mode is None:
                late = False
                for guard, entry, launch, cache, variant, static, numbers, outputs_guard in fast_calls:
                    plan = entry.value  # held until it has run, whatever becomes of the entry
                    try:
                        same = plan is not None and guard(src_cache, dst_cache, block_pairs)
                    except TypeError:  # what is no tensor
                        break
                    if not same:
                        late = True
                        continue
                    place = pools.places.get(src_cache.data_ptr())
                    if place is None or place[2] != dst_cache.data_ptr():
                        place = pools.place(src_cache, dst_cache)
                    src_cache_ptr, src_cache_end, dst_cache_ptr, dst_cache_end, low, high, plain = place
                    if not plain:
                        break  # the body finds out more
                    N_least, block_pairs_row, block_pairs_step0, block_pairs_rest, reach, N_reach = numbers
                    N, block_pairs_n1 = block_pairs.shape
                    block_pairs_ptr = block_pairs.data_ptr()
                    floor = low - (reach + N * N_reach)
                    if (
                        N > N_least
                        and not ((block_pairs_ptr) & 15)
                        and (
                            (src_cache_ptr >= high or src_cache_end <= low)
                            and (block_pairs_ptr >= high or 4194304 <= block_pairs_ptr <= floor)
                            or not (
                                (src_cache_ptr < high and (src_cache_ptr < 4194304 or low < src_cache_end))
                                or (
                                    block_pairs_ptr < high
                                    and (block_pairs_ptr < 4194304 or low < block_pairs_ptr + block_pairs_rest + N * block_pairs_step0)
                                )
                            )
                        )
                    ):
                        entry.used = cache.clock = cache.clock + 1
                        if late:
                            recent.promote(0, guard)
                        if launch is not None:
                            return launch(src_cache_ptr, dst_cache_ptr, block_pairs_ptr, N)
                        return plan.run(src_cache, dst_cache, block_pairs)
                    late = True
            try:
                if pools is not None and not pools.guard(src_cache, dst_cache):
                    pools = None
            except TypeError:  # what is no tensor
                pools = None
            named = None if mode is None else enter(mode, (src_cache, dst_cache, block_pairs), None)
            return body0(recent, pools, src_cache, dst_cache, block_pairs, named)
        except Exception as error:  # free until something is raised
            blame(error, (src_cache, dst_cache, block_pairs), None)
            raise

    def bound_call(bound, block_pairs):
        recent, own_name = bound.recent, bound.own_name
        src_cache, dst_cache, src_cache_ptr, src_cache_end, dst_cache_ptr, dst_cache_end, low, high = bound.fixed
        try:
            if is_compiling():
                src_cache, dst_cache = bound.traced_pools()
                trace((src_cache, dst_cache, block_pairs), own_name)
                return src_cache, dst_cache
            if recording._is_fx_tracing_flag and is_intercepted((src_cache, dst_cache, block_pairs)):
                return trace((src_cache, dst_cache, block_pairs), own_name)
            mode = get_mode()
            epoch, generation, pools, fast_calls = recent.state0
            if not (epoch == chooser.epoch and generation == settings.generation):
                pools = None
            elif fast_calls and mode is None:
                late = False
                for guard, entry, launch, cache, variant, static, numbers, outputs_guard in fast_calls:
                    plan = entry.value  # held until it has run, whatever becomes of the entry
                    try:
                        same = plan is not None and guard(block_pairs)
                    except TypeError:  # what is no tensor
                        break
                    if not same:
                        late = True
                        continue
                    N_least, block_pairs_row, block_pairs_step0, block_pairs_rest, reach, N_reach = numbers
                    N, block_pairs_n1 = block_pairs.shape
                    block_pairs_ptr = block_pairs.data_ptr()
                    floor = low - (reach + N * N_reach)
                    if (
                        N > N_least
                        and not ((block_pairs_ptr) & 15)
                        and (
                            (src_cache_ptr >= high or src_cache_end <= low)
                            and (block_pairs_ptr >= high or 4194304 <= block_pairs_ptr <= floor)
                            or not (
                                (src_cache_ptr < high and (src_cache_ptr < 4194304 or low < src_cache_end))
                                or (
                                    block_pairs_ptr < high
                                    and (block_pairs_ptr < 4194304 or low < block_pairs_ptr + block_pairs_rest + N * block_pairs_step0)
                                )
                            )
                        )
                    ):
                        entry.used = cache.clock = cache.clock + 1
                        if late:
                            recent.promote(0, guard)
                        if launch is not None:
                            return launch(src_cache_ptr, dst_cache_ptr, block_pairs_ptr, N)
                        return plan.run(src_cache, dst_cache, block_pairs)
                    late = True
            named = own_name if mode is None else enter(mode, (src_cache, dst_cache, block_pairs), own_name)
            return body0(recent, pools, src_cache, dst_cache, block_pairs, named)
        except Exception as error:  # free until something is raised
            blame(error, (src_cache, dst_cache, block_pairs), own_name)
            raise

    return call, bound_call
