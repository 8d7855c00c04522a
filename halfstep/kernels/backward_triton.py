"""Triton kernels for the backward pass of compiled steps: several weight gradients, a max pool.

`weight_grad_tiles` computes the weight gradients of several linear layers in one launch: 5 epochs
of the benchmark MLP take 0.286 s in fp32 in place of 0.342 (0.239 for 0.247 in fp16, 0.249 for
0.291 mixed). `max_pool_backward` looks only at the windows that can cover a pixel: a step of
ResNet-50 in O2 at batch 256 takes 34.5 ms in place of 35.3. Both on an H200;
docs/internals/speed.md.

To switch them off: a pass of your own in torch's `post_grad_custom_pre_pass` takes the place of the
first, one in `joint_custom_post_pass` that of the second; `compile=False` uses neither. They are
launched from compiler/passes/batch_weight_grads.py and compiler/passes/joint_graph.py, which import
this module only then: only torch's builds for CUDA bring Triton.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

# Entries of SIZES for each product, in the order in which _compute_tile names them.
SIZES_PER_PRODUCT = tl.constexpr(11)


@triton.jit
def weight_grad_tiles(
    lefts,
    rights,
    masks,
    outs,
    row_sums,
    SIZES: tl.constexpr,
    PRODUCT_COUNT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """out = left · right for each of several products; a program computes one tile of one of them.

    Tiles are numbered through: first those of the first product, then those of the second, …
    `left` is 0 where its mask says so; its row sums (the bias gradient) are stored on request.
    """
    tile = tl.program_id(0)
    for i in tl.static_range(PRODUCT_COUNT):
        tile = _compute_if_own(
            lefts[i],
            rights[i],
            masks[i],
            outs[i],
            row_sums[i],
            tile,
            SIZES,
            SIZES_PER_PRODUCT * i,
            TILE_ROWS,
            TILE_COLUMNS,
            TILE_K,
        )


@triton.jit
def _compute_if_own(
    left,
    right,
    mask,
    out,
    row_sums,
    tile,
    SIZES: tl.constexpr,
    FIRST: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Computes the tile if it is one of this product. Returns its number in the next product.

    A number below 0 says that the tile was one of a product before.
    """
    tiles_across: tl.constexpr = (SIZES[FIRST + 1] + TILE_COLUMNS - 1) // TILE_COLUMNS
    tile_count: tl.constexpr = (SIZES[FIRST] + TILE_ROWS - 1) // TILE_ROWS * tiles_across
    if (tile >= 0) & (tile < tile_count):
        _compute_tile(
            left,
            right,
            mask,
            out,
            row_sums,
            tile // tiles_across,
            tile % tiles_across,
            SIZES,
            FIRST,
            TILE_ROWS,
            TILE_COLUMNS,
            TILE_K,
        )
    return tile - tile_count


