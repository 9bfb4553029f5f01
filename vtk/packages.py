"""Optional packages: what does not work without each, and how to install it.

`pip install vit-toolkit` brings them all but those of an extra. ``requirements/*.txt`` list smaller environments, in
which a job that needs an absent package ends with one line (`vtk.errors.UnavailableError`, exit code 5).
"""

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vtk.errors import UnavailableError

ORT = ("onnxruntime", "onnxruntime-gpu")
"""Distributions of ONNX Runtime, for the CPU and for CUDA; both install the module ``onnxruntime``."""


@dataclass(frozen=True)
class Package:
    """A package that not every job needs.

    Attributes:
        distribution: what pip calls it.
        jobs: what it is needed for.
        pip: what to install, where that is not the distribution itself.
    """

    distribution: str
    jobs: str
    pip: str = ""

    @property
    def install(self) -> str:
        """The line that installs it."""
        return f"pip install {self.pip or self.distribution}"

    @property
    def missing(self) -> str:
        """One line: that it is not installed, what needs it, how to install it."""
        return f"`{self.distribution}` is not installed; it is needed for {self.jobs}: {self.install}"


PACKAGES: Mapping[str, Package] = {
    "accelerate": Package("accelerate", "training runs of several processes"),
    "google.protobuf": Package("protobuf", "ONNX files and configs of Triton Inference Server"),
    "matplotlib": Package("matplotlib", "the plots of training, evaluation, profile and analyze"),
    "ml_dtypes": Package("ml_dtypes", "ONNX exports"),
    "onnx": Package("onnx", "ONNX exports and commands that read an .onnx file"),
    "onnxruntime": Package(
        "onnxruntime",
        "ONNX exports and the back-ends ort-cpu, ort-cuda and ort-trt",
        "onnxruntime-gpu (Linux x86-64; for CPUs only, and elsewhere, onnxruntime)",
    ),
    "openvino": Package("openvino", "the back-end openvino and `vtk export openvino`"),
    "onnxscript": Package("onnxscript", "ONNX exports"),
    "peft": Package("peft", "`--train lora` and adapters (`vtk tasks to-peft`, `from-peft`)"),
    "pyarrow": Package("pyarrow", "tables of labels and of embeddings in parquet files"),
    "scipy": Package("scipy", "the calibration of `vtk analyze`"),
    "sklearn": Package("scikit-learn", "training, evaluation and the demo"),
    "triton": Package("triton", "the GPU kernels and `--compile` on a GPU"),
    "tritonclient": Package(
        "tritonclient", "`vtk export triton` and `vtk profile --server --protocol grpc`", "'tritonclient[grpc]'"
    ),
    "tensorboard": Package("tensorboard", "runs with `--track tensorboard`"),
    "mlflow": Package("mlflow-skinny", "runs with `--track mlflow`"),
    "wandb": Package("wandb", "runs with `--track wandb`"),
    "pynvml": Package("nvidia-ml-py", "clocks and energy in `vtk profile` on a GPU"),
}
"""By the name that is imported."""

CORE = {
    "PIL": "pillow", "natsort": "natsort", "numpy": "numpy", "packaging": "packaging", "psutil": "psutil",
    "huggingface_hub": "huggingface_hub", "safetensors": "safetensors", "timm": "timm", "torch": "torch",
    "torchvision": "torchvision", "yaml": "pyyaml",
}  # fmt: skip
"""What nearly every job needs, by the name that is imported, and what pip calls it."""


def find(distribution: str) -> Package | None:
    """Return what is known of a distribution, by its normalised name; None for one that every job needs."""
    name = "onnxruntime" if distribution in ORT else distribution.replace("_", "-")
    return next((p for p in PACKAGES.values() if p.distribution.replace("_", "-") == name), None)


def require(*names: str) -> None:
    """Make sure that packages are here, before work begins that ends with them.

    Args:
        names: keys of `PACKAGES`.

    Raises:
        UnavailableError: one is not installed.
    """
    for name in names:
        try:
            here = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of what it is a part of
            here = False
        if not here:
            raise UnavailableError(PACKAGES[name].missing)


@contextlib.contextmanager
def importing(message: str) -> Iterator[None]:
    """Turn a failed import inside the context into one line.

    Args:
        message: of the error; ``{error}`` in it becomes the reason.

    Raises:
        UnavailableError: the import failed.
    """
    try:
        yield
    except ImportError as error:
        raise UnavailableError(message.replace("{error}", str(error))) from error


def explain(error: ModuleNotFoundError) -> UnavailableError | None:
    """Return the error to raise in place of a failed import; None where it is no absent package of ours."""
    name = error.name or ""
    if (core := CORE.get(name)) is not None:
        return UnavailableError(f"`{core}` is not installed; nearly everything needs it: pip install {core}")
    known = next((p for key, p in PACKAGES.items() if key == name or key.startswith(f"{name}.")), None)
    return None if known is None or not name else UnavailableError(known.missing)
