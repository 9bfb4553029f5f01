"""Images a second of ``vtk embed`` beside a bare loop over PIL, timm's transform and torch's loader."""

import statistics
import time
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import vtk
from vtk.runtime.embedding.config import EmbedConfig

COUNT, ROUNDS, BATCH = 256, 5, 64


class Files(torch.utils.data.Dataset):
    def __init__(self, paths: list[Path], transform) -> None:
        self.paths, self.transform = paths, transform

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int):
        return self.transform(Image.open(self.paths[i]).convert("RGB"))


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize("depth", [1, 12], ids=["reading", "computing"])
def test_it_has_at_least_0_95_of_a_bare_loops_images_per_second(tmp_path, depth):
    """With one block reading is most of the work, with twelve computing is."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / "photos" / f"{i:04}.jpg" for i in range(COUNT)]
    paths[0].parent.mkdir()
    for path in paths:
        coarse = Image.fromarray(rng.integers(0, 255, (30, 40, 3), dtype=np.uint8)).resize((500, 375))
        noise = rng.integers(-12, 12, (375, 500, 3))
        Image.fromarray(np.clip(np.array(coarse) + noise, 0, 255).astype(np.uint8)).save(path, quality=90)
    torch.set_num_threads(2)
    model = timm.create_model("vit_tiny_patch16_224", depth=depth).eval()
    transform = timm.data.create_transform(**timm.data.resolve_data_config({}, model=model))
    source = vtk.open_source(model, features=True)
    config = EmbedConfig(images=tmp_path / "photos", out=tmp_path / "e.npz", workers=2, batch_size=BATCH)
    times: dict[str, list[float]] = {"ours": [], "bare": []}
    rows = {}
    for _ in range(ROUNDS):
        start = time.perf_counter()
        vtk.embed(source, config)
        times["ours"].append(time.perf_counter() - start)
        start = time.perf_counter()
        loader = torch.utils.data.DataLoader(Files(paths, transform), batch_size=BATCH, num_workers=2)
        with torch.inference_mode():
            found = [model.forward_head(model.forward_features(images), pre_logits=True) for images in loader]
        np.save(tmp_path / "bare.npy", torch.cat(found).numpy())
        times["bare"].append(time.perf_counter() - start)
        rows = np.load(tmp_path / "e.npz")["embedding"], np.load(tmp_path / "bare.npy")
    np.testing.assert_allclose(*rows, rtol=0, atol=1e-4)
    ours, bare = (COUNT / statistics.median(times[name]) for name in ("ours", "bare"))
    assert ours >= 0.95 * bare, f"{ours:.1f} images/s, bare {bare:.1f}"
