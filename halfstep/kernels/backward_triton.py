"""The kernel of `leaves`, in a module of its own: only torch's builds for CUDA bring Triton."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit
def tiles(
    lefts, rights, masks, outs, sums, SIZES: tl.constexpr, COUNT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One tile of one product; SIZES holds eleven numbers of each, as _product names them. float32 stays strict."""
    place = tl.program_id(0)
    for i in tl.static_range(COUNT):
        place = _tile(
            lefts[i],
            rights[i],
            masks[i],
            outs[i],
            sums[i],
            place,
            SIZES,
            11 * i,
            ROWS,
            COLUMNS,
            STEP,
        )


@triton.jit
def _tile(
    left, right, mask, out, total, place, SIZES: tl.constexpr, AT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The tile at `place`, where it is one of this product; where the next product begins."""
    across: tl.constexpr = (SIZES[AT + 1] + COLUMNS - 1) // COLUMNS
    count: tl.constexpr = (SIZES[AT] + ROWS - 1) // ROWS * across
    if (place >= 0) & (place < count):
        _product(
            left,
            right,
            mask,
            out,
            total,
            place // across,
            place % across,
            SIZES,
            AT,
            ROWS,
            COLUMNS,
            STEP,
        )
    return place - count


@triton.jit
def _product(
    left, right, mask, out, total, down, along, SIZES: tl.constexpr, AT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The first tile of a row of tiles has read all that the row sums of `left` need."""
    m: tl.constexpr = SIZES[AT]
    n: tl.constexpr = SIZES[AT + 1]
    k: tl.constexpr = SIZES[AT + 2]
    left_m: tl.constexpr = SIZES[AT + 3]
    left_k: tl.constexpr = SIZES[AT + 4]
    right_k: tl.constexpr = SIZES[AT + 5]
    right_n: tl.constexpr = SIZES[AT + 6]
    mask_m: tl.constexpr = SIZES[AT + 7]
    mask_k: tl.constexpr = SIZES[AT + 8]
    MASKED: tl.constexpr = SIZES[AT + 9]
    SUMMED: tl.constexpr = SIZES[AT + 10]
    rows, columns = down * ROWS + tl.arange(0, ROWS), along * COLUMNS + tl.arange(0, COLUMNS)
    value, each = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, STEP], tl.float32)
    for start in range(0, k, STEP):
        at = start + tl.arange(0, STEP)
        inside = (rows < m)[:, None] & (at < k)[None, :]
        a = tl.load(left + rows[:, None] * left_m + at[None, :] * left_k, inside, 0.0)
        if MASKED:
            h = tl.load(mask + rows[:, None] * mask_m + at[None, :] * mask_k, inside, 0)
            a = tl.where(h if h.dtype == tl.int1 else h <= 0, 0.0, a)
        across = (at < k)[:, None] & (columns < n)[None, :]
        b = tl.load(right + at[:, None] * right_k + columns[None, :] * right_n, across, 0.0)
        value = tl.dot(a, b, value, input_precision="ieee")
        if SUMMED:
            each += a.to(tl.float32)
    value = value.to(left.dtype.element_ty).to(out.dtype.element_ty)
    tl.store(
        out + rows[:, None] * n + columns[None, :],
        value,
        (rows < m)[:, None] & (columns < n)[None, :],
    )
    if SUMMED:  # noqa: SIM102 (known when this is compiled, the next is not)
        if along == 0:
            tl.store(
                total + rows,
                tl.sum(each, 1).to(left.dtype.element_ty).to(out.dtype.element_ty),
                rows < m,
            )
