"""``--init`` in runs: what it draws, the card, and runs that version 0.1 began; default layers of ``--cb-scale``."""

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import save_file

from tests._plots import not_drawn
from vtk.card import Card, Transform
from vtk.data.audit.result import DataAudit
from vtk.errors import DataError, UsageError
from vtk.models.arguments import parse_model_kwargs
from vtk.models.create import build_model
from vtk.models.initialization import scheme
from vtk.models.initialization.draw import describe_init
from vtk.models.inputs import blank_model
from vtk.models.transforms.context_layers import add_context_broadcast
from vtk.packs.load import build_from_card, load_checkpoint, read_card
from vtk.training.engine.result import FitState
from vtk.training.finetune_config import FinetuneConfig
from vtk.training.pretrain.config import PretrainConfig
from vtk.training.pretrain.prepare import make_trainee
from vtk.training.runs import resume_state
from vtk.training.runs.identity import check_identity, init_of, run_identity
from vtk.training.train import train
from vtk.training.train_config import TrainConfig

FIXTURES = Path(__file__).parents[2] / "fixtures" / "v0_1"
NOTHING = DataAudit("folder", Path("data"), ("a", "b"), [], [])
NET = ("channels=[8,8,16,16]", "stem_chs=8", "heads=[1,1,1,1]", "head_dim=8", "window_size=1")


def _identity(config: FinetuneConfig, **flags: Any) -> dict[str, Any]:
    found = run_identity(config, base_id="b", audit=NOTHING, precision="fp32", world=1)
    return {**found, "flags": {**found["flags"], **flags}}


def _without(identity: dict[str, Any], *names: str, **flags: Any) -> dict[str, Any]:
    kept = {name: value for name, value in identity["flags"].items() if name not in names}
    return {**identity, "flags": {**kept, **flags}}