@triton.jit
def _compute_tile(
    left,
    right,
    mask,
    out,
    row_sums,
    tile_row,
    tile_column,
    SIZES: tl.constexpr,
    FIRST: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """One tile of out = left · right, summed in float32, and the row sums of left if requested."""
    m: tl.constexpr = SIZES[FIRST]
    n: tl.constexpr = SIZES[FIRST + 1]
    k: tl.constexpr = SIZES[FIRST + 2]
    left_stride_m: tl.constexpr = SIZES[FIRST + 3]
    left_stride_k: tl.constexpr = SIZES[FIRST + 4]
    right_stride_k: tl.constexpr = SIZES[FIRST + 5]
    right_stride_n: tl.constexpr = SIZES[FIRST + 6]
    mask_stride_m: tl.constexpr = SIZES[FIRST + 7]
    mask_stride_k: tl.constexpr = SIZES[FIRST + 8]
    HAS_MASK: tl.constexpr = SIZES[FIRST + 9]
    WANTS_ROW_SUMS: tl.constexpr = SIZES[FIRST + 10]

    rows = tile_row * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = tile_column * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    product = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    partial_sums = tl.zeros([TILE_ROWS, TILE_K], tl.float32)
    for start in range(0, k, TILE_K):
        ks = start + tl.arange(0, TILE_K)
        in_left = (rows < m)[:, None] & (ks < k)[None, :]
        left_at = left + rows[:, None] * left_stride_m + ks[None, :] * left_stride_k
        a = tl.load(left_at, in_left, 0.0)
        if HAS_MASK:
            # A mask of bool is True where the ReLU passed nothing; any other is the ReLU's output.
            mask_at = mask + rows[:, None] * mask_stride_m + ks[None, :] * mask_stride_k
            h = tl.load(mask_at, in_left, 0)
            a = tl.where(h if h.dtype == tl.int1 else h <= 0, 0.0, a)
        in_right = (ks < k)[:, None] & (columns < n)[None, :]
        right_at = right + ks[:, None] * right_stride_k + columns[None, :] * right_stride_n
        b = tl.load(right_at, in_right, 0.0)
        # "ieee": products of float32 stay strict, without TF32.
        product = tl.dot(a, b, product, input_precision="ieee")
        if WANTS_ROW_SUMS:
            partial_sums += a.to(tl.float32)

    # Rounded twice, as torch would: to the dtype of the product, then to that of the gradient.
    product = product.to(left.dtype.element_ty).to(out.dtype.element_ty)
    out_at = out + rows[:, None] * n + columns[None, :]
    tl.store(out_at, product, (rows < m)[:, None] & (columns < n)[None, :])

    # The first tile of each row of tiles has read all of left that the sums need.
    if WANTS_ROW_SUMS:  # noqa: SIM102 (this is known when the kernel is compiled, the next is not)
        if tile_column == 0:
            sums = tl.sum(partial_sums, 1).to(left.dtype.element_ty).to(out.dtype.element_ty)
            tl.store(row_sums + rows, sums, rows < m)


@triton.jit
def max_pool_backward(
    grad,
    offsets,
    out,
    height,
    width,
    pooled_height,
    pooled_width,
    blocks_per_row,
    CHANNELS: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    WINDOWS_H: tl.constexpr,
    WINDOWS_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of a max pool's input, channels last; a program computes part of one row.

    A pixel gets the sum, in float32, of the gradients of the windows whose maximum it was.
    `offsets` has the place of the maximum within each window. At most WINDOWS_H × WINDOWS_W
    windows cover a pixel.
    """
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)  # counted through all images
    position = (tl.program_id(0) % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    image = row // height
    y = row % height
    x = position // CHANNELS
    channel = position % CHANNELS
    in_row = position < width * CHANNELS
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(WINDOWS_H):
        # The windows that may cover this row of pixels, first to last; where it lies in each.
        window_y = (y + PADDING_H) // STRIDE_H - (WINDOWS_H - 1 - i)
        y_in_window = y + PADDING_H - window_y * STRIDE_H
        if (window_y >= 0) & (window_y < pooled_height) & (y_in_window < KERNEL_H):
            for j in tl.static_range(WINDOWS_W):
                window_x = (x + PADDING_W) // STRIDE_W - (WINDOWS_W - 1 - j)
                x_in_window = x + PADDING_W - window_x * STRIDE_W
                covers = in_row & (window_x >= 0) & (window_x < pooled_width)
                covers = covers & (x_in_window < KERNEL_W)
                window_row = (image * pooled_height + window_y) * pooled_width * CHANNELS
                window = window_row + window_x * CHANNELS + channel
                own_offset = y_in_window * KERNEL_W + x_in_window
                is_maximum = tl.load(offsets + window, covers, other=-1) == own_offset
                window_grad = tl.load(grad + window, covers, other=0.0).to(tl.float32)
                total += tl.where(is_maximum, window_grad, 0.0)
    tl.store(out + row * width * CHANNELS + position, total.to(out.dtype.element_ty), in_row)
