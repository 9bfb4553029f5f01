"""Selects the outputs of a file: logits or probabilities, the features that the classifier reads, or both."""

import copy
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from torch import Tensor, nn

from vtk.errors import UsageError


class WithFeatures(nn.Module):
    """A model that also, or only, returns the pooled features (B, C) that its classifier reads.

    Attributes:
        body: the model without its classifier.
        classifier: a linear layer, None where the features alone are wanted.
        classifier_width: channels of the features.
    """

    def __init__(self, body: nn.Module, classifier: nn.Module | None, width: int) -> None:
        super().__init__()
        self.body, self.classifier, self.classifier_width = body, classifier, width

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Map images to ``features``, or to ``logits`` and ``features``."""
        features: Tensor = self.body(images)
        return features if self.classifier is None else (self.classifier(features), features)


def split_classifier(model: nn.Module, *, logits: bool) -> WithFeatures:
    """Return a copy of a timm model that returns its features, with its logits or without.

    Raises:
        UsageError: the model has no classifier that is one linear layer at its end; it is named.
    """
    body: Any = copy.deepcopy(model)
    classifier = body.get_classifier() if hasattr(body, "get_classifier") else None
    names = [name for name, module in body.named_modules() if module is classifier]
    if not logits and isinstance(classifier, nn.Identity):  # of a source that is opened for its features
        return WithFeatures(body, None, int(body.head_hidden_size)).eval()
    if not isinstance(classifier, nn.Linear) or not names:
        raise UsageError(
            f"`--output features` needs a model that ends with one linear layer; {type(model).__name__} ends with "
            f"{type(classifier).__name__}; export its logits"
        )
    parent, _, name = names[0].rpartition(".")
    setattr(body.get_submodule(parent), name, nn.Identity())
    return WithFeatures(body, classifier if logits else None, classifier.in_features).eval()


def output_names(output: str, *, softmax: bool) -> tuple[str, ...]:
    """Return the names of a file's outputs for ``--output`` logits, features or both and ``--softmax``."""
    first = "probabilities" if softmax else "logits"
    return {"logits": (first,), "features": ("features",), "both": (first, "features")}[output]


def append_softmax(proto: onnx.ModelProto, temperature: float = 1.0) -> None:
    """Turn the output ``logits`` into ``probabilities``, softmax(logits / temperature), in place."""
    graph, read = proto.graph, "logits"
    (value,) = [v for v in graph.output if v.name == "logits"]
    value.name = "probabilities"
    if temperature != 1:
        kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        graph.initializer.append(numpy_helper.from_array(np.array(1 / temperature, kind), "inverse_temperature"))
        read = "logits_by_temperature"
        graph.node.append(helper.make_node("Mul", ["logits", "inverse_temperature"], [read], name=read))
    graph.node.append(helper.make_node("Softmax", [read], ["probabilities"], axis=-1, name="softmax_of_logits"))
