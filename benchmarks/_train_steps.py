"""The training steps that stage ``train`` measures: full fine-tuning, as it is and compiled, and attention only."""

from collections.abc import Callable
from dataclasses import dataclass

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vtk.training.engine.gradients import Means
from vtk.training.engine.learner import Learner
from vtk.training.engine.param_groups import make_optimizer
from vtk.training.engine.precision import Bf16, Precision
from vtk.training.engine.processes import Ranks
from vtk.training.engine.static_step.graph import CudaRecorder
from vtk.training.engine.static_step.step import WARM_UP, StaticStep
from vtk.training.finetune_config import MODES, FinetuneConfig
from vtk.training.frozen_ffn import apply_memory_mode
from vtk.training.objectives.base import Batch, Classification
from vtk.training.policies import policy

AMP, FULL, TORCH = "full, AMP", "full, bf16", "attn, by torch"
COMPILED, COMPILED_GRAPH = "full, compiled", "full, compiled, graph"
GRAPH = ", graph"
CONFIGS = (
    TORCH, COMPILED, f"attn, plain{GRAPH}", f"attn, minimal{GRAPH}", AMP, COMPILED_GRAPH, "attn, plain",
    "attn, minimal", f"attn, act8{GRAPH}", f"attn, recompute{GRAPH}", FULL, "attn, act8", "attn, recompute",
)  # fmt: skip
"""What decides first; torch's own gradients before those that are compared with them."""

LR = 1e-5


@dataclass(frozen=True)
class Step:
    """A training step.

    Attributes:
        model: that it trains.
        gradients: computes gradients and returns the loss; of a static step it updates, too.
        update: what is left to do.
        warm_up: steps until each is like the next.
    """

    model: nn.Module
    gradients: Callable[[], Tensor]
    update: Callable[[], object]
    warm_up: int = 3


@dataclass(frozen=True)
class Case:
    """Model and batch."""

    model: str
    name: str
    px: int
    batch: int
    device: torch.device
    smoke: bool

    def key(self, config: str) -> dict[str, object]:
        """Return the key of a row."""
        return {"model": self.model, "px": self.px, "batch": self.batch, "config": config}

    def images(self) -> Tensor:
        """Return the images of every step."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.batch, 3, self.px, self.px, generator=generator).to(self.device)

    def labels(self) -> Tensor:
        """Return their labels."""
        return (torch.arange(self.batch) % 10).to(self.device)

    def build(self, config: str) -> tuple[nn.Module, Precision | None]:
        """Return the model, ready to train as ``config`` says, and its number format; None under autocast."""
        kwargs = {"embed_dim": 64, "num_heads": 2, "depth": 2} if self.smoke else {}
        torch.manual_seed(0)
        model = timm.create_model(self.name, img_size=self.px, num_classes=10, **kwargs)
        policy.apply(model, policy.select(model, "full" if config.startswith("full") else "attn"))
        policy.train_mode(model)
        if (mode := mode_of(config)) is not None:
            plan = apply_memory_mode(model, mode)  # type: ignore[arg-type]
            assert not plan.reasons, plan
        model.to(self.device)
        if autocast(config):
            return model, None
        precision = Bf16()
        precision.prepare(model, [n for n, p in model.named_parameters() if p.requires_grad])
        return model, precision


def mode_of(config: str) -> str | None:
    """Return the memory mode of a configuration; None for what is none."""
    mode = config.removesuffix(GRAPH).removeprefix("attn, ")
    return mode if mode in MODES else None


def autocast(config: str) -> bool:
    """Tell whether a configuration computes in 16 bits by autocast; all others by the bf16 regime of `vtk finetune`."""
    return config in (AMP, COMPILED, COMPILED_GRAPH)


def make_step(case: Case, config: str) -> Step:
    """Return the step of a configuration."""
    if config.endswith(GRAPH) and config != COMPILED_GRAPH:
        return _static(case, config)
    model, _ = case.build(config)
    images, labels = case.images(), case.labels()

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(case.device.type, torch.bfloat16, enabled=autocast(config)):
            logits = model(images)
        return F.cross_entropy(logits.float(), labels)

    optimizer = make_optimizer(model, FinetuneConfig(lr=LR))
    call: Callable[..., Tensor] = loss_of
    update: Callable[[], object] = optimizer.step
    if config in (COMPILED, COMPILED_GRAPH):
        torch._dynamo.reset()
        # the compiler of a CPU would take longer than everything else of a smoke test
        how = {"backend": "aot_eager"} if case.smoke else {}
        graphs = {"mode": "reduce-overhead"} if config == COMPILED_GRAPH and not case.smoke else {}
        call = torch.compile(loss_of, dynamic=False, **how, **graphs)
        fused = case.device.type == "cuda"  # torch's quickest, which nothing is left to compile of
        optimizer = make_optimizer(model, FinetuneConfig(lr=LR, opt_kwargs=("fused=yes",) if fused else ()))
        update = optimizer.step

    def gradients() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        if config == COMPILED_GRAPH:
            torch.compiler.cudagraph_mark_step_begin()
        loss = call(images, labels)
        loss.backward()
        return loss.detach().clone()

    return Step(model, gradients, update)


def _static(case: Case, config: str) -> Step:
    """Return the step that `vtk finetune` does on a GPU, captured there."""
    model, precision = case.build(config)
    assert precision is not None
    means = Means(model, model, Classification(10), precision, Ranks(case.device), False)
    learner = Learner("", model, FinetuneConfig(lr=LR, clip_grad=0.0, warmup=0.0), 1000)
    step = StaticStep(means, learner, CudaRecorder(case.device) if case.device.type == "cuda" else None)
    batches = [Batch(case.images(), case.labels())]

    def run() -> Tensor:
        losses = step(batches)
        if step.recorder is None and case.device.type == "cuda":
            raise RuntimeError("the step was not captured")
        return losses[0] / case.batch

    return Step(model, run, lambda: None, WARM_UP + 2)


def flat_gradient(model: nn.Module) -> Tensor:
    """Return the gradients of the blocks' weights, end to end, on the CPU."""
    return torch.cat([p.grad.flatten().float().cpu() for p in model.blocks.parameters() if p.grad is not None])
