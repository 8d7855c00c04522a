"""Triton kernels of an update decided on the device: measure, decide, shrink; and a step's record.

`measure`, `decide` and `shrink` do what `Update.on_device` does between the backward pass and the
optimizer, in two launches (three with clipping) where torch takes some forty; `record` writes a
step's row of the record table, which takes torch several. They are part of the row "compile=True,
polish=True, fused SGD" of docs/internals/speed.md: 5 epochs of the benchmark MLP take 0.289 s in
fp32 on an H200. What they add alone is not in the tables. To switch them off: `polish=False`.

No sum is atomic, so that every run gives the same bits. Imported when they are launched: only
torch's builds for CUDA bring Triton.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

INF = tl.constexpr(float("inf"))
EPS = tl.constexpr(1e-6)  # gradients.CLIP_EPS

# The fields of a row that `decide` and `record` write. COLUMNS says in this order where each goes;
# the learning rates follow from column FIELD_COUNT on.
RECORD_FIELDS = ("loss", "cycle_loss", "scale", "grad_norm", "skipped", "updated")


# --- Unscale, average, measure and check the gradients


@triton.jit(
    do_not_specialize_on_alignment=["plan", "square_sums", "nonfinite_flags", "scale", "weight"]
)
def measure(
    grads,
    plan,
    square_sums,
    nonfinite_flags,
    scale,
    weight,
    GRAD_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PER_PROGRAM: tl.constexpr,
):
    """grad ← grad / scale / weight in place; for each program Σ grad² and a flag: any non-finite?

    `plan` has a row for each program: which gradient, from which element, up to which. `scale` and
    `weight` may be None. All in float32. 16-bit gradients come only without a scale and a weight:
    nothing is stored to them.
    """
    program = tl.program_id(0)
    data, first, last = _own_elements(grads, plan, program, GRAD_COUNT)
    inverse_scale = None
    divisor = None
    if scale is not None:
        # As precision.loss_scale computes it: in float64, rounded once.
        inverse_scale = (1.0 / tl.load(scale).to(tl.float64)).to(tl.float32)
    if weight is not None:
        divisor = _weight_or_one(tl.load(weight)).to(tl.float32)

    squares = tl.zeros([BLOCK], tl.float32)
    nonfinite = tl.zeros([BLOCK], tl.int32)
    if last - first == BLOCK * BLOCKS_PER_PROGRAM:
        # A full share needs no mask: four numbers are loaded at a time.
        for block in range(BLOCKS_PER_PROGRAM):
            at = data + (first + block * BLOCK + tl.arange(0, BLOCK))
            grad, is_nonfinite = _unscale(at, None, inverse_scale, divisor)
            squares = squares + grad * grad
            nonfinite = nonfinite | is_nonfinite
    else:
        for block in range(BLOCKS_PER_PROGRAM):
            position = first + block * BLOCK + tl.arange(0, BLOCK)
            grad, is_nonfinite = _unscale(data + position, position < last, inverse_scale, divisor)
            squares = squares + grad * grad
            nonfinite = nonfinite | is_nonfinite
    tl.store(square_sums + program, tl.sum(squares))
    tl.store(nonfinite_flags + program, tl.max(nonfinite))


@triton.jit
def _unscale(at, inside, inverse_scale, divisor):
    """Gradients as the update sees them; and 1 for each that was non-finite before unscaling."""
    if inside is None:
        stored = tl.load(at)
    else:
        stored = tl.load(at, inside, 0.0)
    grad = stored.to(tl.float32)  # the square of a half overflows
    is_nonfinite = (tl.abs(grad) < INF).to(tl.int32) ^ 1  # torch's kernel checks here, too
    if inverse_scale is not None:
        grad = grad * inverse_scale
    if divisor is not None:
        grad = tl.div_rn(grad, divisor)
    if (inverse_scale is not None) or (divisor is not None):
        tl.store(at, grad, inside)
    return grad, is_nonfinite


@triton.jit(do_not_specialize_on_alignment=["plan", "factor"])
def shrink(
    grads,
    plan,
    factor,
    GRAD_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_PER_PROGRAM: tl.constexpr,
):
    """Multiplies the gradients by the clipping factor in place; if it is 1, reads none of them."""
    clip_factor = tl.load(factor)
    if clip_factor != 1.0:
        data, first, last = _own_elements(grads, plan, tl.program_id(0), GRAD_COUNT)
        if last - first == BLOCK * BLOCKS_PER_PROGRAM:
            for block in range(BLOCKS_PER_PROGRAM):
                at = data + (first + block * BLOCK + tl.arange(0, BLOCK))
                tl.store(at, tl.load(at) * clip_factor)
        else:
            for block in range(BLOCKS_PER_PROGRAM):
                position = first + block * BLOCK + tl.arange(0, BLOCK)
                grad = tl.load(data + position, position < last, 0.0)
                tl.store(data + position, grad * clip_factor, position < last)


@triton.jit
def _own_elements(grads, plan, program, GRAD_COUNT: tl.constexpr):
    """The gradient that a program works on, one of GRAD_COUNT, and its first and last element."""
    row = plan + program * 3
    grad_index = tl.load(row)
    first = tl.load(row + 1)
    last = tl.load(row + 2)
    data = grads[0]
    for i in tl.static_range(1, GRAD_COUNT):
        data = tl.where(grad_index == i, grads[i], data)
    return data, tl.multiple_of(first, 16), last


@triton.jit
def _weight_or_one(weight):
    """The cycle's weight N, or 1 for a cycle without terms."""
    return tl.where(weight > 0, weight, 1.0)


