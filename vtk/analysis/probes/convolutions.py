"""Single convolutions of a model as units to remove (Park and Kim 2022, Figures 10b and D.4).

The paper removes the 3×3 convolution of a bottleneck. Its weights cannot just be 0: the block's branch would then be
constant, as if the whole of it were removed. So the convolution passes on what it gets.
"""

from torch import nn

from vtk.analysis.probes.residual_units import Unit, residual_units


def single_convolutions(model: nn.Module) -> list[Unit]:
    """Return the units of a timm model with each spatial convolution, of a kernel above 1×1, in place of its block.

    Blocks without one, such as those of a ViT or the attention blocks of an AlterNet, stay what they are in
    `residual_units`. A convolution is removed by passing on its input: by a kernel that is 1 in its centre, so that one
    of stride 2 passes on every second position. That needs as many output as input channels, an odd kernel and a
    padding of half of it; others have no outlets.

    Raises:
        UsageError: the model has no recognised blocks.
    """
    units: list[Unit] = []
    for unit in residual_units(model):
        convs = [(n, m) for n, m in unit.host.named_modules() if isinstance(m, nn.Conv2d) and max(m.kernel_size) > 1]
        if unit.kind not in ("conv", "subsampling") or unit.seen != (unit.host,) or not convs:
            units.append(unit)
            continue
        for name, conv in convs:
            outlets = (conv,) if _keeps_positions(conv) else ()
            full = f"{unit.name}.{name}" if name else unit.name  # the host may be a convolution itself
            units.append(Unit(full, "conv", outlets, (conv,), "output", unit.host, passes=True))
    return units


def _keeps_positions(conv: nn.Conv2d) -> bool:
    if isinstance(conv.padding, str) or conv.in_channels != conv.out_channels:
        return False
    sides = zip(conv.kernel_size, conv.dilation, conv.padding, strict=True)
    return all(kernel % 2 and pad == dilation * (kernel // 2) for kernel, dilation, pad in sides)
