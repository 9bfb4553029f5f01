"""The floor of a model's latency: what its arithmetic and its memory traffic cost a device that does nothing else.

For L blocks of P branches, C channels, MLP ratio r, N tokens, A classes, in FLOPs (two per multiply-add):

    blocks   L · P · ((8 + 4 r) N C² + 4 N² C)        stem   2 · patches · patch² · 3 · C        head   2 A C
             (in gated FFNs 6 r for 4 r: three matrices)
    weights  every parameter once
    tokens   L · (6 + (8 + 2 r) P) · N C elements      each tensor between two kernels written and read once

While one block's tokens (x and the widest hidden layer) fit into the L2 cache only the weights come from memory. The
floor is the largest of FLOPs over the GEMM ceiling, and bytes over the copy ceiling.

    python benchmarks/roofline.py [--ceilings DIR_OR_CSV]
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import _ceilings
import _rows
import timm
import torch
from _models import END_TO_END, SUBJECTS, Model
from _runner import Ceilings
from _store import read
from torch import nn

ASSUMED = Ceilings(3.0e12, 800e12)
"""Of an H100, where no run has measured them."""

L2_BYTES = 50 << 20
BATCHES = (1, 2, 4, 8, 16, 32, 64, 256)


@dataclass(frozen=True)
class Work:
    """What one forward pass has to do, per batch.

    Attributes:
        flops: of the matrix products.
        weight_bytes: all parameters once.
        token_bytes: traffic between kernels, the norms folded into their neighbours.
        live_bytes: tokens of one block that should stay in the cache.
    """

    flops: int
    weight_bytes: int
    token_bytes: int
    live_bytes: int

    def floor_us(self, ceilings: Ceilings, cache_bytes: int = L2_BYTES) -> float:
        """Return the floor in microseconds."""
        moved = self.weight_bytes + (self.token_bytes if self.live_bytes > cache_bytes else 0)
        return 1e6 * max(self.flops / ceilings.flop_per_s, moved / ceilings.bytes_per_s)


def work(model: nn.Module, batch: int, *, bytes_per_element: int = 2) -> Work:
    """Return the work of a timm VisionTransformer or Eva of equal blocks, parallel or sequential.

    Args:
        model: also on the meta device; its image size counts.
        batch: images.
        bytes_per_element: of weights and activations.
    """
    block = model.blocks[0]
    branches = len(block.attns) if hasattr(block, "attns") else 1
    mlp = block.ffns[0].mlp if hasattr(block, "ffns") else block.mlp
    depth, c, hidden = len(model.blocks), model.embed_dim, mlp.fc2.in_features
    patch = model.patch_embed.proj
    patches = model.patch_embed.num_patches
    n = patches + model.num_prefix_tokens
    products = 2 * sum(layer.weight.numel() for layer in block.modules() if isinstance(layer, nn.Linear))
    flops = depth * (products * n + branches * 4 * n * n * c)
    flops += 2 * patches * patch.weight.numel() + 2 * model.head.weight.numel()
    tokens = depth * (6 * c + branches * (8 * c + 2 * hidden)) * n
    live = (c + branches * hidden) * n
    weights = sum(p.numel() for p in model.parameters())
    return Work(batch * flops, *(bytes_per_element * v for v in (weights, batch * tokens, batch * live)))


def on_meta(model: Model, px: int) -> nn.Module:
    """Return a model without memory for its weights."""
    with torch.device("meta"):
        return timm.create_model(model.timm, **model.kwargs, img_size=px)


def measured(path: Path) -> tuple[Ceilings | None, int]:
    """Return the ceilings in a file of `_ceilings` (or a folder that holds one), and the L2 cache's size."""
    rows = read(path / "gpu_ceilings.csv" if path.is_dir() else path)
    cache = [int(row["value"]) for row in rows if row["what"] == "l2"]
    return _ceilings.from_rows(rows), cache[-1] if cache else L2_BYTES


def table(ceilings: Ceilings, cache_bytes: int) -> Iterator[tuple[str, int, int, float]]:
    """Yield model, px, batch and floor in µs."""
    for name, px in SUBJECTS:
        model = on_meta(END_TO_END[name], px)
        for batch in BATCHES:
            yield name, px, batch, work(model, batch).floor_us(ceilings, cache_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ceilings", type=Path, default=_rows.RESULTS, help="gpu_ceilings.csv, or its folder")
    args = parser.parse_args()
    found, cache = measured(args.ceilings)
    ceilings = found or ASSUMED
    print(f"ceilings {'measured' if found else 'assumed'}: {ceilings.flop_per_s / 1e12:.0f} TFLOP/s, "
          f"{ceilings.bytes_per_s / 1e12:.2f} TB/s, L2 {cache / 2**20:.0f} MiB")  # fmt: skip
    for name, px, batch, floor in table(ceilings, cache):
        print(f"{name:<11} {px} px  batch {batch:>3}  floor {floor:>9.0f} µs  {1e6 * batch / floor:>8.0f} images/s")


if __name__ == "__main__":
    main()
