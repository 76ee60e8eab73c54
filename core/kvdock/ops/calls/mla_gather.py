"""The quick path of `mla_gather`. Written by ``make calls`` from its schema: see `kvdock.ops.calls.writer`, and do not edit it."""

from kvdock.ops.geometry import has_internal_overlap
from kvdock.ops.signatures import EMPTY, FastCall

__all__ = ["make"]


def make(op):
    """Return the op as a function of all its arguments, and as one of a `BoundOp` and the rest."""
    is_compiling, recording, is_intercepted, trace = op.is_compiling, op.recording, op.is_intercepted, op.trace
    get_mode, enter = op.get_mode, op.enter
    recent, chooser, settings, schema = op.recent, op.chooser, op.settings, op.schema
    find, prepare, slow, blame = op.find, op.prepare, op.run_slowly, op.blame

    def body0(recent, pools, kv_cache, slot_mapping, scale, kv_c_out, k_pe_out, named):
        key = (named, 0, (), scale is None)
        signature = recent.signature0
        try:
            known = (
                pools is not None
                and signature.pools is pools
                and signature.key == key
                and signature.guard(slot_mapping, kv_c_out, k_pe_out)
                and (signature.optional is None or signature.optional.accept((kv_cache, slot_mapping, scale, kv_c_out, k_pe_out)))
            )
        except TypeError:  # what is no tensor
            known = False
        if not known:
            signature = find(recent, key, (kv_cache, slot_mapping, scale, kv_c_out, k_pe_out))
            if signature is None:  # nothing that can be known by a guard, such as an int of a class of its own
                return slow((kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), named)
            pools = signature.pools
        if signature.variant == 0:
            slot_mapping_size, slot_mapping_full, kv_c_out_size, kv_c_out_full, k_pe_out_size, k_pe_out_full = signature.numbers
            (lead0,) = slot_mapping.shape
            (slot_mapping_t0,) = slot_mapping.stride()
            slot_mapping_ptr = slot_mapping.data_ptr()
            slot_mapping_end = slot_mapping_ptr + (1 + (lead0 - 1) * slot_mapping_t0) * slot_mapping_size
            kv_c_out_n0, kv_c_out_n1 = kv_c_out.shape
            kv_c_out_t0, kv_c_out_t1 = kv_c_out.stride()
            kv_c_out_ptr = kv_c_out.data_ptr()
            kv_c_out_end = kv_c_out_ptr + (1 + (kv_c_out_n0 - 1) * kv_c_out_t0 + (kv_c_out_n1 - 1) * kv_c_out_t1) * kv_c_out_size
            kv_c_out_bits = kv_c_out_ptr | kv_c_out_full
            if kv_c_out_n0 > 1:
                kv_c_out_bits |= kv_c_out_t0 * kv_c_out_size
            k_pe_out_n0, k_pe_out_n1 = k_pe_out.shape
            k_pe_out_t0, k_pe_out_t1 = k_pe_out.stride()
            k_pe_out_ptr = k_pe_out.data_ptr()
            k_pe_out_end = k_pe_out_ptr + (1 + (k_pe_out_n0 - 1) * k_pe_out_t0 + (k_pe_out_n1 - 1) * k_pe_out_t1) * k_pe_out_size
            k_pe_out_bits = k_pe_out_ptr | k_pe_out_full
            if k_pe_out_n0 > 1:
                k_pe_out_bits |= k_pe_out_t0 * k_pe_out_size
            (kv_cache_extent,) = pools.extents
            kv_cache_ptr = kv_cache.data_ptr()
            kv_cache_end = kv_cache_ptr + kv_cache_extent
            low = kv_c_out_ptr
            if k_pe_out_ptr < low:
                low = k_pe_out_ptr
            high = kv_c_out_end
            if k_pe_out_end > high:
                high = k_pe_out_end
            if (
                not lead0
                or kv_c_out_ptr < 4194304
                or k_pe_out_ptr < 4194304
                or slot_mapping_ptr & (slot_mapping_size - 1)
                or kv_c_out_n0 != lead0
                or k_pe_out_n0 != lead0
                or (not kv_c_out.is_contiguous() and has_internal_overlap(kv_c_out))
                or (not k_pe_out.is_contiguous() and has_internal_overlap(k_pe_out))
                or (kv_c_out_ptr < k_pe_out_end and k_pe_out_ptr < kv_c_out_end)
                or (
                    kv_cache_ptr < high
                    and (
                        kv_cache_ptr < 4194304
                        or low < kv_cache_end
                        and (
                            kv_cache_ptr < kv_c_out_end
                            and kv_c_out_ptr < kv_cache_end
                            or kv_cache_ptr < k_pe_out_end
                            and k_pe_out_ptr < kv_cache_end
                        )
                    )
                )
                or (
                    slot_mapping_ptr < high
                    and (
                        slot_mapping_ptr < 4194304
                        or low < slot_mapping_end
                        and (
                            slot_mapping_ptr < kv_c_out_end
                            and kv_c_out_ptr < slot_mapping_end
                            or slot_mapping_ptr < k_pe_out_end
                            and k_pe_out_ptr < slot_mapping_end
                        )
                    )
                )
            ):
                return slow((kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), named, pools)
            is_full = not ((kv_cache_ptr) & 15 or kv_c_out_bits & (kv_c_out_full - 1) or k_pe_out_bits & (k_pe_out_full - 1))
            more = ()
            if signature.optional is not None:
                is_full = False
                more = signature.optional.read((kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), {"lead0": lead0}, low, high)
                if more is None:
                    return slow((kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), named)
            if is_full:
                classes, entry = None, signature.full
            else:
                classes = (
                    (kv_cache_ptr | 16) & -(kv_cache_ptr | 16),
                    kv_c_out_bits & -kv_c_out_bits,
                    k_pe_out_bits & -k_pe_out_bits,
                    *more,
                )
                entry = signature.entries.get(classes, EMPTY)
            plan = entry.value  # held until it has run, whatever becomes of the entry
            if plan is None:
                entry, plan = prepare(signature, (kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), classes, named)
            else:
                cache = signature.cache
                entry.used = cache.clock = cache.clock + 1
            if is_full and named == recent.own_name:
                strides = (
                    slot_mapping_t0 if lead0 > 1 else -1,
                    kv_c_out_t0 if lead0 > 1 else -1,
                    kv_c_out_t1,
                    k_pe_out_t0 if lead0 > 1 else -1,
                    k_pe_out_t1,
                )
                fast = signature.fast.get(strides)
                if fast.__class__ is not FastCall or fast.entry is not entry:
                    fast = None
                    if signature.is_due(strides):
                        numbers = (
                            int(lead0 > 1),
                            slot_mapping_size - 1,
                            slot_mapping_t0 * slot_mapping_size,
                            (1 - slot_mapping_t0) * slot_mapping_size,
                            kv_c_out_n1,
                            kv_c_out_t0 * kv_c_out_size,
                            (1 + (kv_c_out_n1 - 1) * kv_c_out_t1 - kv_c_out_t0) * kv_c_out_size,
                            k_pe_out_n1,
                            k_pe_out_t0 * k_pe_out_size,
                            (1 + (k_pe_out_n1 - 1) * k_pe_out_t1 - k_pe_out_t0) * k_pe_out_size,
                        )
                        fast = signature.settle(schema, entry, strides, numbers, (kv_cache, slot_mapping, scale, kv_c_out, k_pe_out))
                if fast is not None:
                    recent.adopt(0, fast)
                    if fast.launch is not None:
                        return fast.launch(kv_cache_ptr, slot_mapping_ptr, kv_c_out_ptr, k_pe_out_ptr, lead0)
            return plan.run(kv_cache, slot_mapping, scale, kv_c_out, k_pe_out)
        slot_mapping_size, slot_mapping_full, kv_c_out_size, kv_c_out_full, k_pe_out_size, k_pe_out_full = signature.numbers
        lead0, lead1 = slot_mapping.shape
        slot_mapping_t0, slot_mapping_t1 = slot_mapping.stride()
        slot_mapping_ptr = slot_mapping.data_ptr()
        slot_mapping_end = slot_mapping_ptr + (1 + (lead0 - 1) * slot_mapping_t0 + (lead1 - 1) * slot_mapping_t1) * slot_mapping_size
        kv_c_out_n0, kv_c_out_n1, kv_c_out_n2 = kv_c_out.shape
        kv_c_out_t0, kv_c_out_t1, kv_c_out_t2 = kv_c_out.stride()
        kv_c_out_ptr = kv_c_out.data_ptr()
        kv_c_out_end = (
            kv_c_out_ptr
            + (1 + (kv_c_out_n0 - 1) * kv_c_out_t0 + (kv_c_out_n1 - 1) * kv_c_out_t1 + (kv_c_out_n2 - 1) * kv_c_out_t2) * kv_c_out_size
        )
        kv_c_out_bits = kv_c_out_ptr | kv_c_out_full
        if kv_c_out_n0 > 1:
            kv_c_out_bits |= kv_c_out_t0 * kv_c_out_size
        if kv_c_out_n1 > 1:
            kv_c_out_bits |= kv_c_out_t1 * kv_c_out_size
        k_pe_out_n0, k_pe_out_n1, k_pe_out_n2 = k_pe_out.shape
        k_pe_out_t0, k_pe_out_t1, k_pe_out_t2 = k_pe_out.stride()
        k_pe_out_ptr = k_pe_out.data_ptr()
        k_pe_out_end = (
            k_pe_out_ptr
            + (1 + (k_pe_out_n0 - 1) * k_pe_out_t0 + (k_pe_out_n1 - 1) * k_pe_out_t1 + (k_pe_out_n2 - 1) * k_pe_out_t2) * k_pe_out_size
        )
        k_pe_out_bits = k_pe_out_ptr | k_pe_out_full
        if k_pe_out_n0 > 1:
            k_pe_out_bits |= k_pe_out_t0 * k_pe_out_size
        if k_pe_out_n1 > 1:
            k_pe_out_bits |= k_pe_out_t1 * k_pe_out_size
        (kv_cache_extent,) = pools.extents
        kv_cache_ptr = kv_cache.data_ptr()
        kv_cache_end = kv_cache_ptr + kv_cache_extent
        low = kv_c_out_ptr
        if k_pe_out_ptr < low:
            low = k_pe_out_ptr
        high = kv_c_out_end
        if k_pe_out_end > high:
            high = k_pe_out_end
        if (
            not lead0
            or not lead1
            or kv_c_out_ptr < 4194304
            or k_pe_out_ptr < 4194304
            or slot_mapping_ptr & (slot_mapping_size - 1)
            or kv_c_out_n0 != lead0
            or kv_c_out_n1 != lead1
            or k_pe_out_n0 != lead0
            or k_pe_out_n1 != lead1
            or (not kv_c_out.is_contiguous() and has_internal_overlap(kv_c_out))
            or (not k_pe_out.is_contiguous() and has_internal_overlap(k_pe_out))
            or (kv_c_out_ptr < k_pe_out_end and k_pe_out_ptr < kv_c_out_end)
            or (
                kv_cache_ptr < high
                and (
                    kv_cache_ptr < 4194304
                    or low < kv_cache_end
                    and (
                        kv_cache_ptr < kv_c_out_end
                        and kv_c_out_ptr < kv_cache_end
                        or kv_cache_ptr < k_pe_out_end
                        and k_pe_out_ptr < kv_cache_end
                    )
                )
            )
            or (
                slot_mapping_ptr < high
                and (
                    slot_mapping_ptr < 4194304
                    or low < slot_mapping_end
                    and (
                        slot_mapping_ptr < kv_c_out_end
                        and kv_c_out_ptr < slot_mapping_end
                        or slot_mapping_ptr < k_pe_out_end
                        and k_pe_out_ptr < slot_mapping_end
                    )
                )
            )
        ):
            return slow((kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), named, pools)
        is_full = not ((kv_cache_ptr) & 15 or kv_c_out_bits & (kv_c_out_full - 1) or k_pe_out_bits & (k_pe_out_full - 1))
        more = ()
        if signature.optional is not None:
            is_full = False
            more = signature.optional.read((kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), {"lead0": lead0, "lead1": lead1}, low, high)
            if more is None:
                return slow((kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), named)
        if is_full:
            classes, entry = None, signature.full
        else:
            classes = ((kv_cache_ptr | 16) & -(kv_cache_ptr | 16), kv_c_out_bits & -kv_c_out_bits, k_pe_out_bits & -k_pe_out_bits, *more)
            entry = signature.entries.get(classes, EMPTY)
        plan = entry.value  # held until it has run, whatever becomes of the entry
        if plan is None:
            entry, plan = prepare(signature, (kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), classes, named)
        else:
            cache = signature.cache
            entry.used = cache.clock = cache.clock + 1
        if is_full and named == recent.own_name:
            strides = (
                slot_mapping_t0 if lead0 > 1 else -1,
                slot_mapping_t1 if lead1 > 1 else -1,
                kv_c_out_t0 if lead0 > 1 else -1,
                kv_c_out_t1 if lead1 > 1 else -1,
                kv_c_out_t2,
                k_pe_out_t0 if lead0 > 1 else -1,
                k_pe_out_t1 if lead1 > 1 else -1,
                k_pe_out_t2,
            )
            fast = signature.fast.get(strides)
            if fast.__class__ is not FastCall or fast.entry is not entry:
                fast = None
                if signature.is_due(strides):
                    numbers = (
                        int(lead0 > 1),
                        int(lead1 > 1),
                        slot_mapping_size - 1,
                        slot_mapping_t0 * slot_mapping_size,
                        slot_mapping_t1 * slot_mapping_size,
                        (1 - slot_mapping_t0 - slot_mapping_t1) * slot_mapping_size,
                        kv_c_out_t0 * kv_c_out_size,
                        kv_c_out_t1 * kv_c_out_size,
                        (1 + (kv_c_out_n2 - 1) * kv_c_out_t2 - kv_c_out_t0 - kv_c_out_t1) * kv_c_out_size,
                        k_pe_out_t0 * k_pe_out_size,
                        k_pe_out_t1 * k_pe_out_size,
                        (1 + (k_pe_out_n2 - 1) * k_pe_out_t2 - k_pe_out_t0 - k_pe_out_t1) * k_pe_out_size,
                    )
                    fast = signature.settle(schema, entry, strides, numbers, (kv_cache, slot_mapping, scale, kv_c_out, k_pe_out))
            if fast is not None:
                recent.adopt(0, fast)
                if fast.launch is not None:
                    return fast.launch(kv_cache_ptr, slot_mapping_ptr, kv_c_out_ptr, k_pe_out_ptr, lead0, lead1)
        return plan.run(kv_cache, slot_mapping, scale, kv_c_out, k_pe_out)

    def call(kv_cache, slot_mapping, scale, kv_c_out, k_pe_out):
        try:
            if is_compiling():
                return trace((kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), None)
            if recording._is_fx_tracing_flag and is_intercepted((kv_cache, slot_mapping, scale, kv_c_out, k_pe_out)):
                return trace((kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), None)
            mode = get_mode()
            epoch, generation, pools, fast_calls = recent.state0
            if not (epoch == chooser.epoch and generation == settings.generation):
                pools = None
            elif fast_calls and mode is None and scale is None:
                late = False
                for guard, entry, launch, cache, variant, static, numbers, outputs_guard in fast_calls:
                    plan = entry.value  # held until it has run, whatever becomes of the entry
                    try:
                        same = plan is not None and guard(kv_cache, slot_mapping, kv_c_out, k_pe_out)
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
                            slot_mapping_mask,
                            slot_mapping_step0,
                            slot_mapping_rest,
                            kv_c_out_row,
                            kv_c_out_step0,
                            kv_c_out_rest,
                            k_pe_out_row,
                            k_pe_out_step0,
                            k_pe_out_rest,
                        ) = numbers
                        lead0 = slot_mapping.numel()
                        slot_mapping_ptr = slot_mapping.data_ptr()
                        kv_c_out_ptr = kv_c_out.data_ptr()
                        k_pe_out_ptr = k_pe_out.data_ptr()
                        kv_c_out_end = kv_c_out_ptr + kv_c_out_rest + lead0 * kv_c_out_step0
                        k_pe_out_end = k_pe_out_ptr + k_pe_out_rest + lead0 * k_pe_out_step0
                        low = kv_c_out_ptr
                        if k_pe_out_ptr < low:
                            low = k_pe_out_ptr
                        high = kv_c_out_end
                        if k_pe_out_end > high:
                            high = k_pe_out_end
                        if (
                            kv_c_out_ptr < 4194304
                            or k_pe_out_ptr < 4194304
                            or kv_c_out.numel() != lead0 * kv_c_out_row
                            or k_pe_out.numel() != lead0 * k_pe_out_row
                            or (kv_c_out_ptr < k_pe_out_end and k_pe_out_ptr < kv_c_out_end)
                            or (
                                kv_cache_ptr < high
                                and (
                                    kv_cache_ptr < 4194304
                                    or low < kv_cache_end
                                    and (
                                        kv_cache_ptr < kv_c_out_end
                                        and kv_c_out_ptr < kv_cache_end
                                        or kv_cache_ptr < k_pe_out_end
                                        and k_pe_out_ptr < kv_cache_end
                                    )
                                )
                            )
                            or (
                                slot_mapping_ptr < high
                                and (
                                    slot_mapping_ptr < 4194304
                                    or low < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                    and (
                                        slot_mapping_ptr < kv_c_out_end
                                        and kv_c_out_ptr < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                        or slot_mapping_ptr < k_pe_out_end
                                        and k_pe_out_ptr < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                    )
                                )
                            )
                        ):
                            late = True
                            continue
                        if (
                            lead0 > lead0_least
                            and slot_mapping_ptr >= 4194304
                            and kv_c_out_ptr >= 4194304
                            and k_pe_out_ptr >= 4194304
                            and not ((kv_c_out_ptr | k_pe_out_ptr) & 15 or slot_mapping_ptr & slot_mapping_mask)
                        ):
                            entry.used = cache.clock = cache.clock + 1
                            if late:
                                recent.promote(0, guard)
                            if launch is not None:
                                return launch(kv_cache_ptr, slot_mapping_ptr, kv_c_out_ptr, k_pe_out_ptr, lead0)
                            return plan.run(kv_cache, slot_mapping, scale, kv_c_out, k_pe_out)
                        late = True
                        continue
                    (
                        lead0_least,
                        lead1_least,
                        slot_mapping_mask,
                        slot_mapping_step0,
                        slot_mapping_step1,
                        slot_mapping_rest,
                        kv_c_out_step0,
                        kv_c_out_step1,
                        kv_c_out_rest,
                        k_pe_out_step0,
                        k_pe_out_step1,
                        k_pe_out_rest,
                    ) = numbers
                    lead0, lead1 = slot_mapping.shape
                    slot_mapping_ptr = slot_mapping.data_ptr()
                    kv_c_out_ptr = kv_c_out.data_ptr()
                    k_pe_out_ptr = k_pe_out.data_ptr()
                    kv_c_out_n0, kv_c_out_n1, kv_c_out_n2 = kv_c_out.shape
                    k_pe_out_n0, k_pe_out_n1, k_pe_out_n2 = k_pe_out.shape
                    kv_c_out_end = kv_c_out_ptr + kv_c_out_rest + lead0 * kv_c_out_step0 + lead1 * kv_c_out_step1
                    k_pe_out_end = k_pe_out_ptr + k_pe_out_rest + lead0 * k_pe_out_step0 + lead1 * k_pe_out_step1
                    low = kv_c_out_ptr
                    if k_pe_out_ptr < low:
                        low = k_pe_out_ptr
                    high = kv_c_out_end
                    if k_pe_out_end > high:
                        high = k_pe_out_end
                    if (
                        kv_c_out_ptr < 4194304
                        or k_pe_out_ptr < 4194304
                        or kv_c_out_n0 != lead0
                        or kv_c_out_n1 != lead1
                        or k_pe_out_n0 != lead0
                        or k_pe_out_n1 != lead1
                        or (kv_c_out_ptr < k_pe_out_end and k_pe_out_ptr < kv_c_out_end)
                        or (
                            kv_cache_ptr < high
                            and (
                                kv_cache_ptr < 4194304
                                or low < kv_cache_end
                                and (
                                    kv_cache_ptr < kv_c_out_end
                                    and kv_c_out_ptr < kv_cache_end
                                    or kv_cache_ptr < k_pe_out_end
                                    and k_pe_out_ptr < kv_cache_end
                                )
                            )
                        )
                        or (
                            slot_mapping_ptr < high
                            and (
                                slot_mapping_ptr < 4194304
                                or low < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                and (
                                    slot_mapping_ptr < kv_c_out_end
                                    and kv_c_out_ptr
                                    < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                    or slot_mapping_ptr < k_pe_out_end
                                    and k_pe_out_ptr
                                    < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                )
                            )
                        )
                    ):
                        late = True
                        continue
                    if (
                        lead0 > lead0_least
                        and lead1 > lead1_least
                        and slot_mapping_ptr >= 4194304
                        and kv_c_out_ptr >= 4194304
                        and k_pe_out_ptr >= 4194304
                        and not ((kv_c_out_ptr | k_pe_out_ptr) & 15 or slot_mapping_ptr & slot_mapping_mask)
                    ):
                        entry.used = cache.clock = cache.clock + 1
                        if late:
                            recent.promote(0, guard)
                        if launch is not None:
                            return launch(kv_cache_ptr, slot_mapping_ptr, kv_c_out_ptr, k_pe_out_ptr, lead0, lead1)
                        return plan.run(kv_cache, slot_mapping, scale, kv_c_out, k_pe_out)
                    late = True
            try:
                if pools is not None and not pools.guard(kv_cache):
                    pools = None
            except TypeError:  # what is no tensor
                pools = None
            named = None if mode is None else enter(mode, (kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), None)
            return body0(recent, pools, kv_cache, slot_mapping, scale, kv_c_out, k_pe_out, named)
        except Exception as error:  # free until something is raised
            blame(error, (kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), None)
            raise

    def bound_call(bound, slot_mapping, scale, kv_c_out, k_pe_out):
        recent, own_name = bound.recent, bound.own_name
        kv_cache, kv_cache_ptr, kv_cache_end, low, high = bound.fixed
        try:
            if is_compiling():
                (kv_cache,) = bound.traced_pools()
                trace((kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), own_name)
                return (kv_cache,)
            if recording._is_fx_tracing_flag and is_intercepted((kv_cache, slot_mapping, scale, kv_c_out, k_pe_out)):
                return trace((kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), own_name)
            mode = get_mode()
            epoch, generation, pools, fast_calls = recent.state0
            if not (epoch == chooser.epoch and generation == settings.generation):
                pools = None
            elif fast_calls and mode is None and scale is None:
                late = False
                for guard, entry, launch, cache, variant, static, numbers, outputs_guard in fast_calls:
                    plan = entry.value  # held until it has run, whatever becomes of the entry
                    try:
                        same = plan is not None and guard(slot_mapping, kv_c_out, k_pe_out)
                    except TypeError:  # what is no tensor
                        break
                    if not same:
                        late = True
                        continue
                    if variant == 0:
                        (
                            lead0_least,
                            slot_mapping_mask,
                            slot_mapping_step0,
                            slot_mapping_rest,
                            kv_c_out_row,
                            kv_c_out_step0,
                            kv_c_out_rest,
                            k_pe_out_row,
                            k_pe_out_step0,
                            k_pe_out_rest,
                        ) = numbers
                        lead0 = slot_mapping.numel()
                        slot_mapping_ptr = slot_mapping.data_ptr()
                        kv_c_out_ptr = kv_c_out.data_ptr()
                        k_pe_out_ptr = k_pe_out.data_ptr()
                        kv_c_out_end = kv_c_out_ptr + kv_c_out_rest + lead0 * kv_c_out_step0
                        k_pe_out_end = k_pe_out_ptr + k_pe_out_rest + lead0 * k_pe_out_step0
                        low = kv_c_out_ptr
                        if k_pe_out_ptr < low:
                            low = k_pe_out_ptr
                        high = kv_c_out_end
                        if k_pe_out_end > high:
                            high = k_pe_out_end
                        if (
                            kv_c_out_ptr < 4194304
                            or k_pe_out_ptr < 4194304
                            or kv_c_out.numel() != lead0 * kv_c_out_row
                            or k_pe_out.numel() != lead0 * k_pe_out_row
                            or (kv_c_out_ptr < k_pe_out_end and k_pe_out_ptr < kv_c_out_end)
                            or (
                                kv_cache_ptr < high
                                and (
                                    kv_cache_ptr < 4194304
                                    or low < kv_cache_end
                                    and (
                                        kv_cache_ptr < kv_c_out_end
                                        and kv_c_out_ptr < kv_cache_end
                                        or kv_cache_ptr < k_pe_out_end
                                        and k_pe_out_ptr < kv_cache_end
                                    )
                                )
                            )
                            or (
                                slot_mapping_ptr < high
                                and (
                                    slot_mapping_ptr < 4194304
                                    or low < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                    and (
                                        slot_mapping_ptr < kv_c_out_end
                                        and kv_c_out_ptr < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                        or slot_mapping_ptr < k_pe_out_end
                                        and k_pe_out_ptr < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                    )
                                )
                            )
                        ):
                            late = True
                            continue
                        if (
                            lead0 > lead0_least
                            and slot_mapping_ptr >= 4194304
                            and kv_c_out_ptr >= 4194304
                            and k_pe_out_ptr >= 4194304
                            and not ((kv_c_out_ptr | k_pe_out_ptr) & 15 or slot_mapping_ptr & slot_mapping_mask)
                        ):
                            entry.used = cache.clock = cache.clock + 1
                            if late:
                                recent.promote(0, guard)
                            if launch is not None:
                                return launch(kv_cache_ptr, slot_mapping_ptr, kv_c_out_ptr, k_pe_out_ptr, lead0)
                            return plan.run(kv_cache, slot_mapping, scale, kv_c_out, k_pe_out)
                        late = True
                        continue
                    (
                        lead0_least,
                        lead1_least,
                        slot_mapping_mask,
                        slot_mapping_step0,
                        slot_mapping_step1,
                        slot_mapping_rest,
                        kv_c_out_step0,
                        kv_c_out_step1,
                        kv_c_out_rest,
                        k_pe_out_step0,
                        k_pe_out_step1,
                        k_pe_out_rest,
                    ) = numbers
                    lead0, lead1 = slot_mapping.shape
                    slot_mapping_ptr = slot_mapping.data_ptr()
                    kv_c_out_ptr = kv_c_out.data_ptr()
                    k_pe_out_ptr = k_pe_out.data_ptr()
                    kv_c_out_n0, kv_c_out_n1, kv_c_out_n2 = kv_c_out.shape
                    k_pe_out_n0, k_pe_out_n1, k_pe_out_n2 = k_pe_out.shape
                    kv_c_out_end = kv_c_out_ptr + kv_c_out_rest + lead0 * kv_c_out_step0 + lead1 * kv_c_out_step1
                    k_pe_out_end = k_pe_out_ptr + k_pe_out_rest + lead0 * k_pe_out_step0 + lead1 * k_pe_out_step1
                    low = kv_c_out_ptr
                    if k_pe_out_ptr < low:
                        low = k_pe_out_ptr
                    high = kv_c_out_end
                    if k_pe_out_end > high:
                        high = k_pe_out_end
                    if (
                        kv_c_out_ptr < 4194304
                        or k_pe_out_ptr < 4194304
                        or kv_c_out_n0 != lead0
                        or kv_c_out_n1 != lead1
                        or k_pe_out_n0 != lead0
                        or k_pe_out_n1 != lead1
                        or (kv_c_out_ptr < k_pe_out_end and k_pe_out_ptr < kv_c_out_end)
                        or (
                            kv_cache_ptr < high
                            and (
                                kv_cache_ptr < 4194304
                                or low < kv_cache_end
                                and (
                                    kv_cache_ptr < kv_c_out_end
                                    and kv_c_out_ptr < kv_cache_end
                                    or kv_cache_ptr < k_pe_out_end
                                    and k_pe_out_ptr < kv_cache_end
                                )
                            )
                        )
                        or (
                            slot_mapping_ptr < high
                            and (
                                slot_mapping_ptr < 4194304
                                or low < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                and (
                                    slot_mapping_ptr < kv_c_out_end
                                    and kv_c_out_ptr
                                    < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                    or slot_mapping_ptr < k_pe_out_end
                                    and k_pe_out_ptr
                                    < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                )
                            )
                        )
                    ):
                        late = True
                        continue
                    if (
                        lead0 > lead0_least
                        and lead1 > lead1_least
                        and slot_mapping_ptr >= 4194304
                        and kv_c_out_ptr >= 4194304
                        and k_pe_out_ptr >= 4194304
                        and not ((kv_c_out_ptr | k_pe_out_ptr) & 15 or slot_mapping_ptr & slot_mapping_mask)
                    ):
                        entry.used = cache.clock = cache.clock + 1
                        if late:
                            recent.promote(0, guard)
                        if launch is not None:
                            return launch(kv_cache_ptr, slot_mapping_ptr, kv_c_out_ptr, k_pe_out_ptr, lead0, lead1)
                        return plan.run(kv_cache, slot_mapping, scale, kv_c_out, k_pe_out)
                    late = True
            named = own_name if mode is None else enter(mode, (kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), own_name)
            return body0(recent, pools, kv_cache, slot_mapping, scale, kv_c_out, k_pe_out, named)
        except Exception as error:  # free until something is raised
            blame(error, (kv_cache, slot_mapping, scale, kv_c_out, k_pe_out), own_name)
            raise

    return call, bound_call
