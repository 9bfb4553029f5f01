"""Several processes measure together, and a run that was stopped goes on: the same numbers as one that did all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.vtk.analysis._models import images, tiny_vit
from vtk.analysis import CrossEntropy, Share, hessian_max, hessian_spectrum, parameter_blocks
from vtk.analysis.probes.second_order import hessian_product
from vtk.card import Card, InputSpec, ModelSpec
from vtk.errors import UsageError
from vtk.models.create import build_model
from vtk.packs.load import card_metadata


@pytest.mark.parametrize("sizes, parts", [((3, 4, 5), [[3, 5], [4]]), ((5,), [[3], [2]]), ((1,), [[1], []])])
def test_batches_are_divided_so_that_each_image_is_in_one_part(sizes, parts):
    batches = images(sum(sizes), sizes=sizes)
    found = [Share(rank, 2).of(batches) for rank in (0, 1)]
    assert [[len(x) for x, _ in part] for part in found] == parts
    seen = torch.cat([x for part in found for x, _ in part])
    whole = torch.cat([x for x, _ in batches])
    assert sorted(seen.sum((1, 2, 3)).tolist()) == pytest.approx(sorted(whole.sum((1, 2, 3)).tolist()))


@pytest.mark.parametrize("sizes", [(3, 4, 5), (5,)])
def test_parts_of_a_product_add_up_to_the_product(sizes):
    model, batches, loss = tiny_vit(), images(sum(sizes), sizes=sizes), CrossEntropy(weight_decay=0.5)
    size = sum(p.numel() for p in model.parameters())
    vector = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with hessian_product(model, loss, batches) as product:
        expected = product(vector)
    parts = []
    for rank in (0, 1):
        with hessian_product(model, loss, batches, share=Share(rank, 2)) as product:
            parts.append(product(vector) - 0.5 * vector)  # the l2 term is of the whole, not of the parts
    torch.testing.assert_close(parts[0] + parts[1] + 0.5 * vector, expected, rtol=1e-10, atol=1e-12)


def test_graphs_are_kept_only_as_far_as_there_is_room_and_give_the_same_product():
    model, batches = tiny_vit(), images(12, sizes=(4, 4, 4))
    vector = torch.ones(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    found, calls = [], []

    class Counts(CrossEntropy):
        def __call__(self, model, x, labels):
            calls[-1] += 1
            return super().__call__(model, x, labels)

    for keep in (0, 250_000, 2**30):  # a graph is counted as about 100 kB
        with hessian_product(model, Counts(), batches, keep=keep) as product:
            for _ in range(3):
                calls.append(0)
                found.append(product(vector))
    assert calls[:3] == [3, 3, 3] and calls[-3:] == [3, 0, 0] and calls[3:6] == [3, 1, 1]
    assert all(torch.equal(one, found[0]) for one in found)


def test_mini_batches_and_groups_that_are_known_are_not_done_again():
    model, batches, kept = tiny_vit(), images(12, sizes=(4, 4, 4)), []
    keep = lambda rows: kept.append([list(row) for row in rows])  # noqa: E731

    class Counts(CrossEntropy):
        seen = 0

        def __call__(self, model, x, labels):
            type(self).seen += len(x)
            return super().__call__(model, x, labels)

    whole = hessian_spectrum(model, batches, top=2, save=keep)
    assert [len(rows) for rows in kept] == [1, 2, 3]
    assert hessian_spectrum(model, batches, top=2, known=json.loads(json.dumps(kept[1])), loss=Counts()) == whole
    assert Counts.seen == 4  # of the last batch, whose graph is kept
    kept.clear()
    groups = parameter_blocks(model)
    whole = hessian_max(model, batches, groups=groups, save=keep)
    assert [len(rows) for rows in kept] == [1, 2, 3, 4, 5]
    Counts.seen = 0
    again = hessian_max(model, batches, groups=groups, known=json.loads(json.dumps(kept[3])), loss=Counts())
    assert again == whole and Counts.seen == 12


def test_rows_of_a_version_that_kept_other_numbers_are_not_taken():
    rows = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert Share().agree(rows, 3, torch.device("cpu")) == rows
    assert Share().agree(rows, 5, torch.device("cpu")) == []


def test_the_basis_is_restarted_where_memory_is_short(monkeypatch):
    model, batch = tiny_vit(), images(12)[0]
    expected = hessian_max(model, [batch], top=4, tol=1e-6, max_iter=300)
    monkeypatch.setattr("vtk.analysis.probes.eigenvalues.BASIS_BYTES", 0)  # so that 14 vectors are the room
    found = hessian_max(model, [batch], top=4, tol=1e-6, max_iter=300)
    assert found.values["whole"] == pytest.approx(expected.values["whole"], rel=1e-5)
    assert found.converged == {"whole": True} and 14 < expected.products <= found.products < 150


def test_if_one_process_is_refused_all_are():
    device = torch.device("cpu")
    others_fail, all_well = Share(1, 2, lambda t: t + 1), Share(1, 2)
    with all_well.together(device):
        pass
    with pytest.raises(UsageError, match="another process could not"), others_fail.together(device):
        pass
    for share in (others_fail, all_well, Share()):
        with pytest.raises(UsageError, match="own reason"), share.together(device):
            raise UsageError("own reason")
    fails = Share(1, 2, lambda t: t + 1 if t.ndim == 1 and t.is_floating_point() else t)
    with pytest.raises(UsageError, match="another process"):  # this one has no mini-batch of its own
        hessian_spectrum(tiny_vit(), images(2), share=fails)
    with pytest.raises(UsageError, match="100000 eigenvalues"):
        hessian_spectrum(tiny_vit(), images(2), top=100000, share=Share(0, 2))


@pytest.mark.slow
def test_two_processes_give_what_one_does(tmp_path: Path):
    kwargs = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    created = build_model("vit_tiny_patch16_224", num_classes=3, img_size=32, pretrained=False, seed=0, kwargs=kwargs)
    card = Card(ModelSpec("vit_tiny_patch16_224", kwargs), InputSpec(32, 32), ("a", "b", "c"))
    save_file(created.model.state_dict(), tmp_path / "model.safetensors", metadata=card_metadata(card))
    rng = np.random.default_rng(0)
    for name in "abc":
        (tmp_path / "data" / "val" / name).mkdir(parents=True)
        for i in range(7):
            pixels = rng.integers(0, 255, (32, 32, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / "val" / name / f"{i}.png")
    found = {}
    for world in (1, 2):
        out = tmp_path / str(world)
        starter = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"] if world == 2 else []
        subprocess.run(
            [
                sys.executable, *starter, "-m", "vtk", "analyze", str(tmp_path / "model.safetensors"),
                "--data", str(tmp_path / "data"), "--what", "hessian,hessian-blocks,ntk,landscape", "--device", "cpu",
                "--grid", "3", "--batch-size", "8", "--hessian-batch", "8", "--hessian-images", "20", "--top", "2",
                "--workers", "0", "--threads", "1", "--out", str(out),
            ],
            check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=400,
        )  # fmt: skip
        names = ("hessian", "hessian-blocks", "ntk", "landscape")
        found[world] = {name: json.loads((out / "results" / f"{name}.json").read_text())["result"] for name in names}
    one, two = found[1], found[2]
    assert two["landscape"] == one["landscape"]  # each point is one process's
    np.testing.assert_allclose(two["hessian"]["values"], one["hessian"]["values"], rtol=1e-5)
    np.testing.assert_allclose(two["ntk"]["eigenvalues"], one["ntk"]["eigenvalues"], rtol=1e-6)
    assert list(two["hessian-blocks"]["values"]) == list(one["hessian-blocks"]["values"])
    for name, values in one["hessian-blocks"]["values"].items():
        assert two["hessian-blocks"]["values"][name] == pytest.approx(values, rel=1e-3), name
    assert len(one["hessian-blocks"]["values"]) == 6
