"""The quick path of `static_update_`. Written by ``make calls`` from its schema: see `kvdock.ops.calls.writer`, and do not edit it."""

from kvdock.ops.signatures import EMPTY, FastCall

__all__ = ["make"]


def make(op):
    """Return the op as a function of all its arguments, and as one of a `BoundOp` and the rest."""
    is_compiling, recording, is_intercepted, trace = op.is_compiling, op.recording, op.is_intercepted, op.trace
    get_mode, enter = op.get_mode, op.enter
    recent, chooser, settings, schema = op.recent, op.chooser, op.settings, op.schema
    find, prepare, slow, blame = op.find, op.prepare, op.run_slowly, op.blame

    def body0(recent, pools, k_cache, v_cache, k, v, cache_lengths, named):
        key = (named, 0, ())
        signature = recent.signature0
        try:
            known = pools is not None and signature.pools is pools and signature.key == key and signature.guard(k, v, cache_lengths)
        except TypeError:  # what is no tensor
            known = False
        if not known:
            signature = find(recent, key, (k_cache, v_cache, k, v, cache_lengths))
            if signature is None:  # nothing that can be known by a guard, such as an int of a class of its own
                return slow((k_cache, v_cache, k, v, cache_lengths), named)
            pools = signature.pools
        if signature.variant == 1:
            k_size, k_full, v_size, v_full, cache_lengths_size, cache_lengths_full = signature.numbers
            b, k_n1, s, k_n3 = k.shape
            k_t0, k_t1, k_t2, k_t3 = k.stride()
            k_ptr = k.data_ptr()
            k_end = k_ptr + (1 + (b - 1) * k_t0 + (k_n1 - 1) * k_t1 + (s - 1) * k_t2 + (k_n3 - 1) * k_t3) * k_size
            k_bits = k_ptr | k_full
            if b > 1:
                k_bits |= k_t0 * k_size
            if k_n1 > 1:
                k_bits |= k_t1 * k_size
            if s > 1:
                k_bits |= k_t2 * k_size
            v_n0, v_n1, v_n2, v_n3 = v.shape
            v_t0, v_t1, v_t2, v_t3 = v.stride()
            v_ptr = v.data_ptr()
            v_end = v_ptr + (1 + (v_n0 - 1) * v_t0 + (v_n1 - 1) * v_t1 + (v_n2 - 1) * v_t2 + (v_n3 - 1) * v_t3) * v_size
            v_bits = v_ptr | v_full
            if v_n0 > 1:
                v_bits |= v_t0 * v_size
            if v_n1 > 1:
                v_bits |= v_t1 * v_size
            if v_n2 > 1:
                v_bits |= v_t2 * v_size
            cache_lengths_ptr = cache_lengths.data_ptr()
            cache_lengths_end = cache_lengths_ptr + (1) * cache_lengths_size
            k_cache_extent, v_cache_extent = pools.extents
            k_cache_ptr = k_cache.data_ptr()
            k_cache_end = k_cache_ptr + k_cache_extent
            v_cache_ptr = v_cache.data_ptr()
            v_cache_end = v_cache_ptr + v_cache_extent
            low = k_cache_ptr
            if v_cache_ptr < low:
                low = v_cache_ptr
            high = k_cache_end
            if v_cache_end > high:
                high = v_cache_end
            if (
                not b
                or not s
                or k_cache_ptr < 4194304
                or v_cache_ptr < 4194304
                or v_n0 != b
                or v_n2 != s
                or cache_lengths_ptr & (cache_lengths_size - 1)
                or not (b <= v_cache.shape[0])
                or (
                    k_cache_ptr < v_cache_end
                    and v_cache_ptr < k_cache_end
                    and ("k_cache", "v_cache", v_cache_ptr - k_cache_ptr) not in pools.apart
                )
                or (
                    k_ptr < high
                    and (
                        k_ptr < 4194304
                        or low < k_end
                        and (k_ptr < k_cache_end and k_cache_ptr < k_end or k_ptr < v_cache_end and v_cache_ptr < k_end)
                    )
                )
                or (
                    v_ptr < high
                    and (
                        v_ptr < 4194304
                        or low < v_end
                        and (v_ptr < k_cache_end and k_cache_ptr < v_end or v_ptr < v_cache_end and v_cache_ptr < v_end)
                    )
                )
                or (
                    cache_lengths_ptr < high
                    and (
                        cache_lengths_ptr < 4194304
                        or low < cache_lengths_end
                        and (
                            cache_lengths_ptr < k_cache_end
                            and k_cache_ptr < cache_lengths_end
                            or cache_lengths_ptr < v_cache_end
                            and v_cache_ptr < cache_lengths_end
                        )
                    )
                )
            ):
                return slow((k_cache, v_cache, k, v, cache_lengths), named, pools)
            is_full = not ((k_cache_ptr | v_cache_ptr) & 15 or k_bits & (k_full - 1) or v_bits & (v_full - 1))
            if is_full:
                classes, entry = None, signature.full
            else:
                classes = (
                    (k_cache_ptr | 16) & -(k_cache_ptr | 16),
                    (v_cache_ptr | 16) & -(v_cache_ptr | 16),
                    k_bits & -k_bits,
                    v_bits & -v_bits,
                )
                entry = signature.entries.get(classes, EMPTY)
            plan = entry.value  # held until it has run, whatever becomes of the entry
            if plan is None:
                entry, plan = prepare(signature, (k_cache, v_cache, k, v, cache_lengths), classes, named)
            else:
                cache = signature.cache
                entry.used = cache.clock = cache.clock + 1
            if is_full and named == recent.own_name:
                strides = (
                    k_t0 if b > 1 else -1,
                    k_t1,
                    k_t2 if s > 1 else -1,
                    k_t3,
                    v_t0 if b > 1 else -1,
                    v_t1,
                    v_t2 if s > 1 else -1,
                    v_t3,
                )
                fast = signature.fast.get(strides)
                if fast.__class__ is not FastCall or fast.entry is not entry:
                    fast = None
                    if signature.is_due(strides):
                        numbers = (
                            int(b > 1),
                            int(s > 1),
                            k_t0 * k_size,
                            k_t2 * k_size,
                            (1 + (k_n1 - 1) * k_t1 + (k_n3 - 1) * k_t3 - k_t0 - k_t2) * k_size,
                            v_t0 * v_size,
                            v_t2 * v_size,
                            (1 + (v_n1 - 1) * v_t1 + (v_n3 - 1) * v_t3 - v_t0 - v_t2) * v_size,
                            cache_lengths_size - 1,
                            (1) * cache_lengths_size,
                            max(
                                (1 + (k_n1 - 1) * k_t1 + (k_n3 - 1) * k_t3 - k_t0 - k_t2) * k_size,
                                (1 + (v_n1 - 1) * v_t1 + (v_n3 - 1) * v_t3 - v_t0 - v_t2) * v_size,
                                (1) * cache_lengths_size,
                                0,
                            ),
                            max(k_t0 * k_size, v_t0 * v_size, 0),
                            max(k_t2 * k_size, v_t2 * v_size, 0),
                        )
                        fast = signature.settle(schema, entry, strides, numbers, (k_cache, v_cache, k, v, cache_lengths))
                if fast is not None:
                    recent.adopt(0, fast)
                    if fast.launch is not None:
                        return fast.launch(k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, cache_lengths_ptr, b, s)
            return plan.run(k_cache, v_cache, k, v, cache_lengths)
        k_size, k_full, v_size, v_full, cache_lengths_size, cache_lengths_full = signature.numbers
        b, k_n1, s, k_n3 = k.shape
        k_t0, k_t1, k_t2, k_t3 = k.stride()
        k_ptr = k.data_ptr()
        k_end = k_ptr + (1 + (b - 1) * k_t0 + (k_n1 - 1) * k_t1 + (s - 1) * k_t2 + (k_n3 - 1) * k_t3) * k_size
        k_bits = k_ptr | k_full
        if b > 1:
            k_bits |= k_t0 * k_size
        if k_n1 > 1:
            k_bits |= k_t1 * k_size
        if s > 1:
            k_bits |= k_t2 * k_size
        v_n0, v_n1, v_n2, v_n3 = v.shape
        v_t0, v_t1, v_t2, v_t3 = v.stride()
        v_ptr = v.data_ptr()
        v_end = v_ptr + (1 + (v_n0 - 1) * v_t0 + (v_n1 - 1) * v_t1 + (v_n2 - 1) * v_t2 + (v_n3 - 1) * v_t3) * v_size
        v_bits = v_ptr | v_full
        if v_n0 > 1:
            v_bits |= v_t0 * v_size
        if v_n1 > 1:
            v_bits |= v_t1 * v_size
        if v_n2 > 1:
            v_bits |= v_t2 * v_size
        (n,) = cache_lengths.shape
        (cache_lengths_t0,) = cache_lengths.stride()
        cache_lengths_ptr = cache_lengths.data_ptr()
        cache_lengths_end = cache_lengths_ptr + (1 + (n - 1) * cache_lengths_t0) * cache_lengths_size
        k_cache_extent, v_cache_extent = pools.extents
        k_cache_ptr = k_cache.data_ptr()
        k_cache_end = k_cache_ptr + k_cache_extent
        v_cache_ptr = v_cache.data_ptr()
        v_cache_end = v_cache_ptr + v_cache_extent
        low = k_cache_ptr
        if v_cache_ptr < low:
            low = v_cache_ptr
        high = k_cache_end
        if v_cache_end > high:
            high = v_cache_end
        if (
            not b
            or not s
            or not n
            or k_cache_ptr < 4194304
            or v_cache_ptr < 4194304
            or v_n0 != b
            or v_n2 != s
            or cache_lengths_ptr & (cache_lengths_size - 1)
            or not (b <= v_cache.shape[0])
            or (not (n == 1 or n == b))
            or (
                k_cache_ptr < v_cache_end
                and v_cache_ptr < k_cache_end
                and ("k_cache", "v_cache", v_cache_ptr - k_cache_ptr) not in pools.apart
            )
            or (
                k_ptr < high
                and (
                    k_ptr < 4194304
                    or low < k_end
                    and (k_ptr < k_cache_end and k_cache_ptr < k_end or k_ptr < v_cache_end and v_cache_ptr < k_end)
                )
            )
            or (
                v_ptr < high
                and (
                    v_ptr < 4194304
                    or low < v_end
                    and (v_ptr < k_cache_end and k_cache_ptr < v_end or v_ptr < v_cache_end and v_cache_ptr < v_end)
                )
            )
            or (
                cache_lengths_ptr < high
                and (
                    cache_lengths_ptr < 4194304
                    or low < cache_lengths_end
                    and (
                        cache_lengths_ptr < k_cache_end
                        and k_cache_ptr < cache_lengths_end
                        or cache_lengths_ptr < v_cache_end
                        and v_cache_ptr < cache_lengths_end
                    )
                )
            )
        ):
            return slow((k_cache, v_cache, k, v, cache_lengths), named, pools)
        is_full = not ((k_cache_ptr | v_cache_ptr) & 15 or k_bits & (k_full - 1) or v_bits & (v_full - 1))
        if is_full:
            classes, entry = None, signature.full
        else:
            classes = (
                (k_cache_ptr | 16) & -(k_cache_ptr | 16),
                (v_cache_ptr | 16) & -(v_cache_ptr | 16),
                k_bits & -k_bits,
                v_bits & -v_bits,
            )
            entry = signature.entries.get(classes, EMPTY)
        plan = entry.value  # held until it has run, whatever becomes of the entry
        if plan is None:
            entry, plan = prepare(signature, (k_cache, v_cache, k, v, cache_lengths), classes, named)
        else:
            cache = signature.cache
            entry.used = cache.clock = cache.clock + 1
        if is_full and named == recent.own_name:
            strides = (
                k_t0 if b > 1 else -1,
                k_t1,
                k_t2 if s > 1 else -1,
                k_t3,
                v_t0 if b > 1 else -1,
                v_t1,
                v_t2 if s > 1 else -1,
                v_t3,
                cache_lengths_t0 if n > 1 else -1,
            )
            fast = signature.fast.get(strides)
            if fast.__class__ is not FastCall or fast.entry is not entry:
                fast = None
                if signature.is_due(strides):
                    numbers = (
                        int(b > 1),
                        int(s > 1),
                        int(n > 1),
                        k_t0 * k_size,
                        k_t2 * k_size,
                        (1 + (k_n1 - 1) * k_t1 + (k_n3 - 1) * k_t3 - k_t0 - k_t2) * k_size,
                        v_t0 * v_size,
                        v_t2 * v_size,
                        (1 + (v_n1 - 1) * v_t1 + (v_n3 - 1) * v_t3 - v_t0 - v_t2) * v_size,
                        cache_lengths_size - 1,
                        cache_lengths_t0 * cache_lengths_size,
                        (1 - cache_lengths_t0) * cache_lengths_size,
                        max(
                            (1 + (k_n1 - 1) * k_t1 + (k_n3 - 1) * k_t3 - k_t0 - k_t2) * k_size,
                            (1 + (v_n1 - 1) * v_t1 + (v_n3 - 1) * v_t3 - v_t0 - v_t2) * v_size,
                            (1 - cache_lengths_t0) * cache_lengths_size,
                            0,
                        ),
                        max(k_t0 * k_size, v_t0 * v_size, 0),
                        max(k_t2 * k_size, v_t2 * v_size, 0),
                        max(cache_lengths_t0 * cache_lengths_size, 0),
                    )
                    fast = signature.settle(schema, entry, strides, numbers, (k_cache, v_cache, k, v, cache_lengths))
            if fast is not None:
                recent.adopt(0, fast)
                if fast.launch is not None:
                    return fast.launch(k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, cache_lengths_ptr, b, s, n)
        return plan.run(k_cache, v_cache, k, v, cache_lengths)

    def body1(recent, pools, k_cache, v_cache, k, v, cache_lengths, named):
        key = (named, 1, ())
        signature = recent.signature1
        try:
            known = pools is not None and signature.pools is pools and signature.key == key and signature.guard(k, v)
        except TypeError:  # what is no tensor
            known = False
        if not known:
            signature = find(recent, key, (k_cache, v_cache, k, v, cache_lengths))
            if signature is None:  # nothing that can be known by a guard, such as an int of a class of its own
                return slow((k_cache, v_cache, k, v, cache_lengths), named)
            pools = signature.pools
        k_size, k_full, v_size, v_full = signature.numbers
        b, k_n1, s, k_n3 = k.shape
        k_t0, k_t1, k_t2, k_t3 = k.stride()
        k_ptr = k.data_ptr()
        k_end = k_ptr + (1 + (b - 1) * k_t0 + (k_n1 - 1) * k_t1 + (s - 1) * k_t2 + (k_n3 - 1) * k_t3) * k_size
        k_bits = k_ptr | k_full
        if b > 1:
            k_bits |= k_t0 * k_size
        if k_n1 > 1:
            k_bits |= k_t1 * k_size
        if s > 1:
            k_bits |= k_t2 * k_size
        v_n0, v_n1, v_n2, v_n3 = v.shape
        v_t0, v_t1, v_t2, v_t3 = v.stride()
        v_ptr = v.data_ptr()
        v_end = v_ptr + (1 + (v_n0 - 1) * v_t0 + (v_n1 - 1) * v_t1 + (v_n2 - 1) * v_t2 + (v_n3 - 1) * v_t3) * v_size
        v_bits = v_ptr | v_full
        if v_n0 > 1:
            v_bits |= v_t0 * v_size
        if v_n1 > 1:
            v_bits |= v_t1 * v_size
        if v_n2 > 1:
            v_bits |= v_t2 * v_size
        k_cache_extent, v_cache_extent = pools.extents
        k_cache_ptr = k_cache.data_ptr()
        k_cache_end = k_cache_ptr + k_cache_extent
        v_cache_ptr = v_cache.data_ptr()
        v_cache_end = v_cache_ptr + v_cache_extent
        low = k_cache_ptr
        if v_cache_ptr < low:
            low = v_cache_ptr
        high = k_cache_end
        if v_cache_end > high:
            high = v_cache_end
        if (
            not b
            or not s
            or k_cache_ptr < 4194304
            or v_cache_ptr < 4194304
            or v_n0 != b
            or v_n2 != s
            or not (b <= v_cache.shape[0])
            or (
                k_cache_ptr < v_cache_end
                and v_cache_ptr < k_cache_end
                and ("k_cache", "v_cache", v_cache_ptr - k_cache_ptr) not in pools.apart
            )
            or (
                k_ptr < high
                and (
                    k_ptr < 4194304
                    or low < k_end
                    and (k_ptr < k_cache_end and k_cache_ptr < k_end or k_ptr < v_cache_end and v_cache_ptr < k_end)
                )
            )
            or (
                v_ptr < high
                and (
                    v_ptr < 4194304
                    or low < v_end
                    and (v_ptr < k_cache_end and k_cache_ptr < v_end or v_ptr < v_cache_end and v_cache_ptr < v_end)
                )
            )
        ):
            return slow((k_cache, v_cache, k, v, cache_lengths), named, pools)
        is_full = not ((k_cache_ptr | v_cache_ptr) & 15 or k_bits & (k_full - 1) or v_bits & (v_full - 1))
        if is_full:
            classes, entry = None, signature.full
        else:
            classes = (
                (k_cache_ptr | 16) & -(k_cache_ptr | 16),
                (v_cache_ptr | 16) & -(v_cache_ptr | 16),
                k_bits & -k_bits,
                v_bits & -v_bits,
            )
            entry = signature.entries.get(classes, EMPTY)
        plan = entry.value  # held until it has run, whatever becomes of the entry
        if plan is None:
            entry, plan = prepare(signature, (k_cache, v_cache, k, v, cache_lengths), classes, named)
        else:
            cache = signature.cache
            entry.used = cache.clock = cache.clock + 1
        if is_full and named == recent.own_name:
            strides = (k_t0 if b > 1 else -1, k_t1, k_t2 if s > 1 else -1, k_t3, v_t0 if b > 1 else -1, v_t1, v_t2 if s > 1 else -1, v_t3)
            fast = signature.fast.get(strides)
            if fast.__class__ is not FastCall or fast.entry is not entry:
                fast = None
                if signature.is_due(strides):
                    numbers = (
                        int(b > 1),
                        int(s > 1),
                        k_t0 * k_size,
                        k_t2 * k_size,
                        (1 + (k_n1 - 1) * k_t1 + (k_n3 - 1) * k_t3 - k_t0 - k_t2) * k_size,
                        v_t0 * v_size,
                        v_t2 * v_size,
                        (1 + (v_n1 - 1) * v_t1 + (v_n3 - 1) * v_t3 - v_t0 - v_t2) * v_size,
                        max(
                            (1 + (k_n1 - 1) * k_t1 + (k_n3 - 1) * k_t3 - k_t0 - k_t2) * k_size,
                            (1 + (v_n1 - 1) * v_t1 + (v_n3 - 1) * v_t3 - v_t0 - v_t2) * v_size,
                            0,
                        ),
                        max(k_t0 * k_size, v_t0 * v_size, 0),
                        max(k_t2 * k_size, v_t2 * v_size, 0),
                    )
                    fast = signature.settle(schema, entry, strides, numbers, (k_cache, v_cache, k, v, cache_lengths))
            if fast is not None:
                recent.adopt(1, fast)
                if fast.launch is not None:
                    return fast.launch(k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, b, s, cache_lengths)
        return plan.run(k_cache, v_cache, k, v, cache_lengths)

    def call(k_cache, v_cache, k, v, cache_lengths):
        try:
            if is_compiling():
                return trace((k_cache, v_cache, k, v, cache_lengths), None)
            if recording._is_fx_tracing_flag and is_intercepted((k_cache, v_cache, k, v, cache_lengths)):
                return trace((k_cache, v_cache, k, v, cache_lengths), None)
            mode = get_mode()
            if type(cache_lengths) is int:
                epoch, generation, pools, fast_calls = recent.state1
                if not (epoch == chooser.epoch and generation == settings.generation):
                    pools = None
                elif fast_calls and mode is None:
                    late = False
                    for guard, entry, launch, cache, variant, static, numbers, outputs_guard in fast_calls:
                        plan = entry.value  # held until it has run, whatever becomes of the entry
                        try:
                            same = plan is not None and guard(k_cache, v_cache, k, v)
                        except TypeError:  # what is no tensor
                            break
                        if not same:
                            late = True
                            continue
                        place = pools.places.get(k_cache.data_ptr())
                        if place is None or place[2] != v_cache.data_ptr():
                            place = pools.place(k_cache, v_cache)
                        k_cache_ptr, k_cache_end, v_cache_ptr, v_cache_end, low, high, plain = place
                        if not plain:
                            break  # the body finds out more
                        b_least, s_least, k_step0, k_step2, k_rest, v_step0, v_step2, v_rest, reach, b_reach, s_reach = numbers
                        b, k_n1, s, k_n3 = k.shape
                        v_n0, v_n1, v_n2, v_n3 = v.shape
                        k_ptr = k.data_ptr()
                        v_ptr = v.data_ptr()
                        floor = low - (reach + b * b_reach + s * s_reach)
                        if (
                            b > b_least
                            and s > s_least
                            and v_n0 == b
                            and v_n2 == s
                            and not ((k_ptr | v_ptr) & 15)
                            and (
                                (k_ptr >= high or 4194304 <= k_ptr <= floor)
                                and (v_ptr >= high or 4194304 <= v_ptr <= floor)
                                or not (
                                    (
                                        k_ptr < high
                                        and (
                                            k_ptr < 4194304
                                            or low < k_ptr + k_rest + b * k_step0 + s * k_step2
                                            and (
                                                k_ptr < k_cache_end
                                                and k_cache_ptr < k_ptr + k_rest + b * k_step0 + s * k_step2
                                                or k_ptr < v_cache_end
                                                and v_cache_ptr < k_ptr + k_rest + b * k_step0 + s * k_step2
                                            )
                                        )
                                    )
                                    or (
                                        v_ptr < high
                                        and (
                                            v_ptr < 4194304
                                            or low < v_ptr + v_rest + b * v_step0 + s * v_step2
                                            and (
                                                v_ptr < k_cache_end
                                                and k_cache_ptr < v_ptr + v_rest + b * v_step0 + s * v_step2
                                                or v_ptr < v_cache_end
                                                and v_cache_ptr < v_ptr + v_rest + b * v_step0 + s * v_step2
                                            )
                                        )
                                    )
                                )
                            )
                            and (b <= v_cache.shape[0])
                        ):
                            entry.used = cache.clock = cache.clock + 1
                            if late:
                                recent.promote(1, guard)
                            if launch is not None:
                                return launch(k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, b, s, cache_lengths)
                            return plan.run(k_cache, v_cache, k, v, cache_lengths)
                        late = True
                try:
                    if pools is not None and not pools.guard(k_cache, v_cache):
                        pools = None
                except TypeError:  # what is no tensor
                    pools = None
                named = None if mode is None else enter(mode, (k_cache, v_cache, k, v, cache_lengths), None)
                return body1(recent, pools, k_cache, v_cache, k, v, cache_lengths, named)
            epoch, generation, pools, fast_calls = recent.state0
            if not (epoch == chooser.epoch and generation == settings.generation):
                pools = None
            elif fast_calls and mode is None:
                late = False
                for guard, entry, launch, cache, variant, static, numbers, outputs_guard in fast_calls:
                    plan = entry.value  # held until it has run, whatever becomes of the entry
                    try:
                        same = plan is not None and guard(k_cache, v_cache, k, v, cache_lengths)
                    except TypeError:  # what is no tensor
                        break
                    if not same:
                        late = True
                        continue
                    place = pools.places.get(k_cache.data_ptr())
                    if place is None or place[2] != v_cache.data_ptr():
                        place = pools.place(k_cache, v_cache)
                    k_cache_ptr, k_cache_end, v_cache_ptr, v_cache_end, low, high, plain = place
                    if not plain:
                        break  # the body finds out more
                    if variant == 1:
                        (
                            b_least,
                            s_least,
                            k_step0,
                            k_step2,
                            k_rest,
                            v_step0,
                            v_step2,
                            v_rest,
                            cache_lengths_mask,
                            cache_lengths_rest,
                            reach,
                            b_reach,
                            s_reach,
                        ) = numbers
                        b, k_n1, s, k_n3 = k.shape
                        v_n0, v_n1, v_n2, v_n3 = v.shape
                        k_ptr = k.data_ptr()
                        v_ptr = v.data_ptr()
                        cache_lengths_ptr = cache_lengths.data_ptr()
                        floor = low - (reach + b * b_reach + s * s_reach)
                        if (
                            b > b_least
                            and s > s_least
                            and v_n0 == b
                            and v_n2 == s
                            and not ((k_ptr | v_ptr) & 15 or cache_lengths_ptr & cache_lengths_mask)
                            and (
                                (k_ptr >= high or 4194304 <= k_ptr <= floor)
                                and (v_ptr >= high or 4194304 <= v_ptr <= floor)
                                and (cache_lengths_ptr >= high or 4194304 <= cache_lengths_ptr <= floor)
                                or not (
                                    (
                                        k_ptr < high
                                        and (
                                            k_ptr < 4194304
                                            or low < k_ptr + k_rest + b * k_step0 + s * k_step2
                                            and (
                                                k_ptr < k_cache_end
                                                and k_cache_ptr < k_ptr + k_rest + b * k_step0 + s * k_step2
                                                or k_ptr < v_cache_end
                                                and v_cache_ptr < k_ptr + k_rest + b * k_step0 + s * k_step2
                                            )
                                        )
                                    )
                                    or (
                                        v_ptr < high
                                        and (
                                            v_ptr < 4194304
                                            or low < v_ptr + v_rest + b * v_step0 + s * v_step2
                                            and (
                                                v_ptr < k_cache_end
                                                and k_cache_ptr < v_ptr + v_rest + b * v_step0 + s * v_step2
                                                or v_ptr < v_cache_end
                                                and v_cache_ptr < v_ptr + v_rest + b * v_step0 + s * v_step2
                                            )
                                        )
                                    )
                                    or (
                                        cache_lengths_ptr < high
                                        and (
                                            cache_lengths_ptr < 4194304
                                            or low < cache_lengths_ptr + cache_lengths_rest
                                            and (
                                                cache_lengths_ptr < k_cache_end
                                                and k_cache_ptr < cache_lengths_ptr + cache_lengths_rest
                                                or cache_lengths_ptr < v_cache_end
                                                and v_cache_ptr < cache_lengths_ptr + cache_lengths_rest
                                            )
                                        )
                                    )
                                )
                            )
                            and (b <= v_cache.shape[0])
                        ):
                            entry.used = cache.clock = cache.clock + 1
                            if late:
                                recent.promote(0, guard)
                            if launch is not None:
                                return launch(k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, cache_lengths_ptr, b, s)
                            return plan.run(k_cache, v_cache, k, v, cache_lengths)
                        late = True
                        continue
                    (
                        b_least,
                        s_least,
                        n_least,
                        k_step0,
                        k_step2,
                        k_rest,
                        v_step0,
                        v_step2,
                        v_rest,
                        cache_lengths_mask,
                        cache_lengths_step0,
                        cache_lengths_rest,
                        reach,
                        b_reach,
                        s_reach,
                        n_reach,
                    ) = numbers
                    n = cache_lengths.numel()
                    b, k_n1, s, k_n3 = k.shape
                    v_n0, v_n1, v_n2, v_n3 = v.shape
                    k_ptr = k.data_ptr()
                    v_ptr = v.data_ptr()
                    cache_lengths_ptr = cache_lengths.data_ptr()
                    floor = low - (reach + b * b_reach + s * s_reach + n * n_reach)
                    if (
                        b > b_least
                        and s > s_least
                        and n > n_least
                        and v_n0 == b
                        and v_n2 == s
                        and not ((k_ptr | v_ptr) & 15 or cache_lengths_ptr & cache_lengths_mask)
                        and (
                            (k_ptr >= high or 4194304 <= k_ptr <= floor)
                            and (v_ptr >= high or 4194304 <= v_ptr <= floor)
                            and (cache_lengths_ptr >= high or 4194304 <= cache_lengths_ptr <= floor)
                            or not (
                                (
                                    k_ptr < high
                                    and (
                                        k_ptr < 4194304
                                        or low < k_ptr + k_rest + b * k_step0 + s * k_step2
                                        and (
                                            k_ptr < k_cache_end
                                            and k_cache_ptr < k_ptr + k_rest + b * k_step0 + s * k_step2
                                            or k_ptr < v_cache_end
                                            and v_cache_ptr < k_ptr + k_rest + b * k_step0 + s * k_step2
                                        )
                                    )
                                )
                                or (
                                    v_ptr < high
                                    and (
                                        v_ptr < 4194304
                                        or low < v_ptr + v_rest + b * v_step0 + s * v_step2
                                        and (
                                            v_ptr < k_cache_end
                                            and k_cache_ptr < v_ptr + v_rest + b * v_step0 + s * v_step2
                                            or v_ptr < v_cache_end
                                            and v_cache_ptr < v_ptr + v_rest + b * v_step0 + s * v_step2
                                        )
                                    )
                                )
                                or (
                                    cache_lengths_ptr < high
                                    and (
                                        cache_lengths_ptr < 4194304
                                        or low < cache_lengths_ptr + cache_lengths_rest + n * cache_lengths_step0
                                        and (
                                            cache_lengths_ptr < k_cache_end
                                            and k_cache_ptr < cache_lengths_ptr + cache_lengths_rest + n * cache_lengths_step0
                                            or cache_lengths_ptr < v_cache_end
                                            and v_cache_ptr < cache_lengths_ptr + cache_lengths_rest + n * cache_lengths_step0
                                        )
                                    )
                                )
                            )
                        )
                        and (b <= v_cache.shape[0])
                        and (n == 1 or n == b)
                    ):
                        entry.used = cache.clock = cache.clock + 1
                        if late:
                            recent.promote(0, guard)
                        if launch is not None:
                            return launch(k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, cache_lengths_ptr, b, s, n)
                        return plan.run(k_cache, v_cache, k, v, cache_lengths)
                    late = True
            try:
                if pools is not None and not pools.guard(k_cache, v_cache):
                    pools = None
            except TypeError:  # what is no tensor
                pools = None
            named = None if mode is None else enter(mode, (k_cache, v_cache, k, v, cache_lengths), None)
            return body0(recent, pools, k_cache, v_cache, k, v, cache_lengths, named)
        except Exception as error:  # free until something is raised
            blame(error, (k_cache, v_cache, k, v, cache_lengths), None)
            raise

    def bound_call(bound, k, v, cache_lengths):
        recent, own_name = bound.recent, bound.own_name
        k_cache, v_cache, k_cache_ptr, k_cache_end, v_cache_ptr, v_cache_end, low, high = bound.fixed
        try:
            if is_compiling():
                k_cache, v_cache = bound.traced_pools()
                trace((k_cache, v_cache, k, v, cache_lengths), own_name)
                return k_cache, v_cache
            if recording._is_fx_tracing_flag and is_intercepted((k_cache, v_cache, k, v, cache_lengths)):
                return trace((k_cache, v_cache, k, v, cache_lengths), own_name)
            mode = get_mode()
            if type(cache_lengths) is int:
                epoch, generation, pools, fast_calls = recent.state1
                if not (epoch == chooser.epoch and generation == settings.generation):
                    pools = None
                elif fast_calls and mode is None:
                    late = False
                    for guard, entry, launch, cache, variant, static, numbers, outputs_guard in fast_calls:
                        plan = entry.value  # held until it has run, whatever becomes of the entry
                        try:
                            same = plan is not None and guard(k, v)
                        except TypeError:  # what is no tensor
                            break
                        if not same:
                            late = True
                            continue
                        b_least, s_least, k_step0, k_step2, k_rest, v_step0, v_step2, v_rest, reach, b_reach, s_reach = numbers
                        b, k_n1, s, k_n3 = k.shape
                        v_n0, v_n1, v_n2, v_n3 = v.shape
                        k_ptr = k.data_ptr()
                        v_ptr = v.data_ptr()
                        floor = low - (reach + b * b_reach + s * s_reach)
                        if (
                            b > b_least
                            and s > s_least
                            and v_n0 == b
                            and v_n2 == s
                            and not ((k_ptr | v_ptr) & 15)
                            and (
                                (k_ptr >= high or 4194304 <= k_ptr <= floor)
                                and (v_ptr >= high or 4194304 <= v_ptr <= floor)
                                or not (
                                    (
                                        k_ptr < high
                                        and (
                                            k_ptr < 4194304
                                            or low < k_ptr + k_rest + b * k_step0 + s * k_step2
                                            and (
                                                k_ptr < k_cache_end
                                                and k_cache_ptr < k_ptr + k_rest + b * k_step0 + s * k_step2
                                                or k_ptr < v_cache_end
                                                and v_cache_ptr < k_ptr + k_rest + b * k_step0 + s * k_step2
                                            )
                                        )
                                    )
                                    or (
                                        v_ptr < high
                                        and (
                                            v_ptr < 4194304
                                            or low < v_ptr + v_rest + b * v_step0 + s * v_step2
                                            and (
                                                v_ptr < k_cache_end
                                                and k_cache_ptr < v_ptr + v_rest + b * v_step0 + s * v_step2
                                                or v_ptr < v_cache_end
                                                and v_cache_ptr < v_ptr + v_rest + b * v_step0 + s * v_step2
                                            )
                                        )
                                    )
                                )
                            )
                            and (b <= v_cache.shape[0])
                        ):
                            entry.used = cache.clock = cache.clock + 1
                            if late:
                                recent.promote(1, guard)
                            if launch is not None:
                                return launch(k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, b, s, cache_lengths)
                            return plan.run(k_cache, v_cache, k, v, cache_lengths)
                        late = True
                named = own_name if mode is None else enter(mode, (k_cache, v_cache, k, v, cache_lengths), own_name)
                return body1(recent, pools, k_cache, v_cache, k, v, cache_lengths, named)
            epoch, generation, pools, fast_calls = recent.state0
            if not (epoch == chooser.epoch and generation == settings.generation):
                pools = None
            elif fast_calls and mode is None:
                late = False
                for guard, entry, launch, cache, variant, static, numbers, outputs_guard in fast_calls:
                    plan = entry.value  # held until it has run, whatever becomes of the entry
                    try:
                        same = plan is not None and guard(k, v, cache_lengths)
                    except TypeError:  # what is no tensor
                        break
                    if not same:
                        late = True
                        continue
                    if variant == 1:
                        (
                            b_least,
                            s_least,
                            k_step0,
                            k_step2,
                            k_rest,
                            v_step0,
                            v_step2,
                            v_rest,
                            cache_lengths_mask,
                            cache_lengths_rest,
                            reach,
                            b_reach,
                            s_reach,
                        ) = numbers
                        b, k_n1, s, k_n3 = k.shape
                        v_n0, v_n1, v_n2, v_n3 = v.shape
                        k_ptr = k.data_ptr()
                        v_ptr = v.data_ptr()
                        cache_lengths_ptr = cache_lengths.data_ptr()
                        floor = low - (reach + b * b_reach + s * s_reach)
                        if (
                            b > b_least
                            and s > s_least
                            and v_n0 == b
                            and v_n2 == s
                            and not ((k_ptr | v_ptr) & 15 or cache_lengths_ptr & cache_lengths_mask)
                            and (
                                (k_ptr >= high or 4194304 <= k_ptr <= floor)
                                and (v_ptr >= high or 4194304 <= v_ptr <= floor)
                                and (cache_lengths_ptr >= high or 4194304 <= cache_lengths_ptr <= floor)
                                or not (
                                    (
                                        k_ptr < high
                                        and (
                                            k_ptr < 4194304
                                            or low < k_ptr + k_rest + b * k_step0 + s * k_step2
                                            and (
                                                k_ptr < k_cache_end
                                                and k_cache_ptr < k_ptr + k_rest + b * k_step0 + s * k_step2
                                                or k_ptr < v_cache_end
                                                and v_cache_ptr < k_ptr + k_rest + b * k_step0 + s * k_step2
                                            )
                                        )
                                    )
                                    or (
                                        v_ptr < high
                                        and (
                                            v_ptr < 4194304
                                            or low < v_ptr + v_rest + b * v_step0 + s * v_step2
                                            and (
                                                v_ptr < k_cache_end
                                                and k_cache_ptr < v_ptr + v_rest + b * v_step0 + s * v_step2
                                                or v_ptr < v_cache_end
                                                and v_cache_ptr < v_ptr + v_rest + b * v_step0 + s * v_step2
                                            )
                                        )
                                    )
                                    or (
                                        cache_lengths_ptr < high
                                        and (
                                            cache_lengths_ptr < 4194304
                                            or low < cache_lengths_ptr + cache_lengths_rest
                                            and (
                                                cache_lengths_ptr < k_cache_end
                                                and k_cache_ptr < cache_lengths_ptr + cache_lengths_rest
                                                or cache_lengths_ptr < v_cache_end
                                                and v_cache_ptr < cache_lengths_ptr + cache_lengths_rest
                                            )
                                        )
                                    )
                                )
                            )
                            and (b <= v_cache.shape[0])
                        ):
                            entry.used = cache.clock = cache.clock + 1
                            if late:
                                recent.promote(0, guard)
                            if launch is not None:
                                return launch(k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, cache_lengths_ptr, b, s)
                            return plan.run(k_cache, v_cache, k, v, cache_lengths)
                        late = True
                        continue
                    (
                        b_least,
                        s_least,
                        n_least,
                        k_step0,
                        k_step2,
                        k_rest,
                        v_step0,
                        v_step2,
                        v_rest,
                        cache_lengths_mask,
                        cache_lengths_step0,
                        cache_lengths_rest,
                        reach,
                        b_reach,
                        s_reach,
                        n_reach,
                    ) = numbers
                    n = cache_lengths.numel()
                    b, k_n1, s, k_n3 = k.shape
                    v_n0, v_n1, v_n2, v_n3 = v.shape
                    k_ptr = k.data_ptr()
                    v_ptr = v.data_ptr()
                    cache_lengths_ptr = cache_lengths.data_ptr()
                    floor = low - (reach + b * b_reach + s * s_reach + n * n_reach)
                    if (
                        b > b_least
                        and s > s_least
                        and n > n_least
                        and v_n0 == b
                        and v_n2 == s
                        and not ((k_ptr | v_ptr) & 15 or cache_lengths_ptr & cache_lengths_mask)
                        and (
                            (k_ptr >= high or 4194304 <= k_ptr <= floor)
                            and (v_ptr >= high or 4194304 <= v_ptr <= floor)
                            and (cache_lengths_ptr >= high or 4194304 <= cache_lengths_ptr <= floor)
                            or not (
                                (
                                    k_ptr < high
                                    and (
                                        k_ptr < 4194304
                                        or low < k_ptr + k_rest + b * k_step0 + s * k_step2
                                        and (
                                            k_ptr < k_cache_end
                                            and k_cache_ptr < k_ptr + k_rest + b * k_step0 + s * k_step2
                                            or k_ptr < v_cache_end
                                            and v_cache_ptr < k_ptr + k_rest + b * k_step0 + s * k_step2
                                        )
                                    )
                                )
                                or (
                                    v_ptr < high
                                    and (
                                        v_ptr < 4194304
                                        or low < v_ptr + v_rest + b * v_step0 + s * v_step2
                                        and (
                                            v_ptr < k_cache_end
                                            and k_cache_ptr < v_ptr + v_rest + b * v_step0 + s * v_step2
                                            or v_ptr < v_cache_end
                                            and v_cache_ptr < v_ptr + v_rest + b * v_step0 + s * v_step2
                                        )
                                    )
                                )
                                or (
                                    cache_lengths_ptr < high
                                    and (
                                        cache_lengths_ptr < 4194304
                                        or low < cache_lengths_ptr + cache_lengths_rest + n * cache_lengths_step0
                                        and (
                                            cache_lengths_ptr < k_cache_end
                                            and k_cache_ptr < cache_lengths_ptr + cache_lengths_rest + n * cache_lengths_step0
                                            or cache_lengths_ptr < v_cache_end
                                            and v_cache_ptr < cache_lengths_ptr + cache_lengths_rest + n * cache_lengths_step0
                                        )
                                    )
                                )
                            )
                        )
                        and (b <= v_cache.shape[0])
                        and (n == 1 or n == b)
                    ):
                        entry.used = cache.clock = cache.clock + 1
                        if late:
                            recent.promote(0, guard)
                        if launch is not None:
                            return launch(k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, cache_lengths_ptr, b, s, n)
                        return plan.run(k_cache, v_cache, k, v, cache_lengths)
                    late = True
            named = own_name if mode is None else enter(mode, (k_cache, v_cache, k, v, cache_lengths), own_name)
            return body0(recent, pools, k_cache, v_cache, k, v, cache_lengths, named)
        except Exception as error:  # free until something is raised
            blame(error, (k_cache, v_cache, k, v, cache_lengths), own_name)
            raise

    return call, bound_call
