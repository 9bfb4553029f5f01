"""SimMIM (Xie et al. 2021): predicts hidden pixels from mask tokens, by a linear layer and an L1 loss."""

from typing import Any

from torch import Tensor, nn

from vtk.training.objectives.base import Objective
from vtk.training.pretrain import reconstruction_plots
from vtk.training.pretrain.masked_method import MaskedMethod, PixelObjective, TokenModel
from vtk.training.pretrain.method import Setting
from vtk.training.pretrain.patches import normalized


class SimMim(MaskedMethod):
    """Predicts pixels from the tokens of all patches."""

    def model(self, backbone: nn.Module, setting: Setting) -> nn.Module:
        """Return the backbone with a mask token and a linear layer."""
        rows, columns = self.masks.grid
        spec = setting.spec
        outputs = spec.in_chans * spec.height * spec.width // (rows * columns)
        return self.ready(TokenModel(backbone, outputs, setting.config.mask_at, "simmim.linear"), setting)

    def objective(self, setting: Setting) -> Objective:
        """Return L1 over hidden pixels."""
        return PixelObjective(self.masks, "l1", *([normalized] if setting.config.norm_pixels else []))

    def draw(self, model: nn.Module, images: Tensor, setting: Setting) -> None:
        """Draw originals, masked images and reconstructions."""
        reconstruction_plots.reconstruction(model, images, self.masks, setting)

    def numbers(self) -> dict[str, Any]:
        """Return the number of masked patches."""
        return {"masked": self.masks.count, "patches": self.masks.grid[0] * self.masks.grid[1]}
