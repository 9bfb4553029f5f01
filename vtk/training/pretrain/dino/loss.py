"""DINO's loss, and what changes in it during a run: center, temperature, momentum (Caron et al. 2021, section 3).

With g of the teacher's whole views and v of the student's views, K prototypes, center c and temperatures τ:

    q_g = softmax((t_g − c) / τ_t)    p_v = softmax(s_v / τ_s)    loss = mean over g, v ≠ g, images of − Σ_k q_g log p_v

The cross-entropy is the entropy of the targets plus their divergence from the student: where the divergence is 0 and
the entropy 0 or log K, the model has collapsed to one answer for all images.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def dino_loss(
    student: Tensor, teacher: Tensor, center: Tensor, student_temp: float, teacher_temp: float
) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy over all pairs of different views, and the mean entropy of the targets, in nats.

    Args:
        student: (V, B, K) outputs; the first G views are the teacher's.
        teacher: (G, B, K) outputs.
        center: (K,), subtracted from the teacher's.
        student_temp: τ_s.
        teacher_temp: τ_t.
    """
    wide = torch.promote_types(student.dtype, torch.float32)
    log_p = (student.to(wide) / student_temp).log_softmax(-1)
    log_q = ((teacher.to(wide) - center.to(wide)) / teacher_temp).log_softmax(-1).detach()
    q = log_q.exp()
    cross = -torch.einsum("gbk,vbk->gv", q, log_p) / student.shape[1]
    pairs = cross.numel() - len(teacher)
    same = torch.eye(*cross.shape, dtype=torch.bool, device=cross.device)
    return cross.masked_fill(same, 0).sum() / pairs, -(q * log_q).sum(-1).mean()


@dataclass(frozen=True)
class Schedules:
    """What changes with the optimizer step (from 0) of a run; steps count as epochs in proportion.

    Attributes:
        steps: of the run.
        epochs: of the run.
        momentum: of the teacher at first; it rises to 1 on half a cosine.
        temperature: of the teacher.
        temperature_start: of the teacher in the first epoch.
        temperature_epochs: in which it rises from epoch to epoch.
        frozen_epochs: in which the prototypes stay.
    """

    steps: int
    epochs: int
    momentum: float
    temperature: float
    temperature_start: float
    temperature_epochs: int
    frozen_epochs: int

    def epoch_at(self, step: int) -> int:
        """Return the epoch (from 0) of a step."""
        return step * self.epochs // self.steps

    def momentum_at(self, step: int) -> float:
        """Return the share of itself that the teacher keeps after a step."""
        return 1 - (1 - self.momentum) * 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def temperature_at(self, step: int) -> float:
        """Return the teacher's temperature, which rises linearly with the epochs."""
        epoch, rising = self.epoch_at(step), self.temperature_epochs
        if epoch >= rising:
            return self.temperature
        return self.temperature_start + (self.temperature - self.temperature_start) * epoch / max(1, rising - 1)

    def frozen_at(self, step: int) -> bool:
        """Return whether the prototypes stay as they are in a step."""
        return self.epoch_at(step) < self.frozen_epochs
