"""Context Broadcasting (CB_S) in transformers' ViLT: over the image's tokens, the question's, or both."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import ViltConfig, ViltForQuestionAnswering, ViltModel
from transformers.models.vilt.modeling_vilt import ViltEmbeddings, ViltOutput

from vtk.models.transforms.context_broadcast import ContextBroadcast

TOKENS = ("image", "text", "both")


class Members:
    """The tokens of the present batch that the broadcast averages and reaches; the layers share one of these.

    Attributes:
        mask: (B, N, 1) bool, set by the embeddings of each forward pass.
    """

    mask: Tensor | None = None


class TokenBroadcast(ContextBroadcast):
    """CB_S over some tokens: xᵢ + Λ ⊙ mean(x) for the members i, their mean only; other tokens stay as they are.

    Hyeon-Woo et al. 2023, section 4.7, names the tokens and no more. Padding is no member, so that an answer does not
    depend on how long the other questions of a batch are; the image's class token is one, as in their equation 1.
    """

    def __init__(self, dim: int, members: Members, **where: Any) -> None:
        super().__init__(dim, **where)
        self.members = members

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, N, C) to tokens (B, N, C)."""
        assert self.members.mask is not None and self.scale is not None
        mask = self.members.mask.to(x.dtype)
        mean = (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        return x + mask * self.scale * mean


class ContextOutput(ViltOutput):
    """The second half of ViLT's MLP with CB_S at its end, before the residual sum."""

    cb: TokenBroadcast

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Map the MLP's hidden units (B, N, 4·C) and the stream (B, N, C) to the stream."""
        return self.cb(self.dropout(self.dense(hidden_states))) + input_tensor


class ContextEmbeddings(ViltEmbeddings):
    """ViLT's embeddings, which also say which tokens are whose: the question's come first."""

    members: Members
    tokens: str

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return tokens (B, N, C) and which are no padding (B, N), as ViLT does."""
        embedded, valid = super().forward(input_ids, attention_mask, *args, **kwargs)
        text = torch.arange(valid.shape[1], device=valid.device) < attention_mask.shape[1]
        chosen = {"image": ~text, "text": text, "both": torch.ones_like(text)}[self.tokens]
        self.members.mask = (valid.bool() & chosen)[..., None]
        return embedded, valid


class ContextModel(ViltModel):
    """ViLT without a head; Λ that a file does not have is 0."""

    def _init_weights(self, module: nn.Module) -> None:
        # transformers leaves the memory of a missing tensor as it is until this method writes it
        super()._init_weights(module)
        if isinstance(module, ContextBroadcast):
            nn.init.zeros_(module.scale)


def add_context_broadcast(model: ViltModel, tokens: str = "both") -> None:
    """Add CB_S to all layers of a ViLT in place; with Λ = 0 it computes the same, and all tensors keep their names.

    Args:
        model: transformers' ViLT, without a head.
        tokens: ``image``, ``text`` or ``both`` (one mean over all tokens).

    Raises:
        ValueError: other tokens, or the model has Context Broadcasting already.
    """
    if tokens not in TOKENS:
        raise ValueError(f"`tokens` is {tokens!r}; allowed is {', '.join(TOKENS)}")
    if isinstance(model, ContextModel):
        raise ValueError("this ViLT already has Context Broadcasting; it is added once")
    members = Members()
    model.__class__ = ContextModel
    model.embeddings.__class__ = ContextEmbeddings
    model.embeddings.members, model.embeddings.tokens = members, tokens
    for layer in model.encoder.layer:
        like = layer.output.dense.weight
        layer.output.__class__ = ContextOutput
        layer.output.cb = TokenBroadcast(len(like), members, device=like.device, dtype=like.dtype)


class ContextVilt(ViltForQuestionAnswering):
    """A ViLT that answers questions, with CB_S; ``from_pretrained`` opens ViLT's files with Λ = 0, and its own.

    Args:
        config: of transformers; its ``context_tokens`` is saved with the model.
        tokens: see `add_context_broadcast`; by default those of the config.
    """

    def __init__(self, config: ViltConfig, tokens: str | None = None) -> None:
        super().__init__(config)
        config.context_tokens = tokens or getattr(config, "context_tokens", "both")
        add_context_broadcast(self.vilt, config.context_tokens)
