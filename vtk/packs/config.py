"""Options of the commands ``vtk tasks``; imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import Base, Folder, ImgSize, Out, Overwrite, RunDevice, Seed, Workers

PackDtype = Literal["fp32", "bf16", "int8"]
FolderFormat = Literal["timm", "hf"]
MergeFormat = Literal["file", "timm", "hf"]
_MERGED = Option(
    "timm, hf: a merged folder that both load (hf: in transformers' own classes where possible)",
    often=True,
)
Pack = Annotated[Path, Option("a pack, a bundle, or a run folder (its best pack)", "source", often=True)]
RepoId = Annotated[str, Option("USER/NAME on the hub", "hub", often=True, nonempty=True)]
TokenEnv = Annotated[
    str | None,
    Option("environment variable that holds the token (default: the hub's login, or HF_TOKEN)", "hub", nonempty=True),
]
StoredAs = Annotated[
    PackDtype, Option("precision of the stored weights: fp32 is exact, int8 a quarter of its size", "output")
]
ModelKwargs = Annotated[
    tuple[str, ...],
    Option("arguments of the timm model, such as depth=6; stored in the pack", "model", pattern="(?s)[^=]+=.*",
           allowed="key=value, such as depth=6"),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ListConfig(Config):
    """Folders to search for packs."""

    folders: Annotated[tuple[str, ...], Option("folders to search, or packs", "source", often=True)] = ("runs",)


@dataclass(frozen=True, kw_only=True)
class DiffConfig(Config):
    """The packs to compare."""

    pack: Pack
    other: Annotated[Path | None, Option("a second pack (default: the first one's base)", "source", often=True)] = None
    base: Base = None


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Config):
    """The pack to merge into one checkpoint, or into a folder that other libraries load."""

    pack: Pack
    out: Annotated[Path, Option("file to write; a folder with --format timm or hf", "output", often=True)]
    format: Annotated[MergeFormat, _MERGED] = "file"
    base: Base = None
    overwrite: Overwrite = False


@dataclass(frozen=True, kw_only=True)
class BundleConfig(Config):
    """The pack to bundle with its base."""

    pack: Pack
    out: Out
    base: Base = None
    overwrite: Overwrite = False


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(Config):
    """The pack to calibrate, and held-out images."""

    pack: Pack
    data: Folder
    base: Base = None
    device: RunDevice = None
    workers: Workers = None
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Config):
    """The pack to store in another precision."""

    pack: Pack
    pack_dtype: StoredAs
    out: Out
    base: Base = None
    overwrite: Overwrite = False


@dataclass(frozen=True, kw_only=True)
class CompressConfig(Config):
    """The pack to store as low-rank factors, and how their ranks are chosen and judged."""

    GROUP: ClassVar[str] = "ranks"

    pack: Pack
    out: Out
    rank: Annotated[
        int | Literal["auto"],
        Option(
            "mean rank of the factors; auto: the smallest within --max-drop on held-out images of --data", often=True,
            least=0, allowed="a rank, at least 0, or auto",
        ),
    ] = "auto"  # fmt: skip
    max_drop: Annotated[
        float, Option("--rank auto: allowed drop of the metric, in percentage points", often=True, least=0, most=100)
    ] = 0.5
    metric: Annotated[
        Literal["auto", "top1", "balanced_accuracy", "mAP"],
        Option("metric that is compared (default: top1, or mAP with several labels)"),
    ] = "auto"
    data: Annotated[
        Path | None,
        Option("train/ and val/, class folders, or a table; training images weigh, held-out ones judge", "data",
               often=True),
    ] = None  # fmt: skip
    tune: Annotated[
        int | None,
        Option("tune the factors for N steps to the full pack's logits on training images", often=True, least=1,
               metavar="N"),
    ] = None  # fmt: skip
    pack_dtype: Annotated[PackDtype, Option("precision of the factors; all else stays fp32", "output", often=True)] = (
        "bf16"
    )
    base: Base = None
    device: RunDevice = None
    workers: Workers = None
    seed: Seed = 0
    overwrite: Overwrite = False

    def check(self) -> None:
        """Refuse what needs images that were not given, and options that would have no effect."""
        if self.rank != "auto" and self.max_drop != CompressConfig.max_drop:
            raise UsageError(f"`--max-drop` is for --rank auto; with --rank {self.rank} leave it out")
        if self.data is not None:
            return
        if self.rank == "auto":
            raise UsageError(
                "`--rank auto` chooses the rank on held-out images; give --data FOLDER, or --rank R, of which nothing "
                "is then measured"
            )
        if self.tune is not None:
            raise UsageError("`--tune` learns from training images; give --data FOLDER")
        if self.metric != "auto":
            raise UsageError("`--metric` is measured on held-out images; give --data FOLDER")


@dataclass(frozen=True, kw_only=True)
class ToPeftConfig(Config):
    """The pack to convert to an adapter."""

    pack: Pack
    out: Out
    base: Base = None
    adapter_only: Annotated[
        bool, Option("write no base.safetensors; refused if an adapter cannot hold every change", "output", often=True)
    ] = False
    overwrite: Overwrite = False


@dataclass(frozen=True, kw_only=True)
class FromPeftConfig(Config):
    """The adapter to convert to a pack, and its model."""

    GROUP: ClassVar[str] = "model"

    adapter: Annotated[
        Path, Option("folder of adapter_config.json and adapter_model.safetensors", "source", often=True)
    ]
    out: Out
    base: Annotated[
        Path | None,
        Option("base weights it was trained on (default: base.safetensors in its folder)", "source", often=True),
    ] = None
    card: Annotated[
        Path | None, Option("a pack or merged checkpoint of the same model, size and classes", often=True)
    ] = None
    model: Annotated[str | None, Option("timm model name, in place of --card", often=True, nonempty=True)] = None
    model_kwargs: ModelKwargs = ()
    img_size: ImgSize = None
    classes: Annotated[
        tuple[str, ...], Option("class names in index order, or a .txt file with one per line", often=True)
    ] = ()
    overwrite: Overwrite = False


@dataclass(frozen=True, kw_only=True)
class PushConfig(Config):
    """The pack to upload to the hub."""

    GROUP: ClassVar[str] = "hub"

    pack: Pack
    repo_id: RepoId
    private: Annotated[bool, Option("make the new repository private", often=True)] = False
    revision: Annotated[str | None, Option("branch, created if absent (default: main)", nonempty=True)] = None
    license: Annotated[
        str | None, Option("license identifier for the model card, such as apache-2.0", often=True, nonempty=True)
    ] = None
    with_base: Annotated[bool, Option("also upload the base tensors it needs, as in `vtk tasks bundle`")] = False
    format: Annotated[FolderFormat | None, _MERGED] = None
    base: Base = None
    token_env: TokenEnv = None

    def check(self) -> None:
        """Refuse options that would have no effect."""
        if self.base is not None and not self.with_base and self.format is None:
            raise UsageError(
                "`--base` has no effect without --with-base or --format; add one of these, or leave --base out"
            )


@dataclass(frozen=True, kw_only=True)
class PullConfig(Config):
    """The pack to download from the hub."""

    GROUP: ClassVar[str] = "hub"

    repo_id: RepoId
    out: Annotated[Path | None, Option("folder to write (default: tasks/NAME)", "output", often=True)] = None
    revision: Annotated[str | None, Option("branch, tag or commit (default: main)", often=True, nonempty=True)] = None
    overwrite: Overwrite = False
    token_env: TokenEnv = None
