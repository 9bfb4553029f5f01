"""The tokenizer: nearest words, straight-through gradients, words that are moved, files."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from vtk.card import InputSpec
from vtk.errors import DataError, UsageError
from vtk.training.engine.processes import Ranks
from vtk.training.objectives.base import Batch
from vtk.training.pretrain.fit_tokenizer import Reconstruction, move_words, usage
from vtk.training.pretrain.tokenizer import (
    KEY,
    Quantized,
    Tokenizer,
    TokenizerSpec,
    check_fits,
    load_tokenizer,
    save_tokenizer,
)  # fmt: skip

CPU = torch.device("cpu")
SPEC = TokenizerSpec(2, 4, 3, 6, 5, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), hidden=8)


@pytest.fixture
def tokenizer():
    torch.manual_seed(0)
    return Tokenizer(SPEC).double()


@pytest.fixture
def images():
    return torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_word_is_the_one_with_the_largest_cosine_and_depends_on_its_patch_alone(tokenizer, images):
    ids = tokenizer.ids(images)
    assert ids.shape == (2, 6) and tokenizer.grid(images) == (3, 2)
    for b, n in ((0, 0), (1, 3), (1, 5)):
        row, column = divmod(n, 2)
        patch = images[b, :, 2 * row : 2 * row + 2, 4 * column : 4 * column + 4].permute(1, 2, 0).flatten()
        cosines = F.cosine_similarity(tokenizer.encoder(patch)[None], tokenizer.words)
        assert ids[b, n] == cosines.argmax()
    other = images.clone()
    other[:, :, :2, :4] += 5  # the first patch
    assert torch.equal(tokenizer.ids(other)[:, 1:], ids[:, 1:])


def test_gradients_pass_the_words_straight_through():
    encoded = F.normalize(torch.randn(1, 7, 5, dtype=torch.float64), dim=-1).requires_grad_()
    words = F.normalize(torch.randn(6, 5, dtype=torch.float64), dim=-1).requires_grad_()
    found = Quantized(encoded, words)
    torch.testing.assert_close(found.passed, words[found.ids], rtol=0, atol=1e-15)  # forward: the words
    weights = torch.randn(1, 7, 5, dtype=torch.float64)
    to_encoded, to_words = torch.autograd.grad((found.passed * weights).sum(), (encoded, words), allow_unused=True)
    assert torch.equal(to_encoded, weights) and to_words is None  # backward: as if the encodings had been decoded
    to_encoded, to_words = torch.autograd.grad(found.loss, (encoded, words))
    gap = encoded - words[found.ids]
    torch.testing.assert_close(to_encoded, 0.25 * 2 * gap / 35, rtol=1e-12, atol=0)
    expected = torch.zeros_like(words).index_add(0, found.ids[0], -2 * gap[0] / 35)
    torch.testing.assert_close(to_words, expected, rtol=1e-12, atol=1e-18)


def test_the_loss_is_the_error_of_the_pixels_and_that_of_the_words(tokenizer, images):
    objective = Reconstruction(6, CPU)
    loss, numbers = objective.loss(tokenizer, Batch(images, torch.zeros(2, dtype=torch.int64)))
    found = tokenizer.quantize(images)
    made = tokenizer.decode(F.normalize(tokenizer.words, dim=-1)[found.ids], (3, 2))
    assert numbers["mse"].item() == pytest.approx(((made - images) ** 2).mean().item(), rel=1e-12)
    assert loss.item() == pytest.approx((numbers["mse"] + found.loss).item(), rel=1e-12)
    assert torch.equal(objective.counts, found.ids.flatten().bincount(minlength=6))


def test_usage_counts_words_and_their_perplexity():
    assert usage(torch.tensor([5, 5, 5, 5])) == (1.0, pytest.approx(4.0))
    used, perplexity = usage(torch.tensor([3, 1, 0, 0]))
    assert used == 0.5 and perplexity == pytest.approx(math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))


def test_dead_words_move_to_encodings_that_lack_one(tokenizer):
    with torch.no_grad():
        tokenizer.words.copy_(torch.eye(5, dtype=torch.float64)[[0, 0, 0, 0, 0, 0]])
    near = torch.eye(5, dtype=torch.float64)[[0] * 50]
    far = torch.eye(5, dtype=torch.float64)[[1, 2, 3]]
    dead = torch.tensor([False, True, False, True, False, True])
    before = tokenizer.words.detach().clone()
    move_words(tokenizer, dead, torch.cat([near, far])[None], 3, Ranks(CPU))
    assert torch.equal(tokenizer.words[~dead], before[~dead])
    moved = tokenizer.words[dead].detach()
    assert sorted((moved @ torch.eye(5, dtype=torch.float64)).argmax(1).tolist()) == [1, 2, 3]
    assert (moved.norm(dim=1) - 1).abs().max() < 0.1
    move_words(tokenizer, torch.ones(6, dtype=torch.bool), far[None], 3, Ranks(CPU))  # fewer encodings than words
    assert len(torch.unique(tokenizer.words, dim=0)) == 6


def test_a_file_gives_the_tokenizer_back(tokenizer, images, tmp_path):
    path = tmp_path / "tokenizer.safetensors"
    tokenizer.float()
    save_tokenizer(path, tokenizer, {"perplexity": 3.5})
    again, numbers = load_tokenizer(path)
    assert numbers == {"perplexity": 3.5} and again.spec == SPEC and again.id == tokenizer.id
    assert torch.equal(again.ids(images.float()), tokenizer.ids(images.float()))
    with torch.no_grad():
        tokenizer.words[0, 0] += 1
    assert again.id != tokenizer.id
    check_fits(again, (2, 4), InputSpec(6, 8), path)
    for patch, spec, text in (
        ((4, 4), InputSpec(8, 8), r"patches of 2×4 px; the model has 4×4"),
        ((2, 4), InputSpec(6, 8, mean=(0.4,) * 3), r"give --mean and --std"),
    ):
        with pytest.raises(UsageError, match=text):
            check_fits(again, patch, spec, path)


def _edit(spec=None, **tensors):
    def apply(state, told):
        return {**state, **tensors}, {**told, "spec": {**told["spec"], **(spec or {})}}

    return apply


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state, told: (state, None), "is not a tokenizer"),
        (lambda state, told: (state, {**told, "schema": 9}), "another version"),
        (_edit({"codes": 1 << 30}), "invalid tokenizer"),
        (_edit({"codes": 7}), "`words` is absent, of another shape"),
        (_edit({"dim": "x"}), "expected int"),
        (_edit(words=torch.full((6, 5), math.nan)), "not finite"),
    ],
    ids=["foreign", "schema", "huge", "shape", "type", "nan"],
)
def test_files_that_are_no_tokenizers(tokenizer, tmp_path, change, text):
    path = tmp_path / "tokenizer.safetensors"
    save_tokenizer(path, tokenizer.float(), {})
    from vtk.models.weights.files import read_safetensors

    state, told = change(load_file(path), json.loads(read_safetensors(path)[1][KEY]))
    save_file(state, path, None if told is None else {KEY: json.dumps(told)})
    with pytest.raises(DataError, match=text) as error:
        load_tokenizer(path)
    assert "\n" not in str(error.value)
