"""Writes what a pre-training run leaves behind: its first files, the backbone, the state for a resume, the plots."""

import dataclasses
from typing import Any, cast

from vtk import console
from vtk.card import Card, Regime
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.data.loading.loader import make_loader
from vtk.data.record import record_of
from vtk.files import write_text
from vtk.formats import write_json
from vtk.training.engine.param_groups import describe_rates
from vtk.training.engine.result import FitState
from vtk.training.pretrain import outputs
from vtk.training.pretrain.feature_probe import METRICS as PROBED
from vtk.training.pretrain.prepare import Inputs, Plan, Trainee
from vtk.training.pretrain.reconstruction_plots import SHOWN
from vtk.training.runs import outputs as run_outputs
from vtk.training.runs import resume_state
from vtk.training.runs.command_line import command_line, config_text, versions
from vtk.training.runs.identity import run_identity
from vtk.training.runs.image_list import write_images
from vtk.training.runs.views import describe_views


class Records:
    """Writes the files of a run; used in the main process.

    Args:
        plan: of the run.
        inputs: its images and backbone.
        trainee: the model that is trained.
        rows: numbers of every epoch, which the run extends.
    """

    def __init__(self, plan: Plan, inputs: Inputs, trainee: Trainee, rows: list[dict[str, float]]) -> None:
        self.plan, self.inputs, self.trainee, self.rows = plan, inputs, trainee, rows
        self.out = trainee.setting.out
        self.identity = self._identity()

    def _identity(self) -> dict[str, Any]:
        """Return what a resumed run must share with the one it continues."""
        plan, inputs = self.plan, self.inputs
        identity = run_identity(
            cast(Any, plan.config), base_id=inputs.created.base.ref.id, audit=inputs.audit,
            precision=plan.precision.name, world=plan.ranks.world,
        )  # fmt: skip
        tokenizer = plan.method.numbers().get("tokenizer")  # its contents count, not the path of its file
        identity["flags"] |= {"hflip": inputs.mirroring.probability, "init": inputs.created.init}
        identity["flags"]["tokenizer"] = tokenizer and tokenizer["id"]
        return identity

    def start(self) -> None:
        """Print what will be trained, and write what later commands need; an earlier run stays until here."""
        out, config, model = self.out, self.plan.config, self.trainee.model
        kept, every = (sum(p.numel() for p in m.parameters()) for m in (self.inputs.created.model, model))
        console.say(f"{kept:,} weights are the backbone, {every - kept:,} are used in training only")
        if self.trainee.init_line:
            console.say(self.trainee.init_line)
        console.say(describe_views(config, self.inputs.mirroring))
        console.say(describe_rates(model, config))
        if self.trainee.rule_line:
            console.say(self.trainee.rule_line)
        run_outputs.sweep(out)
        if config.overwrite:
            run_outputs.clear_run(out)
        if config.resume:
            run_outputs.clear_plots(out)
        write_text(out / "config.yaml", config_text(cast(Any, config)))
        write_json(out / "audit.json", self.inputs.audit.to_dict())
        write_images(out, self.inputs.audit)

    def save_backbone(self) -> None:
        """Write the backbone of the last epoch."""
        state = self.plan.precision.master_state_dict(self.trainee.model)
        outputs.save_backbone(self.out / run_outputs.BACKBONE, state, self.card())

    def save_state(self, state: FitState) -> None:
        """Write what a resume needs."""
        live = self.trainee.model.state_dict()
        tensors = {name: live[name].detach().cpu() for name in self.trainee.trained}
        # `tasks` shows the reader that there is no best epoch
        saved = resume_state.Saved(tensors, state, {"tasks": {}}, self.identity)
        resume_state.save_state(self.out / run_outputs.LAST, saved)

    def card(self) -> Card:
        """Return the card of the backbone after the last epoch."""
        plan, config, row = self.plan, self.plan.config, self.rows[-1]
        created, audit = self.inputs.created, self.inputs.audit
        metrics = {key.removeprefix("val_"): value for key, value in row.items() if key.startswith("val_")}
        metrics |= {key: row[key] for key in PROBED if key in row}
        started = config.weights is not None or config.pretrained
        return Card(
            model=created.spec,
            input=created.input,
            classes=(),
            transforms=created.transforms,
            metrics={
                **metrics, "count": len(audit.val), "epoch": int(row["epoch"]), "method": config.method,
                **plan.method.numbers(), **({"started_from": created.base.ref.source} if started else {}),
            },
            data={
                "val_split": config.val_split, "seed": config.seed, "init": created.init,
                "root": audit.root.resolve().name, "images": record_of(audit).to_dict(),
                **config.share,
                **config.trial,
            },
            regime=Regime(plan.precision.name, config.eval_batch_size, plan.ranks.device.type),
            versions=versions(),
            command=command_line(cast(Any, config)),
        )  # fmt: skip

    def draw(self) -> None:
        """Draw the learning curves, and what the method learned of a few held-out images."""
        plan, model, val = self.plan, self.trainee.model, self.inputs.audit.val
        shown = [val[i * len(val) // min(SHOWN, len(val))] for i in range(min(SHOWN, len(val)))]
        loader = make_loader(shown, eval_transform(self.inputs.spec), batch_size=SHOWN, shuffle=False, seed=0,
                             workers=0, max_pixels=plan.config.max_pixels)  # fmt: skip
        images = next(iter(loader))[0].to(plan.ranks.device)
        model.eval()
        with run_outputs.replace_plots(self.out) as staged:
            run_outputs.draw_curves(staged, self.rows)
            plan.method.draw(model, images, dataclasses.replace(self.trainee.setting, out=staged))
