"""Bundles: complete without the base, exactly what is needed, and refused where something would be lost."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vtk.card import Transform
from vtk.errors import BaseError, DataError, UsageError
from vtk.packs import load_checkpoint, load_task, merge_task
from vtk.packs.base_files import BUNDLED
from vtk.packs.bundle import bundle_task, convert_task
from vtk.packs.cards import CARD, HASHES, TENSORS
from vtk.packs.diff import diff_task
from vtk.runtime.opening import open_source

Make = Callable[..., Path]
OPTIONS = [
    {},
    {"in_chans": 1},
    {"transforms": (Transform("parallelize", {"branches": 2}),)},
    {"transforms": (Transform("add_context_broadcast", {"scale": True}),)},
    {"dtype": "int8"},
]


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    x, y = a.state_dict(), b.state_dict()
    return x.keys() == y.keys() and all(torch.equal(v, y[k]) for k, v in x.items())


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "stem", "branches", "cb", "int8"])
def test_a_bundle_needs_no_base(make_pack: Make, base_file: Path, tmp_path: Path, options: dict) -> None:
    pack = make_pack(**options)
    model, base = load_task(pack).model, load_file(base_file)
    bundle_task(pack, tmp_path / "x.vtkbundle")
    base_file.unlink()
    shutil.rmtree(pack)
    bundle = shutil.move(tmp_path / "x.vtkbundle", tmp_path / "moved")
    assert sorted(p.name for p in bundle.iterdir()) == sorted([CARD, HASHES, TENSORS, BUNDLED, "README.md"])
    task = load_task(bundle)
    assert same(task.model, model)
    assert same(open_source(bundle).model(), model)
    merge_task(bundle, tmp_path / "m.safetensors")
    assert same(load_checkpoint(tmp_path / "m.safetensors").model, model)
    brought = load_file(bundle / BUNDLED)
    assert all(torch.equal(v, base[k]) for k, v in brought.items())
    attention = {k for k in base if ".attn." in k}
    differences = {k for k in attention if k.endswith("weight")} if options.get("dtype") == "int8" else set()
    stem = {"patch_embed.proj.weight"} if "in_chans" in options else set()
    assert set(brought) == set(base) - attention - stem - {"pos_embed", "head.weight", "head.bias"} | differences
    bundle_task(bundle, tmp_path / "again")
    assert (tmp_path / "again" / BUNDLED).read_bytes() == (bundle / BUNDLED).read_bytes()


def test_the_base_keeps_its_dtype(make_pack: Make, base_file: Path, tmp_path: Path) -> None:
    save_file({k: v.half().float() for k, v in load_file(base_file).items()}, base_file)
    pack = make_pack()
    half = tmp_path / "half.safetensors"
    save_file({k: v.half() for k, v in load_file(base_file).items()}, half)
    bundle_task(pack, tmp_path / "b", base=half)
    assert {v.dtype for v in load_file(tmp_path / "b" / BUNDLED).values()} == {torch.float16}
    assert same(load_task(tmp_path / "b").model, load_task(pack).model)


def test_a_bundle_converted_stays_one(make_pack: Make, base_file: Path, tmp_path: Path) -> None:
    bundle_task(make_pack(), tmp_path / "b")
    with pytest.raises(UsageError, match=r"int8 stores the differences from these: give --base FILE"):
        convert_task(tmp_path / "b", tmp_path / "small", "int8")
    card = convert_task(tmp_path / "b", tmp_path / "small", "int8", base=base_file)
    assert card.pack["drift"]["logits_cosine"] > 0.9999
    base_file.unlink()
    convert_task(tmp_path / "small", tmp_path / "full", "fp32")
    assert set(load_file(tmp_path / "full" / BUNDLED)) == set(load_file(tmp_path / "b" / BUNDLED))
    assert same(load_task(tmp_path / "small").model, load_task(tmp_path / "full").model)
    convert_task(tmp_path / "small", tmp_path / "again", "int8")


def test_against_its_own_base_it_cannot_be_compared(make_pack: Make, base_file: Path, tmp_path: Path) -> None:
    pack = make_pack()
    bundle_task(pack, tmp_path / "b")
    with pytest.raises(UsageError, match=r"is a bundle, which holds only .*give --base FILE"):
        diff_task(tmp_path / "b")
    assert repr(diff_task(tmp_path / "b", base=base_file)) == repr(diff_task(pack))  # NaN is in both
    assert diff_task(tmp_path / "b", pack).shared_ffn == 8


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-9]), DataError, "not a whole safetensors"),
        (lambda p: save_file({"x": torch.ones(1)}, p), BaseError, "is absent; bundle the pack again"),
        (lambda p: save_file({k: v + 1 for k, v in load_file(p).items()}, p), BaseError, "differs from the recorded"),
    ],
)
def test_a_damaged_bundle_is_one_clear_error(
    make_pack: Make, tmp_path: Path, damage: Callable[[Path], object], error: type, message: str
) -> None:
    bundle_task(make_pack(), tmp_path / "b")
    damage(tmp_path / "b" / BUNDLED)
    with pytest.raises(error, match=message):
        load_task(tmp_path / "b")


def test_nothing_of_a_stranger_is_replaced(make_pack: Make, tmp_path: Path) -> None:
    pack = make_pack()
    bundle_task(pack, tmp_path / "b")
    with pytest.raises(UsageError, match="exists; choose another name, or --overwrite"):
        bundle_task(pack, tmp_path / "b")
    bundle_task(pack, tmp_path / "b", overwrite=True)
    bundle_task(pack, pack, overwrite=True)
    assert load_task(pack).bundled
    with pytest.raises(UsageError, match=r"holds `b`, which would be lost"):
        bundle_task(pack, tmp_path, overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="is a file; give a folder"):
        bundle_task(pack, tmp_path / "file", overwrite=True)
