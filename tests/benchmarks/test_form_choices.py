"""Names of the measured forms of the fused model, and the choice made from the faster one."""

import _choices
import _form_choices
import e2e
import pytest
import torch

from vtk_kernels import choices


@pytest.mark.parametrize(("provider", "folded"), [("fused", False), ("fused+graph", False), ("folded+graph", True)])
def test_a_provider_names_the_form_whatever_was_chosen_before(monkeypatch, provider, folded):
    subject = e2e.Subject("S18x2", 32, torch.device("cpu"), smoke=True)
    seen = []
    monkeypatch.setattr(subject.fused, "capture", lambda sizes: seen.append((sizes, subject.fused.ln_folded)))
    subject.fused.ln_folded = not folded
    subject.provider(provider, torch.zeros(3, 3, 32, 32))
    assert subject.fused.ln_folded is folded
    assert seen == ([] if provider == "fused" else [([3], folded)])


def test_the_quicker_form_of_whole_models_becomes_a_choice(tmp_path, code):
    def row(provider, ms, model="S18x2", batch=8, px=224, passed="True"):
        return {"model": model, "px": str(px), "batch": str(batch), "provider": provider, "dtype": "bfloat16",
                "median_ms": str(ms), "passed": passed, **code}  # fmt: skip

    rows = [
        row("fused+graph", 1.5), row("folded+graph", 1.25), row("timm", 0.1), row("fused", 0.2),
        row("fused+graph", 1.0, "B/16", 1, 384), row("folded+graph", 1.5, "B/16", 1, 384),
        row("fused+graph", 1.0, "B18x2"), row("folded+graph", "", "B18x2", passed="False"),
        row("folded+graph", 1.0, "S/16"), row("fused+graph", 1.0, "S/16", 16),
    ]  # fmt: skip
    found = _form_choices.entries(rows)
    assert [(e["rows"], e["n"], e["k"], e["choice"], e["us"]) for e in found] == [
        (8 * 197, 384, 3072, "folded", {"folded": 1250.0, "separate": 1500.0}),
        (577, 768, 3072, "separate", {"folded": 1500.0, "separate": 1000.0}),
    ]  # fmt: skip
    path = tmp_path / "choices.json"
    other = {**found[0], "op": "linear_gelu", "choice": "aten", "us": {"aten": 1.0, "triton": 2.0}}
    _choices.write(path, [other])  # as the stage kernels does
    _form_choices.write(path, found)
    table = choices.read(path)
    assert other in table and all(entry in table for entry in found)
    _form_choices.write(path, [{**found[0], "choice": "separate"}])
    kept = [e["choice"] for e in choices.read(path) if e["op"] == "ln_folded" and e["rows"] == 8 * 197]
    assert kept == ["separate"] and other in choices.read(path)


def test_the_shape_of_a_choice_is_what_the_model_asks_about():
    assert {name: _form_choices.shape(name, 224) for name in ("S18x2", "B18x2", "B/16", "S/16")} == {
        "S18x2": (197, 384, 3072), "B18x2": (197, 768, 6144), "B/16": (197, 768, 3072), "S/16": (197, 384, 1536),
    }  # fmt: skip
