"""The quick path of `paged_caching_`. Written by ``make calls`` from its schema: see `kvdock.ops.calls.writer`, and do not edit it."""

from kvdock.ops.signatures import EMPTY, FastCall

__all__ = ["make"]


def make(op):
    """Return the op as a function of all its arguments, and as one of a `BoundOp` and the rest."""
    is_compiling, recording, is_intercepted, trace = op.is_compiling, op.recording, op.is_intercepted, op.trace
    get_mode, enter = op.get_mode, op.enter
    recent, chooser, settings, schema = op.recent, op.chooser, op.settings, op.schema
    find, prepare, slow, blame = op.find, op.prepare, op.run_slowly, op.blame

    def body0(recent, pools, k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale, named):
        key = (named, 0, (), k_scale is None, v_scale is None)
        signature = recent.signature0
        try:
            known = (
                pools is not None
                and signature.pools is pools
                and signature.key == key
                and signature.guard(k, v, slot_mapping)
                and (signature.optional is None or signature.optional.accept((k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale)))
            )
        except TypeError:  # what is no tensor
            known = False
        if not known:
            signature = find(recent, key, (k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale))
            if signature is None:  # nothing that can be known by a guard, such as an int of a class of its own
                return slow((k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), named)
            pools = signature.pools
        if signature.variant == 0:
            k_size, k_full, v_size, v_full, slot_mapping_size, slot_mapping_full = signature.numbers
            lead0, k_n1, k_n2 = k.shape
            k_t0, k_t1, k_t2 = k.stride()
            k_ptr = k.data_ptr()
            k_end = k_ptr + (1 + (lead0 - 1) * k_t0 + (k_n1 - 1) * k_t1 + (k_n2 - 1) * k_t2) * k_size
            k_bits = k_ptr | k_full
            if lead0 > 1:
                k_bits |= k_t0 * k_size
            if k_n1 > 1:
                k_bits |= k_t1 * k_size
            v_n0, v_n1, v_n2 = v.shape
            v_t0, v_t1, v_t2 = v.stride()
            v_ptr = v.data_ptr()
            v_end = v_ptr + (1 + (v_n0 - 1) * v_t0 + (v_n1 - 1) * v_t1 + (v_n2 - 1) * v_t2) * v_size
            v_bits = v_ptr | v_full
            if v_n0 > 1:
                v_bits |= v_t0 * v_size
            if v_n1 > 1:
                v_bits |= v_t1 * v_size
            (slot_mapping_n0,) = slot_mapping.shape
            (slot_mapping_t0,) = slot_mapping.stride()
            slot_mapping_ptr = slot_mapping.data_ptr()
            slot_mapping_end = slot_mapping_ptr + (1 + (slot_mapping_n0 - 1) * slot_mapping_t0) * slot_mapping_size
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
                not lead0
                or k_cache_ptr < 4194304
                or v_cache_ptr < 4194304
                or v_n0 != lead0
                or slot_mapping_n0 != lead0
                or slot_mapping_ptr & (slot_mapping_size - 1)
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
                    slot_mapping_ptr < high
                    and (
                        slot_mapping_ptr < 4194304
                        or low < slot_mapping_end
                        and (
                            slot_mapping_ptr < k_cache_end
                            and k_cache_ptr < slot_mapping_end
                            or slot_mapping_ptr < v_cache_end
                            and v_cache_ptr < slot_mapping_end
                        )
                    )
                )
            ):
                return slow((k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), named, pools)
            is_full = not ((k_cache_ptr | v_cache_ptr) & 15 or k_bits & (k_full - 1) or v_bits & (v_full - 1))
            more = ()
            if signature.optional is not None:
                is_full = False
                more = signature.optional.read((k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), {"lead0": lead0}, low, high)
                if more is None:
                    return slow((k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), named)
            if is_full:
                classes, entry = None, signature.full
            else:
                classes = (
                    (k_cache_ptr | 16) & -(k_cache_ptr | 16),
                    (v_cache_ptr | 16) & -(v_cache_ptr | 16),
                    k_bits & -k_bits,
                    v_bits & -v_bits,
                    *more,
                )
                entry = signature.entries.get(classes, EMPTY)
            plan = entry.value  # held until it has run, whatever becomes of the entry
            if plan is None:
                entry, plan = prepare(signature, (k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), classes, named)
            else:
                cache = signature.cache
                entry.used = cache.clock = cache.clock + 1
            if is_full and named == recent.own_name:
                strides = (
                    k_t0 if lead0 > 1 else -1,
                    k_t1,
                    k_t2,
                    v_t0 if lead0 > 1 else -1,
                    v_t1,
                    v_t2,
                    slot_mapping_t0 if lead0 > 1 else -1,
                )
                fast = signature.fast.get(strides)
                if fast.__class__ is not FastCall or fast.entry is not entry:
                    fast = None
                    if signature.is_due(strides):
                        numbers = (
                            int(lead0 > 1),
                            k_n1 * k_n2,
                            k_t0 * k_size,
                            (1 + (k_n1 - 1) * k_t1 + (k_n2 - 1) * k_t2 - k_t0) * k_size,
                            v_n1 * v_n2,
                            v_t0 * v_size,
                            (1 + (v_n1 - 1) * v_t1 + (v_n2 - 1) * v_t2 - v_t0) * v_size,
                            slot_mapping_size - 1,
                            slot_mapping_t0 * slot_mapping_size,
                            (1 - slot_mapping_t0) * slot_mapping_size,
                            max(
                                (1 + (k_n1 - 1) * k_t1 + (k_n2 - 1) * k_t2 - k_t0) * k_size,
                                (1 + (v_n1 - 1) * v_t1 + (v_n2 - 1) * v_t2 - v_t0) * v_size,
                                (1 - slot_mapping_t0) * slot_mapping_size,
                                0,
                            ),
                            max(k_t0 * k_size, v_t0 * v_size, slot_mapping_t0 * slot_mapping_size, 0),
                        )
                        fast = signature.settle(schema, entry, strides, numbers, (k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale))
                if fast is not None:
                    recent.adopt(0, fast)
                    if fast.launch is not None:
                        return fast.launch(k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, slot_mapping_ptr, lead0)
            return plan.run(k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale)
        k_size, k_full, v_size, v_full, slot_mapping_size, slot_mapping_full = signature.numbers
        lead0, lead1, k_n2, k_n3 = k.shape
        k_t0, k_t1, k_t2, k_t3 = k.stride()
        k_ptr = k.data_ptr()
        k_end = k_ptr + (1 + (lead0 - 1) * k_t0 + (lead1 - 1) * k_t1 + (k_n2 - 1) * k_t2 + (k_n3 - 1) * k_t3) * k_size
        k_bits = k_ptr | k_full
        if lead0 > 1:
            k_bits |= k_t0 * k_size
        if lead1 > 1:
            k_bits |= k_t1 * k_size
        if k_n2 > 1:
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
        slot_mapping_n0, slot_mapping_n1 = slot_mapping.shape
        slot_mapping_t0, slot_mapping_t1 = slot_mapping.stride()
        slot_mapping_ptr = slot_mapping.data_ptr()
        slot_mapping_end = (
            slot_mapping_ptr + (1 + (slot_mapping_n0 - 1) * slot_mapping_t0 + (slot_mapping_n1 - 1) * slot_mapping_t1) * slot_mapping_size
        )
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
            not lead0
            or not lead1
            or k_cache_ptr < 4194304
            or v_cache_ptr < 4194304
            or v_n0 != lead0
            or v_n1 != lead1
            or slot_mapping_n0 != lead0
            or slot_mapping_n1 != lead1
            or slot_mapping_ptr & (slot_mapping_size - 1)
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
                slot_mapping_ptr < high
                and (
                    slot_mapping_ptr < 4194304
                    or low < slot_mapping_end
                    and (
                        slot_mapping_ptr < k_cache_end
                        and k_cache_ptr < slot_mapping_end
                        or slot_mapping_ptr < v_cache_end
                        and v_cache_ptr < slot_mapping_end
                    )
                )
            )
        ):
            return slow((k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), named, pools)
        is_full = not ((k_cache_ptr | v_cache_ptr) & 15 or k_bits & (k_full - 1) or v_bits & (v_full - 1))
        more = ()
        if signature.optional is not None:
            is_full = False
            more = signature.optional.read(
                (k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), {"lead0": lead0, "lead1": lead1}, low, high
            )
            if more is None:
                return slow((k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), named)
        if is_full:
            classes, entry = None, signature.full
        else:
            classes = (
                (k_cache_ptr | 16) & -(k_cache_ptr | 16),
                (v_cache_ptr | 16) & -(v_cache_ptr | 16),
                k_bits & -k_bits,
                v_bits & -v_bits,
                *more,
            )
            entry = signature.entries.get(classes, EMPTY)
        plan = entry.value  # held until it has run, whatever becomes of the entry
        if plan is None:
            entry, plan = prepare(signature, (k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), classes, named)
        else:
            cache = signature.cache
            entry.used = cache.clock = cache.clock + 1
        if is_full and named == recent.own_name:
            strides = (
                k_t0 if lead0 > 1 else -1,
                k_t1 if lead1 > 1 else -1,
                k_t2,
                k_t3,
                v_t0 if lead0 > 1 else -1,
                v_t1 if lead1 > 1 else -1,
                v_t2,
                v_t3,
                slot_mapping_t0 if lead0 > 1 else -1,
                slot_mapping_t1 if lead1 > 1 else -1,
            )
            fast = signature.fast.get(strides)
            if fast.__class__ is not FastCall or fast.entry is not entry:
                fast = None
                if signature.is_due(strides):
                    numbers = (
                        int(lead0 > 1),
                        int(lead1 > 1),
                        k_t0 * k_size,
                        k_t1 * k_size,
                        (1 + (k_n2 - 1) * k_t2 + (k_n3 - 1) * k_t3 - k_t0 - k_t1) * k_size,
                        v_t0 * v_size,
                        v_t1 * v_size,
                        (1 + (v_n2 - 1) * v_t2 + (v_n3 - 1) * v_t3 - v_t0 - v_t1) * v_size,
                        slot_mapping_size - 1,
                        slot_mapping_t0 * slot_mapping_size,
                        slot_mapping_t1 * slot_mapping_size,
                        (1 - slot_mapping_t0 - slot_mapping_t1) * slot_mapping_size,
                        max(
                            (1 + (k_n2 - 1) * k_t2 + (k_n3 - 1) * k_t3 - k_t0 - k_t1) * k_size,
                            (1 + (v_n2 - 1) * v_t2 + (v_n3 - 1) * v_t3 - v_t0 - v_t1) * v_size,
                            (1 - slot_mapping_t0 - slot_mapping_t1) * slot_mapping_size,
                            0,
                        ),
                        max(k_t0 * k_size, v_t0 * v_size, slot_mapping_t0 * slot_mapping_size, 0),
                        max(k_t1 * k_size, v_t1 * v_size, slot_mapping_t1 * slot_mapping_size, 0),
                    )
                    fast = signature.settle(schema, entry, strides, numbers, (k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale))
            if fast is not None:
                recent.adopt(0, fast)
                if fast.launch is not None:
                    return fast.launch(k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, slot_mapping_ptr, lead0, lead1)
        return plan.run(k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale)

    def call(k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale):
        try:
            if is_compiling():
                return trace((k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), None)
            if recording._is_fx_tracing_flag and is_intercepted((k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale)):
                return trace((k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), None)
            mode = get_mode()
            epoch, generation, pools, fast_calls = recent.state0
            if not (epoch == chooser.epoch and generation == settings.generation):
                pools = None
            elif fast_calls and mode is None and k_scale is None and v_scale is None:
                late = False
                for guard, entry, launch, cache, variant, static, numbers, outputs_guard in fast_calls:
                    plan = entry.value  # held until it has run, whatever becomes of the entry
                    try:
                        same = plan is not None and guard(k_cache, v_cache, k, v, slot_mapping)
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
                    if variant == 0:
                        (
                            lead0_least,
                            k_row,
                            k_step0,
                            k_rest,
                            v_row,
                            v_step0,
                            v_rest,
                            slot_mapping_mask,
                            slot_mapping_step0,
                            slot_mapping_rest,
                            reach,
                            lead0_reach,
                        ) = numbers
                        lead0 = slot_mapping.numel()
                        k_ptr = k.data_ptr()
                        v_ptr = v.data_ptr()
                        slot_mapping_ptr = slot_mapping.data_ptr()
                        floor = low - (reach + lead0 * lead0_reach)
                        if (
                            lead0 > lead0_least
                            and k.numel() == lead0 * k_row
                            and v.numel() == lead0 * v_row
                            and not ((k_ptr | v_ptr) & 15 or slot_mapping_ptr & slot_mapping_mask)
                            and (
                                (k_ptr >= high or 4194304 <= k_ptr <= floor)
                                and (v_ptr >= high or 4194304 <= v_ptr <= floor)
                                and (slot_mapping_ptr >= high or 4194304 <= slot_mapping_ptr <= floor)
                                or not (
                                    (
                                        k_ptr < high
                                        and (
                                            k_ptr < 4194304
                                            or low < k_ptr + k_rest + lead0 * k_step0
                                            and (
                                                k_ptr < k_cache_end
                                                and k_cache_ptr < k_ptr + k_rest + lead0 * k_step0
                                                or k_ptr < v_cache_end
                                                and v_cache_ptr < k_ptr + k_rest + lead0 * k_step0
                                            )
                                        )
                                    )
                                    or (
                                        v_ptr < high
                                        and (
                                            v_ptr < 4194304
                                            or low < v_ptr + v_rest + lead0 * v_step0
                                            and (
                                                v_ptr < k_cache_end
                                                and k_cache_ptr < v_ptr + v_rest + lead0 * v_step0
                                                or v_ptr < v_cache_end
                                                and v_cache_ptr < v_ptr + v_rest + lead0 * v_step0
                                            )
                                        )
                                    )
                                    or (
                                        slot_mapping_ptr < high
                                        and (
                                            slot_mapping_ptr < 4194304
                                            or low < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                            and (
                                                slot_mapping_ptr < k_cache_end
                                                and k_cache_ptr < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                                or slot_mapping_ptr < v_cache_end
                                                and v_cache_ptr < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                            )
                                        )
                                    )
                                )
                            )
                        ):
                            entry.used = cache.clock = cache.clock + 1
                            if late:
                                recent.promote(0, guard)
                            if launch is not None:
                                return launch(k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, slot_mapping_ptr, lead0)
                            return plan.run(k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale)
                        late = True
                        continue
                    (
                        lead0_least,
                        lead1_least,
                        k_step0,
                        k_step1,
                        k_rest,
                        v_step0,
                        v_step1,
                        v_rest,
                        slot_mapping_mask,
                        slot_mapping_step0,
                        slot_mapping_step1,
                        slot_mapping_rest,
                        reach,
                        lead0_reach,
                        lead1_reach,
                    ) = numbers
                    lead0, lead1 = slot_mapping.shape
                    k_n0, k_n1, k_n2, k_n3 = k.shape
                    v_n0, v_n1, v_n2, v_n3 = v.shape
                    k_ptr = k.data_ptr()
                    v_ptr = v.data_ptr()
                    slot_mapping_ptr = slot_mapping.data_ptr()
                    floor = low - (reach + lead0 * lead0_reach + lead1 * lead1_reach)
                    if (
                        lead0 > lead0_least
                        and lead1 > lead1_least
                        and k_n0 == lead0
                        and k_n1 == lead1
                        and v_n0 == lead0
                        and v_n1 == lead1
                        and not ((k_ptr | v_ptr) & 15 or slot_mapping_ptr & slot_mapping_mask)
                        and (
                            (k_ptr >= high or 4194304 <= k_ptr <= floor)
                            and (v_ptr >= high or 4194304 <= v_ptr <= floor)
                            and (slot_mapping_ptr >= high or 4194304 <= slot_mapping_ptr <= floor)
                            or not (
                                (
                                    k_ptr < high
                                    and (
                                        k_ptr < 4194304
                                        or low < k_ptr + k_rest + lead0 * k_step0 + lead1 * k_step1
                                        and (
                                            k_ptr < k_cache_end
                                            and k_cache_ptr < k_ptr + k_rest + lead0 * k_step0 + lead1 * k_step1
                                            or k_ptr < v_cache_end
                                            and v_cache_ptr < k_ptr + k_rest + lead0 * k_step0 + lead1 * k_step1
                                        )
                                    )
                                )
                                or (
                                    v_ptr < high
                                    and (
                                        v_ptr < 4194304
                                        or low < v_ptr + v_rest + lead0 * v_step0 + lead1 * v_step1
                                        and (
                                            v_ptr < k_cache_end
                                            and k_cache_ptr < v_ptr + v_rest + lead0 * v_step0 + lead1 * v_step1
                                            or v_ptr < v_cache_end
                                            and v_cache_ptr < v_ptr + v_rest + lead0 * v_step0 + lead1 * v_step1
                                        )
                                    )
                                )
                                or (
                                    slot_mapping_ptr < high
                                    and (
                                        slot_mapping_ptr < 4194304
                                        or low
                                        < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                        and (
                                            slot_mapping_ptr < k_cache_end
                                            and k_cache_ptr
                                            < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                            or slot_mapping_ptr < v_cache_end
                                            and v_cache_ptr
                                            < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                        )
                                    )
                                )
                            )
                        )
                    ):
                        entry.used = cache.clock = cache.clock + 1
                        if late:
                            recent.promote(0, guard)
                        if launch is not None:
                            return launch(k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, slot_mapping_ptr, lead0, lead1)
                        return plan.run(k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale)
                    late = True
            try:
                if pools is not None and not pools.guard(k_cache, v_cache):
                    pools = None
            except TypeError:  # what is no tensor
                pools = None
            named = None if mode is None else enter(mode, (k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), None)
            return body0(recent, pools, k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale, named)
        except Exception as error:  # free until something is raised
            blame(error, (k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), None)
            raise

    def bound_call(bound, k, v, slot_mapping, k_scale, v_scale):
        recent, own_name = bound.recent, bound.own_name
        k_cache, v_cache, k_cache_ptr, k_cache_end, v_cache_ptr, v_cache_end, low, high = bound.fixed
        try:
            if is_compiling():
                k_cache, v_cache = bound.traced_pools()
                trace((k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), own_name)
                return k_cache, v_cache
            if recording._is_fx_tracing_flag and is_intercepted((k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale)):
                return trace((k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), own_name)
            mode = get_mode()
            epoch, generation, pools, fast_calls = recent.state0
            if not (epoch == chooser.epoch and generation == settings.generation):
                pools = None
            elif fast_calls and mode is None and k_scale is None and v_scale is None:
                late = False
                for guard, entry, launch, cache, variant, static, numbers, outputs_guard in fast_calls:
                    plan = entry.value  # held until it has run, whatever becomes of the entry
                    try:
                        same = plan is not None and guard(k, v, slot_mapping)
                    except TypeError:  # what is no tensor
                        break
                    if not same:
                        late = True
                        continue
                    if variant == 0:
                        (
                            lead0_least,
                            k_row,
                            k_step0,
                            k_rest,
                            v_row,
                            v_step0,
                            v_rest,
                            slot_mapping_mask,
                            slot_mapping_step0,
                            slot_mapping_rest,
                            reach,
                            lead0_reach,
                        ) = numbers
                        lead0 = slot_mapping.numel()
                        k_ptr = k.data_ptr()
                        v_ptr = v.data_ptr()
                        slot_mapping_ptr = slot_mapping.data_ptr()
                        floor = low - (reach + lead0 * lead0_reach)
                        if (
                            lead0 > lead0_least
                            and k.numel() == lead0 * k_row
                            and v.numel() == lead0 * v_row
                            and not ((k_ptr | v_ptr) & 15 or slot_mapping_ptr & slot_mapping_mask)
                            and (
                                (k_ptr >= high or 4194304 <= k_ptr <= floor)
                                and (v_ptr >= high or 4194304 <= v_ptr <= floor)
                                and (slot_mapping_ptr >= high or 4194304 <= slot_mapping_ptr <= floor)
                                or not (
                                    (
                                        k_ptr < high
                                        and (
                                            k_ptr < 4194304
                                            or low < k_ptr + k_rest + lead0 * k_step0
                                            and (
                                                k_ptr < k_cache_end
                                                and k_cache_ptr < k_ptr + k_rest + lead0 * k_step0
                                                or k_ptr < v_cache_end
                                                and v_cache_ptr < k_ptr + k_rest + lead0 * k_step0
                                            )
                                        )
                                    )
                                    or (
                                        v_ptr < high
                                        and (
                                            v_ptr < 4194304
                                            or low < v_ptr + v_rest + lead0 * v_step0
                                            and (
                                                v_ptr < k_cache_end
                                                and k_cache_ptr < v_ptr + v_rest + lead0 * v_step0
                                                or v_ptr < v_cache_end
                                                and v_cache_ptr < v_ptr + v_rest + lead0 * v_step0
                                            )
                                        )
                                    )
                                    or (
                                        slot_mapping_ptr < high
                                        and (
                                            slot_mapping_ptr < 4194304
                                            or low < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                            and (
                                                slot_mapping_ptr < k_cache_end
                                                and k_cache_ptr < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                                or slot_mapping_ptr < v_cache_end
                                                and v_cache_ptr < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                            )
                                        )
                                    )
                                )
                            )
                        ):
                            entry.used = cache.clock = cache.clock + 1
                            if late:
                                recent.promote(0, guard)
                            if launch is not None:
                                return launch(k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, slot_mapping_ptr, lead0)
                            return plan.run(k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale)
                        late = True
                        continue
                    (
                        lead0_least,
                        lead1_least,
                        k_step0,
                        k_step1,
                        k_rest,
                        v_step0,
                        v_step1,
                        v_rest,
                        slot_mapping_mask,
                        slot_mapping_step0,
                        slot_mapping_step1,
                        slot_mapping_rest,
                        reach,
                        lead0_reach,
                        lead1_reach,
                    ) = numbers
                    lead0, lead1 = slot_mapping.shape
                    k_n0, k_n1, k_n2, k_n3 = k.shape
                    v_n0, v_n1, v_n2, v_n3 = v.shape
                    k_ptr = k.data_ptr()
                    v_ptr = v.data_ptr()
                    slot_mapping_ptr = slot_mapping.data_ptr()
                    floor = low - (reach + lead0 * lead0_reach + lead1 * lead1_reach)
                    if (
                        lead0 > lead0_least
                        and lead1 > lead1_least
                        and k_n0 == lead0
                        and k_n1 == lead1
                        and v_n0 == lead0
                        and v_n1 == lead1
                        and not ((k_ptr | v_ptr) & 15 or slot_mapping_ptr & slot_mapping_mask)
                        and (
                            (k_ptr >= high or 4194304 <= k_ptr <= floor)
                            and (v_ptr >= high or 4194304 <= v_ptr <= floor)
                            and (slot_mapping_ptr >= high or 4194304 <= slot_mapping_ptr <= floor)
                            or not (
                                (
                                    k_ptr < high
                                    and (
                                        k_ptr < 4194304
                                        or low < k_ptr + k_rest + lead0 * k_step0 + lead1 * k_step1
                                        and (
                                            k_ptr < k_cache_end
                                            and k_cache_ptr < k_ptr + k_rest + lead0 * k_step0 + lead1 * k_step1
                                            or k_ptr < v_cache_end
                                            and v_cache_ptr < k_ptr + k_rest + lead0 * k_step0 + lead1 * k_step1
                                        )
                                    )
                                )
                                or (
                                    v_ptr < high
                                    and (
                                        v_ptr < 4194304
                                        or low < v_ptr + v_rest + lead0 * v_step0 + lead1 * v_step1
                                        and (
                                            v_ptr < k_cache_end
                                            and k_cache_ptr < v_ptr + v_rest + lead0 * v_step0 + lead1 * v_step1
                                            or v_ptr < v_cache_end
                                            and v_cache_ptr < v_ptr + v_rest + lead0 * v_step0 + lead1 * v_step1
                                        )
                                    )
                                )
                                or (
                                    slot_mapping_ptr < high
                                    and (
                                        slot_mapping_ptr < 4194304
                                        or low
                                        < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                        and (
                                            slot_mapping_ptr < k_cache_end
                                            and k_cache_ptr
                                            < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                            or slot_mapping_ptr < v_cache_end
                                            and v_cache_ptr
                                            < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                        )
                                    )
                                )
                            )
                        )
                    ):
                        entry.used = cache.clock = cache.clock + 1
                        if late:
                            recent.promote(0, guard)
                        if launch is not None:
                            return launch(k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, slot_mapping_ptr, lead0, lead1)
                        return plan.run(k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale)
                    late = True
            named = own_name if mode is None else enter(mode, (k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), own_name)
            return body0(recent, pools, k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale, named)
        except Exception as error:  # free until something is raised
            blame(error, (k_cache, v_cache, k, v, slot_mapping, k_scale, v_scale), own_name)
            raise

    return call, bound_call
