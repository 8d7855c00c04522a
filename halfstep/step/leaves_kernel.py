"""The kernel of `leaves`, in a module of its own: only torch's builds for CUDA bring Triton."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit
def tiles(
    lefts, rights, outs, SIZES: tl.constexpr, COUNT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One tile of one product; SIZES holds M, N, K and the four strides of each. float32 stays strict."""
    place = tl.program_id(0)
    for i in tl.static_range(COUNT):
        place = _tile(
            lefts[i], rights[i], outs[i], place, SIZES[7 * i], SIZES[7 * i + 1], SIZES[7 * i + 2], SIZES[7 * i + 3],
            SIZES[7 * i + 4], SIZES[7 * i + 5], SIZES[7 * i + 6], ROWS, COLUMNS, STEP,
        )  # fmt: skip


@triton.jit
def _tile(
    left, right, out, place, m: tl.constexpr, n: tl.constexpr, k: tl.constexpr, lm: tl.constexpr, lk: tl.constexpr,
    rk: tl.constexpr, rn: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The tile at `place`, where it is one of this product; where the next product begins."""
    across: tl.constexpr = (n + COLUMNS - 1) // COLUMNS
    count: tl.constexpr = (m + ROWS - 1) // ROWS * across
    if (place >= 0) & (place < count):
        _product(left, right, out, place // across, place % across, m, n, k, lm, lk, rk, rn, ROWS, COLUMNS, STEP)
    return place - count


@triton.jit
def _product(
    left, right, out, down, along, m: tl.constexpr, n: tl.constexpr, k: tl.constexpr, lm: tl.constexpr,
    lk: tl.constexpr, rk: tl.constexpr, rn: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    rows, columns = down * ROWS + tl.arange(0, ROWS), along * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, k, STEP):
        at = start + tl.arange(0, STEP)
        a = tl.load(left + rows[:, None] * lm + at[None, :] * lk, (rows < m)[:, None] & (at < k)[None, :], 0.0)
        b = tl.load(right + at[:, None] * rk + columns[None, :] * rn, (at < k)[:, None] & (columns < n)[None, :], 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    value = total.to(left.dtype.element_ty).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * n + columns[None, :], value, (rows < m)[:, None] & (columns < n)[None, :])
