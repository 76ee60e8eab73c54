"""The quick path of `mla_caching_`. Written by ``make calls`` from its schema: see `kvdock.ops.calls.writer`, and do not edit it."""

from kvdock.ops.signatures import EMPTY, FastCall

__all__ = ["make"]


def make(op):
    """Return the op as a function of all its arguments, and as one of a `BoundOp` and the rest."""
    is_compiling, recording, is_intercepted, trace = op.is_compiling, op.recording, op.is_intercepted, op.trace
    get_mode, enter = op.get_mode, op.enter
    recent, chooser, settings, schema = op.recent, op.chooser, op.settings, op.schema
    find, prepare, slow, blame = op.find, op.prepare, op.run_slowly, op.blame

    def body0(recent, pools, kv_cache, kv_c, k_pe, slot_mapping, scale, named):
        key = (named, 0, (), scale is None)
        signature = recent.signature0
        try:
            known = (
                pools is not None
                and signature.pools is pools
                and signature.key == key
                and signature.guard(kv_c, k_pe, slot_mapping)
                and (signature.optional is None or signature.optional.accept((kv_cache, kv_c, k_pe, slot_mapping, scale)))
            )
        except TypeError:  # what is no tensor
            known = False
        if not known:
            signature = find(recent, key, (kv_cache, kv_c, k_pe, slot_mapping, scale))
            if signature is None:  # nothing that can be known by a guard, such as an int of a class of its own
                return slow((kv_cache, kv_c, k_pe, slot_mapping, scale), named)
            pools = signature.pools
        if signature.variant == 0:
            kv_c_size, kv_c_full, k_pe_size, k_pe_full, slot_mapping_size, slot_mapping_full = signature.numbers
            lead0, kv_c_n1 = kv_c.shape
            kv_c_t0, kv_c_t1 = kv_c.stride()
            kv_c_ptr = kv_c.data_ptr()
            kv_c_end = kv_c_ptr + (1 + (lead0 - 1) * kv_c_t0 + (kv_c_n1 - 1) * kv_c_t1) * kv_c_size
            kv_c_bits = kv_c_ptr | kv_c_full
            if lead0 > 1:
                kv_c_bits |= kv_c_t0 * kv_c_size
            k_pe_n0, k_pe_n1 = k_pe.shape
            k_pe_t0, k_pe_t1 = k_pe.stride()
            k_pe_ptr = k_pe.data_ptr()
            k_pe_end = k_pe_ptr + (1 + (k_pe_n0 - 1) * k_pe_t0 + (k_pe_n1 - 1) * k_pe_t1) * k_pe_size
            k_pe_bits = k_pe_ptr | k_pe_full
            if k_pe_n0 > 1:
                k_pe_bits |= k_pe_t0 * k_pe_size
            (slot_mapping_n0,) = slot_mapping.shape
            (slot_mapping_t0,) = slot_mapping.stride()
            slot_mapping_ptr = slot_mapping.data_ptr()
            slot_mapping_end = slot_mapping_ptr + (1 + (slot_mapping_n0 - 1) * slot_mapping_t0) * slot_mapping_size
            (kv_cache_extent,) = pools.extents
            kv_cache_ptr = kv_cache.data_ptr()
            kv_cache_end = kv_cache_ptr + kv_cache_extent
            low = kv_cache_ptr
            high = kv_cache_end
            if (
                not lead0
                or kv_cache_ptr < 4194304
                or k_pe_n0 != lead0
                or slot_mapping_n0 != lead0
                or slot_mapping_ptr & (slot_mapping_size - 1)
                or (kv_c_ptr < high and (kv_c_ptr < 4194304 or low < kv_c_end))
                or (k_pe_ptr < high and (k_pe_ptr < 4194304 or low < k_pe_end))
                or (slot_mapping_ptr < high and (slot_mapping_ptr < 4194304 or low < slot_mapping_end))
            ):
                return slow((kv_cache, kv_c, k_pe, slot_mapping, scale), named, pools)
            is_full = not ((kv_cache_ptr) & 15 or kv_c_bits & (kv_c_full - 1) or k_pe_bits & (k_pe_full - 1))
            more = ()
            if signature.optional is not None:
                is_full = False
                more = signature.optional.read((kv_cache, kv_c, k_pe, slot_mapping, scale), {"lead0": lead0}, low, high)
                if more is None:
                    return slow((kv_cache, kv_c, k_pe, slot_mapping, scale), named)
            if is_full:
                classes, entry = None, signature.full
            else:
                classes = ((kv_cache_ptr | 16) & -(kv_cache_ptr | 16), kv_c_bits & -kv_c_bits, k_pe_bits & -k_pe_bits, *more)
                entry = signature.entries.get(classes, EMPTY)
            plan = entry.value  # held until it has run, whatever becomes of the entry
            if plan is None:
                entry, plan = prepare(signature, (kv_cache, kv_c, k_pe, slot_mapping, scale), classes, named)
            else:
                cache = signature.cache
                entry.used = cache.clock = cache.clock + 1
            if is_full and named == recent.own_name:
                strides = (
                    kv_c_t0 if lead0 > 1 else -1,
                    kv_c_t1,
                    k_pe_t0 if lead0 > 1 else -1,
                    k_pe_t1,
                    slot_mapping_t0 if lead0 > 1 else -1,
                )
                fast = signature.fast.get(strides)
                if fast.__class__ is not FastCall or fast.entry is not entry:
                    fast = None
                    if signature.is_due(strides):
                        numbers = (
                            int(lead0 > 1),
                            kv_c_n1,
                            kv_c_t0 * kv_c_size,
                            (1 + (kv_c_n1 - 1) * kv_c_t1 - kv_c_t0) * kv_c_size,
                            k_pe_n1,
                            k_pe_t0 * k_pe_size,
                            (1 + (k_pe_n1 - 1) * k_pe_t1 - k_pe_t0) * k_pe_size,
                            slot_mapping_size - 1,
                            slot_mapping_t0 * slot_mapping_size,
                            (1 - slot_mapping_t0) * slot_mapping_size,
                            max(
                                (1 + (kv_c_n1 - 1) * kv_c_t1 - kv_c_t0) * kv_c_size,
                                (1 + (k_pe_n1 - 1) * k_pe_t1 - k_pe_t0) * k_pe_size,
                                (1 - slot_mapping_t0) * slot_mapping_size,
                                0,
                            ),
                            max(kv_c_t0 * kv_c_size, k_pe_t0 * k_pe_size, slot_mapping_t0 * slot_mapping_size, 0),
                        )
                        fast = signature.settle(schema, entry, strides, numbers, (kv_cache, kv_c, k_pe, slot_mapping, scale))
                if fast is not None:
                    recent.adopt(0, fast)
                    if fast.launch is not None:
                        return fast.launch(kv_cache_ptr, kv_c_ptr, k_pe_ptr, slot_mapping_ptr, lead0)
            return plan.run(kv_cache, kv_c, k_pe, slot_mapping, scale)
        kv_c_size, kv_c_full, k_pe_size, k_pe_full, slot_mapping_size, slot_mapping_full = signature.numbers
        lead0, lead1, kv_c_n2 = kv_c.shape
        kv_c_t0, kv_c_t1, kv_c_t2 = kv_c.stride()
        kv_c_ptr = kv_c.data_ptr()
        kv_c_end = kv_c_ptr + (1 + (lead0 - 1) * kv_c_t0 + (lead1 - 1) * kv_c_t1 + (kv_c_n2 - 1) * kv_c_t2) * kv_c_size
        kv_c_bits = kv_c_ptr | kv_c_full
        if lead0 > 1:
            kv_c_bits |= kv_c_t0 * kv_c_size
        if lead1 > 1:
            kv_c_bits |= kv_c_t1 * kv_c_size
        k_pe_n0, k_pe_n1, k_pe_n2 = k_pe.shape
        k_pe_t0, k_pe_t1, k_pe_t2 = k_pe.stride()
        k_pe_ptr = k_pe.data_ptr()
        k_pe_end = k_pe_ptr + (1 + (k_pe_n0 - 1) * k_pe_t0 + (k_pe_n1 - 1) * k_pe_t1 + (k_pe_n2 - 1) * k_pe_t2) * k_pe_size
        k_pe_bits = k_pe_ptr | k_pe_full
        if k_pe_n0 > 1:
            k_pe_bits |= k_pe_t0 * k_pe_size
        if k_pe_n1 > 1:
            k_pe_bits |= k_pe_t1 * k_pe_size
        slot_mapping_n0, slot_mapping_n1 = slot_mapping.shape
        slot_mapping_t0, slot_mapping_t1 = slot_mapping.stride()
        slot_mapping_ptr = slot_mapping.data_ptr()
        slot_mapping_end = (
            slot_mapping_ptr + (1 + (slot_mapping_n0 - 1) * slot_mapping_t0 + (slot_mapping_n1 - 1) * slot_mapping_t1) * slot_mapping_size
        )
        (kv_cache_extent,) = pools.extents
        kv_cache_ptr = kv_cache.data_ptr()
        kv_cache_end = kv_cache_ptr + kv_cache_extent
        low = kv_cache_ptr
        high = kv_cache_end
        if (
            not lead0
            or not lead1
            or kv_cache_ptr < 4194304
            or k_pe_n0 != lead0
            or k_pe_n1 != lead1
            or slot_mapping_n0 != lead0
            or slot_mapping_n1 != lead1
            or slot_mapping_ptr & (slot_mapping_size - 1)
            or (kv_c_ptr < high and (kv_c_ptr < 4194304 or low < kv_c_end))
            or (k_pe_ptr < high and (k_pe_ptr < 4194304 or low < k_pe_end))
            or (slot_mapping_ptr < high and (slot_mapping_ptr < 4194304 or low < slot_mapping_end))
        ):
            return slow((kv_cache, kv_c, k_pe, slot_mapping, scale), named, pools)
        is_full = not ((kv_cache_ptr) & 15 or kv_c_bits & (kv_c_full - 1) or k_pe_bits & (k_pe_full - 1))
        more = ()
        if signature.optional is not None:
            is_full = False
            more = signature.optional.read((kv_cache, kv_c, k_pe, slot_mapping, scale), {"lead0": lead0, "lead1": lead1}, low, high)
            if more is None:
                return slow((kv_cache, kv_c, k_pe, slot_mapping, scale), named)
        if is_full:
            classes, entry = None, signature.full
        else:
            classes = ((kv_cache_ptr | 16) & -(kv_cache_ptr | 16), kv_c_bits & -kv_c_bits, k_pe_bits & -k_pe_bits, *more)
            entry = signature.entries.get(classes, EMPTY)
        plan = entry.value  # held until it has run, whatever becomes of the entry
        if plan is None:
            entry, plan = prepare(signature, (kv_cache, kv_c, k_pe, slot_mapping, scale), classes, named)
        else:
            cache = signature.cache
            entry.used = cache.clock = cache.clock + 1
        if is_full and named == recent.own_name:
            strides = (
                kv_c_t0 if lead0 > 1 else -1,
                kv_c_t1 if lead1 > 1 else -1,
                kv_c_t2,
                k_pe_t0 if lead0 > 1 else -1,
                k_pe_t1 if lead1 > 1 else -1,
                k_pe_t2,
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
                        kv_c_t0 * kv_c_size,
                        kv_c_t1 * kv_c_size,
                        (1 + (kv_c_n2 - 1) * kv_c_t2 - kv_c_t0 - kv_c_t1) * kv_c_size,
                        k_pe_t0 * k_pe_size,
                        k_pe_t1 * k_pe_size,
                        (1 + (k_pe_n2 - 1) * k_pe_t2 - k_pe_t0 - k_pe_t1) * k_pe_size,
                        slot_mapping_size - 1,
                        slot_mapping_t0 * slot_mapping_size,
                        slot_mapping_t1 * slot_mapping_size,
                        (1 - slot_mapping_t0 - slot_mapping_t1) * slot_mapping_size,
                        max(
                            (1 + (kv_c_n2 - 1) * kv_c_t2 - kv_c_t0 - kv_c_t1) * kv_c_size,
                            (1 + (k_pe_n2 - 1) * k_pe_t2 - k_pe_t0 - k_pe_t1) * k_pe_size,
                            (1 - slot_mapping_t0 - slot_mapping_t1) * slot_mapping_size,
                            0,
                        ),
                        max(kv_c_t0 * kv_c_size, k_pe_t0 * k_pe_size, slot_mapping_t0 * slot_mapping_size, 0),
                        max(kv_c_t1 * kv_c_size, k_pe_t1 * k_pe_size, slot_mapping_t1 * slot_mapping_size, 0),
                    )
                    fast = signature.settle(schema, entry, strides, numbers, (kv_cache, kv_c, k_pe, slot_mapping, scale))
            if fast is not None:
                recent.adopt(0, fast)
                if fast.launch is not None:
                    return fast.launch(kv_cache_ptr, kv_c_ptr, k_pe_ptr, slot_mapping_ptr, lead0, lead1)
        return plan.run(kv_cache, kv_c, k_pe, slot_mapping, scale)

    def call(kv_cache, kv_c, k_pe, slot_mapping, scale):
        try:
            if is_compiling():
                return trace((kv_cache, kv_c, k_pe, slot_mapping, scale), None)
            if recording._is_fx_tracing_flag and is_intercepted((kv_cache, kv_c, k_pe, slot_mapping, scale)):
                return trace((kv_cache, kv_c, k_pe, slot_mapping, scale), None)
            mode = get_mode()
            epoch, generation, pools, fast_calls = recent.state0
            if not (epoch == chooser.epoch and generation == settings.generation):
                pools = None
            elif fast_calls and mode is None and scale is None:
                late = False
                for guard, entry, launch, cache, variant, static, numbers, outputs_guard in fast_calls:
                    plan = entry.value  # held until it has run, whatever becomes of the entry
                    try:
                        same = plan is not None and guard(kv_cache, kv_c, k_pe, slot_mapping)
                    except TypeError:  # what is no tensor
                        break
                    if not same:
                        late = True
                        continue
                    place = pools.places.get(kv_cache.data_ptr())
                    if place is None:
                        place = pools.place(kv_cache)
                    kv_cache_ptr, kv_cache_end, low, high, plain = place
                    if not plain:
                        break  # the body finds out more
                    if variant == 0:
                        (
                            lead0_least,
                            kv_c_row,
                            kv_c_step0,
                            kv_c_rest,
                            k_pe_row,
                            k_pe_step0,
                            k_pe_rest,
                            slot_mapping_mask,
                            slot_mapping_step0,
                            slot_mapping_rest,
                            reach,
                            lead0_reach,
                        ) = numbers
                        lead0 = slot_mapping.numel()
                        kv_c_ptr = kv_c.data_ptr()
                        k_pe_ptr = k_pe.data_ptr()
                        slot_mapping_ptr = slot_mapping.data_ptr()
                        floor = low - (reach + lead0 * lead0_reach)
                        if (
                            lead0 > lead0_least
                            and kv_c.numel() == lead0 * kv_c_row
                            and k_pe.numel() == lead0 * k_pe_row
                            and not ((kv_c_ptr | k_pe_ptr) & 15 or slot_mapping_ptr & slot_mapping_mask)
                            and (
                                (kv_c_ptr >= high or 4194304 <= kv_c_ptr <= floor)
                                and (k_pe_ptr >= high or 4194304 <= k_pe_ptr <= floor)
                                and (slot_mapping_ptr >= high or 4194304 <= slot_mapping_ptr <= floor)
                                or not (
                                    (kv_c_ptr < high and (kv_c_ptr < 4194304 or low < kv_c_ptr + kv_c_rest + lead0 * kv_c_step0))
                                    or (k_pe_ptr < high and (k_pe_ptr < 4194304 or low < k_pe_ptr + k_pe_rest + lead0 * k_pe_step0))
                                    or (
                                        slot_mapping_ptr < high
                                        and (
                                            slot_mapping_ptr < 4194304
                                            or low < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                        )
                                    )
                                )
                            )
                        ):
                            entry.used = cache.clock = cache.clock + 1
                            if late:
                                recent.promote(0, guard)
                            if launch is not None:
                                return launch(kv_cache_ptr, kv_c_ptr, k_pe_ptr, slot_mapping_ptr, lead0)
                            return plan.run(kv_cache, kv_c, k_pe, slot_mapping, scale)
                        late = True
                        continue
                    (
                        lead0_least,
                        lead1_least,
                        kv_c_step0,
                        kv_c_step1,
                        kv_c_rest,
                        k_pe_step0,
                        k_pe_step1,
                        k_pe_rest,
                        slot_mapping_mask,
                        slot_mapping_step0,
                        slot_mapping_step1,
                        slot_mapping_rest,
                        reach,
                        lead0_reach,
                        lead1_reach,
                    ) = numbers
                    lead0, lead1 = slot_mapping.shape
                    kv_c_n0, kv_c_n1, kv_c_n2 = kv_c.shape
                    k_pe_n0, k_pe_n1, k_pe_n2 = k_pe.shape
                    kv_c_ptr = kv_c.data_ptr()
                    k_pe_ptr = k_pe.data_ptr()
                    slot_mapping_ptr = slot_mapping.data_ptr()
                    floor = low - (reach + lead0 * lead0_reach + lead1 * lead1_reach)
                    if (
                        lead0 > lead0_least
                        and lead1 > lead1_least
                        and kv_c_n0 == lead0
                        and kv_c_n1 == lead1
                        and k_pe_n0 == lead0
                        and k_pe_n1 == lead1
                        and not ((kv_c_ptr | k_pe_ptr) & 15 or slot_mapping_ptr & slot_mapping_mask)
                        and (
                            (kv_c_ptr >= high or 4194304 <= kv_c_ptr <= floor)
                            and (k_pe_ptr >= high or 4194304 <= k_pe_ptr <= floor)
                            and (slot_mapping_ptr >= high or 4194304 <= slot_mapping_ptr <= floor)
                            or not (
                                (
                                    kv_c_ptr < high
                                    and (kv_c_ptr < 4194304 or low < kv_c_ptr + kv_c_rest + lead0 * kv_c_step0 + lead1 * kv_c_step1)
                                )
                                or (
                                    k_pe_ptr < high
                                    and (k_pe_ptr < 4194304 or low < k_pe_ptr + k_pe_rest + lead0 * k_pe_step0 + lead1 * k_pe_step1)
                                )
                                or (
                                    slot_mapping_ptr < high
                                    and (
                                        slot_mapping_ptr < 4194304
                                        or low
                                        < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                    )
                                )
                            )
                        )
                    ):
                        entry.used = cache.clock = cache.clock + 1
                        if late:
                            recent.promote(0, guard)
                        if launch is not None:
                            return launch(kv_cache_ptr, kv_c_ptr, k_pe_ptr, slot_mapping_ptr, lead0, lead1)
                        return plan.run(kv_cache, kv_c, k_pe, slot_mapping, scale)
                    late = True
            try:
                if pools is not None and not pools.guard(kv_cache):
                    pools = None
            except TypeError:  # what is no tensor
                pools = None
            named = None if mode is None else enter(mode, (kv_cache, kv_c, k_pe, slot_mapping, scale), None)
            return body0(recent, pools, kv_cache, kv_c, k_pe, slot_mapping, scale, named)
        except Exception as error:  # free until something is raised
            blame(error, (kv_cache, kv_c, k_pe, slot_mapping, scale), None)
            raise

    def bound_call(bound, kv_c, k_pe, slot_mapping, scale):
        recent, own_name = bound.recent, bound.own_name
        kv_cache, kv_cache_ptr, kv_cache_end, low, high = bound.fixed
        try:
            if is_compiling():
                (kv_cache,) = bound.traced_pools()
                trace((kv_cache, kv_c, k_pe, slot_mapping, scale), own_name)
                return (kv_cache,)
            if recording._is_fx_tracing_flag and is_intercepted((kv_cache, kv_c, k_pe, slot_mapping, scale)):
                return trace((kv_cache, kv_c, k_pe, slot_mapping, scale), own_name)
            mode = get_mode()
            epoch, generation, pools, fast_calls = recent.state0
            if not (epoch == chooser.epoch and generation == settings.generation):
                pools = None
            elif fast_calls and mode is None and scale is None:
                late = False
                for guard, entry, launch, cache, variant, static, numbers, outputs_guard in fast_calls:
                    plan = entry.value  # held until it has run, whatever becomes of the entry
                    try:
                        same = plan is not None and guard(kv_c, k_pe, slot_mapping)
                    except TypeError:  # what is no tensor
                        break
                    if not same:
                        late = True
                        continue
                    if variant == 0:
                        (
                            lead0_least,
                            kv_c_row,
                            kv_c_step0,
                            kv_c_rest,
                            k_pe_row,
                            k_pe_step0,
                            k_pe_rest,
                            slot_mapping_mask,
                            slot_mapping_step0,
                            slot_mapping_rest,
                            reach,
                            lead0_reach,
                        ) = numbers
                        lead0 = slot_mapping.numel()
                        kv_c_ptr = kv_c.data_ptr()
                        k_pe_ptr = k_pe.data_ptr()
                        slot_mapping_ptr = slot_mapping.data_ptr()
                        floor = low - (reach + lead0 * lead0_reach)
                        if (
                            lead0 > lead0_least
                            and kv_c.numel() == lead0 * kv_c_row
                            and k_pe.numel() == lead0 * k_pe_row
                            and not ((kv_c_ptr | k_pe_ptr) & 15 or slot_mapping_ptr & slot_mapping_mask)
                            and (
                                (kv_c_ptr >= high or 4194304 <= kv_c_ptr <= floor)
                                and (k_pe_ptr >= high or 4194304 <= k_pe_ptr <= floor)
                                and (slot_mapping_ptr >= high or 4194304 <= slot_mapping_ptr <= floor)
                                or not (
                                    (kv_c_ptr < high and (kv_c_ptr < 4194304 or low < kv_c_ptr + kv_c_rest + lead0 * kv_c_step0))
                                    or (k_pe_ptr < high and (k_pe_ptr < 4194304 or low < k_pe_ptr + k_pe_rest + lead0 * k_pe_step0))
                                    or (
                                        slot_mapping_ptr < high
                                        and (
                                            slot_mapping_ptr < 4194304
                                            or low < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                        )
                                    )
                                )
                            )
                        ):
                            entry.used = cache.clock = cache.clock + 1
                            if late:
                                recent.promote(0, guard)
                            if launch is not None:
                                return launch(kv_cache_ptr, kv_c_ptr, k_pe_ptr, slot_mapping_ptr, lead0)
                            return plan.run(kv_cache, kv_c, k_pe, slot_mapping, scale)
                        late = True
                        continue
                    (
                        lead0_least,
                        lead1_least,
                        kv_c_step0,
                        kv_c_step1,
                        kv_c_rest,
                        k_pe_step0,
                        k_pe_step1,
                        k_pe_rest,
                        slot_mapping_mask,
                        slot_mapping_step0,
                        slot_mapping_step1,
                        slot_mapping_rest,
                        reach,
                        lead0_reach,
                        lead1_reach,
                    ) = numbers
                    lead0, lead1 = slot_mapping.shape
                    kv_c_n0, kv_c_n1, kv_c_n2 = kv_c.shape
                    k_pe_n0, k_pe_n1, k_pe_n2 = k_pe.shape
                    kv_c_ptr = kv_c.data_ptr()
                    k_pe_ptr = k_pe.data_ptr()
                    slot_mapping_ptr = slot_mapping.data_ptr()
                    floor = low - (reach + lead0 * lead0_reach + lead1 * lead1_reach)
                    if (
                        lead0 > lead0_least
                        and lead1 > lead1_least
                        and kv_c_n0 == lead0
                        and kv_c_n1 == lead1
                        and k_pe_n0 == lead0
                        and k_pe_n1 == lead1
                        and not ((kv_c_ptr | k_pe_ptr) & 15 or slot_mapping_ptr & slot_mapping_mask)
                        and (
                            (kv_c_ptr >= high or 4194304 <= kv_c_ptr <= floor)
                            and (k_pe_ptr >= high or 4194304 <= k_pe_ptr <= floor)
                            and (slot_mapping_ptr >= high or 4194304 <= slot_mapping_ptr <= floor)
                            or not (
                                (
                                    kv_c_ptr < high
                                    and (kv_c_ptr < 4194304 or low < kv_c_ptr + kv_c_rest + lead0 * kv_c_step0 + lead1 * kv_c_step1)
                                )
                                or (
                                    k_pe_ptr < high
                                    and (k_pe_ptr < 4194304 or low < k_pe_ptr + k_pe_rest + lead0 * k_pe_step0 + lead1 * k_pe_step1)
                                )
                                or (
                                    slot_mapping_ptr < high
                                    and (
                                        slot_mapping_ptr < 4194304
                                        or low
                                        < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                    )
                                )
                            )
                        )
                    ):
                        entry.used = cache.clock = cache.clock + 1
                        if late:
                            recent.promote(0, guard)
                        if launch is not None:
                            return launch(kv_cache_ptr, kv_c_ptr, k_pe_ptr, slot_mapping_ptr, lead0, lead1)
                        return plan.run(kv_cache, kv_c, k_pe, slot_mapping, scale)
                    late = True
            named = own_name if mode is None else enter(mode, (kv_cache, kv_c, k_pe, slot_mapping, scale), own_name)
            return body0(recent, pools, kv_cache, kv_c, k_pe, slot_mapping, scale, named)
        except Exception as error:  # free until something is raised
            blame(error, (kv_cache, kv_c, k_pe, slot_mapping, scale), own_name)
            raise

    return call, bound_call
