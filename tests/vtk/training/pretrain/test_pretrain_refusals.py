"""What `vtk pretrain` refuses: one line, before anything is written."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vtk.__main__ import main
from vtk.training.pretrain.tokenizer import Tokenizer, TokenizerSpec, save_tokenizer

TINY = (
    "--model vit_tiny_patch16_224 --model-kwargs patch_size=4 depth=1 embed_dim=16 num_heads=2 --img-size 16 --workers "
    "0 --device cpu --epochs 1"
).split()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    for name, count in (("none", 0), ("three", 3), ("bad", 0)):
        (root / name).mkdir()
        for i in range(count):
            Image.fromarray(np.full((16, 16, 3), 40 * i, np.uint8)).save(root / name / f"{i}.png")
    for i in range(5):
        (root / "bad" / f"{i}.png").write_bytes(b"nothing")
    spec = TokenizerSpec(8, 8, 3, 4, 2, (0.5,) * 3, (0.5,) * 3, hidden=4)
    save_tokenizer(root / "other.safetensors", Tokenizer(spec), {})
    torch.save({}, root / "pickle.pt")
    return root


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("HEAP --mask-ratio 1.5", 2, "`--mask-ratio` is 1.5; allowed is above 0 to below 1"),
        ("HEAP --mask-ratio 0.01", 2, "hides nothing of 16 patches"),
        ("HEAP --mask-unit 3 --mask-shape random", 2, "does not divide the grid of 4×4"),
        ("HEAP --img-size 18", 2, "height 18 is not a multiple of the patch"),
        ("HEAP --method simmim --codes 9", 2, "`--codes` is for --method beit"),
        ("HEAP --codes 4096", 2, "exceeds the 432 patches of the training images"),
        ("HEAP --tokenizer FOLDERS/other.safetensors", 2, "patches of 8×8 px; the model has 4×4"),
        ("HEAP --tokenizer FOLDERS/absent.safetensors", 3, "`--tokenizer`: there is no file"),
        ("HEAP --weights FOLDERS", 3, "is a folder; give a file of weights, such as"),
        ("FOLDERS/pickle.pt", 3, "is a file; give a folder of images"),
        ("HEAP --tokenizer FOLDERS/pickle.pt", 3, "pickle.pt"),
        ("HEAP --batch-size auto", 2, "auto"),
        ("FOLDERS/absent --method mae --local-attention 3", 2, "local attention needs the whole grid of them"),
        ("HEAP --method supcon --batch-size 1", 2, "compares the images of a batch; give 2 or more"),
        ("HEAP --resume", 3, "holds no state of a run"),
        ("HEAP --on-bad-image fail", 3, "1 of 31 image files cannot be read"),
        ("FOLDERS/none", 3, "has no images, at any depth"),
        ("FOLDERS/three", 3, "2 readable training images and 1 held out; give at least 4"),
        ("FOLDERS/bad", 3, "0 readable training images and 0 held out"),
        ("FOLDERS/absent", 3, "does not exist"),
        ("", 2, "no data: give a folder of images"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(words, code, text, heap, folders, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = words.replace("HEAP", str(heap)).replace("FOLDERS", str(folders)).split()
    # later flags win over earlier ones
    assert main(["pretrain", *given[:1], *TINY, "--out", "run", *given[1:]]) == code
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vtk pretrain: error: ") and text in error
    assert not Path("run").exists()


def test_weights_with_local_attention_are_refused_before_a_run_begins(heap, tmp_path, capsys):
    """Their file says it, not an option."""
    first = ["pretrain", str(heap), *TINY, "--method", "simmim", "--local-attention", "3", "--max-steps", "1"]
    assert main([*first, "--out", str(tmp_path / "first")]) == 0
    again = [*first[:2], *TINY, "--method", "mae", "--weights", str(tmp_path / "first/backbone.safetensors")]
    assert main([*again, "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vtk pretrain: error: `--method` mae drops masked patches, and local attention needs")
    assert not (tmp_path / "run").exists()
