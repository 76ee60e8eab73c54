"""The quick path of `gather_paged`. Written by ``make calls`` from its schema: see `kvdock.ops.calls.writer`, and do not edit it."""

from kvdock.ops.geometry import has_internal_overlap
from kvdock.ops.signatures import EMPTY, FastCall

__all__ = ["make"]


def make(op):
    """Return the op as a function of all its arguments, and as one of a `BoundOp` and the rest."""
    is_compiling, recording, is_intercepted, trace = op.is_compiling, op.recording, op.is_intercepted, op.trace
    get_mode, enter = op.get_mode, op.enter
    recent, chooser, settings, schema = op.recent, op.chooser, op.settings, op.schema
    find, prepare, slow, blame = op.find, op.prepare, op.run_slowly, op.blame
    make_outputs = op.make_outputs

    def body0(recent, pools, k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out, named):
        if k_out is None and v_out is None:
            k_out, v_out = make_outputs((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out))
        key = (named, 0, (), k_scale is None, v_scale is None)
        signature = recent.signature0
        try:
            known = (
                pools is not None
                and signature.pools is pools
                and signature.key == key
                and signature.guard(slot_mapping, k_out, v_out)
                and (
                    signature.optional is None
                    or signature.optional.accept((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out))
                )
            )
        except TypeError:  # what is no tensor
            known = False
        if not known:
            signature = find(recent, key, (k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out))
            if signature is None:  # nothing that can be known by a guard, such as an int of a class of its own
                slow((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), named)
                return k_out, v_out
            pools = signature.pools
        if signature.variant == 0:
            slot_mapping_size, slot_mapping_full, k_out_size, k_out_full, v_out_size, v_out_full = signature.numbers
            (lead0,) = slot_mapping.shape
            (slot_mapping_t0,) = slot_mapping.stride()
            slot_mapping_ptr = slot_mapping.data_ptr()
            slot_mapping_end = slot_mapping_ptr + (1 + (lead0 - 1) * slot_mapping_t0) * slot_mapping_size
            k_out_n0, k_out_n1, k_out_n2 = k_out.shape
            k_out_t0, k_out_t1, k_out_t2 = k_out.stride()
            k_out_ptr = k_out.data_ptr()
            k_out_end = k_out_ptr + (1 + (k_out_n0 - 1) * k_out_t0 + (k_out_n1 - 1) * k_out_t1 + (k_out_n2 - 1) * k_out_t2) * k_out_size
            k_out_bits = k_out_ptr | k_out_full
            if k_out_n0 > 1:
                k_out_bits |= k_out_t0 * k_out_size
            if k_out_n1 > 1:
                k_out_bits |= k_out_t1 * k_out_size
            v_out_n0, v_out_n1, v_out_n2 = v_out.shape
            v_out_t0, v_out_t1, v_out_t2 = v_out.stride()
            v_out_ptr = v_out.data_ptr()
            v_out_end = v_out_ptr + (1 + (v_out_n0 - 1) * v_out_t0 + (v_out_n1 - 1) * v_out_t1 + (v_out_n2 - 1) * v_out_t2) * v_out_size
            v_out_bits = v_out_ptr | v_out_full
            if v_out_n0 > 1:
                v_out_bits |= v_out_t0 * v_out_size
            if v_out_n1 > 1:
                v_out_bits |= v_out_t1 * v_out_size
            k_cache_extent, v_cache_extent = pools.extents
            k_cache_ptr = k_cache.data_ptr()
            k_cache_end = k_cache_ptr + k_cache_extent
            v_cache_ptr = v_cache.data_ptr()
            v_cache_end = v_cache_ptr + v_cache_extent
            low = k_out_ptr
            if v_out_ptr < low:
                low = v_out_ptr
            high = k_out_end
            if v_out_end > high:
                high = v_out_end
            if (
                not lead0
                or k_out_ptr < 4194304
                or v_out_ptr < 4194304
                or slot_mapping_ptr & (slot_mapping_size - 1)
                or k_out_n0 != lead0
                or v_out_n0 != lead0
                or (not k_out.is_contiguous() and has_internal_overlap(k_out))
                or (not v_out.is_contiguous() and has_internal_overlap(v_out))
                or (k_out_ptr < v_out_end and v_out_ptr < k_out_end)
                or (
                    k_cache_ptr < high
                    and (
                        k_cache_ptr < 4194304
                        or low < k_cache_end
                        and (k_cache_ptr < k_out_end and k_out_ptr < k_cache_end or k_cache_ptr < v_out_end and v_out_ptr < k_cache_end)
                    )
                )
                or (
                    v_cache_ptr < high
                    and (
                        v_cache_ptr < 4194304
                        or low < v_cache_end
                        and (v_cache_ptr < k_out_end and k_out_ptr < v_cache_end or v_cache_ptr < v_out_end and v_out_ptr < v_cache_end)
                    )
                )
                or (
                    slot_mapping_ptr < high
                    and (
                        slot_mapping_ptr < 4194304
                        or low < slot_mapping_end
                        and (
                            slot_mapping_ptr < k_out_end
                            and k_out_ptr < slot_mapping_end
                            or slot_mapping_ptr < v_out_end
                            and v_out_ptr < slot_mapping_end
                        )
                    )
                )
            ):
                slow((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), named, pools)
                return k_out, v_out
            is_full = not ((k_cache_ptr | v_cache_ptr) & 15 or k_out_bits & (k_out_full - 1) or v_out_bits & (v_out_full - 1))
            more = ()
            if signature.optional is not None:
                is_full = False
                more = signature.optional.read(
                    (k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), {"lead0": lead0}, low, high
                )
                if more is None:
                    slow((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), named)
                    return k_out, v_out
            if is_full:
                classes, entry = None, signature.full
            else:
                classes = (
                    (k_cache_ptr | 16) & -(k_cache_ptr | 16),
                    (v_cache_ptr | 16) & -(v_cache_ptr | 16),
                    k_out_bits & -k_out_bits,
                    v_out_bits & -v_out_bits,
                    *more,
                )
                entry = signature.entries.get(classes, EMPTY)
            plan = entry.value  # held until it has run, whatever becomes of the entry
            if plan is None:
                entry, plan = prepare(signature, (k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), classes, named)
            else:
                cache = signature.cache
                entry.used = cache.clock = cache.clock + 1
            if is_full and named == recent.own_name:
                strides = (
                    slot_mapping_t0 if lead0 > 1 else -1,
                    k_out_t0 if lead0 > 1 else -1,
                    k_out_t1,
                    k_out_t2,
                    v_out_t0 if lead0 > 1 else -1,
                    v_out_t1,
                    v_out_t2,
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
                            k_out_n1,
                            k_out_n2,
                            k_out_n1 * k_out_n2,
                            k_out_t0 * k_out_size,
                            (1 + (k_out_n1 - 1) * k_out_t1 + (k_out_n2 - 1) * k_out_t2 - k_out_t0) * k_out_size,
                            v_out_n1,
                            v_out_n2,
                            v_out_n1 * v_out_n2,
                            v_out_t0 * v_out_size,
                            (1 + (v_out_n1 - 1) * v_out_t1 + (v_out_n2 - 1) * v_out_t2 - v_out_t0) * v_out_size,
                        )
                        fast = signature.settle(
                            schema, entry, strides, numbers, (k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out)
                        )
                if fast is not None:
                    recent.adopt(0, fast)
                    if fast.launch is not None:
                        fast.launch(k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_out_ptr, v_out_ptr, lead0)
                        return k_out, v_out
            plan.run(k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out)
            return k_out, v_out
        slot_mapping_size, slot_mapping_full, k_out_size, k_out_full, v_out_size, v_out_full = signature.numbers
        lead0, lead1 = slot_mapping.shape
        slot_mapping_t0, slot_mapping_t1 = slot_mapping.stride()
        slot_mapping_ptr = slot_mapping.data_ptr()
        slot_mapping_end = slot_mapping_ptr + (1 + (lead0 - 1) * slot_mapping_t0 + (lead1 - 1) * slot_mapping_t1) * slot_mapping_size
        k_out_n0, k_out_n1, k_out_n2, k_out_n3 = k_out.shape
        k_out_t0, k_out_t1, k_out_t2, k_out_t3 = k_out.stride()
        k_out_ptr = k_out.data_ptr()
        k_out_end = (
            k_out_ptr
            + (1 + (k_out_n0 - 1) * k_out_t0 + (k_out_n1 - 1) * k_out_t1 + (k_out_n2 - 1) * k_out_t2 + (k_out_n3 - 1) * k_out_t3)
            * k_out_size
        )
        k_out_bits = k_out_ptr | k_out_full
        if k_out_n0 > 1:
            k_out_bits |= k_out_t0 * k_out_size
        if k_out_n1 > 1:
            k_out_bits |= k_out_t1 * k_out_size
        if k_out_n2 > 1:
            k_out_bits |= k_out_t2 * k_out_size
        v_out_n0, v_out_n1, v_out_n2, v_out_n3 = v_out.shape
        v_out_t0, v_out_t1, v_out_t2, v_out_t3 = v_out.stride()
        v_out_ptr = v_out.data_ptr()
        v_out_end = (
            v_out_ptr
            + (1 + (v_out_n0 - 1) * v_out_t0 + (v_out_n1 - 1) * v_out_t1 + (v_out_n2 - 1) * v_out_t2 + (v_out_n3 - 1) * v_out_t3)
            * v_out_size
        )
        v_out_bits = v_out_ptr | v_out_full
        if v_out_n0 > 1:
            v_out_bits |= v_out_t0 * v_out_size
        if v_out_n1 > 1:
            v_out_bits |= v_out_t1 * v_out_size
        if v_out_n2 > 1:
            v_out_bits |= v_out_t2 * v_out_size
        k_cache_extent, v_cache_extent = pools.extents
        k_cache_ptr = k_cache.data_ptr()
        k_cache_end = k_cache_ptr + k_cache_extent
        v_cache_ptr = v_cache.data_ptr()
        v_cache_end = v_cache_ptr + v_cache_extent
        low = k_out_ptr
        if v_out_ptr < low:
            low = v_out_ptr
        high = k_out_end
        if v_out_end > high:
            high = v_out_end
        if (
            not lead0
            or not lead1
            or k_out_ptr < 4194304
            or v_out_ptr < 4194304
            or slot_mapping_ptr & (slot_mapping_size - 1)
            or k_out_n0 != lead0
            or k_out_n1 != lead1
            or v_out_n0 != lead0
            or v_out_n1 != lead1
            or (not k_out.is_contiguous() and has_internal_overlap(k_out))
            or (not v_out.is_contiguous() and has_internal_overlap(v_out))
            or (k_out_ptr < v_out_end and v_out_ptr < k_out_end)
            or (
                k_cache_ptr < high
                and (
                    k_cache_ptr < 4194304
                    or low < k_cache_end
                    and (k_cache_ptr < k_out_end and k_out_ptr < k_cache_end or k_cache_ptr < v_out_end and v_out_ptr < k_cache_end)
                )
            )
            or (
                v_cache_ptr < high
                and (
                    v_cache_ptr < 4194304
                    or low < v_cache_end
                    and (v_cache_ptr < k_out_end and k_out_ptr < v_cache_end or v_cache_ptr < v_out_end and v_out_ptr < v_cache_end)
                )
            )
            or (
                slot_mapping_ptr < high
                and (
                    slot_mapping_ptr < 4194304
                    or low < slot_mapping_end
                    and (
                        slot_mapping_ptr < k_out_end
                        and k_out_ptr < slot_mapping_end
                        or slot_mapping_ptr < v_out_end
                        and v_out_ptr < slot_mapping_end
                    )
                )
            )
        ):
            slow((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), named, pools)
            return k_out, v_out
        is_full = not ((k_cache_ptr | v_cache_ptr) & 15 or k_out_bits & (k_out_full - 1) or v_out_bits & (v_out_full - 1))
        more = ()
        if signature.optional is not None:
            is_full = False
            more = signature.optional.read(
                (k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), {"lead0": lead0, "lead1": lead1}, low, high
            )
            if more is None:
                slow((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), named)
                return k_out, v_out
        if is_full:
            classes, entry = None, signature.full
        else:
            classes = (
                (k_cache_ptr | 16) & -(k_cache_ptr | 16),
                (v_cache_ptr | 16) & -(v_cache_ptr | 16),
                k_out_bits & -k_out_bits,
                v_out_bits & -v_out_bits,
                *more,
            )
            entry = signature.entries.get(classes, EMPTY)
        plan = entry.value  # held until it has run, whatever becomes of the entry
        if plan is None:
            entry, plan = prepare(signature, (k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), classes, named)
        else:
            cache = signature.cache
            entry.used = cache.clock = cache.clock + 1
        if is_full and named == recent.own_name:
            strides = (
                slot_mapping_t0 if lead0 > 1 else -1,
                slot_mapping_t1 if lead1 > 1 else -1,
                k_out_t0 if lead0 > 1 else -1,
                k_out_t1 if lead1 > 1 else -1,
                k_out_t2,
                k_out_t3,
                v_out_t0 if lead0 > 1 else -1,
                v_out_t1 if lead1 > 1 else -1,
                v_out_t2,
                v_out_t3,
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
                        k_out_n2,
                        k_out_n3,
                        k_out_t0 * k_out_size,
                        k_out_t1 * k_out_size,
                        (1 + (k_out_n2 - 1) * k_out_t2 + (k_out_n3 - 1) * k_out_t3 - k_out_t0 - k_out_t1) * k_out_size,
                        v_out_n2,
                        v_out_n3,
                        v_out_t0 * v_out_size,
                        v_out_t1 * v_out_size,
                        (1 + (v_out_n2 - 1) * v_out_t2 + (v_out_n3 - 1) * v_out_t3 - v_out_t0 - v_out_t1) * v_out_size,
                    )
                    fast = signature.settle(
                        schema, entry, strides, numbers, (k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out)
                    )
            if fast is not None:
                recent.adopt(0, fast)
                if fast.launch is not None:
                    fast.launch(k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_out_ptr, v_out_ptr, lead0, lead1)
                    return k_out, v_out
        plan.run(k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out)
        return k_out, v_out

    def call(k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out):
        try:
            if is_compiling():
                return trace((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), None)
            if recording._is_fx_tracing_flag and is_intercepted((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out)):
                return trace((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), None)
            mode = get_mode()
            epoch, generation, pools, fast_calls = recent.state0
            if not (epoch == chooser.epoch and generation == settings.generation):
                pools = None
            elif fast_calls and mode is None and k_scale is None and v_scale is None:
                made = k_out is None and v_out is None
                late = False
                for guard, entry, launch, cache, variant, static, numbers, outputs_guard in fast_calls:
                    plan = entry.value  # held until it has run, whatever becomes of the entry
                    try:
                        same = plan is not None and guard(k_cache, v_cache, slot_mapping) and (made or outputs_guard(k_out, v_out))
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
                            slot_mapping_mask,
                            slot_mapping_step0,
                            slot_mapping_rest,
                            k_out_n1,
                            k_out_n2,
                            k_out_row,
                            k_out_step0,
                            k_out_rest,
                            v_out_n1,
                            v_out_n2,
                            v_out_row,
                            v_out_step0,
                            v_out_rest,
                        ) = numbers
                        lead0 = slot_mapping.numel()
                        if made:
                            try:
                                k_out = k_cache.new_empty(lead0, k_out_n1, k_out_n2)
                                v_out = v_cache.new_empty(lead0, v_out_n1, v_out_n2)
                            except RuntimeError:  # there may be no memory, which is said there
                                k_out, v_out = make_outputs((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out))
                        slot_mapping_ptr = slot_mapping.data_ptr()
                        k_out_ptr = k_out.data_ptr()
                        v_out_ptr = v_out.data_ptr()
                        if not made:
                            k_out_end = k_out_ptr + k_out_rest + lead0 * k_out_step0
                            v_out_end = v_out_ptr + v_out_rest + lead0 * v_out_step0
                            low = k_out_ptr
                            if v_out_ptr < low:
                                low = v_out_ptr
                            high = k_out_end
                            if v_out_end > high:
                                high = v_out_end
                            if (
                                k_out_ptr < 4194304
                                or v_out_ptr < 4194304
                                or k_out.numel() != lead0 * k_out_row
                                or v_out.numel() != lead0 * v_out_row
                                or (k_out_ptr < v_out_end and v_out_ptr < k_out_end)
                                or (
                                    k_cache_ptr < high
                                    and (
                                        k_cache_ptr < 4194304
                                        or low < k_cache_end
                                        and (
                                            k_cache_ptr < k_out_end
                                            and k_out_ptr < k_cache_end
                                            or k_cache_ptr < v_out_end
                                            and v_out_ptr < k_cache_end
                                        )
                                    )
                                )
                                or (
                                    v_cache_ptr < high
                                    and (
                                        v_cache_ptr < 4194304
                                        or low < v_cache_end
                                        and (
                                            v_cache_ptr < k_out_end
                                            and k_out_ptr < v_cache_end
                                            or v_cache_ptr < v_out_end
                                            and v_out_ptr < v_cache_end
                                        )
                                    )
                                )
                                or (
                                    slot_mapping_ptr < high
                                    and (
                                        slot_mapping_ptr < 4194304
                                        or low < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                        and (
                                            slot_mapping_ptr < k_out_end
                                            and k_out_ptr < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                            or slot_mapping_ptr < v_out_end
                                            and v_out_ptr < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                        )
                                    )
                                )
                            ):
                                late = True
                                continue
                        if (
                            lead0 > lead0_least
                            and slot_mapping_ptr >= 4194304
                            and not ((k_out_ptr | v_out_ptr) & 15 or slot_mapping_ptr & slot_mapping_mask)
                        ):
                            entry.used = cache.clock = cache.clock + 1
                            if late:
                                recent.promote(0, guard)
                            if launch is not None:
                                launch(k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_out_ptr, v_out_ptr, lead0)
                                return k_out, v_out
                            plan.run(k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out)
                            return k_out, v_out
                        late = True
                        continue
                    (
                        lead0_least,
                        lead1_least,
                        slot_mapping_mask,
                        slot_mapping_step0,
                        slot_mapping_step1,
                        slot_mapping_rest,
                        k_out_n2,
                        k_out_n3,
                        k_out_step0,
                        k_out_step1,
                        k_out_rest,
                        v_out_n2,
                        v_out_n3,
                        v_out_step0,
                        v_out_step1,
                        v_out_rest,
                    ) = numbers
                    lead0, lead1 = slot_mapping.shape
                    if made:
                        try:
                            k_out = k_cache.new_empty(lead0, lead1, k_out_n2, k_out_n3)
                            v_out = v_cache.new_empty(lead0, lead1, v_out_n2, v_out_n3)
                        except RuntimeError:  # there may be no memory, which is said there
                            k_out, v_out = make_outputs((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out))
                    slot_mapping_ptr = slot_mapping.data_ptr()
                    k_out_ptr = k_out.data_ptr()
                    v_out_ptr = v_out.data_ptr()
                    if not made:
                        k_out_n0, k_out_n1, k_out_n2, k_out_n3 = k_out.shape
                        v_out_n0, v_out_n1, v_out_n2, v_out_n3 = v_out.shape
                        k_out_end = k_out_ptr + k_out_rest + lead0 * k_out_step0 + lead1 * k_out_step1
                        v_out_end = v_out_ptr + v_out_rest + lead0 * v_out_step0 + lead1 * v_out_step1
                        low = k_out_ptr
                        if v_out_ptr < low:
                            low = v_out_ptr
                        high = k_out_end
                        if v_out_end > high:
                            high = v_out_end
                        if (
                            k_out_ptr < 4194304
                            or v_out_ptr < 4194304
                            or k_out_n0 != lead0
                            or k_out_n1 != lead1
                            or v_out_n0 != lead0
                            or v_out_n1 != lead1
                            or (k_out_ptr < v_out_end and v_out_ptr < k_out_end)
                            or (
                                k_cache_ptr < high
                                and (
                                    k_cache_ptr < 4194304
                                    or low < k_cache_end
                                    and (
                                        k_cache_ptr < k_out_end
                                        and k_out_ptr < k_cache_end
                                        or k_cache_ptr < v_out_end
                                        and v_out_ptr < k_cache_end
                                    )
                                )
                            )
                            or (
                                v_cache_ptr < high
                                and (
                                    v_cache_ptr < 4194304
                                    or low < v_cache_end
                                    and (
                                        v_cache_ptr < k_out_end
                                        and k_out_ptr < v_cache_end
                                        or v_cache_ptr < v_out_end
                                        and v_out_ptr < v_cache_end
                                    )
                                )
                            )
                            or (
                                slot_mapping_ptr < high
                                and (
                                    slot_mapping_ptr < 4194304
                                    or low < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                    and (
                                        slot_mapping_ptr < k_out_end
                                        and k_out_ptr
                                        < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                        or slot_mapping_ptr < v_out_end
                                        and v_out_ptr
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
                        and not ((k_out_ptr | v_out_ptr) & 15 or slot_mapping_ptr & slot_mapping_mask)
                    ):
                        entry.used = cache.clock = cache.clock + 1
                        if late:
                            recent.promote(0, guard)
                        if launch is not None:
                            launch(k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_out_ptr, v_out_ptr, lead0, lead1)
                            return k_out, v_out
                        plan.run(k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out)
                        return k_out, v_out
                    late = True
            try:
                if pools is not None and not pools.guard(k_cache, v_cache):
                    pools = None
            except TypeError:  # what is no tensor
                pools = None
            named = None if mode is None else enter(mode, (k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), None)
            return body0(recent, pools, k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out, named)
        except Exception as error:  # free until something is raised
            blame(error, (k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), None)
            raise

    def bound_call(bound, slot_mapping, k_scale, v_scale, k_out, v_out):
        recent, own_name = bound.recent, bound.own_name
        k_cache, v_cache, k_cache_ptr, k_cache_end, v_cache_ptr, v_cache_end, low, high = bound.fixed
        try:
            if is_compiling():
                k_cache, v_cache = bound.traced_pools()
                return trace((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), own_name)
            if recording._is_fx_tracing_flag and is_intercepted((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out)):
                return trace((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), own_name)
            mode = get_mode()
            epoch, generation, pools, fast_calls = recent.state0
            if not (epoch == chooser.epoch and generation == settings.generation):
                pools = None
            elif fast_calls and mode is None and k_scale is None and v_scale is None:
                made = k_out is None and v_out is None
                late = False
                for guard, entry, launch, cache, variant, static, numbers, outputs_guard in fast_calls:
                    plan = entry.value  # held until it has run, whatever becomes of the entry
                    try:
                        same = plan is not None and guard(slot_mapping) and (made or outputs_guard(k_out, v_out))
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
                            k_out_n1,
                            k_out_n2,
                            k_out_row,
                            k_out_step0,
                            k_out_rest,
                            v_out_n1,
                            v_out_n2,
                            v_out_row,
                            v_out_step0,
                            v_out_rest,
                        ) = numbers
                        lead0 = slot_mapping.numel()
                        if made:
                            try:
                                k_out = k_cache.new_empty(lead0, k_out_n1, k_out_n2)
                                v_out = v_cache.new_empty(lead0, v_out_n1, v_out_n2)
                            except RuntimeError:  # there may be no memory, which is said there
                                k_out, v_out = make_outputs((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out))
                        slot_mapping_ptr = slot_mapping.data_ptr()
                        k_out_ptr = k_out.data_ptr()
                        v_out_ptr = v_out.data_ptr()
                        if not made:
                            k_out_end = k_out_ptr + k_out_rest + lead0 * k_out_step0
                            v_out_end = v_out_ptr + v_out_rest + lead0 * v_out_step0
                            low = k_out_ptr
                            if v_out_ptr < low:
                                low = v_out_ptr
                            high = k_out_end
                            if v_out_end > high:
                                high = v_out_end
                            if (
                                k_out_ptr < 4194304
                                or v_out_ptr < 4194304
                                or k_out.numel() != lead0 * k_out_row
                                or v_out.numel() != lead0 * v_out_row
                                or (k_out_ptr < v_out_end and v_out_ptr < k_out_end)
                                or (
                                    k_cache_ptr < high
                                    and (
                                        k_cache_ptr < 4194304
                                        or low < k_cache_end
                                        and (
                                            k_cache_ptr < k_out_end
                                            and k_out_ptr < k_cache_end
                                            or k_cache_ptr < v_out_end
                                            and v_out_ptr < k_cache_end
                                        )
                                    )
                                )
                                or (
                                    v_cache_ptr < high
                                    and (
                                        v_cache_ptr < 4194304
                                        or low < v_cache_end
                                        and (
                                            v_cache_ptr < k_out_end
                                            and k_out_ptr < v_cache_end
                                            or v_cache_ptr < v_out_end
                                            and v_out_ptr < v_cache_end
                                        )
                                    )
                                )
                                or (
                                    slot_mapping_ptr < high
                                    and (
                                        slot_mapping_ptr < 4194304
                                        or low < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                        and (
                                            slot_mapping_ptr < k_out_end
                                            and k_out_ptr < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                            or slot_mapping_ptr < v_out_end
                                            and v_out_ptr < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0
                                        )
                                    )
                                )
                            ):
                                late = True
                                continue
                        if (
                            lead0 > lead0_least
                            and slot_mapping_ptr >= 4194304
                            and not ((k_out_ptr | v_out_ptr) & 15 or slot_mapping_ptr & slot_mapping_mask)
                        ):
                            entry.used = cache.clock = cache.clock + 1
                            if late:
                                recent.promote(0, guard)
                            if launch is not None:
                                launch(k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_out_ptr, v_out_ptr, lead0)
                                return k_out, v_out
                            plan.run(k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out)
                            return k_out, v_out
                        late = True
                        continue
                    (
                        lead0_least,
                        lead1_least,
                        slot_mapping_mask,
                        slot_mapping_step0,
                        slot_mapping_step1,
                        slot_mapping_rest,
                        k_out_n2,
                        k_out_n3,
                        k_out_step0,
                        k_out_step1,
                        k_out_rest,
                        v_out_n2,
                        v_out_n3,
                        v_out_step0,
                        v_out_step1,
                        v_out_rest,
                    ) = numbers
                    lead0, lead1 = slot_mapping.shape
                    if made:
                        try:
                            k_out = k_cache.new_empty(lead0, lead1, k_out_n2, k_out_n3)
                            v_out = v_cache.new_empty(lead0, lead1, v_out_n2, v_out_n3)
                        except RuntimeError:  # there may be no memory, which is said there
                            k_out, v_out = make_outputs((k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out))
                    slot_mapping_ptr = slot_mapping.data_ptr()
                    k_out_ptr = k_out.data_ptr()
                    v_out_ptr = v_out.data_ptr()
                    if not made:
                        k_out_n0, k_out_n1, k_out_n2, k_out_n3 = k_out.shape
                        v_out_n0, v_out_n1, v_out_n2, v_out_n3 = v_out.shape
                        k_out_end = k_out_ptr + k_out_rest + lead0 * k_out_step0 + lead1 * k_out_step1
                        v_out_end = v_out_ptr + v_out_rest + lead0 * v_out_step0 + lead1 * v_out_step1
                        low = k_out_ptr
                        if v_out_ptr < low:
                            low = v_out_ptr
                        high = k_out_end
                        if v_out_end > high:
                            high = v_out_end
                        if (
                            k_out_ptr < 4194304
                            or v_out_ptr < 4194304
                            or k_out_n0 != lead0
                            or k_out_n1 != lead1
                            or v_out_n0 != lead0
                            or v_out_n1 != lead1
                            or (k_out_ptr < v_out_end and v_out_ptr < k_out_end)
                            or (
                                k_cache_ptr < high
                                and (
                                    k_cache_ptr < 4194304
                                    or low < k_cache_end
                                    and (
                                        k_cache_ptr < k_out_end
                                        and k_out_ptr < k_cache_end
                                        or k_cache_ptr < v_out_end
                                        and v_out_ptr < k_cache_end
                                    )
                                )
                            )
                            or (
                                v_cache_ptr < high
                                and (
                                    v_cache_ptr < 4194304
                                    or low < v_cache_end
                                    and (
                                        v_cache_ptr < k_out_end
                                        and k_out_ptr < v_cache_end
                                        or v_cache_ptr < v_out_end
                                        and v_out_ptr < v_cache_end
                                    )
                                )
                            )
                            or (
                                slot_mapping_ptr < high
                                and (
                                    slot_mapping_ptr < 4194304
                                    or low < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                    and (
                                        slot_mapping_ptr < k_out_end
                                        and k_out_ptr
                                        < slot_mapping_ptr + slot_mapping_rest + lead0 * slot_mapping_step0 + lead1 * slot_mapping_step1
                                        or slot_mapping_ptr < v_out_end
                                        and v_out_ptr
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
                        and not ((k_out_ptr | v_out_ptr) & 15 or slot_mapping_ptr & slot_mapping_mask)
                    ):
                        entry.used = cache.clock = cache.clock + 1
                        if late:
                            recent.promote(0, guard)
                        if launch is not None:
                            launch(k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_out_ptr, v_out_ptr, lead0, lead1)
                            return k_out, v_out
                        plan.run(k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out)
                        return k_out, v_out
                    late = True
            named = own_name if mode is None else enter(mode, (k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), own_name)
            return body0(recent, pools, k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out, named)
        except Exception as error:  # free until something is raised
            blame(error, (k_cache, v_cache, slot_mapping, k_scale, v_scale, k_out, v_out), own_name)
            raise

    return call, bound_call
