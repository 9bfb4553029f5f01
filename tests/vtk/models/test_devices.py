"""Precisions by name stand in one table; the other copies are of files that run without vtk."""

import ast
from pathlib import Path

import pytest
import torch

from vtk.errors import UsageError
from vtk.models.devices import DTYPES, FP8, check_dtype, dtype_name, itemsize, resolve_dtype

ROOT = Path(__file__).parents[3]
COPIED = {"export/vtk_export/triton/served/bank_model.py", "vtk/runtime/aoti_load.py"}


def test_torch_types_of_precisions_stand_in_one_module_and_in_copied_files() -> None:
    tables = set()
    for folder in ("vtk", "export", "kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if '"bf16"' not in text or "torch.bfloat16" not in text:
                continue
            found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Dict)]
            if any('"bf16": torch.' in (ast.get_source_segment(text, node) or "") for node in found):
                tables.add(file.relative_to(ROOT).as_posix())
    assert tables == COPIED | {"vtk/models/devices.py"}


@pytest.mark.parametrize(("name", "bits"), [("fp32", 32), ("bf16", 16), ("fp16", 16)])
def test_a_precision_has_the_bytes_of_its_type(name: str, bits: int) -> None:
    assert itemsize(name) * 8 == torch.finfo(resolve_dtype(name)).bits == bits
    assert dtype_name(DTYPES[name]) == name


def test_fp8_is_of_products_alone() -> None:
    assert itemsize(FP8) == torch.float8_e4m3fn.itemsize and FP8 not in DTYPES


def test_types_without_arithmetic_are_refused() -> None:
    assert check_dtype(torch.float64) == torch.float64
    with pytest.raises(UsageError, match=r"`dtype` is torch.int8; give torch.float16, torch.bfloat16"):
        check_dtype(torch.int8)
