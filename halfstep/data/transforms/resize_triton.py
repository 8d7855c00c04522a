"""The kernel of fused_resize.py: bilinear resize and what follows it. Imported when it is launched.

Only torch's builds for CUDA bring Triton. With the numbers below, an H200 makes 256 float32 images
of 224 × 224 in 58 µs; only filling them takes 44 µs.
"""

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from halfstep.data.transforms.values import constant_vector

if TYPE_CHECKING:
    from halfstep.data.transforms.fused_resize import ResizePlan

ROWS_PER_PROGRAM = 16
VALUES_PER_PROGRAM = 256  # of a row, channels counted where they lie side by side
WARPS = 2


def launch(batch: Tensor, out: Tensor, plan: "ResizePlan") -> None:
    """Fills `out`, whose samples lie one after the other in memory."""
    height, width, rows, columns = plan.sizes
    planes, side_by_side = plan.channels
    sample_stride, row_stride, column_stride, channel_stride = plan.read_strides
    upper_rows, lower_weights = sampling_table(height, rows, batch.device)
    left_columns, right_weights = sampling_table(width, columns, batch.device)
    grid = (
        len(batch) * planes,
        triton.cdiv(rows, ROWS_PER_PROGRAM),
        triton.cdiv(columns * side_by_side, VALUES_PER_PROGRAM),
    )
    with torch.cuda.device(batch.device):
        _resize_bilinear[grid](
            batch,
            out,
            upper_rows,
            lower_weights,
            left_columns,
            right_weights,
            constant_vector(plan.first, torch.float32, batch.device),
            constant_vector(plan.second, torch.float32, batch.device),
            height=height,
            width=width,
            rows=rows,
            columns=columns,
            sample_stride=sample_stride,
            row_stride=row_stride,
            column_stride=column_stride,
            channel_stride=channel_stride,
            PLANES=planes,
            SIDE_BY_SIDE=side_by_side,
            MODE=plan.mode,
            ROWS=ROWS_PER_PROGRAM,
            BLOCK=VALUES_PER_PROGRAM,
            num_warps=WARPS,
            enable_fp_fusion=False,  # x · a + b rounds twice, as in torch
        )


@cache  # for good: captured graphs read the tables
def sampling_table(
    source_size: int, output_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """For each output pixel along one axis: the source pixel before it, and the weight of the next.

    The weight is how far the output pixel lies towards the next source pixel, from 0 to 1.
    """
    # Positions in units of 1 / (2 · output_size) of a source pixel, which are whole numbers.
    output_pixels = torch.arange(output_size, device="cpu")
    positions = ((2 * output_pixels + 1) * source_size - output_size).clamp(min=0)
    before = positions // (2 * output_size)
    weight_of_next = (positions % (2 * output_size)).float() / (2 * output_size)
    return before.int().to(device), weight_of_next.to(device)  # waits, so any stream may read


# Sizes and strides of the source are not specialised: one compilation for images of any size.
@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=["height", "width", "sample_stride", "row_stride"],
    do_not_specialize_on_alignment=["source"],
)
def _resize_bilinear(  # type: ignore[no-untyped-def]
    source,
    out,
    upper_rows,
    lower_weights,
    left_columns,
    right_weights,
    first,
    second,
    height,
    width,
    rows,
    columns,
    sample_stride,
    row_stride,
    column_stride,
    channel_stride,
    PLANES: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A few rows of an image, or of one plane of it.

    `value_index` counts along an output row as it lies in memory, channels included.
    """
    image = tl.program_id(0)
    first_row = tl.program_id(1) * ROWS
    value_index = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    x = value_index // SIDE_BY_SIDE
    channel = image % PLANES + value_index % SIDE_BY_SIDE
    in_row = value_index < columns * SIDE_BY_SIDE

    # The two source columns around each output column.
    left = tl.load(left_columns + x, in_row, 0)
    right_weight = tl.load(right_weights + x, in_row, 0.0)
    left_offset = left * column_stride + channel * channel_stride
    right = tl.minimum(left + 1, width - 1)
    right_offset = right * column_stride + channel * channel_stride
    if MODE:
        a = tl.load(first + channel)
        b = tl.load(second + channel)
    source += (image // PLANES).to(tl.int64) * sample_stride
    out += image.to(tl.int64) * rows * columns * SIDE_BY_SIDE + value_index

    # The two source rows around an output row, already resized along the row. They are loaded again
    # only when they change: an image that grows sevenfold needs others in every seventh row.
    loaded_row = -1
    upper_values = tl.zeros([BLOCK], tl.float32)
    lower_values = tl.zeros([BLOCK], tl.float32)
    for y in range(first_row, tl.minimum(first_row + ROWS, rows)):
        upper_row = tl.load(upper_rows + y)
        lower_weight = tl.load(lower_weights + y)
        if upper_row != loaded_row:
            upper = source + upper_row * row_stride
            lower = source + tl.minimum(upper_row + 1, height - 1) * row_stride
            upper_values = (
                tl.load(upper + left_offset).to(tl.float32) * (1 - right_weight)
                + tl.load(upper + right_offset).to(tl.float32) * right_weight
            )
            lower_values = (
                tl.load(lower + left_offset).to(tl.float32) * (1 - right_weight)
                + tl.load(lower + right_offset).to(tl.float32) * right_weight
            )
            loaded_row = upper_row
        value = upper_values * (1 - lower_weight) + lower_values * lower_weight

        # Round to the source's dtype, as Resize does; a cast to uint8 cuts off, so 0.5 is added.
        if source.dtype.element_ty == tl.uint8:
            value += 0.5
        value = value.to(source.dtype.element_ty).to(tl.float32)
        if MODE == 1:  # fused_resize.MULTIPLY_ADD
            value = value * a + b
        if MODE == 2:  # fused_resize.SUBTRACT_DIVIDE
            value = tl.div_rn(value - a, b)
        tl.store(out + y * columns * SIDE_BY_SIDE, value.to(out.dtype.element_ty), in_row)
