"""One module per subcommand, each with ``main(argv) -> exit code`` and free of torch until it runs."""

from typing import NamedTuple


class Command(NamedTuple):
    """Where a subcommand lives and its line in ``vtk --help``."""

    module: str
    help: str


COMMANDS = {
    "finetune": Command("vtk.commands.finetune", "adapt a pretrained ViT to a folder of images: a task pack"),
    "train": Command("vtk.commands.train", "train a whole model, by recipes of papers: a checkpoint"),
    "pretrain": Command("vtk.commands.pretrain", "a backbone from images without labels: masked image modelling"),
    "eval": Command("vtk.commands.eval", "accuracy of a pack, a checkpoint or an .onnx on a folder"),
    "predict": Command("vtk.commands.predict", "labels for images"),
    "data": Command("vtk.commands.data", "audit a folder of images: classes, split, bad files"),
    "tasks": Command("vtk.commands.tasks", "packs: list, diff, merge, convert, bundle, bench, PEFT, hub"),
    "parallelize": Command("vtk.commands.parallelize", "a sequential ViT as parallel branches, with the drift"),
    "export": Command("vtk.commands.export", "verified artefacts: onnx, tasks, triton, tensorrt, aoti"),
    "profile": Command("vtk.commands.profile", "latency per batch size, per back-end"),
    "analyze": Command("vtk.commands.analyze", "why a model behaves as it does: plots and one report"),
    "doctor": Command("vtk.commands.doctor", "versions, devices, providers that load; how to mend what does not"),
    "demo": Command("vtk.commands.demo", "the whole path on bundled digits, offline, in two minutes"),
}
