"""The kernels of `quick`, in a module of their own: only torch's builds for CUDA bring Triton.

`plan` has a row for each program: which gradient, and from which element up to which. No sum is atomic, so that every
run gives the same bits.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

INF = tl.constexpr(float("inf"))
EPS = tl.constexpr(1e-6)  # gradients.CLIP_EPS


@triton.jit(do_not_specialize_on_alignment=["plan", "sums", "flags", "scale", "weight"])
def measure(
    grads, plan, sums, flags, scale, weight, COUNT: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr
):  # fmt: skip
    """g · inv_scale / N in place, where either is given; for each program Σ g² and whether one was non-finite.

    In float32. Half gradients come only without a scale and a weight: nothing is stored to them.
    """
    program = tl.program_id(0)
    data, first, last = _part(grads, plan, program, COUNT)
    inverse, n = None, None
    if scale is not None:
        inverse = (1.0 / tl.load(scale).to(tl.float64)).to(tl.float32)  # precision.scale.inverse
    if weight is not None:
        n = _or_one(tl.load(weight)).to(tl.float32)
    squares, bad = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    if last - first == BLOCK * TURNS:  # without a mask: four numbers at a time
        for turn in range(TURNS):
            x, wrong = _change(
                data + (first + turn * BLOCK + tl.arange(0, BLOCK)), None, inverse, n
            )
            squares, bad = squares + x * x, bad | wrong
    else:
        for turn in range(TURNS):
            place = first + turn * BLOCK + tl.arange(0, BLOCK)
            x, wrong = _change(data + place, place < last, inverse, n)
            squares, bad = squares + x * x, bad | wrong
    tl.store(sums + program, tl.sum(squares))
    tl.store(flags + program, tl.max(bad))


@triton.jit
def _change(at, inside, inverse, n):
    """The gradients there as the update sees them, and 1 for each that was non-finite as backward left it."""
    x = (tl.load(at) if inside is None else tl.load(at, inside, 0.0)).to(
        tl.float32
    )  # a half's square overflows
    wrong = (tl.abs(x) < INF).to(tl.int32) ^ 1  # before unscaling, as torch's kernel checks
    if inverse is not None:
        x = x * inverse
    if n is not None:
        x = tl.div_rn(x, n)
    if (inverse is not None) or (n is not None):
        tl.store(at, x, inside)
    return x, wrong


@triton.jit(do_not_specialize_on_alignment=["plan", "factor"])
def shrink(grads, plan, factor, COUNT: tl.constexpr, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    """Multiplies the gradients in place; without a look at them when the factor is 1."""
    by = tl.load(factor)
    if by != 1.0:
        data, first, last = _part(grads, plan, tl.program_id(0), COUNT)
        if last - first == BLOCK * TURNS:
            for turn in range(TURNS):
                at = data + (first + turn * BLOCK + tl.arange(0, BLOCK))
                tl.store(at, tl.load(at) * by)
        else:
            for turn in range(TURNS):
                place = first + turn * BLOCK + tl.arange(0, BLOCK)
                tl.store(data + place, tl.load(data + place, place < last, 0.0) * by, place < last)


@triton.jit
def _part(grads, plan, program, COUNT: tl.constexpr):
    """A program's gradient, one of COUNT pointers, and its share of the elements."""
    row = plan + program * 3
    owner, first, last = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    data = grads[0]
    for i in tl.static_range(1, COUNT):
        data = tl.where(owner == i, grads[i], data)
    return data, tl.multiple_of(first, 16), last


@triton.jit
def _or_one(n):
    """N, or 1 for a cycle without terms."""
    return tl.where(n > 0, n, 1.0)


