"""YAML, tables, results, and what is only remembered: caches, marks, locks and journals."""

import json
import os
import shutil
from pathlib import Path

from tests.fuzz.mutators import flip
from tests.fuzz.reader import JSON, TENSORS, V0_1, Reader, copy


def _make_yaml(folder: Path) -> None:
    for name in ("finetune.yaml", "lora.yaml"):
        shutil.copyfile(V0_1 / name, folder / name)
    (folder / "more.yaml").write_text(
        "epochs: 3\nlr: 1e-3\nmean: [0.5, 0.5, 0.5]\nimg-size: [32, 48]\ndata: &d x\nout: *d\nmodel: !!str a\n"
    )


def _read_yaml(folder: Path, file: Path) -> None:
    from vtk.options.files import read_values
    from vtk.training.finetune_config import FinetuneConfig

    values = read_values(file, FinetuneConfig, "--config")
    FinetuneConfig(**{"data": Path("x"), **values})


def _make_tables(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = [("a.png", "x"), ("b.png", "y"), ("sub/c.png", "x")]
    (folder / "t.csv").write_text("path,label,split\n" + "".join(f"{p},{c},train\n" for p, c in rows))
    (folder / "u.tsv").write_text("".join(f'{p}\t"{c}"\n' for p, c in rows))
    (folder / "v.csv").write_text("image;a;b\na.png;0;1\nb.png;1;1\n")
    table = pyarrow.table({"path": [p for p, _ in rows], "label": [1, 2, 3], "n": [[1.0], None, [2.0, 3.0]]})
    parquet.write_table(table, folder / "w.parquet")
    parquet.write_table(table, folder / "x.parquet", compression="gzip", use_dictionary=False)


def _read_table(folder: Path, file: Path) -> None:
    from vtk.data.sources.columns import choose_parts, read_lines

    lines = read_lines(file, None, "path,label")
    assert all(isinstance(line.name, str) and line.name for line in lines.lines)
    choose_parts(lines)


def _read_profile(folder: Path, file: Path) -> None:
    from vtk.profiling.regression import compare_profiles, print_comparison
    from vtk.profiling.result import ProfileResult

    found = ProfileResult.read(file)
    json.dumps(found.to_dict())
    for pair in ((V0_1 / "profile" / "profile.json", found), (found, found)):
        compared = compare_profiles(*pair)
        print_comparison(compared, ("a", "b"))
        compared.regressions(5.0), compared.to_dict()


def _read_analysis(folder: Path, file: Path) -> None:
    from vtk.analysis.result_files import read_analysis

    read_analysis(folder)


def _make_cache(folder: Path) -> None:
    import PIL

    from vtk.data.probing.probe import EMPTY

    entry = [[10, 20, 30], list(EMPTY)]
    (folder / "cache.json").write_text(
        json.dumps({"format": 7, "pillow": PIL.__version__, "root": "x", "files": {"a.png": entry, "b.png": entry}})
    )
    (folder / "config.json").write_text(json.dumps({"label_names": ["a", "b"], "id2label": {"0": "x", "1": "y"}}))


def _read_cache(folder: Path, file: Path) -> None:
    """Caches, and names beside weights, are ignored where they are damaged: nothing is raised."""
    from vtk.data.probing import cache
    from vtk.models.weights.class_names import read_names

    assert all(isinstance(name, str) for name in read_names(folder / "w.pth", None))
    path = cache.cache_path
    try:
        cache.cache_path = lambda *_: folder / "cache.json"
        assert isinstance(cache.load(folder), dict)
    finally:
        cache.cache_path = path


def _make_choices(folder: Path) -> None:
    from vtk_kernels import choices

    entries = choices.read(Path(choices.__file__).with_name("choices.json"))
    (folder / "choices.json").write_text(choices.text(entries[::6]))


def _read_choices(folder: Path, file: Path) -> None:
    import torch

    from vtk.fused.stages import check_choices
    from vtk_kernels import choices

    os.environ["VTK_CHOICES"] = str(file)
    try:
        choices.use(None)
        check_choices()
        for op in choices.DEFAULT:
            asked = (op, 197, 384, 384, torch.float16, "NVIDIA H200")
            assert choices.choose(*asked) == choices.explain(*asked).choice in choices.ALLOWED[op]
            str(choices.explain(*asked))
    finally:
        del os.environ["VTK_CHOICES"]
        choices.use(None)


def _read_run(folder: Path, file: Path) -> None:
    """What marks, journals, locks and caches read must never raise at all."""
    from vtk import filesets, locks, marks
    from vtk.training.runs.outputs import _PLOT

    for mark in (
        marks.json_with("a"),
        marks.json_lines_with("a"),
        marks.header_with("a"),
        marks.safetensors_with("vtk"),
        marks.png(),
        marks.says("x"),
        marks.tail_says(b"x"),
        _PLOT,
    ):
        assert marks._ours(file, mark) in (True, False)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        locks._read(descriptor)
    finally:
        os.close(descriptor)
    waiting = folder / filesets._NEXT
    waiting.mkdir(exist_ok=True)
    shutil.copyfile(file, waiting / filesets._JOURNAL)
    whole = sorted(folder.parent.glob("*"))
    filesets.recover(folder)
    shutil.rmtree(waiting, ignore_errors=True)
    assert sorted(folder.parent.glob("*")) == whole


READERS = {
    "yaml": Reader(1000, _make_yaml, _read_yaml, {".yaml": (flip,)}),
    "tables": Reader(800, _make_tables, _read_table, {".csv": (flip,), ".tsv": (flip,), ".parquet": (flip,)}),
    "profile": Reader(500, copy("profile"), _read_profile, {".json": JSON}),
    "analysis": Reader(300, copy("analysis/analysis.json"), _read_analysis, {".json": JSON}),
    "choices": Reader(300, _make_choices, _read_choices, {".json": JSON}),
    "caches": Reader(400, _make_cache, _read_cache, {".json": JSON}),
    "marks": Reader(
        500,
        copy("profile", "digits.safetensors", "runs/digits/last/state.json", "data/digits/val/one"),
        _read_run,
        {".json": JSON, ".csv": (flip,), ".safetensors": TENSORS, ".png": (flip,)},
    ),
}
