"""Removes a model's classifier, so that it returns the pooled features that the classifier reads."""

from typing import Any

from torch import Tensor, nn

from vtk.errors import UsageError


class BeforeClassifier(nn.Module):
    """A timm model whose classifier is more than linear layers: its own `forward_head` stops before it."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to features (B, channels)."""
        features: Tensor = self.body.forward_head(self.body.forward_features(images), pre_logits=True)
        return features


def without_classifier(model: nn.Module) -> nn.Module:
    """Return a model without its classifier; the given model may be changed.

    A linear classifier, or each of two (a distilled model, which gives their mean), is replaced by the identity: the
    result is a model of the same family, that can still be fused and exported.

    Raises:
        UsageError: a module that does not say which part is its classifier.
    """
    body: Any = model
    found = body.get_classifier() if hasattr(body, "get_classifier") else None
    heads = list(found) if isinstance(found, (tuple, list)) else [found]
    if heads and all(isinstance(head, (nn.Linear, nn.Identity)) for head in heads):
        for name in [name for name, part in model.named_modules() if any(part is head for head in heads)]:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, nn.Identity())
        return model
    if found is not None and hasattr(body, "forward_features") and hasattr(body, "forward_head"):
        return BeforeClassifier(model)
    raise UsageError(
        f"{type(model).__name__} does not say which part is its classifier; give it timm's method `get_classifier`, or "
        "a model that has it"
    )
