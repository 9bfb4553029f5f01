"""Parts shared by the kernels around a matrix product: tiles, the loop over K, launch settings."""

from typing import Any, no_type_check

from torch import Tensor

from vtk_kernels._dispatch import accumulator
from vtk_kernels._rows import check_channels
from vtk_kernels._triton import tl, triton

GROUP = 8
"""Rows of tiles that run together, so that they find the same columns of w in the L2 cache."""

_ENOUGH_TILES = 128
"""About one tile for each multiprocessor of an A100 (108) or an H100 (132)."""


def tile_config(rows: int, features: int, *operands: Tensor) -> tuple[int, int, int, int, int]:
    """Return (BLOCK_T, BLOCK_F, BLOCK_K, num_warps, num_stages) for a product (rows, K) · (K, features).

    128 × 128 tiles move the fewest bytes, but only where there are enough of them for every multiprocessor; flat tiles
    for a few pooled rows. What is not `aligned` cannot be copied past the registers, and fp32 has no matrix units at
    full precision: both leave fewer registers for sums.
    """
    if operands[0].element_size() > 2:
        return 32, 32, 32, 4, 2
    if rows <= 32:
        return 16 if rows <= 16 else 32, 64, 64, 4, 4
    if not aligned(*operands):
        return 64, 64, 32, 4, 2
    if triton.cdiv(rows, 128) * triton.cdiv(features, 128) >= _ENOUGH_TILES:
        return 128, 128, 64, 8, 3
    return 64, 64, 64, 4, 4


def mapped_tile_config(rows: int, features: int, wide: bool = False) -> tuple[int, int, int, int, int]:
    """Return what `tile_config` does for operands with tensor maps, where no register holds an address.

    Measured on an H200: small tiles while a multiprocessor gets at most two of them, or else tiles of 128 × 128. Where
    these are ``wide``, having a tile of more beside the operands' and the output's, they take shorter steps through K,
    so that there is still room for two programs a multiprocessor; that has not been measured yet.
    """
    if rows <= 32:
        return 16 if rows <= 16 else 32, 64, 128, 4, 4
    small = triton.cdiv(rows, 64) * triton.cdiv(features, 64)
    if small <= _ENOUGH_TILES:
        return 64, 64, 128, 4, 4
    if small <= 2 * _ENOUGH_TILES:
        return 64, 64, 64, 4, 4
    if triton.cdiv(rows, 64) * triton.cdiv(features, 128) <= 2 * _ENOUGH_TILES:
        return 64, 128, 64, 4, 4
    return (128, 128, 32, 8, 5) if wide else (128, 128, 64, 8, 3)


def residual_tile_config(mapped: bool, rows: int, features: int, *operands: Tensor) -> tuple[int, int, int, int, int]:
    """Return the tiles of a product with residual and row statistics, whose columns are whole pieces of 64.

    Tiles of 32 rows where those of 64 would leave half of the multiprocessors without one: sums whose rows are then
    surveyed cannot be cut along K. Not measured yet.
    """
    if operands[0].element_size() > 2:
        return 32, 64, 32, 4, 2
    if rows > 32 and triton.cdiv(rows, 64) * triton.cdiv(features, 64) <= _ENOUGH_TILES // 2:
        if mapped or aligned(*operands):
            return 32, 64, 128 if mapped else 64, 4, 4
    if not mapped:
        return tile_config(rows, features, *operands)
    return mapped_tile_config(rows, features, wide=True)


def gated_tile_config(
    mapped: bool, rows: int, features: int, wide: bool, *operands: Tensor
) -> tuple[int, int, int, int, int]:
    """Return the tiles of a gated product, of 64 columns of y: a piece, from 64 columns of gate and of value each.

    Like tiles of 128 columns in a product of twice the features, with shorter steps through K where they are ``wide``:
    statistics and codes want shared memory too. Not measured yet.
    """
    if operands[0].element_size() > 2:
        return 32, 64, 32, 4, 2
    if rows <= 32:
        return 16 if rows <= 16 else 32, 64, 128 if mapped else 64, 4, 3
    if not mapped and not aligned(*operands):
        return 32 if wide else 64, 64, 32, 4, 2
    small = triton.cdiv(rows, 64) * triton.cdiv(features, 64)
    if small <= 2 * _ENOUGH_TILES:
        return 64, 64, 64, 4, 4
    return (128, 64, 32, 8, 5) if mapped and wide else (128, 64, 64, 8, 3)


_ALIGN = 128
"""Slices start at multiples of this many columns, which every BLOCK_K divides."""

PROGRAMS = 132
"""Multiprocessors of an H100: a program each, or two where a single slice would fill them."""


