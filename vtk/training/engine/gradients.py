"""The gradients of one optimizer step, as a step rule asks for them: forward pass by forward pass, or all at once."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vtk.training.engine.learner import Learner
from vtk.training.engine.precision import Precision
from vtk.training.engine.processes import Ranks
from vtk.training.engine.step_plan import Feed, Part, single_images
from vtk.training.objectives.base import JointObjective, Objective


@dataclass(frozen=True)
class Means:
    """Model, objective and number formats of the gradients of a run.

    Attributes:
        model: whose forward pass is run.
        wrapped: what is called for it: ``model``, or DistributedDataParallel around it.
        objective: gives the loss.
        precision: number formats.
        ranks: this process and the others.
        joint: whether every stream has a learner of its own, whose gradients are summed here.
    """

    model: nn.Module
    wrapped: nn.Module
    objective: Objective
    precision: Precision
    ranks: Ranks
    joint: bool


class Gradients:
    """Gradients of the batches of one optimizer step.

    A rule calls this object, which is all that plain training does, or it puts the gradients together itself: `clear`,
    `add` for each forward pass as often as it likes, `finish`. A part that is added again draws the same random numbers
    (the same neurons and paths are dropped), and leaves buffers as they are (BatchNorm counts an image once).

    Args:
        means: of the run.
        learners: all of the run.
        taking: numbers of those that take part.
        feed: the step's batches.
        images: of the step, of all processes, by stream.

    Attributes:
        feed: as given.
        learners: those that take part.
        losses: (learners of the run,) this process's losses where parts were added first, summed over images.
        again: the same where parts were added again.
        logs: the objective's further numbers of parts that were added first, summed over images.
    """

    def __init__(
        self, means: Means, learners: Sequence[Learner], taking: Sequence[int], feed: Feed, images: Mapping[int, int]
    ) -> None:
        self.means, self.feed, self.images = means, feed, images
        self.learners = [learners[i] for i in taking]
        self.losses = torch.zeros(len(learners), device=means.ranks.device)
        self.again = torch.zeros_like(self.losses)
        self.logs: dict[str, Tensor] = {}

    def __call__(self) -> Tensor:
        """Compute the gradients that plain training updates by; return the mean loss of this process's images."""
        self.clear()
        total = torch.zeros_like(self.losses)
        for part in self.feed:
            total += self.add(part, average=part.last)
        self.finish()
        return total.sum() / sum(self.images.values())

    def clear(self) -> None:
        """Forget the gradients of all learners."""
        for learner in self.learners:
            learner.optimizer.zero_grad(set_to_none=True)

    def add(self, part: Part, *, average: bool, inputs: Sequence[Tensor] | None = None) -> Tensor:
        """Run one forward and backward pass, which adds to the gradients.

        Args:
            part: its batches.
            average: let DistributedDataParallel sum this gradient, and those added before, over all processes.
            inputs: compute the gradients of these tensors only.

        Returns:
            (learners of the run,) this process's losses, summed over images.
        """
        means, seen = self.means, part.random is not None
        losses = torch.zeros_like(self.losses)
        # DDP averages over processes what is a sum over their images, hence the factor `world`
        factor = 1 if means.joint else means.ranks.world
        # DDP decides in the forward pass whether the backward pass will send anything
        sync = contextlib.nullcontext() if average else means.ranks.no_sync(means.wrapped)
        with sync, self._buffers_kept() if seen else contextlib.nullcontext():
            if self.feed.keep:
                part.play(means.ranks.device)
            terms = []
            for batch, (loss, numbers) in zip(part.batches, self._losses(part), strict=True):
                # every image of the step weighs the same, also in a last batch or group that is not full
                share = len(batch.images) / self.images[batch.stream]
                terms.append(loss * (share * factor))
                losses[batch.stream if means.joint else 0] += loss.detach() * len(batch.images)
                if not seen:
                    self._note(numbers, len(batch.images))
            means.precision.scaler.scale(torch.stack(terms).sum()).backward(inputs=inputs)
        total = self.again if seen else self.losses
        total += losses
        return losses

    def sum_over_ranks(self) -> None:
        """Sum the gradients of several learners over all processes; DistributedDataParallel has done so for one."""
        if self.means.joint:
            gradients = [p.grad for learner in self.learners for p in learner.parameters if p.grad is not None]
            self.means.ranks.add(gradients)

    def finish(self) -> None:
        """Make the gradients what the update takes: summed over processes, divided by the loss's factor."""
        self.sum_over_ranks()
        for learner in self.learners:
            self.means.precision.after_backward(learner.optimizer)

    def _losses(self, part: Part) -> Sequence[tuple[Tensor, Mapping[str, Tensor | float]]]:
        objective, wrapped = self.means.objective, self.means.wrapped
        with single_images(self.means.model, part.batches):
            if isinstance(objective, JointObjective):
                return objective.losses(wrapped, part.batches)
            return [objective.loss(wrapped, batch) for batch in part.batches]

    def _note(self, numbers: Mapping[str, Tensor | float], images: int) -> None:
        for key, value in numbers.items():
            device = self.means.ranks.device
            if isinstance(value, Tensor):
                number = value.detach().to(device, torch.float32)
            else:
                number = torch.full((), value, device=device)  # a kernel, where copying it would wait for the device
            self.logs[key] = self.logs.get(key, torch.zeros_like(number)) + number * images

    @contextlib.contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        buffers = [buffer for learner in self.learners for buffer in learner.buffers]
        kept = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            if buffers:
                torch._foreach_copy_(buffers, kept)
