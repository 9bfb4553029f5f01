"""BatchNorm of stems and FFNs in the fused model and in ONNX files: folded away, with the same logits."""

from collections import Counter
from typing import Any

import onnxruntime
import pytest
import timm
import torch
from timm.layers import BatchNormAct2d, ConvNormAct
from torch import nn

from vtk.card import InputSpec
from vtk.errors import UsageError
from vtk.fused import fuse
from vtk.fused.batch_norms import fold_batch_norms
from vtk.models.stems import STEMS, replace_stem
from vtk.models.transforms.mlp_layers import change_mlp
from vtk.models.transforms.parallel_blocks import parallelize
from vtk_export.graph.convert import convert, export_form

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)


def lively(module: Any) -> Any:
    """Give every tensor a value that matters, running statistics too; fp64, eval mode."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name.endswith("running_var"):
            tensor.data = torch.rand_like(tensor) + 0.5
        elif tensor.is_floating_point():
            spread = 0.3 if tensor.ndim == 1 else tensor[0].numel() ** -0.5
            tensor.data = spread * torch.randn_like(tensor) + (0.5 if tensor.ndim == 1 and "weight" in name else 0.0)
    return module.double().eval()


def vit(**kwargs: Any) -> Any:
    small = {"depth": 2, "embed_dim": 16, "num_heads": 2, "img_size": 32, "num_classes": 3}
    return timm.create_model("vit_tiny_patch16_224", **{**small, **kwargs})


def norms(module: nn.Module) -> int:
    return sum(isinstance(m, NORMS) for m in module.modules())


def difference(model: Any, fused: Any, size: tuple[int, int] = (32, 32), chans: int = 3) -> float:
    images = torch.randn(2, chans, *size, dtype=torch.float64)
    with torch.no_grad():
        expected, found = model(images), fused(images)
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("stem", STEMS)
def test_stems_fuse_without_batch_norm(stem: Any) -> None:
    model = vit(in_chans=2)
    replace_stem(model, stem=stem)
    lively(model)
    fused = fuse(model)
    assert norms(fused) == 0 and (norms(model) > 0) == ("bn" in stem or stem in ("hmlp", "conv", "levit"))
    assert difference(model, fused, chans=2) <= 1e-12


@pytest.mark.parametrize("act", ["gelu", "scaled-relu"])
def test_stems_of_other_activations_strides_and_synchronised_norms_fuse(act: Any) -> None:
    model = vit()
    replace_stem(model, stem="conv", act=act, strides=(2, 2, 2, 2))
    lively(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    assert norms(model) == 3 and norms(fuse(model)) == 0
    assert difference(model, fuse(model)) <= 1e-12


def test_a_stem_of_any_size_fuses_and_wrong_sizes_are_refused() -> None:
    model = vit(dynamic_img_size=True)
    replace_stem(model, stem="hmlp")
    lively(model)
    assert difference(model, fuse(model), (48, 16)) <= 1e-12
    with pytest.raises(UsageError, match=r"height and width must be multiples of the patch, 16 × 16"):
        fuse(model)(torch.randn(1, 3, 40, 32))
    fixed = vit()
    replace_stem(fixed, stem="conv")
    for shape in ((1, 3, 48, 32), (1, 1, 32, 32)):
        with pytest.raises(UsageError, match=r"this model takes \(B, 3, 32, 32\)"):
            fuse(fixed)(torch.randn(shape))


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("design", ["relu", "bn"])
def test_designs_of_the_ffn_fuse(design: Any, branches: int) -> None:
    model = vit()
    change_mlp(model, design=design)
    if branches == 2:
        parallelize(model, branches=2)
    lively(model)
    assert norms(model) == (2 if design == "bn" else 0)
    fused = fuse(model)
    assert norms(fused) == 0 and difference(model, fused) <= 1e-12


def test_an_ffn_without_its_norm_is_refused_by_name() -> None:
    model = vit()
    change_mlp(model, design="no-norm")
    with pytest.raises(UsageError, match=r"cannot fuse `blocks.0.norm2` \(Identity\)"):
        fuse(model)


def test_chains_of_timms_own_modules_fold_and_keep_their_activations() -> None:
    chain = nn.Sequential(
        ConvNormAct(3, 4, 3, act_layer=nn.SiLU),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.GELU(), nn.Conv2d(4, 5, 3)),
        nn.Identity(),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 4, 2),
        BatchNormAct2d(4, act_layer=nn.ReLU, inplace=False),
        nn.BatchNorm2d(4),  # a second one has no convolution before it
    )
    lively(chain)
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    with torch.no_grad():
        expected = chain(x)
        folded = fold_batch_norms(chain)
        assert float((folded(x) - expected).abs().max()) <= 1e-12
    assert norms(folded) == 1 and isinstance(folded[7], nn.BatchNorm2d)


@pytest.mark.slow
def test_a_hybrids_resnet_folds() -> None:
    model = timm.create_model("vit_small_resnet26d_224", depth=1, img_size=64, num_classes=3)
    lively(model)
    assert norms(model) > 20
    fused = fuse(model)
    assert norms(fused) == 0 and difference(model, fused, (64, 64)) <= 1e-10


@pytest.mark.slow  # the exporter takes seconds; what it is given has no BatchNorm, as the tests above say
@pytest.mark.parametrize("stem", ["conv", "hmlp", "levit"])
def test_the_onnx_file_has_no_batch_norm_and_the_same_logits(stem: Any) -> None:
    model = vit(depth=1)
    replace_stem(model, stem=stem)
    lively(model).float()
    proto = convert(export_form(model), InputSpec(32, 32), opset=18)
    kinds = Counter(node.op_type for node in proto.graph.node)
    assert kinds["BatchNormalization"] == 0
    assert kinds["Conv"] == {"conv": 4, "hmlp": 3, "levit": 4}[stem]
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for batch in (1, 3):
        images = torch.randn(batch, 3, 32, 32)
        (found,) = session.run(None, {"pixel_values": images.numpy()})
        with torch.no_grad():
            expected = model(images)
        assert float((torch.tensor(found) - expected).abs().max()) <= 1e-4 * float(expected.abs().max())