def default_splits(rows: int, features: int, size: int) -> int:
    """Return into how many equal slices a product of 64 × 64 tiles is cut to fill a large card.

    Args:
        rows: T.
        features: F.
        size: K.
    """
    tiles = max(-(-rows // 64) * -(-features // 64), 1)
    wanted = PROGRAMS // tiles
    if wanted < 2:
        wanted = 2 * PROGRAMS // tiles
    steps = -(-size // _ALIGN)
    return max((s for s in range(1, min(8, wanted) + 1) if steps % s == 0), default=1)


def slice_length(size: int, splits: int) -> int:
    """Return the columns of a slice of K, of which the last ones may be shorter or empty."""
    return -(-size // (splits * _ALIGN)) * _ALIGN


def has_tensor_map(*operands: Tensor) -> bool:
    """Return whether the copy engine can move matrices: half precision, rows that start at multiples of 16 bytes."""
    return all(
        t.element_size() == 2 and t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in operands
    )


def tensor_map(matrix: Tensor, rows: int, columns: int) -> Any:
    """Return the tensor map of a matrix in tiles of ``rows`` × ``columns``: its shape, and where each row starts."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def in_tiles(matrix: Tensor, mapped: bool, rows: int, columns: int) -> Any:
    """Return what a kernel reads a matrix by: a tensor map of its tiles, or its address."""
    return tensor_map(matrix, rows, columns) if mapped else matrix


def tile_options(mapped: bool, size: int, config: tuple[int, int, int, int, int]) -> dict[str, Any]:
    """Return the options of a product's launch that follow from its tiles.

    Args:
        mapped: whether the operands have tensor maps.
        size: K.
        config: of `tile_config` and the others.
    """
    block_t, block_f, block_k, warps, stages = config
    blocks = {"BLOCK_T": block_t, "BLOCK_F": block_f, "BLOCK_K": block_k}
    return {"TMA": mapped, "EVEN_K": size % block_k == 0, **blocks, "num_warps": warps, "num_stages": stages}


def aligned(*operands: Tensor) -> bool:
    """Return whether all strides are 1 or multiples of 16, as far as Triton looks before it copies 16 bytes at once."""
    return all(stride == 1 or stride % 16 == 0 for t in operands for stride in t.stride())


def check_linear(x: Tensor, w: Tensor, b: Tensor | None, name: str = "x") -> None:
    """Refuse what is no linear layer of ``x`` (..., K), called ``name`` in the message.

    Raises:
        ValueError: no channel, integers, or ``w`` and ``b`` of other shapes or types.
    """
    check_channels(x, name)
    if w.ndim != 2 or w.shape[1] != x.shape[-1] or w.dtype != x.dtype:
        raise ValueError(
            f"`w` is {tuple(w.shape)} {w.dtype}; it must be (F, {x.shape[-1]}) {x.dtype}, the weight of a linear layer"
        )
    if b is not None and (b.shape != w.shape[:1] or b.dtype != x.dtype):
        raise ValueError(f"`b` is {tuple(b.shape)} {b.dtype}; it must be ({w.shape[0]},) {x.dtype}, or None")


def check_row_scale(x: Tensor, row_scale: Tensor | None) -> None:
    """Refuse a ``row_scale`` that is not one value per row of ``x`` (..., C), in the type of its sums.

    Raises:
        ValueError: another shape or type.
    """
    wide = accumulator(x.dtype)
    if row_scale is not None and (row_scale.shape != x.shape[:-1] or row_scale.dtype != wide):
        raise ValueError(
            f"`row_scale` is {tuple(row_scale.shape)} {row_scale.dtype}; it must be {tuple(x.shape[:-1])} {wide}, "
            "one value per row"
        )


@triton.jit
@no_type_check
def tile_of(pid, T, F, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr, GROUP: tl.constexpr):
    """Return (row of tiles, column of tiles) of a program: down a column of at most GROUP tiles, then the next one."""
    columns = tl.cdiv(F, BLOCK_F)
    first = pid // (GROUP * columns) * GROUP
    height = tl.minimum(tl.cdiv(T, BLOCK_T) - first, GROUP)
    inside = pid % (GROUP * columns)
    return first + inside % height, inside // height


@triton.jit
@no_type_check
def product(
    x_ptr,  # (BLOCK_T, BLOCK_K) pointers to the first columns of x
    w_ptr,  # (BLOCK_K, BLOCK_F) pointers to the first columns of w, transposed
    x_mask,  # (BLOCK_T, 1)
    w_mask,  # (1, BLOCK_F)
    K,
    stride_xk,  # from a column of x to the next
    stride_wk,  # of w
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    start_from=None,  # (BLOCK_T, BLOCK_F) in fp32 that the product is added to, or None for 0
):
    """Return x · wᵀ of a tile: (BLOCK_T, BLOCK_F) in fp32; rows and columns outside the masks are 0."""
    step = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_T, BLOCK_F], tl.float32) if start_from is None else start_from
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptr, mask=x_mask, other=0.0)
            w = tl.load(w_ptr, mask=w_mask, other=0.0)
        else:
            inside = start + step < K
            x = tl.load(x_ptr, mask=x_mask & inside[None, :], other=0.0)
            w = tl.load(w_ptr, mask=w_mask & inside[:, None], other=0.0)
        total = tl.dot(x, w, total, input_precision="ieee")
        x_ptr += BLOCK_K * stride_xk
        w_ptr += BLOCK_K * stride_wk
    return total


@triton.jit
@no_type_check
def mapped_product(
    x_map,  # (T, K), tiles of BLOCK_T × BLOCK_K
    w_map,  # (F, K), tiles of BLOCK_F × BLOCK_K
    tile_row,
    tile_out,
    first,  # column of x and w
    last,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    start_from=None,  # as of `product`
):
    """Return x · wᵀ of a tile over some columns, as `product` does; what lies outside a matrix is read as 0."""
    total = tl.zeros([BLOCK_T, BLOCK_F], tl.float32) if start_from is None else start_from
    for start in range(first, last, BLOCK_K):
        total = tl.dot(x_map.load([tile_row, start]), w_map.load([tile_out, start]).T, total)
    return total
