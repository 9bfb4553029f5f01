"""Sharpness-aware minimisation (Foret et al. 2021; Chen et al. 2022, eq. 1 and 2), alone or with adversarial training.

    ε = ρ · g / ‖g‖,    g = ∇L(w);          the update is that of ∇L(w + ε)
    ε = ρ · w² ⊙ g / ‖|w| ⊙ g‖              adaptive (Kwon et al., 2021), elementwise

A step runs its batches twice. The first backward pass gives the direction in which the trained weights climb and, with
`--adversarial`, also that of the pixels (Chen et al. 2022, eq. 5), so that both together cost no more than one. The
second pass gives the gradients of the update. Weights are restored from a copy, bit for bit.

Papers and published code leave open:

- **Images of an ε.** Each process computes its own ε from its images of a step, without communication, as Chen et al.
  2022 do (appendix H: 32 images a core). With accumulation these are the images of all its forward passes, so that k
  batches of n images do what one of k · n does. `--sam-m` computes an ε for each group of so many images.
- **Several tasks** in a step climb each by its own gradient and norm; the weights they share are frozen.
- **The second pass** draws the same random numbers, so it drops the same neurons and paths, and counts no statistics of
  BatchNorm: these are the first pass's, of the weights that the model really has.
- **A gradient that is not finite** in the first pass makes ε NaN, and so every gradient of the second pass, on all
  processes once they are averaged: all skip the step without further communication.
- **A loss scaler's factor** drops out of g / ‖g‖, so the first pass is not divided by it.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from vtk.training.engine.gradients import Gradients
from vtk.training.engine.step_plan import Part, cut
from vtk.training.step_rules.adversarial import Adversary


class Ascent:
    """A step rule of two passes: climb, then descend from there.

    Args:
        rho: radius of the weights' ascent; None for none.
        adaptive: measure it relative to each weight.
        most: images that climb together; None for all that this process has in a step.
        together: whether the images of all processes climb together; all weights then move alike.
        adversary: changes the images; None for none.
    """

    passes = 2

    def __init__(
        self, rho: float | None = None, *, adaptive: bool = False, most: int | None = None, together: bool = False,
        adversary: Adversary | None = None,
    ) -> None:  # fmt: skip
        self.rho, self.adaptive, self.most, self.together, self.adversary = rho, adaptive, most, together, adversary

    def step(self, gradients: Gradients, update: Callable[[], None]) -> None:
        """Do one optimizer step."""
        parameters = [learner.parameters for learner in gradients.learners]
        gradients.clear()
        for group in cut(gradients.feed, self.most):
            sums = [p.grad for of_one in parameters for p in of_one]  # of the groups before
            gradients.clear()
            self._look(gradients, group)
            with contextlib.nullcontext() if self.rho is None else climbed(parameters, self.rho, self.adaptive):
                for p, total in zip((p for of_one in parameters for p in of_one), sums, strict=True):
                    p.grad = total
                del sums
                for part in group:
                    gradients.add(part, average=part.last)
        gradients.finish()
        update()

    def _look(self, gradients: Gradients, group: Sequence[Part]) -> None:
        """Run the first pass; change the images by what it says of them."""
        for part in group:
            clean, inputs = part.batches, None
            if self.adversary is not None:
                part.batches = [self.adversary.start(batch) for batch in clean]
                # without an ascent of the weights nobody asks for their gradients
                inputs = [batch.images for batch in part.batches] if self.rho is None else None
            gradients.add(part, average=self.together and part is group[-1], inputs=inputs)
            if self.adversary is not None:
                pairs = zip(clean, part.batches, strict=True)
                part.batches = [self.adversary.attack(batch, started) for batch, started in pairs]
        if self.together:
            gradients.sum_over_ranks()


@contextlib.contextmanager
def climbed(groups: Sequence[Sequence[torch.nn.Parameter]], rho: float, adaptive: bool) -> Iterator[None]:
    """Let parameters be w + ε inside of the context, and the same bits as before outside.

    Args:
        groups: parameters that share a norm; those without a gradient stay where they are. Gradients are used up: ε is
            made in their memory, so that one copy of the weights is all that is needed besides.
        rho: of each group's ascent.
        adaptive: see above.
    """
    moving = [[p for p in group if p.grad is not None] for group in groups]
    parameters: list[Tensor] = [p for group in moving for p in group]
    kept = [p.detach().clone() for p in parameters]
    try:
        for group in moving:
            if group:
                _climb(group, rho, adaptive)
        yield
    finally:
        if parameters:
            with torch.no_grad():
                torch._foreach_copy_(parameters, kept)


@torch.no_grad()
def _climb(parameters: Sequence[torch.nn.Parameter], rho: float, adaptive: bool) -> None:
    weights = [p.detach() for p in parameters]
    steps: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
    for p in parameters:
        p.grad = None
    if adaptive:
        torch._foreach_mul_(steps, weights)
    norm = torch.nn.utils.get_total_norm(steps)
    # a gradient of zeros leaves the weights where they are; a norm that is not finite must not do so
    scale = torch.where(norm.isfinite(), rho / norm.clamp_min(torch.finfo(norm.dtype).tiny), torch.nan)
    if adaptive:
        torch._foreach_mul_(steps, weights)
    torch._foreach_mul_(steps, scale)
    torch._foreach_add_(weights, steps)
