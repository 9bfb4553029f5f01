"""The examples on transformers' models compute what the paper and the libraries say."""

import copy
import importlib.util
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from vtk.models.transforms.context_broadcast import ContextBroadcast

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WIDTH, TEXT = 8, 5


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.replace('/', '_')}", EXAMPLES / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def context() -> ModuleType:
    return load("vilt_context_broadcast/context.py")


@pytest.fixture(scope="module")
def vilt(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with the files of a plain ViLT, and the model."""
    from transformers import ViltConfig, ViltForQuestionAnswering
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    config = ViltConfig(
        vocab_size=9, max_position_embeddings=TEXT, pad_token_id=0, num_labels=3, image_size=8, patch_size=4,
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, initializer_range=0.5,
    )  # fmt: skip
    model = ViltForQuestionAnswering(config).eval()
    folder = tmp_path_factory.mktemp("vilt")
    model.save_pretrained(folder)
    return folder, model


def inputs(lengths: tuple[int, ...] = (5, 3)) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(1, 9, (len(lengths), TEXT), generator=generator)
    valid = torch.arange(TEXT) < torch.tensor(lengths)[:, None]
    images = torch.randn(len(lengths), 3, 8, 8, generator=generator)
    return {"input_ids": words * valid, "attention_mask": valid.long(), "pixel_values": images}


def logits(model: nn.Module, **given: Tensor) -> Tensor:
    torch.manual_seed(2)  # of the patches' order
    with torch.no_grad():
        return model(**given).logits


def draw_scales(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("cb.scale"):
                value.copy_(torch.randn(value.shape, generator=generator))


@pytest.mark.parametrize("tokens", ["image", "text", "both"])
def test_a_vilt_opened_with_cb_s_computes_the_same_bits(context: Any, vilt: Any, tokens: str, tmp_path: Path) -> None:
    folder, plain = vilt
    model = context.ContextVilt.from_pretrained(folder, tokens=tokens)
    scales = [value for name, value in model.named_parameters() if name.endswith("output.cb.scale")]
    assert len(scales) == 2 and all(torch.equal(value, torch.zeros(WIDTH)) for value in scales)
    assert set(model.state_dict()) - {f"vilt.encoder.layer.{i}.output.cb.scale" for i in (0, 1)} == {
        *plain.state_dict()
    }
    assert torch.equal(logits(model, **inputs()), logits(plain, **inputs()))
    draw_scales(model)
    changed = logits(model, **inputs())
    assert not torch.allclose(changed, logits(plain, **inputs()))
    model.save_pretrained(tmp_path)
    again = context.ContextVilt.from_pretrained(tmp_path)  # the tokens come from its config
    assert torch.equal(logits(again, **inputs()), changed)
    assert torch.equal(logits(copy.deepcopy(again), **inputs((4, 4))), logits(again, **inputs((4, 4))))


@pytest.mark.parametrize("tokens", ["image", "text", "both"])
def test_cb_s_of_vilt_adds_the_mean_of_its_tokens_and_of_no_padding(context: Any, vilt: Any, tokens: str) -> None:
    model = context.ContextVilt.from_pretrained(vilt[0], tokens=tokens)
    draw_scales(model)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    ends: list[tuple[Tensor, Tensor, Tensor]] = []
    for layer in model.vilt.encoder.layer:
        layer.output.cb.register_forward_hook(lambda module, given, out: seen.append((module.scale, given[0], out)))
        layer.output.register_forward_hook(
            lambda module, given, out: ends.append((module.dense(given[0]), given[1], out))
        )
    logits(model, **inputs((5, 3)))
    assert len(seen) == 2
    for (_, x, out), (last, stream, end) in zip(seen, ends, strict=True):
        assert torch.equal(x, last) and torch.equal(end, out + stream)  # at the MLP's end, before the residual sum
    for scale, x, out in seen:
        for image, words in enumerate((5, 3)):
            text, patches = range(words), range(TEXT, TEXT + 1 + 4)  # the image's class token and its four patches
            members = {"image": [*patches], "text": [*text], "both": [*text, *patches]}[tokens]
            mean = sum(x[image, i].double() for i in members) / len(members)
            for i in range(x.shape[1]):
                wanted = x[image, i].double() + (scale.double() * mean if i in members else 0)
                assert torch.allclose(out[image, i].double(), wanted, atol=1e-5), (image, i)


def test_cb_s_on_both_without_padding_is_that_of_vtk_and_padding_changes_no_answer(context: Any, vilt: Any) -> None:
    model = context.ContextVilt.from_pretrained(vilt[0])
    draw_scales(model)
    given = inputs((3, 3))
    padded = logits(model, **given)
    cut = {**given, "input_ids": given["input_ids"][:, :3], "attention_mask": given["attention_mask"][:, :3]}
    assert torch.allclose(logits(model, **cut), padded, atol=1e-5)
    for layer in model.vilt.encoder.layer:
        kept = ContextBroadcast(WIDTH)
        kept.scale = layer.output.cb.scale
        layer.output.cb = kept
    assert torch.allclose(logits(model, **cut), padded, atol=1e-5)


def test_cb_s_of_vilt_is_added_once_and_to_known_tokens(context: Any, vilt: Any) -> None:
    model = copy.deepcopy(vilt[1]).vilt
    with pytest.raises(ValueError, match="`tokens` is 'words'; allowed is image, text, both"):
        context.add_context_broadcast(model, "words")
    context.add_context_broadcast(model)
    with pytest.raises(ValueError, match="already has Context Broadcasting"):
        context.add_context_broadcast(model)


def test_generated_questions_have_the_answer_that_the_picture_gives() -> None:
    data = load("vilt_context_broadcast/data.py")
    answers = {kind: Counter() for kind in data.KINDS}  # type: ignore[var-annotated]
    for seed in range(400):
        rng = random.Random(seed)
        _, things = data.draw(rng)
        kind = data.KINDS[seed % 4]
        pair = data.ask(rng, things, kind)
        if pair is None:
            continue
        words, answer = pair[0].split(), pair[1]
        answers[kind][answer] += 1
        named = [
            thing for thing in things if all(word in thing for word in words if word in {*data.SHAPES, *data.COLORS})
        ]
        if kind == "count":
            assert answer == str(len(named))
        elif kind == "exists":
            assert answer == ("yes" if named else "no")
        else:
            assert len(named) == 1 and answer == named[0][kind == "color"]
    assert all(len(found) >= wanted for found, wanted in zip(answers.values(), (3, 3, 3, 2), strict=True)), answers
    assert 0.3 < answers["exists"]["yes"] / answers["exists"].total() < 0.7
    first, again = (data.questions(8, 0) for _ in range(2))
    assert torch.equal(first.images, again.images) and torch.equal(first.words, again.words)
    assert len(first) == 8 and first.kinds == data.KINDS * 2 and float(first.images.abs().max()) <= 1


def test_the_loss_of_answers_is_transformers(vilt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "data", load("vilt_context_broadcast/data.py"))
    answering = load("vilt_context_broadcast/answering.py")
    given, labels = inputs(), torch.tensor([[1.0, 0, 0], [0, 0, 1]])
    batch = answering.QuestionBatch(given["pixel_values"], labels, words=given["input_ids"])
    losses = []
    for loss in (
        lambda: answering.AnswerObjective().loss(vilt[1], batch)[0], lambda: vilt[1](**given, labels=labels).loss,
    ):  # fmt: skip
        torch.manual_seed(2)
        losses.append(float(loss().detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_upernet_of_the_example_gives_the_logits_and_the_loss_of_transformers_model() -> None:
    from transformers import ResNetConfig, UperNetConfig, UperNetForSemanticSegmentation

    example = load("segmentation_upernet/model.py")
    torch.manual_seed(0)
    maps = [torch.randn(2, WIDTH, 8, 8) for _ in range(4)]
    backbone = nn.Module()
    backbone.forward_intermediates = lambda images, **kwargs: maps  # type: ignore[assignment]
    model = example.Segmenter(backbone, width=WIDTH, classes=3, channels=WIDTH)
    stages = ResNetConfig(
        embedding_size=WIDTH, hidden_sizes=[WIDTH] * 4, depths=[1] * 4, out_features=[f"stage{i}" for i in range(1, 5)]
    )
    whole = UperNetForSemanticSegmentation(
        UperNetConfig(
            backbone_config=stages, hidden_size=WIDTH, num_labels=3, pool_scales=(1, 2, 4), auxiliary_channels=WIDTH
        )
    ).train()
    whole.decode_head.load_state_dict(model.decode_head.state_dict())
    whole.auxiliary_head.load_state_dict(model.auxiliary_head.state_dict())
    levels = model.pyramid(maps)
    assert [tuple(level.shape[-2:]) for level in levels] == [(32, 32), (16, 16), (8, 8), (4, 4)]
    assert torch.equal(levels[2], maps[2])
    assert torch.equal(levels[3], maps[3].view(2, WIDTH, 4, 2, 4, 2).amax((3, 5)))
    features = SimpleNamespace(feature_maps=levels, hidden_states=None, attentions=None)
    whole.backbone = nn.Module()
    whole.backbone.forward_with_filtered_kwargs = lambda *args, **kwargs: features
    images, labels = torch.zeros(2, 3, 32, 32), torch.randint(0, 3, (2, 32, 32))
    loss, _ = example.PixelObjective().loss(model.train(), SimpleNamespace(images=images, labels=labels))
    wanted = whole(images, labels=labels)
    assert float(loss.detach()) == pytest.approx(float(wanted.loss.detach()), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())
    # both have seen one batch, so that their running statistics agree, too
    with torch.no_grad():
        features.feature_maps = model.eval().pyramid(maps)
        assert torch.allclose(model(images), whole.eval()(images).logits, atol=1e-5)


@pytest.fixture
def perturbations(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "heads", load("segmentation/heads.py"))
    return load("segmentation_upernet/perturbations.py")


def test_miou_under_perturbations_is_of_pixels_changed_before_they_are_normalised(perturbations: Any) -> None:
    seen: list[Tensor] = []

    class Judge(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(images)
            return torch.stack([images[:, 0], -images[:, 0]], 1)  # class 0 above the mean

    pixels = torch.full((40, 3, 16, 16), 0.4) + 0.4 * (torch.arange(16) < 8)
    mean, std = (0.5, 0.6, 0.6), (0.5, 0.25, 0.25)
    scores = perturbations.measure(Judge(), pixels, (pixels[:, 0] < 0.6).long(), 2, mean, std)
    assert {name: len(values) for name, values in scores.items()} == {
        "clean": 1, "shot noise": 5, "Gaussian noise, 5 of 255": 5, "Gaussian noise, 10 of 255": 5,
        "Gaussian blur, 1 px": 1, "Gaussian blur, 2 px": 1,
    }  # fmt: skip
    assert scores["clean"] == [1.0] and max(scores["shot noise"]) < 1 and len(set(scores["shot noise"])) > 1
    shown = [images * torch.tensor(std).view(3, 1, 1) + torch.tensor(mean).view(3, 1, 1) for images in seen]
    assert torch.allclose(shown[0], pixels, atol=1e-6)
    deviations = [float(shown[i][..., 8:].std()) * 255 for i in (1, 6, 11)]
    assert deviations == pytest.approx([255 * (0.4 / 60) ** 0.5, 5, 10], rel=0.05)  # counts n ÷ 60 vary by n ÷ 60²
    edges = [float((images[:, :, :, 7] - images[:, :, :, 8]).mean()) for images in (shown[0], *shown[16:])]
    # neighbours across a step of 0.4 differ by 0.4 times the kernel's middle, about 1 ÷ (σ·√(2π))
    assert edges == pytest.approx([0.4, 0.4 * 0.399, 0.4 * 0.1995], rel=0.05)


def test_an_interval_over_draws_is_students(perturbations: Any) -> None:
    scores = [0.52, 0.5, 0.53, 0.51, 0.5]
    low, high = stats.t.interval(0.95, 4, np.mean(scores), stats.sem(scores))
    assert perturbations.describe(scores) == f"51.2% ± {50 * (high - low):.2f} points"
    assert perturbations.describe([0.5]) == "50.0%"