@triton.jit(
    do_not_specialize=["count", "longest", "columns", "row", "column", "lines", "width", "step"],
    do_not_specialize_on_alignment=[
        "bad", "scale", "growth", "weight", "loss", "table", "lr", "mean", "floats", "journal", "at", "shown",
    ],
)  # fmt: skip
def decide(
    sums, flags, begins, bad, counters, scale, growth, weight, loss, table, rates, lr, mean, floats, truths,
    journal, at, shown, count, longest, columns, row, column, lines, width, step,
    T: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, MANY: tl.constexpr, MASKED: tl.constexpr,
    NONFINITE: tl.constexpr, DYNAMIC: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Everything of an update that is a number, and its record: `Update.on_device` between measuring and committing."""
    here = tl.load(at) if journal is not None else 0
    updates, skips, streak, halted, tries = counters
    done, dropped, in_a_row, stopped = (
        tl.load(updates),
        tl.load(skips),
        tl.load(streak),
        tl.load(halted),
    )
    tried, used, grown = tl.load(tries) + 1, tl.load(scale), tl.load(growth)
    each, found, norm = _norms(sums, flags, begins, count, longest, T, K)
    overflow, hold = found & (NONFINITE != "ignore"), stopped > 0
    value, n, empty = tl.load(loss), None, hold & False
    if weight is not None:
        n = tl.load(weight)
        norm, empty = tl.where(n > 0, norm, 0.0), n == 0
    elif MASKED:
        empty = (value != value) & (norm == 0)
    tl.debug_barrier()  # below is overwritten what every warp has to have read by now
    hold |= empty
    skipped, updated = overflow & (hold == 0), (overflow | hold) == 0
    tl.store(updates, done + updated.to(tl.int64))
    tl.store(skips, dropped + skipped.to(tl.int64))
    tl.store(streak, tl.where(hold, in_a_row, (in_a_row + 1) * overflow.to(tl.int64)))
    tl.store(tries, tried)
    if NONFINITE == "raise":
        tl.store(halted, tl.where(skipped, tried, stopped))
    place = tl.arange(0, T)
    tl.store(bad + place, (each < INF) == 0, place < tl.where(skipped, count, 0))
    if DYNAMIC is not None:
        _next_scale(scale, growth, used, grown, overflow, hold, DYNAMIC)
    if table is not None:
        shown, step = table + tl.minimum(done, columns - 1) * column, row
        _set_rates(shown, row, rates, lr, GROUPS)
    if mean is not None:
        value = _mean(mean, value, n, empty, MANY)
    _tell(floats, truths, norm, used, skipped, updated, LIMIT)
    if journal is not None:
        _enter(
            journal,
            at,
            here,
            lines,
            width,
            value,
            used,
            norm,
            skipped,
            updated,
            shown,
            step,
            GROUPS,
        )


@triton.jit
def _norms(sums, flags, begins, count, longest, T: tl.constexpr, K: tl.constexpr):
    """The norm of each gradient, whether any holds a non-finite value, and the norm of all."""
    place = tl.arange(0, T)
    first = tl.load(begins + place, place < count, 0)
    last = tl.load(begins + place + 1, place < count, 0)
    squares, worst = tl.zeros([T], tl.float32), tl.zeros([T], tl.int32)
    start = 0
    while start < longest:
        at = first[:, None] + start + tl.arange(0, K)[None, :]
        inside = at < last[:, None]
        squares += tl.sum(tl.load(sums + at, inside, 0.0), 1)
        worst |= tl.max(tl.load(flags + at, inside, 0), 1)
        start += K
    each = tl.sqrt_rn(squares)
    return each, tl.max(worst) > 0, tl.sqrt_rn(tl.sum(each * each))


@triton.jit
def _next_scale(scale, growth, used, grown, overflow, hold, DYNAMIC: tl.constexpr):
    """DynamicScale.next: torch's transition, products in float64 and rounded once, then floor and cap."""
    wide = used.to(tl.float64)
    more = tl.minimum(grown, DYNAMIC[2] - 1) + 1
    full = more == DYNAMIC[2]
    up = (wide * DYNAMIC[0]).to(tl.float32)
    after = tl.where(full & (up < INF), up, used)
    after = tl.where(overflow, (wide * DYNAMIC[1]).to(tl.float32), after)
    after = tl.maximum(after, DYNAMIC[3])
    if DYNAMIC[4] is not None:
        after = tl.minimum(after, DYNAMIC[4])
    tl.store(scale, tl.where(hold, used, after))
    tl.store(growth, tl.where(hold, grown, tl.where(overflow | full, 0, more)))


@triton.jit
def _set_rates(table, row, rates, lr, GROUPS: tl.constexpr):
    """The column's rates into the optimizer's tensors, and into the record."""
    for g in tl.static_range(GROUPS):
        rate = tl.load(table + g * row)
        tl.store(rates[g], rate)
        tl.store(lr + g, rate.to(tl.float64))


@triton.jit
def _mean(mean, value, n, empty, MANY: tl.constexpr):
    """The cycle's loss, as Update._loss has it: stored, and returned."""
    if MANY:
        if n is not None:
            value = value / _or_one(n)  # both are float64
    else:
        value = tl.where(empty, 0.0, value)
    if mean.dtype.element_ty.primitive_bitwidth == 16:
        value = value.to(tl.float32)  # torch rounds a float64 to 16 bits by way of float32
    value = value.to(mean.dtype.element_ty)
    tl.store(mean, value)
    return value


@triton.jit
def _enter(
    journal, at, here, lines, width, value, used, norm, skipped, updated, rates, step, GROUPS: tl.constexpr
):  # fmt: skip
    """A record's row: the loss is the batch's and the cycle's."""
    out, inside = journal + here * width, here < lines
    tl.store(at, here + 1)
    tl.store(out, value.to(tl.float64), inside)
    tl.store(out + 1, value.to(tl.float64), inside)
    tl.store(out + 2, used.to(tl.float64), inside)
    tl.store(out + 3, norm.to(tl.float64), inside)
    tl.store(out + 4, skipped.to(tl.float64), inside)
    tl.store(out + 5, updated.to(tl.float64), inside)
    for g in tl.static_range(GROUPS):
        tl.store(out + (6 + g), tl.load(rates + g * step).to(tl.float64), inside)


@triton.jit
def _tell(floats, truths, norm, used, skipped, updated, LIMIT: tl.constexpr):
    """The outcome, the optimizer's flag and the factor that clips."""
    tl.store(floats, norm)
    tl.store(floats + 1, used)
    tl.store(floats + 2, tl.where(updated, 0.0, 1.0))
    if LIMIT is not None:
        factor = tl.div_rn(1.0, norm + EPS) * LIMIT  # torch's limit / (norm + eps)
        tl.store(floats + 3, tl.where(factor > 1.0, 1.0, factor))  # NaN stays
    tl.store(truths, skipped)
    tl.store(truths + 1, updated)
    tl.store(truths + 2, updated == 0)
