"""Options of a fine-tuning run: every default of the recipe is here, once."""

from dataclasses import dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Literal

from vtk.card import Transform
from vtk.errors import UsageError
from vtk.training.spec import parse_starts, parse_tasks

PolicyName = Literal["attn", "full", "ffn", "head", "attn+norm", "lora"]
MemoryMode = Literal["plain", "gelu8", "recompute", "minimal"]
MODES: tuple[MemoryMode, ...] = ("plain", "gelu8", "recompute", "minimal")
"""Fastest first; each keeps less than the one before."""


@dataclass(frozen=True)
class FinetuneConfig:
    """What to fine-tune on which images, and how.

    The defaults are a recipe for a few hundred to a few ten thousand images: AdamW at a small rate, the new head ten
    times faster, a short warm-up, light augmentation.

    Raises:
        UsageError: a value is out of range or two values contradict each other.
    """

    data: Path | None = field(
        default=None,
        metadata={"help": "folder with train/ and val/ holding one folder per class, or with class folders"},
    )
    tasks: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "in place of DATA, once for each task: NAME=FOLDER or NAME=FOLDER@SIZE; all of them are trained "
            "together over one set of frozen weights",
            "flag": "task",
            "metavar": "NAME=FOLDER[@SIZE]",
        },
    )
    sampling: float = field(
        default=1.0,
        metadata={
            "help": "of several tasks: temperature of how often each is drawn; 1 shows every image once an epoch, more "
            "shows small tasks more often, up to equally often"
        },
    )
    init_from: tuple[str, ...] = field(
        default=(),
        metadata={
            "help": "start from a trained pack in place of the base, also at another size; with --task give NAME=PACK, "
            "once for each",
            "flag": "init-from",
            "metavar": "PACK",
        },
    )
    out: Path | None = field(default=None, metadata={"help": "folder for the results; default runs/NAME-OF-DATA"})
    model: str = field(default="vit_small_patch16_224", metadata={"help": "name of a timm model"})
    model_kwargs: tuple[str, ...] = field(
        default=(),
        metadata={"help": "arguments for timm's model as key=value, such as depth=6; kept in the pack"},
    )
    weights: Path | None = field(
        default=None,
        metadata={"help": "base weights (.safetensors or .pth) in place of the hub's"},
    )
    pretrained: bool = field(
        default=True,
        metadata={"help": "start from the hub's weights; --no-pretrained starts from random ones"},
    )
    img_size: int | tuple[int, int] | None = field(
        default=None,
        metadata={"help": "pixels, one side or height width; default the model's own"},
    )
    resize_mode: Literal["crop", "squash", "pad"] = field(
        default="crop",
        metadata={"help": "what happens to images of another aspect ratio"},
    )
    interpolation: Literal["bicubic", "bilinear", "nearest"] | None = field(
        default=None,
        metadata={"help": "default the weights' own"},
    )
    mean: tuple[float, ...] | None = field(
        default=None,
        metadata={"help": "per channel, in 0 to 1; default the weights' own"},
    )
    std: tuple[float, ...] | None = field(
        default=None,
        metadata={"help": "per channel, in 0 to 1; default the weights' own"},
    )
    crop_pct: float | None = field(
        default=None,
        metadata={"help": "share of the image that evaluation keeps; default the weights' own"},
    )
    val_split: float = field(default=0.2, metadata={"help": "share of the images held out when the folder has no val/"})

    branches: int = field(
        default=1,
        metadata={"help": "run so many consecutive blocks of a sequential ViT in parallel (as `vtk parallelize` does)"},
    )
    cb: bool = field(default=False, metadata={"help": "Context Broadcasting: mix the mean of all tokens into each"})
    cb_scale: bool = field(
        default=False,
        metadata={"help": "CB with a trained factor per channel and layer, from 0, in place of the fixed ½"},
    )
    cb_layers: tuple[str, ...] = field(
        default=("upper",),
        metadata={"help": "of CB: upper (the upper half of the blocks), all, or block numbers from 0"},
    )
    cb_on: Literal["mlp", "msa", "both"] = field(default="mlp", metadata={"help": "of CB: FFN, attention or both"})
    cb_placement: Literal["end", "mid", "front"] = field(
        default="end",
        metadata={"help": "of CB: after the module, before its last layer (FFN only), or before it"},
    )

    train: PolicyName = field(default="attn", metadata={"help": "which weights to train"})
    attn_only: bool = field(default=False, metadata={"help": "short for --train attn"})
    lora_rank: int = field(default=8, metadata={"help": "of --train lora: rank of each layer's update"})
    lora_alpha: float = field(default=16.0, metadata={"help": "of --train lora: updates count alpha / rank times"})
    lora_dropout: float = field(default=0.0, metadata={"help": "of --train lora: of the input of the factors"})
    lora_targets: tuple[str, ...] = field(
        default=("qkv", "proj"),
        metadata={
            "help": "of --train lora: names of the linear layers, with fc1 and fc2 the FFN is no longer the base's"
        },
    )
    epochs: int = field(default=5, metadata={"help": "passes over the training images"})
    batch_size: int | Literal["auto"] = field(
        default=32,
        metadata={"help": "images per forward pass, all processes together; auto is the largest that memory allows"},
    )
    accumulate: int = field(default=1, metadata={"help": "forward passes per optimiser step"})
    optimizer: Literal["adamw", "sgd"] = field(default="adamw", metadata={"help": "sgd has Nesterov momentum"})
    lr: float = field(default=1e-4, metadata={"help": "highest learning rate (AdamW; sgd wants about 100 times more)"})
    head_lr_mult: float = field(
        default=10.0,
        metadata={"help": "factor on the learning rate of the head, which starts from nothing"},
    )
    min_lr: float = field(default=0.0, metadata={"help": "learning rate at the end, as a fraction of the highest"})
    warmup: float = field(
        default=0.1,
        metadata={"help": "share of all steps in which the learning rate rises linearly; then it falls as a cosine"},
    )
    weight_decay: float = field(
        default=0.05,
        metadata={"help": "of trained matrices; never of biases, norms and position tables"},
    )
    momentum: float = field(default=0.9, metadata={"help": "of sgd"})
    clip_grad: float = field(default=1.0, metadata={"help": "highest norm of the gradient, 0 for no limit"})
    smoothing: float = field(default=0.1, metadata={"help": "label smoothing"})
    mixup: float = field(default=0.0, metadata={"help": "alpha of mixup, 0 for none (0.8 is usual)"})
    cutmix: float = field(default=0.0, metadata={"help": "alpha of cutmix, 0 for none (1.0 is usual)"})
    mix_prob: float = field(
        default=1.0,
        metadata={"help": "share of batches that are mixed, where mixup or cutmix is on"},
    )
    crop_scale: tuple[float, ...] = field(
        default=(0.6, 1.0),
        metadata={"help": "smallest and largest area of a random training crop"},
    )
    hflip: float = field(
        default=0.5,
        metadata={"help": "probability of a mirrored training image; 0 where left and right matter"},
    )
    auto_augment: str | None = field(
        default=None,
        metadata={"help": "timm's string, for instance rand-m9-mstd0.5-inc1 (RandAugment)"},
    )
    color_jitter: float | None = field(
        default=None,
        metadata={"help": "strength of brightness, contrast and saturation changes"},
    )
    reprob: float = field(default=0.0, metadata={"help": "probability of erasing a random rectangle"})
    drop_path: float = field(default=0.0, metadata={"help": "highest stochastic depth rate, rising over the blocks"})
    grad_checkpointing: bool = field(default=False, metadata={"help": "compute each block twice and keep less memory"})
    memory: Literal["auto", "plain", "gelu8", "recompute", "minimal"] = field(
        default="auto",
        metadata={
            "help": "what blocks with frozen norms and FFN keep for backward, fastest first and leanest last: plain, "
            "gelu8 (GELU's derivative in a byte), recompute (fc1 again), minimal (qkv again, too); auto is the fastest "
            "that fits the device's free memory"
        },
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = field(
        default="auto",
        metadata={"help": "auto is bf16 on CUDA and fp32 elsewhere; fp16 scales the loss and needs CUDA"},
    )

    eval_batch_size: int = field(default=64, metadata={"help": "images per forward pass of the evaluation"})
    pack_dtype: Literal["fp32", "bf16", "int8"] = field(
        default="fp32",
        metadata={"help": "how trained weights are stored; fp32 reloads bit for bit, int8 takes a quarter of it"},
    )
    device: str = field(default="auto", metadata={"help": "auto, cpu, cuda or cuda:N"})
    workers: int | None = field(
        default=None,
        metadata={"help": "processes that load images; default the number of CPU cores, at most 8"},
    )
    seed: int = field(default=0, metadata={"help": "of the split, the order, the augmentation and the new head"})
    stop_after: int | None = field(
        default=None,
        metadata={"help": "stop after this many epochs of the plan; --resume goes on from there"},
    )
    dry_run: bool = field(default=False, metadata={"help": "show the memory that each mode takes; train nothing"})
    resume: bool = field(default=False, metadata={"help": "continue the run in --out after its last whole epoch"})
    overwrite: bool = field(default=False, metadata={"help": "replace the results of an earlier run in --out"})

    def __post_init__(self) -> None:
        if self.attn_only and self.train != "attn":
            raise UsageError(f"`--attn-only` is short for --train attn, but --train is {self.train}; give one of them")
        precision: str = self.precision
        if precision not in ("auto", "fp32", "bf16", "fp16"):
            raise UsageError(f"`--precision` {precision} is not known; choose auto, fp32, bf16 or fp16")
        if self.resume and self.overwrite:
            raise UsageError("`--resume` continues a run and `--overwrite` replaces it; give one of them")
        if self.weights is not None and not self.pretrained:
            raise UsageError("`--weights` gives base weights, --no-pretrained asks for random ones; give one of them")
        for f in fields(self):
            value = getattr(self, f.name)
            _require(not isinstance(value, float) or isfinite(value), f.name, value, "a finite number")
        _require(self.branches >= 1, "branches", self.branches, "at least 1")
        self.transforms()
        self._check_tasks()
        self._check_lora()
        _require(0 <= self.seed < 1 << 32, "seed", self.seed, "from 0 to 4294967295")
        _require(self.color_jitter is None or 0 <= self.color_jitter <= 1, "color_jitter", self.color_jitter, "0 to 1")
        for name in ("epochs", "batch_size", "accumulate", "eval_batch_size", "lora_rank"):
            value = getattr(self, name)
            if not (name == "batch_size" and value == "auto"):
                _require(isinstance(value, int) and value >= 1, name, value, "at least 1")
        _require(self.memory in ("auto", *MODES), "memory", self.memory, f"auto, {', '.join(MODES)}")
        for name in ("lr", "head_lr_mult", "lora_alpha"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name in ("weight_decay", "clip_grad", "mixup", "cutmix"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or above")
        for name in ("warmup", "smoothing", "drop_path", "momentum", "lora_dropout"):
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "from 0 to below 1")
        for name in ("hflip", "reprob", "mix_prob", "min_lr"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "from 0 to 1")
        _require(self.sampling >= 1, "sampling", self.sampling, "1 or above")
        _require(0 < self.val_split < 1, "val_split", self.val_split, "between 0 and 1")
        _require(self.crop_pct is None or 0.05 <= self.crop_pct <= 1, "crop_pct", self.crop_pct, "from 0.05 to 1")
        _require(self.stop_after is None or self.stop_after >= 1, "stop_after", self.stop_after, "at least 1")
        _require(self.workers is None or self.workers >= 0, "workers", self.workers, "0 or above")
        scale = self.crop_scale
        fits = len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1
        _require(fits, "crop_scale", scale, "two areas, 0 < smallest ≤ largest ≤ 1")

    def _check_tasks(self) -> None:
        specs = parse_tasks(self.tasks)
        parse_starts(self.init_from, [spec.name for spec in specs])
        if specs and self.data is not None:
            raise UsageError(f"{self.data} and `--task` {self.tasks[0]}: give one folder, or tasks, not both")
        if self.init_from and self.train == "lora":
            raise UsageError("`--init-from` trains a pack's weights on; adapters start from the base: leave one out")
        if len(specs) == 1:
            raise UsageError(f"`--task` {self.tasks[0]} is alone; give another, or its folder without --task")
        if not specs:
            if self.sampling != 1.0:
                raise UsageError("`--sampling` says how often each of several tasks is drawn; give --task")
            return
        if self.train not in ("attn", "head"):
            raise UsageError(
                f"`--train` {self.train}: tasks of one run share the frozen FFN, norms and stem; choose attn or head"
            )
        if self.cb_scale:
            raise UsageError(
                "`--cb-scale` trains Λ inside what the tasks of one run share; use --cb, or one run for each task"
            )
        if self.grad_checkpointing:
            raise UsageError("`--grad-checkpointing` is for runs of one task; use --memory minimal")

    def _check_lora(self) -> None:
        if self.train == "lora":
            _require(bool(self.lora_targets), "lora_targets", "empty", "names of layers such as qkv,proj")
            if self.cb or self.cb_scale:
                raise UsageError(
                    f"`--{'cb' if self.cb else 'cb-scale'}`: timm has no Context Broadcasting, so stock PEFT could not "
                    "use the adapter that --train lora writes; use --train attn"
                )
            return
        for f in fields(self):
            if f.name.startswith("lora_") and getattr(self, f.name) != f.default:
                raise UsageError(f"`--{f.name.replace('_', '-')}` is of --train lora, but --train is {self.train}")

    def transforms(self) -> tuple[Transform, ...]:
        """Return the changes of the architecture that the flags ask for, in order.

        Raises:
            UsageError: ``--cb-layers`` cannot be read, or a flag of Context Broadcasting is given without it.
        """
        result = [Transform("parallelize", {"branches": self.branches})] if self.branches > 1 else []
        if self.cb or self.cb_scale:
            arguments = {"scale": self.cb_scale, "placement": self.cb_placement, "on": self.cb_on}
            result.append(Transform("add_context_broadcast", {**arguments, "layers": _layers(self.cb_layers)}))
        elif (self.cb_layers, self.cb_on, self.cb_placement) != (("upper",), "mlp", "end"):
            raise UsageError("`--cb-layers`, `--cb-on` and `--cb-placement` say how; add --cb or --cb-scale")
        return tuple(result)


def _layers(words: tuple[str, ...]) -> str | list[int]:
    if words in (("all",), ("upper",)):
        return words[0]
    if words and all(word.isdecimal() and len(word) < 6 for word in words):
        return [int(word) for word in words]
    raise UsageError(f"`--cb-layers` {' '.join(words) or 'nothing'}: give upper, all, or block numbers such as 0,3,5")


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise UsageError(f"`--{name.replace('_', '-')}` is {value}; allowed is {allowed}")