# --- Decide


@triton.jit(
    do_not_specialize=[
        "param_count",
        "longest",
        "table_columns",
        "table_row_stride",
        "table_column_stride",
        "record_rows",
        "record_stride",
        "record_lr_stride",
    ],
    do_not_specialize_on_alignment=[
        "bad",
        "scale",
        "growth",
        "weight",
        "loss",
        "lr_table",
        "lr_out",
        "loss_out",
        "result_floats",
        "record_table",
        "record_row",
        "record_lr",
    ],
)
def decide(
    square_sums,
    nonfinite_flags,
    first_programs,
    bad,
    counters,
    scale,
    growth,
    weight,
    loss,
    lr_table,
    lr_tensors,
    lr_out,
    loss_out,
    result_floats,
    result_flags,
    record_table,
    record_row,
    record_lr,
    param_count,
    longest,
    table_columns,
    table_row_stride,
    table_column_stride,
    record_rows,
    record_stride,
    record_lr_stride,
    PARAM_SLOTS: tl.constexpr,
    PROGRAMS_AT_ONCE: tl.constexpr,
    GROUPS: tl.constexpr,
    ACCUMULATES: tl.constexpr,
    IGNORES_TARGETS: tl.constexpr,
    NONFINITE: tl.constexpr,
    DYNAMIC: tl.constexpr,
    CLIP_NORM: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIELD_COUNT: tl.constexpr,
):
    """All of `Update.on_device` that is a number, in one program: norms, flags, scale, record.

    PARAM_SLOTS is `param_count` rounded up to a power of two. Tables may be None.
    """
    # Read everything first: most of it is overwritten below.
    record_index = 0
    if record_table is not None:
        record_index = tl.load(record_row)
    updates_at, skips_at, streak_at, halted_at, cycles_ended_at = counters
    updates = tl.load(updates_at)
    skips = tl.load(skips_at)
    streak = tl.load(streak_at)
    halted = tl.load(halted_at)
    cycles_ended = tl.load(cycles_ended_at) + 1
    scale_used = tl.load(scale)
    growth_count = tl.load(growth)
    nonfinite, norm = _measure_grads(
        square_sums,
        nonfinite_flags,
        first_programs,
        param_count,
        longest,
        PARAM_SLOTS,
        PROGRAMS_AT_ONCE,
    )

    # Decide: an overflow is skipped; a halted run and a cycle without terms change nothing.
    overflow = (tl.max(nonfinite) > 0) & (NONFINITE != "ignore")
    hold = halted > 0
    loss_value = tl.load(loss)
    cycle_weight = None
    is_empty = hold & False
    if weight is not None:
        cycle_weight = tl.load(weight)
        norm = tl.where(cycle_weight > 0, norm, 0.0)
        is_empty = cycle_weight == 0
    elif IGNORES_TARGETS:
        # A mean over no terms is NaN, and its gradients are 0.
        is_empty = (loss_value != loss_value) & (norm == 0)
    tl.debug_barrier()  # every warp has to have read what is overwritten below
    hold |= is_empty
    skipped = overflow & (hold == 0)
    updated = (overflow | hold) == 0

    # Count.
    tl.store(updates_at, updates + updated.to(tl.int64))
    tl.store(skips_at, skips + skipped.to(tl.int64))
    next_streak = (streak + 1) * overflow.to(tl.int64)
    tl.store(streak_at, tl.where(hold, streak, next_streak))
    tl.store(cycles_ended_at, cycles_ended)
    if NONFINITE == "raise":
        tl.store(halted_at, tl.where(skipped, cycles_ended, halted))
    param = tl.arange(0, PARAM_SLOTS)
    tl.store(bad + param, nonfinite > 0, param < tl.where(skipped, param_count, 0))

    # Next scale, next learning rates.
    if DYNAMIC is not None:
        _next_scale(scale, growth, scale_used, growth_count, overflow, hold, DYNAMIC)
    lr_values = record_lr
    lr_stride = record_lr_stride
    if lr_table is not None:
        lr_values = lr_table + tl.minimum(updates, table_columns - 1) * table_column_stride
        lr_stride = table_row_stride
        _set_rates(lr_values, lr_stride, lr_tensors, lr_out, GROUPS)

    # The results, and the record.
    if loss_out is not None:
        loss_value = _cycle_loss(loss_out, loss_value, cycle_weight, is_empty, ACCUMULATES)
    _store_results(result_floats, result_flags, norm, scale_used, skipped, updated, CLIP_NORM)
    if record_table is not None:
        _append_record(
            record_table,
            record_row,
            record_index,
            record_rows,
            record_stride,
            loss_value,
            scale_used,
            norm,
            skipped,
            updated,
            lr_values,
            lr_stride,
            GROUPS,
            COLUMNS,
            FIELD_COUNT,
        )


