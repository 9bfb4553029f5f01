"""Features as maps: tokens laid out on their grid again, without class and register tokens."""

from torch import Tensor, nn

from vtk.analysis.places import prefix_tokens

_SKEW = 1.5  # by how much cells may be longer than wide; a grid of fewer fits is no grid


class Maps:
    """Lays out the features of a model's units, whatever form the model holds them in.

    Args:
        model: a timm model; its number of prefix tokens and the layout of its maps are known from it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._last = getattr(model, "output_fmt", None) == "NHWC"
        self._prefix = prefix_tokens(model)

    def lay(self, features: Tensor, image: tuple[int, int]) -> Tensor | None:
        """Return tokens (B, N, C), a map (B, H, W, C) or (B, C, H, W) as a map (B, C, H, W).

        Args:
            features: of the model, as `vtk.analysis.units.watch_units` shows them.
            image: height and width in pixels: the grid of tokens has nearly its proportions.

        Returns:
            The map; None where tokens are no grid, as class tokens on their own.
        """
        if features.ndim == 4:
            return features.movedim(-1, 1) if self._last else features
        count = features.shape[1]
        if count <= self._prefix:
            return None
        grids = {front: grid_of(count - front, image) for front in (self._prefix, 0)}  # CaiT's come in at its end
        known = {front: grid for front, grid in grids.items() if grid is not None}
        if not known:
            return None
        front = min(known, key=lambda at: skew(known[at], image))
        return features[:, front:].transpose(1, 2).unflatten(2, known[front])


def grid_of(count: int, image: tuple[int, int]) -> tuple[int, int] | None:
    """Return the rows and columns of ``count`` tokens whose proportions are nearest to the image's; None if none are.

    Every pixel belongs to one patch and patches are about square, so that a count has one fitting grid at most in
    practice: 196 tokens of a square image are 14×14.
    """
    if count < 1:
        return None
    grids = [(rows, count // rows) for rows in range(1, count + 1) if count % rows == 0]
    best = min(grids, key=lambda grid: skew(grid, image))
    return best if skew(best, image) <= _SKEW else None


def skew(grid: tuple[int, int], image: tuple[int, int]) -> float:
    """Return the longer side of a cell over the shorter one, 1 or more."""
    ratio = grid[0] * image[1] / (grid[1] * image[0])
    return max(ratio, 1 / ratio)