def test_a_run_draws_by_the_scheme_and_it_and_its_card_say_it(photos: Path, tmp_path: Path, capsys: Any) -> None:
    config = TrainConfig(
        data=photos, out=tmp_path / "run", model="alternet_18_cifar", model_kwargs=NET, img_size=32, lr=1e-9,
        max_steps=1, batch_size=12, workers=0, device="cpu", init="0.1",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name in ("confusion_png", "curves_png"):  # a picture takes longer than the run
            patch.setattr(f"vtk.evaluation.result_files.{name}", lambda data, path: path.write_bytes(not_drawn()))
        loaded = load_checkpoint(train(config).model)
    line = "initial weights of alternet.conv, alternet.attention, alternet.classifier: 0.1 (--init)"
    assert line in capsys.readouterr().out.splitlines()
    weight = loaded.model.stages[3].blocks[1].attn.proj.weight  # type: ignore[index,union-attr]
    # one step at this rate changes nothing that is seen here; the papers' deviation is 0.2
    assert weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert loaded.card.init == loaded.card.data["init"] == "0.1" and "--init 0.1" in loaded.card.command
    unknown = {**loaded.card.to_dict(), "data": {"init": "timm"}}
    with pytest.raises(DataError, match=r"`data.init` is 'timm'; known: papers, 0.1"):
        Card.from_dict(unknown, "the file")


def test_a_scheme_is_told_where_it_decides_something(tmp_path: Path) -> None:
    """Not of timm's layers, of those that both schemes draw alike, or of those whose weights a file has."""
    sizes = {"depth": 2, "embed_dim": 16, "num_heads": 2}

    def built(name: str, **more: Any) -> Any:
        return build_model(name, num_classes=3, img_size=32, **{"pretrained": False, "kwargs": sizes, **more})

    stem = [Transform("replace_stem", {"stem": "local-transformer", "depth": 1}), Transform("softmax_free", {})]
    plain = built("vit_tiny_patch16_224", transforms=stem)
    assert plain.decided == () and describe_init("papers", plain.decided) is None
    joined = built("vit_tiny_patch16_1x2_224", init="0.1", kwargs={"embed_dim": 16, "num_heads": 2})
    assert joined.decided == ("parallel.layer_scale",)
    assert describe_init(joined.init, joined.decided) == "initial weights of parallel.layer_scale: 0.1 (--init)"
    file = tmp_path / "weights.safetensors"
    net = built("alternet_18_cifar", kwargs=parse_model_kwargs(NET))
    save_file(net.model.state_dict(), file)
    again = {"pretrained": True, "weights": file, "kwargs": parse_model_kwargs(NET)}
    assert built("alternet_18_cifar", **again).decided == ()
    assert built("vit_tiny_patch2_32", init="0.1").decided == ("cifar_vit.linear", "cifar_vit.position")
    other = build_model("alternet_18_cifar", num_classes=5, img_size=32, **again)
    assert other.decided == ("alternet.classifier",)  # for other classes it starts anew


@pytest.mark.parametrize("init", ["papers", "0.1"])
def test_the_layers_of_a_pre_training_method_are_drawn_by_the_scheme_of_the_backbone(init: str) -> None:
    class Stop(Exception):
        pass

    def model(backbone: Any, setting: Any) -> None:
        raise Stop(scheme())

    created = SimpleNamespace(init=init, model=None, notes=[])
    plan: Any = SimpleNamespace(
        config=SimpleNamespace(seed=0), ranks=SimpleNamespace(main=False), method=SimpleNamespace(model=model)
    )
    inputs: Any = SimpleNamespace(created=created, spec=None, audit=None, workers=0)
    with pytest.raises(Stop, match=f"^{init}$"):
        make_trainee(plan, inputs, Path("run"))


def test_a_card_of_version_0_1_is_of_its_scheme_and_a_new_one_without_it_too() -> None:
    card = read_card(FIXTURES / "runs" / "digits" / "task")
    assert "init" not in card.data and card.init == "0.1" == build_from_card(card, pretrained=False).init
    assert dataclasses.replace(card, data={"init": "papers"}).init == "papers"


def test_a_resumed_run_of_version_0_1_keeps_its_initial_weights() -> None:
    config = FinetuneConfig(data=Path("data"))
    old = _without(_identity(config), "init")
    saved = resume_state.Saved({}, FitState.__new__(FitState), {}, old)
    assert init_of(saved) == "0.1" and init_of(None) is None
    assert init_of(dataclasses.replace(saved, identity=_identity(config))) is None  # the options say it
    check_identity(old, _identity(config, init="0.1"), FinetuneConfig)
    with pytest.raises(UsageError, match=r"these differ: --init papers \(was 0.1\)"):
        check_identity(_identity(config, init="0.1"), _identity(config), FinetuneConfig)


def test_scaled_context_broadcasting_is_in_all_layers_the_papers_share_of_the_weights() -> None:
    def layers(kind: Any = FinetuneConfig, **flags: Any) -> Any:
        return kind(**flags).transforms()[-1].args["layers"]

    for kind in (FinetuneConfig, TrainConfig, PretrainConfig):
        assert layers(kind, cb_scale=True) == "all" and layers(kind, cb=True) == "upper"
    assert layers(cb_scale=True, cb_layers=("upper",)) == "upper" and layers(cb=True, cb_layers=("all",)) == "all"
    model = blank_model("vit_small_patch16_224")
    weights = sum(p.numel() for p in model.parameters())
    own = copy.deepcopy(model)
    add_context_broadcast(own, scale=True, layers=layers(cb_scale=True))
    added = sum(p.numel() for p in own.parameters()) - weights
    assert added == 12 * 384 and f"{added / weights:.4%}" == "0.0209%"


@pytest.mark.parametrize(
    ("flags", "refused"), [({}, False), ({"cb": True}, False), ({"cb_scale": True}, True)], ids=["none", "cb", "scaled"]
)
def test_a_run_of_version_0_1_goes_on_with_the_layers_that_it_has(flags: dict[str, Any], refused: bool) -> None:
    old = _without(_identity(FinetuneConfig(**flags)), cb_layers=["upper"])
    check_identity(old, _identity(FinetuneConfig(**flags, cb_layers=("upper",))), FinetuneConfig)
    if not refused:
        check_identity(old, _identity(FinetuneConfig(**flags)), FinetuneConfig)
        return
    with pytest.raises(UsageError, match=r"--cb-layers \['all'\] \(was \['upper'\]\); repeat them"):
        check_identity(old, _identity(FinetuneConfig(**flags)), FinetuneConfig)