@triton.jit
def _measure_grads(
    square_sums,
    nonfinite_flags,
    first_programs,
    param_count,
    longest,
    PARAM_SLOTS: tl.constexpr,
    PROGRAMS_AT_ONCE: tl.constexpr,
):
    """Whether each gradient has a non-finite value, and the norm of all together.

    `first_programs` says where each parameter's programs begin; `longest` is the most it has.
    """
    param = tl.arange(0, PARAM_SLOTS)
    first = tl.load(first_programs + param, param < param_count, 0)
    last = tl.load(first_programs + param + 1, param < param_count, 0)
    squares = tl.zeros([PARAM_SLOTS], tl.float32)
    nonfinite = tl.zeros([PARAM_SLOTS], tl.int32)
    start = 0
    while start < longest:
        program = first[:, None] + start + tl.arange(0, PROGRAMS_AT_ONCE)[None, :]
        inside = program < last[:, None]
        squares += tl.sum(tl.load(square_sums + program, inside, 0.0), 1)
        nonfinite |= tl.max(tl.load(nonfinite_flags + program, inside, 0), 1)
        start += PROGRAMS_AT_ONCE
    norms = tl.sqrt_rn(squares)
    return nonfinite, tl.sqrt_rn(tl.sum(norms * norms))


@triton.jit
def _next_scale(scale, growth, scale_used, growth_count, overflow, hold, DYNAMIC: tl.constexpr):
    """DynamicScale.next: products in float64 and rounded once, as torch does; then floor and cap.

    DYNAMIC: growth factor, backoff factor, interval, floor, cap (or None).
    """
    wide_scale = scale_used.to(tl.float64)
    next_count = tl.minimum(growth_count, DYNAMIC[2] - 1) + 1
    grows = next_count == DYNAMIC[2]
    grown = (wide_scale * DYNAMIC[0]).to(tl.float32)
    new_scale = tl.where(grows & (grown < INF), grown, scale_used)
    new_scale = tl.where(overflow, (wide_scale * DYNAMIC[1]).to(tl.float32), new_scale)
    new_scale = tl.maximum(new_scale, DYNAMIC[3])
    if DYNAMIC[4] is not None:
        new_scale = tl.minimum(new_scale, DYNAMIC[4])
    tl.store(scale, tl.where(hold, scale_used, new_scale))
    new_count = tl.where(overflow | grows, 0, next_count)
    tl.store(growth, tl.where(hold, growth_count, new_count))


@triton.jit
def _set_rates(lr_values, lr_stride, lr_tensors, lr_out, GROUPS: tl.constexpr):
    """Copies this update's learning rates into the optimizer's tensors and into the result."""
    for group in tl.static_range(GROUPS):
        lr = tl.load(lr_values + group * lr_stride)
        tl.store(lr_tensors[group], lr)
        tl.store(lr_out + group, lr.to(tl.float64))


