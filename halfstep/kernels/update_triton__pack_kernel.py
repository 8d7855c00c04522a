"""The kernel of `pack`, in a module of its own: only torch's builds for CUDA bring Triton."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit(
    do_not_specialize=["rows", "row", "step"],
    do_not_specialize_on_alignment=[
        "table",
        "at",
        "loss",
        "mean",
        "lr",
        "scale",
        "skipped",
        "norm",
        "updated",
    ],
)
def record(
    table, at, loss, mean, lr, scale, skipped, norm, updated, rows, row, step,
    GROUPS: tl.constexpr, KEEP: tl.constexpr, MOVE: tl.constexpr,
):  # fmt: skip
    """One row of `pack`, by one warp: what it moves at the end it has read at the start."""
    here = tl.load(at)
    place = here - 1 if KEEP else here
    out, inside = table + place * row, (place >= 0) & (place < rows)
    if not KEEP:
        tl.store(out, tl.load(loss).to(tl.float64), inside)
    tl.store(out + 1, tl.load(mean).to(tl.float64), inside)
    tl.store(out + 2, tl.load(scale).to(tl.float64), inside)
    tl.store(out + 3, tl.load(norm).to(tl.float64), inside)
    tl.store(out + 4, tl.load(skipped).to(tl.float64), inside)
    tl.store(out + 5, tl.load(updated).to(tl.float64), inside)
    for g in tl.static_range(GROUPS):
        tl.store(out + (6 + g), tl.load(lr + g * step).to(tl.float64), inside)
    if MOVE:
        tl.store(at, here + 1)
