"""Choices of a made-up card in the fused model, on fake CUDA tensors: plain, compiled, counted, and refused."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vtk.__main__ import main
from vtk.bank.bank import TaskBank
from vtk.errors import UsageError
from vtk.fused import FusedViT, count_launches, fuse
from vtk.fused.kernel_count import Counting
from vtk_kernels import choices

CARD = "a card"
ENTRY = {"device": CARD, "torch": "2.11", "triton": "3.6", "dtype": "bfloat16", "rows": 197}
SPLIT = [
    {**ENTRY, "op": "splitk_linear", "n": 192, "k": k, "choice": choice}
    for k, choice in ((192, "aten"), (1536, "triton"))
]
PLAIN = [{**ENTRY, "op": "linear_gelu", "n": 1536, "k": 192, "choice": "aten"}]
FOLDED = [{**ENTRY, "op": "ln_folded", "n": 192, "k": 1536, "choice": "folded"}]
CUT = [{**e, "op": op, "choice": "finish"} for e in SPLIT for op in ("linear_residual", "splitk_linear")]
TABLES = {
    "separate": SPLIT + PLAIN, "folded": SPLIT + PLAIN + FOLDED, "finish": CUT + PLAIN, "folded finish": CUT + FOLDED,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("made_up_card")


def parallel() -> nn.Module:
    return timm.create_model("vit_small_patch16_18x2_224", embed_dim=192, num_heads=3, depth=2)


def operations(fused: FusedViT, batch: int) -> tuple[Counter[str], Counter[str]]:
    """Return the kernels' operations of a pass over fake CUDA tensors as it is, and of the compiled program."""
    programs: list[torch.fx.GraphModule] = []

    def keep(program: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        programs.append(program)
        return program

    with FakeTensorMode(), torch.no_grad():
        for module in fused.modules():
            for name, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                fake = torch.empty(value.shape, dtype=value.dtype, device="cuda")
                setattr(module, name, nn.Parameter(fake, requires_grad=False) if name in module._parameters else fake)
        images = torch.empty(batch, 3, 224, 224, dtype=fused.dtype, device="cuda")
        with Counting() as counting:
            fused.compute(images)
        torch._dynamo.reset()
        torch.compile(fused.compute, fullgraph=True, backend=keep)(images)
    called = [getattr(node.target, "_qualified_op_name", "") for g in programs for node in g.graph.nodes]
    ours = Counter(name.removeprefix("vtk_kernels::") for name in called if name.startswith("vtk_kernels::"))
    return Counter({k: v for k, v in counting.counts.items() if hasattr(torch.ops.vtk_kernels, k)}), ours


@pytest.mark.parametrize("named", TABLES)
def test_the_compiled_model_takes_the_choices_of_the_plain_one(named: str) -> None:
    choices.use(TABLES[named])
    plain, compiled = operations(fuse(parallel(), torch.float16), 1)
    assert plain == compiled
    assert plain["patchify_counters"] == ("finish" in named)
    if "folded" in named:
        assert plain["linear_residual"] == 3 and plain["linear_gelu_stats"] == 2
    elif named == "finish":
        assert plain["linear_residual"] == plain["norm"] == 2 and not plain["splitk_linear"]
    else:  # of two blocks; the last one has one token, of which no measurement speaks
        assert plain["splitk_linear"] == plain["linear_gelu"] == 1


def test_a_gated_layer_is_one_kernel_or_torchs() -> None:
    size = {"img_size": 224, "embed_dim": 192, "num_heads": 3, "depth": 2}  # hidden layers of 512, gate and value
    gated = {**ENTRY, "op": "linear_swiglu", "n": 1024, "k": 192, "choice": "aten"}
    choices.use([{**gated, "rows": rows} for rows in (1, 257)])
    plain, compiled = operations(fuse(timm.create_model("eva02_tiny_patch14_224", **size), torch.float16), 1)
    assert plain == compiled and not plain["linear_swiglu"]


def test_counting_asks_no_card() -> None:
    counts = []
    for table in ([], TABLES["folded"]):
        choices.use(table)
        counts.append(count_launches(parallel()))
    assert len(set(counts)) == 1


def test_a_bad_table_in_the_environment_is_one_line_for_models_and_banks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_text("{}")
    monkeypatch.setenv("VTK_CHOICES", str(path))
    choices.use(None)
    with pytest.raises(
        UsageError, match=rf"^VTK_CHOICES: {path} is no choice table: KeyError: 'schema'; give the path"
    ):
        TaskBank()
    assert main(["profile", "vit_tiny_patch16_224", "--no-pretrained", "--backends", "fused"]) == 2
    said = capsys.readouterr().err
    assert f"VTK_CHOICES: {path} is no choice table" in said and "Traceback" not in said