@triton.jit
def _cycle_loss(loss_out, loss_value, cycle_weight, is_empty, ACCUMULATES: tl.constexpr):
    """The loss of the cycle, as Update computes it on the device: stored and returned."""
    if ACCUMULATES:
        if cycle_weight is not None:
            loss_value = loss_value / _weight_or_one(cycle_weight)  # both are float64
    else:
        loss_value = tl.where(is_empty, 0.0, loss_value)
    if loss_out.dtype.element_ty.primitive_bitwidth == 16:
        loss_value = loss_value.to(tl.float32)  # torch rounds float64 to 16 bits by way of float32
    loss_value = loss_value.to(loss_out.dtype.element_ty)
    tl.store(loss_out, loss_value)
    return loss_value


@triton.jit
def _store_results(
    result_floats,
    result_flags,
    norm,
    scale_used,
    skipped,
    updated,
    CLIP_NORM: tl.constexpr,
):
    """Floats: norm, scale, found_inf, clip factor. Flags: skipped, updated, not updated."""
    tl.store(result_floats, norm)
    tl.store(result_floats + 1, scale_used)
    tl.store(result_floats + 2, tl.where(updated, 0.0, 1.0))
    if CLIP_NORM is not None:
        factor = tl.div_rn(1.0, norm + EPS) * CLIP_NORM  # how torch computes CLIP_NORM / (norm + ε)
        tl.store(result_floats + 3, tl.where(factor > 1.0, 1.0, factor))  # NaN stays NaN
    tl.store(result_flags, skipped)
    tl.store(result_flags + 1, updated)
    tl.store(result_flags + 2, updated == 0)


@triton.jit
def _append_record(
    record_table,
    record_row,
    record_index,
    record_rows,
    record_stride,
    loss_value,
    scale_used,
    norm,
    skipped,
    updated,
    lr_values,
    lr_stride,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIELD_COUNT: tl.constexpr,
):
    """Writes a row of the record table and counts it. A row beyond the table is left out.

    Each cycle is one batch here: both have the same loss.
    """
    out = record_table + record_index * record_stride
    inside = record_index < record_rows
    tl.store(record_row, record_index + 1)
    tl.store(out + COLUMNS[0], loss_value.to(tl.float64), inside)
    tl.store(out + COLUMNS[1], loss_value.to(tl.float64), inside)
    tl.store(out + COLUMNS[2], scale_used.to(tl.float64), inside)
    tl.store(out + COLUMNS[3], norm.to(tl.float64), inside)
    tl.store(out + COLUMNS[4], skipped.to(tl.float64), inside)
    tl.store(out + COLUMNS[5], updated.to(tl.float64), inside)
    for group in tl.static_range(GROUPS):
        lr_at = lr_values + group * lr_stride
        tl.store(out + (FIELD_COUNT + group), tl.load(lr_at).to(tl.float64), inside)


# --- The record of a step that was not decided here


@triton.jit(
    do_not_specialize=["record_rows", "record_stride", "lr_stride"],
    do_not_specialize_on_alignment=[
        "record_table",
        "record_row",
        "loss",
        "cycle_loss",
        "lr",
        "scale",
        "skipped",
        "grad_norm",
        "updated",
    ],
)
def record(
    record_table,
    record_row,
    loss,
    cycle_loss,
    lr,
    scale,
    skipped,
    grad_norm,
    updated,
    record_rows,
    record_stride,
    lr_stride,
    GROUPS: tl.constexpr,
    KEEP_LOSS: tl.constexpr,
    ADVANCE: tl.constexpr,
    COLUMNS: tl.constexpr,
    FIELD_COUNT: tl.constexpr,
):
    """Writes a row: the fields of a record, then the learning rates; one warp does it.

    With KEEP_LOSS it is the row before, all but its loss. A row beyond the table is left out.
    """
    next_row = tl.load(record_row)
    if KEEP_LOSS:
        index = next_row - 1
    else:
        index = next_row
    out = record_table + index * record_stride
    inside = (index >= 0) & (index < record_rows)
    if not KEEP_LOSS:
        tl.store(out + COLUMNS[0], tl.load(loss).to(tl.float64), inside)
    tl.store(out + COLUMNS[1], tl.load(cycle_loss).to(tl.float64), inside)
    tl.store(out + COLUMNS[2], tl.load(scale).to(tl.float64), inside)
    tl.store(out + COLUMNS[3], tl.load(grad_norm).to(tl.float64), inside)
    tl.store(out + COLUMNS[4], tl.load(skipped).to(tl.float64), inside)
    tl.store(out + COLUMNS[5], tl.load(updated).to(tl.float64), inside)
    for group in tl.static_range(GROUPS):
        lr_at = lr + group * lr_stride
        tl.store(out + (FIELD_COUNT + group), tl.load(lr_at).to(tl.float64), inside)
    if ADVANCE:
        tl.store(record_row, next_row + 1)
