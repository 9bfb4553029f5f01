"""Work, ceilings, energy: against formulas, a fake NVML and a device that cannot be beaten."""

import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import timm
import torch
from torch import Tensor, nn

from vtk.profiling import ceilings, nvml, result
from vtk.profiling.config import ProfileConfig
from vtk.profiling.nvml import Meter, energy_per_image
from vtk.profiling.plot import latency_png
from vtk.profiling.profile import find_ceilings
from vtk.profiling.report import print_result
from vtk.profiling.rows import notes
from vtk.profiling.work import Ceilings, Work, work_of

LIMITS = Ceilings(bytes_per_s=1e9, flop_per_s={"fp32": 1e12, "bf16": 4e12})


def test_flops_of_a_vit_are_those_of_the_formula() -> None:
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=64, depth=3, num_classes=10)
    found = work_of(model, (3, 64, 64), 10)
    n, c = 17, 192
    blocks = 3 * (2 * n * 12 * c * c + 4 * n * n * c)
    ends = 2 * 16 * 16 * 16 * 3 * c + 2 * c * 10
    assert found is not None and found.flops == blocks + ends
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.values == 3 * 64 * 64 + 10


def test_a_model_that_needs_real_numbers_has_no_count() -> None:
    class Peeks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() else -x

    assert work_of(Peeks(), (3, 8, 8), 5) is None


@pytest.mark.parametrize("batch,precision,floor", [
    (1, "fp32", 4 * (1e6 + 100) / 1e9),  # weights over the copy rate
    (1000, "fp32", 1000 * 1e9 / 1e12),  # products over their rate
    (1, "bf16", 2 * (1e6 + 100) / 1e9),
])  # fmt: skip
def test_floor_is_the_larger_of_two(batch: int, precision: str, floor: float) -> None:
    work = Work(flops=10**9, parameters=10**6, values=100)
    assert work.floor_s(batch, precision, LIMITS) == pytest.approx(floor)


def test_floor_of_a_precision_without_a_ceiling_is_unknown() -> None:
    assert Work(1, 1, 1).floor_s(1, "fp16", LIMITS) is None


def test_ceilings_are_kept_by_device_and_threads() -> None:
    cpu = torch.device("cpu")
    assert ceilings.known(cpu, 1) is None
    measured = ceilings.measure(cpu, 1, quick=True)
    assert ceilings.known(cpu, 1) == measured and ceilings.known(cpu, 2) is None
    assert measured.bytes_per_s > 0 and measured.flop_per_s["fp32"] > 0
    other = ceilings.measure(cpu, 2, quick=True)
    assert ceilings.known(cpu, 1) == measured and ceilings.known(cpu, 2) == other
    assert find_ceilings(ProfileConfig(device="cpu"), cpu, 1) == measured


def test_a_measured_ceiling_is_what_the_device_does() -> None:
    found = ceilings.measure(torch.device("cpu"), 1, quick=True)
    a = torch.randn(64, 64)
    by_hand = []
    for _ in range(50):
        start = time.perf_counter()
        a @ a
        by_hand.append(time.perf_counter() - start)
    assert found.flop_per_s["fp32"] > 0.3 * 2 * 64**3 / min(by_hand)


def test_share_of_the_roof_is_in_every_cell_and_above_one_is_doubted(
    fakes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backends = {"eager": fakes.Backend("eager", sync_s=0.001)}
    monkeypatch.setattr(ceilings, "known", lambda device, threads: LIMITS)
    found = fakes.run(backends, batch_sizes=(1, 2))
    for cell in found.backends[0].cells:
        floor_ms = 1000 * 4 * (3 * 64 * 5 + 5 + cell.batch * (3 * 64 + 5)) / 1e9
        assert cell.roofline == pytest.approx(floor_ms / cell.typical_ms)
    assert not any("ceilings" in text for text in found.warnings)
    print_result(found)
    out = capsys.readouterr().out
    assert "% roof" in out and "copy 1 GB/s" in " ".join(notes(found))
    assert latency_png(found).startswith(b"\x89PNG")
    monkeypatch.setattr(ceilings, "known", lambda device, threads: Ceilings(1.0, {"fp32": 1.0}))
    assert any("faster than the device's ceilings at batch 1, 2" in w for w in fakes.run(backends).warnings)


class _Driver:
    """An NVML that counts: every reading takes 50 J more, the clock falls by 10 MHz."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_CLOCK_SM = 1

    def __init__(self, *, energy: bool = True) -> None:
        self.joules, self.mhz, self.uuid, self.energy = 0.0, 1990, "", energy

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.uuid = uuid
        return "handle"

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        assert (handle, kind) == ("handle", self.NVML_CLOCK_SM)
        self.mhz -= 10
        return self.mhz

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        if not self.energy:
            raise self.NVMLError("not supported")
        self.joules += 50
        return int(1000 * self.joules)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> _Driver:
    found = _Driver()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2-3"))
    return found


def test_readings_come_from_the_device_with_torchs_uuid(driver: _Driver) -> None:
    meter = Meter(torch.device("cuda", 1))
    assert driver.uuid == "GPU-1-2-3"
    first, second = meter.read(), meter.read()
    assert (first.clock_mhz, second.clock_mhz) == (1980, 1970)
    assert second.energy_j - first.energy_j == pytest.approx(50)


def test_a_card_without_an_energy_counter_gives_its_clock_alone(driver: _Driver) -> None:
    driver.energy = False
    found = Meter(torch.device("cuda")).read()
    assert found.clock_mhz == 1980 and found.energy_j is None


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_without_the_binding_or_a_gpu_nothing_is_said(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Meter(torch.device(place)).read() == nvml.Reading()


def test_energy_of_a_short_time_is_not_given() -> None:
    assert energy_per_image(50.0, 2.0, 100) == pytest.approx(0.5)
    assert energy_per_image(50.0, 0.2, 100) is None and energy_per_image(None, 2.0, 100) is None


def test_energy_and_clocks_reach_the_row(fakes, driver: _Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from vtk.profiling import measure

    monkeypatch.setattr(measure, "Meter", lambda device: Meter(torch.device("cuda")))
    monkeypatch.setattr(nvml, "MIN_S", 0.0)
    found = fakes.run({"eager": fakes.Backend("eager")}, batch_sizes=(4,), duration=1e-6)
    (cell,) = found.backends[0].cells
    assert cell.clock_before_mhz == 1980 and cell.clock_after_mhz == 1980 - 10 * (2 * cell.windows - 1)
    assert cell.energy_per_image_j == pytest.approx(50 * cell.windows / (4 * cell.runs))


def test_a_clock_that_moved_is_said() -> None:
    cell = result.Cell(8, runs=50, p50_ms=1.0, clock_before_mhz=1980, clock_after_mhz=1200)
    from vtk.profiling.cautions import _clocks

    (text,) = _clocks(result.BackendResult("fused", cells=(cell, replace(cell, clock_after_mhz=1950))))
    assert "batch 8: the GPU clock changed from 1980 to 1200 MHz" in text
