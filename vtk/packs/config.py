"""Options of ``vtk tasks``: work on packs; free of torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from vtk.errors import UsageError
from vtk.options import Config, Option
from vtk.options.shared import Base, ImgSize, Out, OutFile, Overwrite

PackDtype = Literal["fp32", "bf16", "int8"]
Pack = Annotated[Path, Option("a pack, a bundle, or a run folder (its best pack)", "source", often=True)]
RepoId = Annotated[str, Option("USER/NAME on the hub", "hub", often=True, nonempty=True)]
TokenEnv = Annotated[
    str | None,
    Option("environment variable that holds the token (default: the hub's login, or HF_TOKEN)", "hub", nonempty=True),
]
StoredAs = Annotated[
    PackDtype, Option("stored weights: fp32 reloads bit for bit, int8 takes a quarter of it", "output")
]
ModelKwargs = Annotated[
    tuple[str, ...],
    Option("arguments of timm's model, such as depth=6; kept in the pack", "model", pattern="(?s)[^=]+=.*",
           allowed="key=value, such as depth=6"),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ListConfig(Config):
    """Where packs are looked for."""

    folders: Annotated[tuple[str, ...], Option("folders to search, and packs", "source", often=True)] = ("runs",)


@dataclass(frozen=True, kw_only=True)
class DiffConfig(Config):
    """What is compared."""

    pack: Pack
    other: Annotated[Path | None, Option("a second pack (default: the first one's base)", "source", often=True)] = None
    base: Base = None


@dataclass(frozen=True, kw_only=True)
class MergeConfig(Config):
    """What becomes one checkpoint."""

    pack: Pack
    out: OutFile
    base: Base = None
    overwrite: Overwrite = False


@dataclass(frozen=True, kw_only=True)
class BundleConfig(Config):
    """What becomes a pack with its base."""

    pack: Pack
    out: Out
    base: Base = None
    overwrite: Overwrite = False


@dataclass(frozen=True, kw_only=True)
class ConvertConfig(Config):
    """Which pack is stored otherwise."""

    pack: Pack
    pack_dtype: StoredAs
    out: Out
    base: Base = None
    overwrite: Overwrite = False


@dataclass(frozen=True, kw_only=True)
class ToPeftConfig(Config):
    """Which pack becomes an adapter."""

    pack: Pack
    out: Out
    base: Base = None
    adapter_only: Annotated[
        bool, Option("without base.safetensors; refused where an adapter cannot hold all changes", "output", often=True)
    ] = False
    overwrite: Overwrite = False


@dataclass(frozen=True, kw_only=True)
class FromPeftConfig(Config):
    """Which adapter becomes a pack, and of what model it is."""

    GROUP: ClassVar[str] = "model"

    adapter: Annotated[
        Path, Option("folder of adapter_config.json and adapter_model.safetensors", "source", often=True)
    ]
    out: Out
    base: Annotated[
        Path | None,
        Option("weights it was trained on (default: base.safetensors in its folder)", "source", often=True),
    ] = None
    card: Annotated[
        Path | None, Option("a pack or merged checkpoint of the same model, size and classes", often=True)
    ] = None
    model: Annotated[str | None, Option("timm model name, in place of --card", often=True, nonempty=True)] = None
    model_kwargs: ModelKwargs = ()
    img_size: ImgSize = None
    classes: Annotated[
        tuple[str, ...], Option("class names in index order, or a .txt with one a line", often=True)
    ] = ()
    overwrite: Overwrite = False


@dataclass(frozen=True, kw_only=True)
class PushConfig(Config):
    """Which pack goes to the hub."""

    GROUP: ClassVar[str] = "hub"

    pack: Pack
    repo_id: RepoId
    private: Annotated[bool, Option("make the new repository private", often=True)] = False
    revision: Annotated[str | None, Option("branch, made if there is none (default: main)", nonempty=True)] = None
    license: Annotated[
        str | None, Option("identifier for the model card, such as apache-2.0", often=True, nonempty=True)
    ] = None
    with_base: Annotated[bool, Option("with the base tensors it needs, as `vtk tasks bundle` writes them")] = False
    base: Base = None
    token_env: TokenEnv = None

    def check(self) -> None:
        """Refuse options that would have no effect."""
        if self.base is not None and not self.with_base:
            raise UsageError("`--base` is what --with-base reads; add that, or leave --base out")


@dataclass(frozen=True, kw_only=True)
class PullConfig(Config):
    """Which pack comes from the hub."""

    GROUP: ClassVar[str] = "hub"

    repo_id: RepoId
    out: Annotated[Path | None, Option("folder to write (default: tasks/NAME)", "output", often=True)] = None
    revision: Annotated[str | None, Option("branch, tag or commit (default: main)", often=True, nonempty=True)] = None
    overwrite: Overwrite = False
    token_env: TokenEnv = None
