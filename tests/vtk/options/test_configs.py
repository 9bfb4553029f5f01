"""Every config refuses what it cannot do when it is made from Python: each type, bound, choice and pair."""

import dataclasses
import typing
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tests.vtk.options._configs import configs, make
from vtk.errors import UsageError
from vtk.options import Config, option_of, type_of
from vtk.options.config import flag_of
from vtk.options.values import alternatives, is_list
from vtk.training.finetune_config import FinetuneConfig

ALL = configs()


def bad_values(kind: type[Config], name: str) -> Iterator[Any]:
    """Values that an option cannot have, made from its type and bounds."""
    hint, option = type_of(kind, name), option_of(kind, name)
    found = alternatives(hint)
    yield object()
    if type(None) not in typing.get_args(hint):
        yield None
    if all(typing.get_origin(one) is Literal for one in found):
        yield from ("nonsense", "", 3, ["a"])
    element = typing.get_args(found[0])[0] if is_list(found[0]) else found[0]
    wrap: Any = (lambda value: (value,)) if is_list(found[0]) else (lambda value: value)
    if element in (int, float):
        yield wrap("some")
        yield wrap(float("nan"))
        yield wrap(float("inf"))
        yield wrap(True) if str not in found else object()
        if element is int and float not in found:
            yield wrap(2.5)
        if option.least is not None:
            yield wrap(option.least - 1)
        if option.most is not None:
            yield wrap(option.most + 1)
        if option.above is not None:
            yield wrap(element(option.above))
        if option.below is not None:
            yield wrap(element(option.below))
    if element is Path:
        yield from (wrap(3), wrap(""), wrap("  "), wrap(b"x"))
    if element is bool:
        yield from (1, 0, "yes", "false", [True])
    if element is str and option.convert is None:
        yield from (wrap(3), wrap(2.5), wrap(b"x"))
        if option.among or option.pattern or option.nonempty:
            yield wrap("")
    if option.unique and is_list(found[0]):
        yield {int: (1, 1), float: (1.5, 1.5)}.get(element, (option.among[0],) * 2 if option.among else ("a", "a"))


@pytest.mark.parametrize("name", ALL)
def test_no_option_takes_what_it_cannot_have(name: str) -> None:
    kind = ALL[name]
    make(kind)  # the values that every probe stands beside are right
    for f in dataclasses.fields(kind):
        for value in bad_values(kind, f.name):
            with pytest.raises(UsageError) as caught:
                make(kind, **{f.name: value})
                pytest.fail(f"{name}({f.name}={value!r}) was accepted")
            text = str(caught.value)
            assert flag_of(kind, f.name) in text or f.name in text, (f.name, value, text)
            assert "\n" not in text and len(text) < 900


PAIRS: list[tuple[str, dict[str, Any]]] = [
    ("FinetuneConfig", {"pack_dtype": "int4"}),
    ("FinetuneConfig", {"interpolation": "lanczos"}),
    ("FinetuneConfig", {"attn_only": False}),
    ("FinetuneConfig", {"attn_only": True, "train": "full"}),
    ("FinetuneConfig", {"weights": "w.safetensors", "pretrained": False}),
    ("FinetuneConfig", {"mean": (0.5, 0.5)}),
    ("FinetuneConfig", {"std": (0.5, 0.5, 0.0)}),
    ("FinetuneConfig", {"mean": (0.5, 0.5, 0.5), "in_chans": 1}),
    ("FinetuneConfig", {"crop_scale": (0.9, 0.1)}),
    ("FinetuneConfig", {"crop_scale": (0.9,)}),
    ("FinetuneConfig", {"img_size": (224, 224, 3)}),
    ("FinetuneConfig", {"img_size": (224, 0)}),
    ("FinetuneConfig", {"resume": True, "overwrite": True}),
    ("FinetuneConfig", {"sampling": 2.0}),
    ("FinetuneConfig", {"tasks": ("a=b",)}),
    ("FinetuneConfig", {"tasks": ("a=b", "c=d"), "data": "e"}),
    ("FinetuneConfig", {"tasks": ("a=b", "c=d"), "train": "full"}),
    ("FinetuneConfig", {"lora_rank": 4}),
    ("FinetuneConfig", {"train": "lora", "lora_targets": ()}),
    ("FinetuneConfig", {"sam_adaptive": True}),
    ("FinetuneConfig", {"sam_m": 8}),
    ("FinetuneConfig", {"distill_kind": "hard"}),
    ("FinetuneConfig", {"distill_from": "t", "distill_kind": "hard", "distill_temperature": 2.0}),
    ("FinetuneConfig", {"class_weights": "balanced", "sampler": "balanced"}),
    ("FinetuneConfig", {"multi_label": True, "sampler": "balanced"}),
    ("FinetuneConfig", {"metric": "mAP"}),
    ("FinetuneConfig", {"multi_label": True, "metric": "top1"}),
    ("FinetuneConfig", {"label_separator": "|"}),
    ("FinetuneConfig", {"cb_layers": ("upper", "3"), "cb": True}),
    ("FinetuneConfig", {"cb_on": "msa"}),
    ("FinetuneConfig", {"msa_window": 3}),
    ("FinetuneConfig", {"local_attention": 4}),
    ("FinetuneConfig", {"stem_act": "relu"}),
    ("FinetuneConfig", {"model_kwargs": ("depth",)}),
    ("FinetuneConfig", {"opt_kwargs": ("eps",)}),
    ("FinetuneConfig", {"auto_augment": "augment-m9"}),
    ("FinetuneConfig", {"track": ("comet",)}),
    ("FinetuneConfig", {"device": "cuda:x"}),
    ("TrainConfig", {"recipe": "nonsense"}),
    ("TrainConfig", {"bce_threshold": 0.2}),
    ("TrainConfig", {"loss": "bce", "multi_label": True}),
    ("TrainConfig", {"keep_empty_classes": True, "multi_label": True}),
    ("TrainConfig", {"weights": "w", "pretrained": True}),
    ("PretrainConfig", {"method": "mae", "codes": 64}),
    ("PretrainConfig", {"decoder_dim": 100, "method": "mae"}),
    ("OnnxConfig", {"opset": 17}),
    ("OnnxConfig", {"keep_io_types": True}),
    ("OnnxConfig", {"int8": "static"}),
    ("OnnxConfig", {"int8": "dynamic", "dtype": "fp16"}),
    ("OnnxConfig", {"softmax": True, "output": "features"}),
    ("OnnxConfig", {"target": "trt:10.9", "int8": "dynamic"}),
    ("OnnxConfig", {"target": "nonsense:1"}),
    ("OnnxConfig", {"profile": (1, 8), "static_batch": 4}),
    ("OnnxConfig", {"profile": (8, 8)}),
    ("TensorrtConfig", {"min": 4, "opt": 2}),
    ("TensorrtConfig", {"trt": "9.1"}),
    ("TritonCommand", {"ensemble": True}),
    ("TritonCommand", {"sources": ()}),
    ("TritonCommand", {"backend": "python", "static_batch": 4}),
    ("TasksConfig", {"form": "gathered", "fuse": True}),
    ("ProfileConfig", {"batch_sizes": ()}),
    ("ProfileConfig", {"batch_sizes": (1, 1)}),
    ("ProfileConfig", {"tasks": ("a",)}),
    ("ServerConfig", {"concurrency": (2048,)}),
    ("EvalConfig", {"split": "test"}),
    ("PredictConfig", {"threshold": 1.5}),
    ("ParallelizeConfig", {"finetune": 3}),
    ("ParallelizeConfig", {"lr": 1e-3}),
    ("ParallelizeConfig", {"train": "full"}),
    ("ParallelizeConfig", {"labels": False}),
    ("AnalyzeConfig", {"what": ("entropie",)}),
    ("AnalyzeConfig", {"grid": 4}),
    ("BenchConfig", {"copies": 4, "batch": (2,)}),
    ("PushConfig", {"base": "b"}),
]


