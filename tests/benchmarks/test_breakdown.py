"""The stage breakdown: kernels are summed by name and grouped by what they do; bounds are judged from rows."""

from types import SimpleNamespace

import _bounds
import _groups
import _subject
import breakdown
import pytest
import torch

HOST, CARD = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


def event(name, us, device=CARD):
    return SimpleNamespace(name=name, device_time=us, device_type=device)


@pytest.mark.parametrize(("kernel", "group"), [
    ("nvjet_sm90_tst_64x32_64x16_2x4_h_bz_splitK_bias_TNT", "matrix products"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_64x64>", "matrix products"),
    ("_splitk_linear_kernel", "matrix products"), ("_linear_gelu_kernel", "matrix products"),
    ("_linear_kernel", "matrix products"), ("_linear_residual_kernel", "matrix products"),
    ("_packed_attention_kernel", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16_knob_3_64x64x64_4x1x1", "attention"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "attention"),
    ("void at::native::vectorized_elementwise_kernel<8, at::native::GeluCUDAKernelImpl(at::TensorIterator", "GELU"),
    ("_add_norm_kernel", "norms"), ("_norm_kernel", "norms"),
    ("void implicit_convolve_sgemm<__nv_bfloat16, __nv_bfloat16, 128, 5, 5>", "patch embedding"),
    ("void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_optimized_bf16>", "patch embedding"),
    ("void cudnn::engines_precompiled::nchwToNhwcKernel<__nv_bfloat16>", "patch embedding"),
    ("_patchify_kernel", "patch embedding"), ("Memcpy DtoD (Device -> Device)", "other"),
    ("void at::native::elementwise_kernel<128, 4, at::native::CUDAFunctor_add<c10::BFloat16>>", "other"),
    ("gaps", "gaps"),
])  # fmt: skip
def test_kernels_are_told_by_their_names(kernel, group):
    assert _groups.group_of(kernel) == group and group in _groups.COLUMNS


def test_events_of_one_kernel_are_summed_and_the_rest_is_gaps():
    long = "void at::native::elementwise_kernel<" + "x" * 200
    events = [event("gemm", 30.0), event("norm", 5.0), event("gemm", 50.0), event("norm", 7.0),
              event("cudaGraphLaunch", 99.0, HOST), event(long + "1", 2.0), event(long + "2", 4.0)]  # fmt: skip
    found = breakdown.collect(events, 2, 60.0)
    assert list(found) == ["gemm", "norm", long[: breakdown.NAME], "gaps"]
    assert found["gemm"] == (1, 40.0) and found["norm"] == (1, 6.0) and found["gaps"] == (0, 60.0 - 49.0)
    assert found[long[: breakdown.NAME]] == (1, 3.0)  # names that begin alike are one row
    assert breakdown.collect(events, 2, 20.0)["gaps"] == (0, 0.0)  # slower under the profiler


def test_rows_end_with_the_gaps_and_have_shares():
    times = {"gemm": (3, 75.0), "_norm_kernel": (1, 5.0), "gaps": (0, 20.0)}
    found = breakdown.rows_of("S18x2", 224, 1, times)
    assert [(r["kernel"], r["calls"], r["us"], r["percent"]) for r in found] == [
        ("gemm", 3, 75.0, 75.0), ("_norm_kernel", 1, 5.0, 5.0), ("gaps", 0, 20.0, 20.0),
    ]  # fmt: skip
    line = breakdown.summary(times)
    assert line.startswith("matrix products 75.0 %, attention 0.0 %") and line.endswith("gaps 20.0 %")


def test_a_cell_counts_when_it_was_measured_to_its_end():
    def row(batch, kernel, us):
        return {"model": "S18x2", "px": "224", "batch": batch, "kernel": kernel, "us": us}

    first = [row("1", "gemm", "10"), row("1", "gaps", "1")]
    cut = [row("8", "gemm", "70")]
    later = [row("1", "gemm", "20"), row("1", "gaps", "2")]
    found = _groups.cells([*first, *cut, *later])
    assert list(found) == [("S18x2", "224", "1")]
    assert (found["S18x2", "224", "1"]["matrix products"], found["S18x2", "224", "1"]["gaps"]) == (20.0, 2.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures here")
def test_without_a_gpu_a_smoke_test_is_left_out(tmp_path, capsys):
    assert breakdown.main(["--out", str(tmp_path), "--smoke"]) == 0
    assert "left out" in capsys.readouterr().out and not list(tmp_path.iterdir())
    with pytest.raises(SystemExit, match="none is here"):
        breakdown.main(["--out", str(tmp_path)])


def latency(model, batch, provider, ms, **changes):
    row = {"model": model, "px": "224", "batch": str(batch), "provider": provider, "median_ms": str(ms)}
    return row | {"images_s": str(1e3 * batch / ms), "floor_ms": "0.1", "bound": ""} | changes


def test_bounds_between_models_and_providers():
    rows = [
        latency("S18x2", 64, "fused+graph", 5.0), latency("S18x2", 8, "fused+graph", 2.0),
        latency("S18x2", 1, "fused+graph", 0.5, bound="<= 0.55 ms"), latency("S36x1", 1, "fused+graph", 0.4),
        latency("S36x1", 8, "fused+graph", 3.0), latency("S36x1", 8, "timm", 3.0), latency("S18x2", 8, "timm", 3.0),
        *(latency("S18x2", b, _bounds.COMPILED, ms) for b, ms in ((1, 0.8), (64, 4.75))),
        latency("S36x1", 64, "fused+graph", 5.0, median_ms=""),
    ]  # fmt: skip
    found = [(v.what.split(", 224 px, ")[0], v.bound, round(v.value, 2), v.says) for v in _bounds.verdicts(rows)]
    assert found == [
        ("S18x2", "<= 0.55 ms", 0.5, "met"),
        ("S18x2 against S36x1", ">= 1.00 ×", 0.8, "missed"), ("S18x2 against S36x1", ">= 1.00 ×", 1.5, "met"),
        ("S18x2", ">= 1.20 ×", 1.6, "met"), ("S18x2", ">= 1.00 ×", 0.95, "missed"),
    ]  # fmt: skip
    last = list(_bounds.verdicts(rows))[-1]
    assert str(last) == (
        "S18x2, 224 px, batch 64, fused+graph against compile max-autotune (blocks)+graph: "
        ">= 1.00 ×, measured 0.95, floor 0.1 ms: missed"
    )


def test_bounds_name_the_providers_of_the_stage():
    assert (_bounds.FUSED, _bounds.COMPILED) == (_subject.FUSED_GRAPH, _subject.MAX_GRAPH)
    assert _bounds.FOLDED == _subject.FOLDED_GRAPH and set(_bounds.FOLDED_MODELS) < set(_subject.END_TO_END)


def test_both_forms_must_be_quicker_than_the_compiled_model():
    rows = [latency("S18x2", 64, p, ms) for p, ms in ((_bounds.COMPILED, 6.0), (_bounds.FOLDED, 5.0), ("fused", 4.0))]
    (verdict,) = _bounds.verdicts(rows)
    assert (verdict.bound, round(verdict.value, 2)) == (">= 1.00 ×", 1.2) and ", folded+graph against" in verdict.what


def test_the_folded_form_has_cells_of_its_own():
    assert {c[:2] for c in breakdown.FORMS if c[2] == "fused+graph"} == set(breakdown.CELLS)
    folded = {c[:2] for c in breakdown.FORMS if c[2] == "folded+graph"}
    assert folded == {(m, b) for m in ("S18x2", "B18x2", "B/16") for b in (1, 64)}
    assert {_bounds.folded(m) for m, _ in folded}.isdisjoint(m for m, _ in breakdown.CELLS)  # nor rows of one name
