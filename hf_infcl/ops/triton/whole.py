"""A small batch: the loss in two launches and a sum, its gradients in two more or in a few per band of G.

Up to some 8,192 pairs the GPU waits for the host; what counts is how little Python runs per step. The general path
makes running statistics, merges into them and finishes with small operations; here the kernels make, merge and finish.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from hf_infcl.ops.chunks import parts
from hf_infcl.ops.sides import Rule, Side
from hf_infcl.ops.triton import pingpong
from hf_infcl.ops.triton.configs import TileConfig, interpreted
from hf_infcl.ops.triton.kernels_gradient import dot_kernel, finish_kernel, gradient_kernel
from hf_infcl.ops.triton.kernels_kept import reweigh_kernel
from hf_infcl.ops.triton.kernels_statistics import merge_kernel, statistics_kernel
from hf_infcl.ops.triton.kernels_weights import weights_kernel
from hf_infcl.ops.triton.launch import Tiles, launch, operand
from hf_infcl.ops.triton.products import empty_matrix, gain, matmul
from hf_infcl.ops.triton.softmax import NONE_KEPT, exact

# In float32 for an incoming gradient of one: of images, of texts, and parts of the scale's, yet to be added up.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

LARGEST = 16_384
# From so many terms in the product of images and texts the GPU is what a step waits for, however few the pairs.
_LARGEST_WORK = 3 * 2**34  # 8,192 pairs of 768
# Up to here each row keeps its own maximum: sharing one costs the host a second launch.
_LARGEST_EXACT = 8192
# In float32 G is kept whole. With ids every tile compares its own, which at more pairs costs more than a map of them,
# and which the launches that share a maximum do not do.
LARGEST_FLOAT32 = LARGEST_WITH_IDS = _LARGEST_EXACT
# Up to here G is kept in float32 beside half-precision embeddings, and multiplied as the sum of two such numbers.
# Rounded to bfloat16 its errors may all point one way (n equal rows), and a small sum has too few to forgive one.
_LARGEST_SPLIT = 2048
# Up to here both products with G are one launch. The vendor's are faster (0.18 ms against 0.25 on an H200 at 8,192
# pairs of 512), but take four launches.
_LARGEST_FUSED = 8192
_BAND = 2**26  # entries of G at a time for the vendor's products, 128 MiB in half precision
_KEPT_BAND = 2**27  # where they hold exponentials first, which spares their product
_SHALLOW = 512  # up to this depth the product costs no more than what spares it
_MERGE_ROWS, _MERGE_STEP = 32, 16
_RUN = 128
_FINISH_BLOCK = 2048
_DOT_BLOCK = 8192
_PART, _PART_DEPTH = 16, 32


def _empty(device: torch.device, *shape: int) -> Tensor:
    """Room for what the kernels write in float32, whatever torch's default dtype is."""
    return torch.empty(shape, device=device, dtype=torch.float32)


def suits(n: int, dtype: torch.dtype, has_ids: bool, block_size: int | None) -> bool:
    """Whether a batch of n pairs goes this way."""
    largest = LARGEST_FLOAT32 if dtype == torch.float32 else LARGEST_WITH_IDS if has_ids else LARGEST
    return n <= (largest if block_size is None else min(largest, block_size))


def _tile(n: int, dtype: torch.dtype, precision: str, device: torch.device) -> TileConfig:
    if device.type != "cuda":
        return interpreted(n)
    if dtype == torch.float32:
        return TileConfig(64, 64, 32, 4, 3 if precision == "tf32" else 2, copy_engine=False)
    # Small tiles keep all multiprocessors busy; large ones read less.
    return TileConfig(128, 128, 64, 4, 3) if n > 2048 else TileConfig(64, 64, 64, 4, 3, copy_engine=False)


