"""Models and images that give no numbers: one line for the diagnostic, and the others go on."""

import pytest
import timm
import torch

import vtk
from tests.vtk.analysis._models import images, tiny_vit
from vtk.analysis import Share, attention_entropy, attention_maps, ntk_condition
from vtk.analysis.config import AnalyzeConfig
from vtk.data.sources.listing import folders
from vtk.errors import NoResultError, UsageError


@pytest.fixture
def photos(tmp_path):
    from PIL import Image

    for name, colour in (("blue", (0, 0, 200)), ("green", (0, 200, 0)), ("red", (200, 0, 0))):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (32, 32), tuple(c + 9 * i for c in colour)).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


def test_one_image_stops_what_needs_two_and_nothing_else(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("vtk.analysis.analyze.draw", lambda analyses, out: {})
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=16, num_heads=2, num_classes=3)
    config = AnalyzeConfig(
        data=photos, what=("ntk", "miss-rate", "neurons", "norms"), max_images=1, workers=0, device="cpu",
        out=tmp_path / "out", split="all",
    )  # fmt: skip
    found = vtk.analyze(model, config)
    (one,) = found.analyses
    assert list(one.results) == ["neurons", "norms"] and found.missing == ("miss-rate", "ntk")
    assert all("two images or more" in reason for reason in one.refused.values())
    assert (tmp_path / "out" / "report.html").is_file() and len(folders(photos)) == 3


def overflowing():
    model = tiny_vit(depth=2).float()
    with torch.no_grad():
        model.blocks[0].mlp.fc2.weight.mul_(2e38)
    return model


@pytest.mark.parametrize("measure", [attention_entropy, attention_maps])
def test_attention_that_is_not_finite_is_one_line(measure):
    with pytest.raises(NoResultError, match=r"the attention of `blocks\.1\.attn` is not finite"):
        measure(overflowing(), [(x.float(), y) for x, y in images(4)])


def test_a_kernel_that_is_not_finite_is_one_line():
    with pytest.raises(NoResultError, match="derivatives of the model's outputs are not finite"):
        ntk_condition(overflowing(), [(x.float(), y) for x, y in images(4)])


@pytest.mark.parametrize("error", [UsageError, NoResultError])
def test_a_process_without_a_result_tells_the_others(error):
    told = []
    share = Share(0, 2, lambda tensor: told.append(float(tensor)) or tensor)
    with pytest.raises(error), share.together(torch.device("cpu")):
        raise error("no")
    assert told == [1.0]  # else they would wait for sums that never come
    other = Share(1, 2, lambda tensor: torch.ones_like(tensor))
    with pytest.raises(UsageError, match="another process could not measure its part"), other.together("cpu"):
        pass
