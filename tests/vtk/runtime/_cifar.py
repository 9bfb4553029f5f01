"""A small model of CIFAR-10's classes, and pictures about which it says different things."""

import numpy as np
import torch
from PIL import Image

import vtk
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.sources.cifar_names import CIFAR_10
from vtk.formats import save_tensors
from vtk.models.create import build_model
from vtk.packs.load import card_metadata, load_checkpoint

NAMES = tuple(CIFAR_10.split())[::-1]  # not in the order of the labels


def save_model(path):
    """A model of 32 px with CIFAR-10's classes in another order, with random weights that tell pictures apart."""
    kwargs = {"depth": 1, "embed_dim": 16, "num_heads": 2, "class_token": False, "global_pool": "avg"}
    created = build_model(
        "vit_tiny_patch16_224", num_classes=10, img_size=32, pretrained=False, classes=NAMES, kwargs=kwargs
    )
    generator = torch.Generator().manual_seed(0)
    for layer in (created.model.head, created.model.patch_embed.proj):
        torch.nn.init.normal_(layer.weight, generator=generator)
    save_tensors(path, created.model.state_dict(), card_metadata(vtk.Card(created.spec, created.input, NAMES)))
    return path


def logits(checkpoint, images):
    task = load_checkpoint(checkpoint)
    transform = eval_transform(task.card.input)
    with torch.no_grad():
        return task.model.eval()(torch.stack([transform(Image.fromarray(image)) for image in images])).numpy()


def pictures(count, seed=0):
    """Coarse pictures, about which the model says different things."""
    coarse = np.random.default_rng(seed).integers(0, 256, (count, 2, 2, 3)).astype(np.uint8)
    return coarse.repeat(16, 1).repeat(16, 2)


def save_classes(root, images, names):
    for i, (image, name) in enumerate(zip(images, names, strict=True)):
        (root / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / name / f"{i:02d}.png")
