"""Help: titled groups, 80 columns, one line of plain words an option; each option is defined once."""

import dataclasses
import re

import pytest

from tests.vtk.options._configs import configs
from vtk.__main__ import main
from vtk.commands import COMMANDS
from vtk.options import option_of, type_of
from vtk.options.values import alternatives

PARTS = {
    "export": ("onnx", "openvino", "aoti", "tasks", "tensorrt", "triton"),
    "tasks": ("list", "diff", "merge", "bench", "convert", "bundle", "to-peft", "from-peft", "push", "pull"),
    "data": ("audit",),
}
LINES = [
    *((name,) for name in COMMANDS if name not in PARTS),
    *((name, part) for name, parts in PARTS.items() for part in parts),
    ("profile", "--server", "x"),
]
SEVERAL = frozenset(
    "backend base batch_size batch_sizes branches compare data device dtype duration form images img_size max_drop "
    "metric model out overwrite pack pack_dtype precision pretrained protocol rank resume revision source split tasks "
    "threshold warmup weight_decay with_preproc".split()
)
"""Names with another meaning in another command; every other name means one thing everywhere."""


def shown(argv: tuple[str, ...], flag: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as stop:
        main([*argv, flag])
    assert not stop.value.code
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("argv", LINES, ids=" ".join)
def test_help_fits_a_terminal_and_the_rest_is_one_flag_away(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    short, every = shown(argv, "--help", capsys), shown(argv, "--help-all", capsys)
    assert max(map(len, short + every)) <= 80
    assert short[0].startswith(f"usage: vtk {' '.join(argv[:2] if argv[1:2] != ('--server',) else argv[:1])}")
    text = "\n".join(every)
    assert "default: None" not in text and "{None}" not in text
    flags = set(re.findall(r"^  (--[a-z0-9-]+)", text, re.M))
    listed = set(re.findall(r"^  (--[a-z0-9-]+)", "\n".join(short), re.M))
    assert listed <= flags and {"--config", "--json", "--debug"} <= flags - listed
    hidden = re.search(r"--help-all shows (\d+) more options?\.", "\n".join(short))
    assert len(flags) - len(listed) - 3 == (int(hidden[1]) if hidden else 0)


def test_help_of_finetune_is_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(("finetune",), "--help", capsys)
    assert len(lines) <= 60
    titles = [line for line in lines if re.fullmatch(r"[a-z ]+:", line)]
    assert titles == [f"{t}:" for t in ("data", "model", "what to train", "schedule", "regularisation", "memory",
                                        "running", "output")]  # fmt: skip


@pytest.mark.parametrize("name", configs())
def test_every_option_is_a_line_of_plain_words(name: str) -> None:
    kind = configs()[name]
    for f in dataclasses.fields(kind):
        told = option_of(kind, f.name).help
        assert 0 < len(told) <= 100 and told[-1] not in ".;" and not told[0].isspace(), (f.name, told)
        assert "paper " not in told, (f.name, told)
        if bool in alternatives(type_of(kind, f.name)) and f.default is True:
            assert 0 < len(option_of(kind, f.name).off) <= 100, f.name


def test_each_option_is_defined_once() -> None:
    found: dict[str, set[tuple[object, ...]]] = {}
    for kind in configs().values():
        for f in dataclasses.fields(kind):
            told = dataclasses.replace(option_of(kind, f.name), group="", metavar="")
            found.setdefault(f.name, set()).add(dataclasses.astuple(told))
    assert {name for name, definitions in found.items() if len(definitions) > 1} == SEVERAL


def test_a_flag_that_would_always_be_refused_is_not_offered(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(shown(("pretrain",), "--help-all", capsys))
    assert "--sam " in text
    for flag in ("--layer-decay", "--head-lr-mult", "--dry-run", "--sam-m", "--adversarial", "auto}"):
        assert flag not in text
    for flag in ("--layer-decay", "--dry-run"):
        assert main(["pretrain", "data", flag]) == 2
        assert f"unknown option `{flag}`" in capsys.readouterr().err


def test_a_switch_that_may_be_left_open_shows_both_its_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert "  --fuse, --no-fuse " in "\n".join(shown(("export", "onnx"), "--help", capsys))
    assert "--no-attn-only" not in "\n".join(shown(("finetune",), "--help", capsys))


@pytest.mark.parametrize("argv", [(), *((name,) for name in PARTS)], ids=" ".join)
def test_all_options_of_a_group_of_commands_are_its_list(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--help"]) == 0
    listed = capsys.readouterr().out
    assert max(map(len, listed.splitlines())) <= 80
    assert main([*argv, "--help-all"]) == 0
    assert capsys.readouterr().out == listed


@pytest.mark.parametrize("name", configs())
def test_an_option_stands_under_its_heading_in_every_command(name: str) -> None:
    # a default of the command's own must not move it
    kind = configs()[name]
    for parent in kind.__mro__[1:]:
        for f in dataclasses.fields(parent) if parent.__name__.endswith("Options") else ():
            if f.name != "data":
                assert option_of(kind, f.name).group == option_of(parent, f.name).group, f.name


@pytest.mark.parametrize(
    ("argv", "says", "never"),
    [
        (("eval",), "exported file", "timm"), (("predict",), "exported file", "timm"),
        (("parallelize",), "timm", "exported"), (("export", "onnx"), "timm", "exported"),
        (("export", "aoti"), "timm", "exported"), (("export", "openvino"), "timm", "exported"),
    ],
    ids=str,
)  # fmt: skip
def test_a_source_is_said_to_be_what_the_command_takes(
    argv: tuple[str, ...], says: str, never: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(" ".join(shown(argv, "--help", capsys)).split())
    told = text[text.index(" SOURCE task pack") :].split("(required)")[0]
    assert says in told and never not in told


def test_attn_only_has_no_opposite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "data", "--no-attn-only"]) == 2
    assert "unknown option `--no-attn-only`; did you mean --attn-only?" in capsys.readouterr().err