@pytest.mark.parametrize(("name", "values"), PAIRS, ids=lambda v: v if isinstance(v, str) else ",".join(v))
def test_what_contradicts_itself_is_refused_before_anything_runs(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        make(ALL[name], **values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ALL)
def test_text_is_a_path_and_a_list_is_a_tuple(name: str) -> None:
    kind, values = ALL[name], {}
    for f in dataclasses.fields(kind):
        hint = type_of(kind, f.name)
        if Path in alternatives(hint) and f.name not in ("base", "engine", "weights"):
            values[f.name] = "some/where"
    named = {f.name for f in dataclasses.fields(kind)}
    if "precision" in named and "data" in values and "fp8" in str(type_of(kind, "precision")):
        values["precision"] = "fp8"  # what `--data` is for there
    found = make(kind, **values)
    assert all(getattr(found, key) == Path("some/where") for key in values if key != "precision")


def test_replacing_a_value_checks_it_too() -> None:
    config = make(ALL["OnnxConfig"])
    with pytest.raises(UsageError, match="`--opset` is 17; allowed is from 18 to 22"):
        dataclasses.replace(config, opset=17)


@pytest.mark.parametrize("name", ALL)
def test_text_is_plain_and_has_no_nul(name: str) -> None:
    kind = ALL[name]
    for f in dataclasses.fields(kind):
        hints = alternatives(type_of(kind, f.name))
        if not {str, Path} & {*hints, *(typing.get_args(one)[0] for one in hints if is_list(one))}:
            continue
        for text in ("a\0=b", "a\ud800=b"):
            with pytest.raises(UsageError, match=f"{flag_of(kind, f.name)}|no data|task"):
                make(kind, **{f.name: text})
        if f.name in ("model", "source", "out"):
            value = getattr(make(kind, **{f.name: np.str_("m")}), f.name)
            assert type(value) is str or isinstance(value, Path)


def test_a_text_of_an_enum_is_a_choice() -> None:
    class Format(StrEnum):
        SMALL = "bf16"

    assert type(FinetuneConfig(precision=Format.SMALL).precision) is str  # type: ignore[arg-type]
    assert FinetuneConfig(precision=np.str_("bf16")).precision == "bf16"  # type: ignore[arg-type]


def test_a_number_as_text_shows_that_it_is_text() -> None:
    with pytest.raises(UsageError, match="`--epochs` is '3'; allowed is a whole number"):
        FinetuneConfig(epochs="3")  # type: ignore[arg-type]


def test_what_to_open_is_apart_from_what_to_do() -> None:
    for name in ("OnnxConfig", "AotiConfig", "TensorrtConfig", "TritonConfig", "TasksConfig", "ProfileConfig",
                 "EvalConfig", "PredictConfig", "AnalyzeConfig", "ParallelizeConfig"):  # fmt: skip
        fields = {f.name for f in dataclasses.fields(ALL[name])}
        assert not fields & {"source", "sources", "packs", "model", "base", "pretrained", "num_classes", "img_size"}
    with pytest.raises(TypeError, match="source"):
        make(ALL["OnnxConfig"], source="nonsense")


def test_a_device_of_torch_serves_as_its_name() -> None:
    import torch

    assert make(ALL["FinetuneConfig"], device=torch.device("cuda", 1)).device == "cuda:1"  # type: ignore[attr-defined]
