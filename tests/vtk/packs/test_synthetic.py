"""Synthetic packs: valid by every reader, of the ranks, classes, size and type that were asked for."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vtk.card import Transform
from vtk.errors import UsageError
from vtk.models.create import build_model
from vtk.packs.bundle import bundle_task
from vtk.packs.factors import read_pack
from vtk.packs.load import load_task
from vtk.packs.synthetic import synthetic_start, write_synthetic

Make = Callable[..., Path]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_a_synthetic_pack_is_its_base_plus_changes_of_the_rank_that_was_asked_for(
    make_pack: Make, tmp_path: Path, dtype: str
) -> None:
    like = make_pack()
    path = write_synthetic(tmp_path / "new", like, rank=3, classes=4, size=(32, 48), dtype=dtype, seed=1)
    task, stored = load_task(path), read_pack(path)
    state = task.model.state_dict()
    assert (task.card.schema, len(task.classes), task.card.input.size) == (2, 4, (32, 48))
    assert task.card.base == load_task(like).card.base and task.card.pack["dtype"] == dtype
    matrices = {k for k, v in state.items() if ".attn." in k and v.ndim == 2} | {"pos_embed"}
    assert set(task.factors) == matrices == set(stored.factors)
    assert stored.dense.keys() == {k for k in state if (".attn." in k and k.endswith("bias")) or k.startswith("head.")}
    start = build_model(
        task.card.model.name, num_classes=4, img_size=(32, 48), kwargs=task.card.model.kwargs, base=task.base
    ).model.state_dict()
    for name in matrices:
        change = (state[name] - start[name]).double().reshape(-1, state[name].shape[-1])
        values = torch.linalg.svdvals(change)
        assert values[2] > 0.01 * values[0] > 100 * values[3], name
        assert 0.05 <= change.std() / start[name].std() <= 0.2
    for name, value in state.items():
        assert torch.equal(value, start[name]) == (name not in task.carried), name


def test_seeds_ranks_and_types_of_one_start_are_each_their_own(make_pack: Make, tmp_path: Path) -> None:
    start = synthetic_start(make_pack(), classes=3)
    packs = [
        read_pack(write_synthetic(tmp_path / str(i), start, rank=rank, seed=seed))
        for i, (rank, seed) in enumerate([(2, 0), (2, 0), (2, 1), ((0, 1, 500), 0)])
    ]
    first, again, other, mixed = ({k: f.change() for k, f in p.factors.items() if f.rank} for p in packs)
    assert all(torch.equal(v, again[k]) and not torch.equal(v, other[k]) for k, v in first.items())
    named = {name: f.rank for name, f in packs[3].factors.items()}
    ranks = [named.get(name) for name in start.model.state_dict() if name in named]
    assert ranks == [0, 1, 48, 0, 1] and mixed.keys() < first.keys()  # 48 is full
    load_task(packs[3].path)


@pytest.mark.parametrize(
    ("transform", "matrices"),
    [
        (
            Transform("parallelize", {"branches": 2}),
            {f"blocks.0.attns.{i}.attn.{n}" for i in (0, 1) for n in ("proj", "qkv")},
        ),
        (Transform("uniform_heads", {"variant": "b"}), {f"blocks.{i}.attn.proj" for i in (0, 1)}),
    ],
    ids=lambda value: getattr(value, "op", ""),
)
def test_matrices_that_a_transform_made_have_no_start_in_the_base_and_are_stored_whole(
    make_pack: Make, base_file: Path, tmp_path: Path, transform: Transform, matrices: set[str]
) -> None:
    like = load_task(make_pack(transforms=(transform,)))
    start = build_model(
        like.card.model.name, num_classes=3, img_size=32, kwargs=like.card.model.kwargs, weights=base_file,
        transforms=(transform,),
    )  # fmt: skip
    for i, given in enumerate((like, start)):
        path = write_synthetic(tmp_path / str(i), given, rank=2)
        task = load_task(path)
        assert set(task.factors) == {f"{name}.weight" for name in matrices} | {"pos_embed"}
        assert task.carried == {k for k in task.model.state_dict() if ".attn." in k or k.startswith(("pos_", "head."))}


def test_what_cannot_be_made_is_refused(make_pack: Make, tmp_path: Path) -> None:
    pack = make_pack()
    for wrong in (-1, True, (), ("a",), 1.5):
        with pytest.raises(UsageError, match=r"`rank` is .*; give a number from 0 on, or several"):
            write_synthetic(tmp_path / "new", pack, rank=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`classes` is 0; a task has 1 or more"):
        write_synthetic(tmp_path / "new", pack, classes=0)
    bundle_task(pack, tmp_path / "bundle")
    with pytest.raises(UsageError, match="is a bundle, which does not have a whole base"):
        write_synthetic(tmp_path / "new", tmp_path / "bundle")
    assert not (tmp_path / "new").exists()