def finish(made: Gradients, grad: Tensor, scale: Tensor, dtype: torch.dtype, share: float | None) -> Gradients:
    """The gradients for an incoming one, a scalar, each rounded once: of images and texts to dtype, of the scale.

    share: what those of images and texts are yet to be multiplied by, with the scale; None: by nothing.
    """
    d_x, d_y, sums = made
    some = d_x if d_x is not None else d_y
    length = 1 if some is None else some.numel()
    out_x, out_y = (None if d is None else torch.empty_like(d, dtype=dtype) for d in (d_x, d_y))
    out_scale = None if sums is None else torch.empty((), device=grad.device, dtype=scale.dtype)
    for_x, for_y = d_x is not None, d_y is not None
    values = d_x, d_y, sums, scale, share or 0.0, grad, out_x, out_y, out_scale
    launch(
        finish_kernel,
        grad.device,
        -(-length // _FINISH_BLOCK) * max(for_x + for_y, 1),
        (*values, length, 0 if sums is None else sums.numel()),
        (for_x, for_y, sums is not None, share is not None, _FINISH_BLOCK, 256),
        warps=4,
        stages=1,
    )
    return out_x, out_y, out_scale


# The incoming gradient and the scale -> the gradients of images, texts and scale.
Finish = Callable[[Gradients, Tensor, Tensor], Gradients]


class Batch:
    """A small batch of n pairs: its loss, and its gradients from the statistics that the loss leaves.

    Args:
        images, texts: (n, d).
        scale: scalar in float32.
        ids: (n, m) int64 or None.
        rule, precision: as everywhere.
    """

    def __init__(self, images: Tensor, texts: Tensor, scale: Tensor, ids: Tensor | None, rule: Rule, precision: str):
        self.images, self.texts, self.scale, self.ids = images, texts, scale, ids
        self.rule, self.precision = rule, precision
        # Room for G with a band of exponentials, what they are relative to, and the tiles where they are of no use.
        self.kept: tuple[Tensor, Tensor, Tensor] | None = None
        self.n, self.depth = images.shape
        self.x, self.y = operand(images), operand(texts)
        self.config = _tile(self.n, images.dtype, precision, images.device)
        # What else a launch depends on are compile-time arguments, and that memory allocated here is aligned.
        of_ids = None if ids is None else (ids.stride(), ids.data_ptr() % 16)
        self.kind = (
            images.dtype, self.n % 16, self.n == 1, self.depth, self.x.stride(0), self.y.stride(0),
            scale.data_ptr() % 16, of_ids,
        )  # fmt: skip

    def _tiles(self, rows: Side) -> Tiles:
        return Tiles.of("whole", rows, Side(self.y, 0, self.ids), self.rule, self.precision, self.config)

    def _exceeds(self, largest: int) -> bool:
        """Whether the GPU is the bound: by the number of pairs, or because their products take long."""
        return self.n > largest or self.n * self.n * self.depth >= _LARGEST_WORK

    @cached_property
    def tiles(self) -> Tiles:
        """All rows by all columns."""
        return self._tiles(Side(self.x, 0, self.ids))

    def _height(self, entries: int, together: int) -> int:
        """Rows of G at a time, of at most so many entries: so many rows of tiles together, where not all."""
        step = self.config.block_m * together
        return min(max(entries // self.n // step, 1) * step, self.n)

    def loss(self, for_rows: bool, for_cols: bool, keep: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, and the statistics of rows and columns ((0,) where not wanted).

        keep: the images' gradient follows. A first band of exponentials is kept for it where the product costs more
        than memory.
        """
        tiles, scale, rule = self.tiles, self.scale, self.rule
        n, device = self.n, self.images.device
        many, smooth = tiles.has_ids and rule.duplicates == "positive", rule.label_smoothing > 0
        fields, planes, blocks = 6 if smooth else 4, 2 + 2 * many + 2 * smooth, -(-n // _MERGE_ROWS)
        sides = for_rows + for_cols
        rows, cols = (_empty(device, *((fields, n) if wanted else (0,))) for wanted in (for_rows, for_cols))
        row_parts = _empty(device, planes * tiles.tiles_n * n if for_rows else 0)
        col_parts = _empty(device, planes * tiles.tiles_m * n if for_cols else 0)
        losses, loss = _empty(device, 1 + blocks * sides), _empty(device)
        running = rows if for_rows else None, cols if for_cols else None, n, n
        wanted = for_rows, for_cols
        is_half = self.images.dtype != torch.float32
        shared = is_half and self._exceeds(_LARGEST_EXACT) and not smooth and not tiles.has_ids
        doubts = torch.empty(tiles.tiles_m * tiles.tiles_n, device=device, dtype=torch.int32) if shared else None
        values = (scale, *running, row_parts, col_parts, doubts)
        # In float16, whose range they would leave, they would cost three of its bits.
        keep = keep and shared and self.images.dtype == torch.bfloat16 and self.depth > _SHALLOW
        keep = keep and self._exceeds(_LARGEST_FUSED)
        if not keep and pingpong.suits(tiles, not shared, pingpong.STATISTICS):
            pingpong.statistics(tiles, rule, values, wanted, True, kind=self.kind)
        else:
            kept: tuple[Any, ...] = NONE_KEPT
            if keep:
                assert doubts is not None
                g = empty_matrix(self._height(_KEPT_BAND, self.config.group), n, torch.bfloat16, device)
                self.kept = g, row_parts if for_rows else col_parts, doubts
                kept = tiles.weights(g), g.stride(0), g.shape[0]
            switches = (*wanted, many, smooth, not shared, False, True, keep)
            tiles.launch(statistics_kernel, (*values, losses, *kept), switches, kind=self.kind)
        if shared:
            switches = (*wanted, many, smooth, True, True, True, False)
            tiles.by_pointers.launch(
                statistics_kernel, (*values, losses, *NONE_KEPT), switches, repair=True, kind=self.kind
            )
        launch(
            merge_kernel,
            device,
            blocks * sides,
            (
                row_parts, col_parts, *running, n, n, tiles.tiles_m, tiles.tiles_n, blocks if for_rows else 0, scale,
                losses, loss, 1.0 / (sides * n), float(rule.label_smoothing),
            ),
            (*wanted, many, smooth, True, True, _MERGE_ROWS, _MERGE_STEP),
            warps=4,
            stages=1,
            kind=self.kind,
        )  # fmt: skip
        return loss, rows, cols

    def gradients(
        self, rows: Tensor | None, cols: Tensor | None, needs: tuple[bool, bool, bool]
    ) -> tuple[Gradients, Finish]:
        """Gradients of images, texts and scale, None where not needed, and what finishes them once one comes in.

        Args:
            rows, cols: their statistics; None: not anchors.
        """
        n, dtype = self.n, self.images.dtype
        share = 1.0 / (((rows is not None) + (cols is not None)) * n * gain(dtype))
        by_bands = dtype != torch.float32 and self._exceeds(_LARGEST_FUSED)
        made = (self._by_bands if by_bands else self._fused)(rows, cols, needs, share)
        return made, partial(finish, dtype=dtype, share=share if by_bands else None)

    def _weights(self, r: slice, g: Tensor, rows: Tensor | None, cols: Tensor | None, want_sum: bool) -> Tensor | None:
        """Writes G of rows r (`rows`: their statistics) by all columns; sums of G u of its tiles, if wanted."""
        n, dtype, rule = self.n, self.images.dtype, self.rule
        tiles = self.tiles if r == slice(0, n) else self._tiles(Side(self.x, 0, self.ids)[r])
        sums = _empty(g.device, tiles.tiles_m * tiles.tiles_n) if want_sum else None
        stats = rows, cols, 0 if rows is None else rows.stride(0), n
        wanted = rows is not None, cols is not None
        last = float(rule.label_smoothing), gain(dtype)
        is_exact = exact(self.precision, dtype)
        kind = (self.kind, g.dtype, g.stride(0) % 16)
        # Its descriptors cost the host more, which counts where that is the bound.
        pays = self._exceeds(_LARGEST_FUSED) and not want_sum
        if pays and pingpong.suits(tiles, is_exact, pingpong.WEIGHTS):
            pingpong.weights(tiles, rule, g, (self.scale, *stats, None, *last), wanted, kind=kind)
            return None
        many = tiles.has_ids and rule.duplicates == "positive"
        tiles.launch(
            weights_kernel,
            (self.scale, *stats, tiles.weights(g), g.stride(0), sums, None, *last),
            (*wanted, many, rule.label_smoothing > 0, is_exact, want_sum, False, False),
            kind=kind,
        )
        return sums

    def _by_bands(
        self, rows: Tensor | None, cols: Tensor | None, needs: tuple[bool, bool, bool], share: float
    ) -> Gradients:
        """Both gradients by the vendor's products, from as many rows of G at a time as scratch memory holds."""
        images, texts, device = self.images, self.texts, self.images.device
        n = self.n
        need_x, need_y, need_scale = needs
        kept, self.kept = self.kept, None
        g = empty_matrix(self._height(_BAND, 1), n, images.dtype, device) if kept is None else kept[0]
        height = g.shape[0]
        d_x = d_y = None
        if height < n:  # else the products make them, which costs the host less
            d_x = _empty(device, n, self.depth) if need_x else None
            d_y = _empty(device, n, self.depth) if need_y else None
        from_tiles: list[Tensor] = []  # of the scale, where dX is not computed
        for r in parts(n, height):
            band, own, out, of_rows = g, images, d_x, rows
            if height < n:  # views cost the host
                band, own = g[: r.stop - r.start], images[r]
                out, of_rows = None if d_x is None else d_x[r], None if rows is None else rows[:, r]
            if kept is not None and r.start == 0 and need_x:
                self._reweigh(*kept, rows, cols)
            else:
                sums = self._weights(r, band, of_rows, cols, need_scale and not need_x)
                if sums is not None:
                    from_tiles.append(sums)
            if need_x:
                made = matmul(band, texts, "ieee", out=out, add=False)
                d_x = made if height == n else d_x
            if need_y:
                d_y = matmul(band.T, own, "ieee", out=d_y, add=r.start > 0)
        sum_gu = None
        if need_scale:
            sum_gu = self._dot(d_x, share) if d_x is not None else torch.cat(from_tiles) * share
        return d_x, d_y, sum_gu

    def _reweigh(self, g: Tensor, references: Tensor, doubts: Tensor, rows: Tensor | None, cols: Tensor | None) -> None:
        """Makes G of its exponentials, in place."""
        n, height, c, x, y = self.n, g.shape[0], self.config, self.x, self.y
        part = min(_PART, c.block_m)
        launch(
            reweigh_kernel,
            g.device,
            -(-height // c.block_m) * -(-n // c.block_n) * (c.block_m // part),
            (
                x, y, x.stride(0), y.stride(0), self.depth, g, g.stride(0), height, n, self.scale, references, rows,
                cols, 0 if rows is None else rows.stride(0), n, doubts, n,
            ),
            (rows is not None, cols is not None, c.block_m, c.block_n, _PART_DEPTH, part, c.group),
            warps=4,
            stages=1,
            kind=(self.kind, g.stride(0) % 16),
        )  # fmt: skip

    def _dot(self, d_x: Tensor, share: float) -> Tensor:
        """Parts of share times the sum over all i of x_i . dX_i."""
        length = d_x.numel()
        programs = -(-length // _DOT_BLOCK)
        sums = _empty(d_x.device, programs)
        values = (self.x.contiguous(), d_x, sums, length, share)
        launch(dot_kernel, d_x.device, programs, values, (_DOT_BLOCK,), warps=8, stages=1, kind=self.kind)
        return sums

    def _fused(
        self, rows: Tensor | None, cols: Tensor | None, needs: tuple[bool, bool, bool], share: float
    ) -> Gradients:
        """Both gradients in one launch, from the whole of G."""
        x, y, device, c = self.x, self.y, self.images.device, self.config
        need_x, need_y, need_scale = needs
        n, depth, dtype = self.n, self.depth, self.images.dtype
        split = dtype != torch.float32 and n <= _LARGEST_SPLIT
        width = -(-n // 16) * 16  # rows of G start on 16-byte boundaries, and are read up to there
        g = torch.empty(n, width, device=device, dtype=torch.float32 if split else dtype)
        if width > n:
            g[:, n:].zero_()
        # Where dX is not computed, the scale's gradient comes from the tiles of G.
        sums = self._weights(slice(0, n), g[:, :n], rows, cols, need_scale and not need_x)
        if not (need_x or need_y):
            return None, None, None if sums is None else sums * share
        block_d = 16 if depth <= 16 else 32 if depth <= 32 else 64 if depth <= 64 else c.block_n
        programs = -(-n // c.block_m) * -(-depth // block_d)
        dot_sums = _empty(device, programs) if need_scale and need_x else None
        d_x = _empty(device, n, depth) if need_x else None
        d_y = _empty(device, n, depth) if need_y else None
        if x.dtype == torch.float32:  # under the interpreter half-precision operands are widened
            split, g = False, g.float()
        launch(
            gradient_kernel,
            device,
            programs * (need_x + need_y),
            (g, x, y, d_x, d_y, g.stride(0), x.stride(0), y.stride(0), n, depth, self.scale, share, dot_sums),
            (
                need_x, need_y, dot_sums is not None, split, self.precision, _RUN if dtype == torch.float32 else 2**30,
                c.block_m, block_d, c.block_k,
            ),
            c.warps,
            c.stages,
            self.kind,
        )  # fmt: skip
        if dot_sums is not None:
            return d_x, d_y, dot_sums
        return d_x, d_y, None if sums is None else sums * share
