"""One module per subcommand, each with ``main(argv) -> exit code`` and free of torch until it runs."""

from typing import NamedTuple


class Command(NamedTuple):
    """The module of a subcommand and its line in ``vtk --help``."""

    module: str
    help: str


COMMANDS = {
    "finetune": Command("vtk.commands.finetune", "fine-tune a pretrained ViT on a folder of images: a task pack"),
    "train": Command("vtk.commands.train", "train a whole model, by published recipes: a checkpoint"),
    "pretrain": Command("vtk.commands.pretrain", "pre-train a backbone without labels: masked image modelling"),
    "eval": Command("vtk.commands.eval", "evaluate a pack, a checkpoint or an exported file on a folder"),
    "predict": Command("vtk.commands.predict", "predict labels of images"),
    "embed": Command("vtk.commands.embed", "write the features of images: a table for search and clustering"),
    "data": Command("vtk.commands.data", "audit a folder of images: classes, split, bad files"),
    "tasks": Command("vtk.commands.tasks", "manage packs: list, diff, merge, convert, bundle, bench, PEFT, hub"),
    "parallelize": Command("vtk.commands.parallelize", "convert to parallel blocks and report the drift"),
    "export": Command("vtk.commands.export", "export verified artefacts: onnx, tasks, triton, tensorrt, aoti"),
    "profile": Command("vtk.commands.profile", "measure latency per batch size and back-end"),
    "analyze": Command("vtk.commands.analyze", "diagnose a model: attention, features, loss, robustness"),
    "doctor": Command("vtk.commands.doctor", "check versions, devices and providers; suggested fixes"),
    "demo": Command("vtk.commands.demo", "run the whole workflow on bundled digits, offline, in two minutes"),
}
