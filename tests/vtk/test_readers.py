"""What parsers raise is one line, what waits or grows for ever is refused, and whole files of odd kinds are read."""

import json
import os
import signal
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vtk.card import Card
from vtk.data.decoding.images import load_image
from vtk.data.probing import cache
from vtk.data.sources import table
from vtk.data.sources.timm_datasets import _guarded
from vtk.errors import DataError, UsageError, VtkError
from vtk.formats import read_json
from vtk.locks import _read
from vtk.models.weights.files import read_weights
from vtk.models.weights.npz import read_npz
from vtk.models.weights.sources import read_base
from vtk.options.files import read_values
from vtk.packs.hub_errors import translate_errors
from vtk.readers import reading, short
from vtk.runtime.opening import open_source
from vtk.training.finetune_config import FinetuneConfig

V0_1 = Path(__file__).resolve().parents[1] / "fixtures" / "v0_1"


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    """A test here that waits for something that never comes fails."""

    def ring(*_: Any) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refused(action: Callable[[], object], match: str = ".", kind: type[VtkError] = VtkError) -> None:
    with pytest.raises(kind, match=match) as caught:
        action()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1500 and str(caught.value).isprintable()


class TestBoundary:
    @pytest.mark.parametrize(
        ("error", "line"),
        [
            (IndexError("pop from empty list"), "x.bin is odd (IndexError: pop from empty list); mend it"),
            (KeyError("a"), "x.bin is odd (it lacks 'a'); mend it"),
            (AssertionError(), "x.bin is odd (AssertionError); mend it"),
            (RecursionError("maximum"), "x.bin is odd (it is nested too deeply); mend it"),
            (MemoryError(), "there is not enough memory to read x.bin; mend it"),
            (OSError(5, "Input/output error"), "cannot read x.bin: Input/output error"),
            (OSError("broken data stream"), "x.bin is odd (broken data stream); mend it"),
            (ValueError("a\x1b[31m\nb"), "x.bin is odd (a\\x1b[31m b); mend it"),
        ],
    )
    def test_whatever_is_raised_is_one_line(self, error: Exception, line: str) -> None:
        with pytest.raises(DataError) as caught, reading("x.bin", "is odd", "mend it"):
            raise error
        assert str(caught.value) == line and caught.value.__cause__ is error

    def test_what_was_said_on_purpose_and_what_ends_the_process_pass(self) -> None:
        for error in (UsageError("so"), KeyboardInterrupt(), SystemExit(3)):
            with pytest.raises(type(error)) as caught, reading("x.bin", "is odd"):
                raise error
            assert caught.value is error

    def test_a_panic_of_rust_is_a_damaged_file(self) -> None:
        panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
        with pytest.raises(DataError, match=r"is odd \(called unwrap"), reading("x", "is odd"):
            raise panic("called unwrap")

    def test_a_text_that_is_long_or_cannot_be_made_is_short(self) -> None:
        class Bad(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        assert len(short(ValueError("x" * 10_000))) == 160 and short(Bad()) == "Bad"


def torch_file(path: Path, pickle: bytes, records: int = 1) -> Path:
    """An archive as torch writes it, with a pickle of one's own."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickle)
        archive.writestr("a/byteorder", "little")
        archive.writestr("a/version", "3\n")
        for i in range(records):
            archive.writestr(f"a/data/{i}", b"\0" * 32)
    return path


_STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x08tQ"
_REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"


class TestTorchFiles:
    @pytest.mark.parametrize(
        "pickle",
        [
            b".",  # IndexError
            b"}h\x07.",  # KeyError
            b"K\1K\1K\1s.",  # AssertionError
            _REBUILD + b")R.",  # TypeError
            _REBUILD + b"(K\1K\0K\x08\x85K\1\x85\x89NtR.",  # AttributeError
            _REBUILD + b"(" + _STORAGE + b"K\0J\xff\xff\xff\x7f\x85K\1\x85\x89NtR.",  # far more than the storage
            b"cbuiltins\nbytearray\nJ\0\0\0\x40\x85R.",  # a gigabyte of zeros
            b"X\xff\xff\xff\x7fabc",
            b"}" + b"]" * 5000,
            b"(K\1K\2K\3tQ.",
        ],
    )
    def test_a_damaged_pickle_is_one_line(self, tmp_path: Path, pickle: bytes) -> None:
        refused(
            lambda: read_weights(torch_file(tmp_path / "w.pth", b"\x80\x02" + pickle)),
            "whole torch file|no sta|byte arrays",
        )
        (tmp_path / "old.pth").write_bytes(b"\x80\x02" + pickle)
        refused(lambda: read_weights(tmp_path / "old.pth"), "whole torch file|no sta|byte arrays|Python objects")

    def test_tensors_that_no_model_can_be_filled_with_are_refused(self, tmp_path: Path) -> None:
        eye = torch.eye(3)
        cases = {
            "sparse_coo": eye.to_sparse(),
            "sparse_csr": eye.to_sparse_csr(),
            "sparse_bsr": torch.eye(4).to_sparse_bsr((2, 2)),
            "meta": torch.empty(3, device="meta"),
            "quantised": torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        }
        for match, value in cases.items():
            torch.save({"a.weight": torch.ones(2), "blocks.0.norm1.weight": value}, tmp_path / "w.pth")
            refused(lambda: read_weights(tmp_path / "w.pth"), f"blocks.0.norm1.weight` .*{match}", DataError)

    def test_whole_tensors_of_odd_forms_are_read_as_torch_reads_them(self, tmp_path: Path) -> None:
        shared = torch.arange(6.0)
        state = {
            "tied": shared,
            "again": shared,
            "part": shared[1:3],
            "turned": torch.ones(2, 3).T,
            "scalar": torch.tensor(2.0),
            "few": torch.zeros(1).expand(7),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "half": torch.ones(2).half(),
            "bool": torch.ones(2, dtype=torch.bool),
            "empty": torch.empty(0, 3),
            "signs": torch.ones(2, dtype=torch.complex64).conj().imag,
        }
        for old in (False, True):
            torch.save({"model": state, "args": {"lr": 1}}, tmp_path / "w.pth", _use_new_zipfile_serialization=not old)
            found = read_weights(tmp_path / "w.pth").tensors
            assert found.keys() == state.keys() and all(torch.equal(found[k], state[k]) for k in state)
            assert not any(value.requires_grad or value.is_neg() for value in found.values())

    @pytest.mark.parametrize("strides", [(0,), (0, 0)])
    def test_one_number_that_claims_terabytes_is_refused(self, tmp_path: Path, strides: tuple[int, ...]) -> None:
        shape = (1 << 40,) if len(strides) == 1 else (1 << 20, 1 << 20)
        value = torch.zeros(1).as_strided(shape, strides)
        torch.save({"blocks.0.attn.qkv.weight": value}, tmp_path / "w.pth")
        refused(
            lambda: read_weights(tmp_path / "w.pth"), r"would need 4,398,046,511,104 bytes and the file has", DataError
        )

    def test_an_archive_that_unpacks_to_far_more_is_refused(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "w.pth", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            archive.writestr("a/data.pkl", b"\x80\x02}.")
            archive.writestr("a/data/0", b"\0" * (80 << 20))
        refused(lambda: read_weights(tmp_path / "w.pth"), "would unpack to 83,886,08", DataError)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda t: t.to(torch.int64), "holds torch.int64"),
            (lambda t: t.bool(), "holds torch.bool"),
            (lambda t: t.to(torch.complex64), "holds torch.complex64"),
            (lambda t: t.to(torch.float8_e4m3fn), "holds torch.float8_e4m3fn"),
            (lambda t: t / 0, "not finite"),
            (lambda t: t.double() * 1e300, "not finite"),
        ],
    )
    @pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
    def test_numbers_that_no_weight_can_be_are_refused(
        self, tmp_path: Path, change: Callable[[Any], Any], match: str, suffix: str
    ) -> None:
        model = json.loads((V0_1 / "digits-bf16" / "task.json").read_text())["model"]
        state = read_weights(V0_1 / "base.safetensors").tensors
        state["blocks.0.attn.qkv.weight"] = change(state["blocks.0.attn.qkv.weight"])
        path = tmp_path / f"w{suffix}"
        torch.save(state, path) if suffix == ".pth" else save_file(state, path)
        refused(
            lambda: read_base(model["name"], model["kwargs"], path), f"`blocks.0.attn.qkv.weight` .*{match}", DataError
        )


class TestPipesAndDevices:
    @pytest.mark.parametrize(
        ("name", "read"),
        [
            ("w.pth", read_weights),
            ("w.safetensors", read_weights),
            ("w.npz", lambda p: read_npz("vit_tiny_patch16_224", {}, p)),
            ("m.onnx", open_source),
            ("m.pt2", open_source),
            ("m.engine", open_source),
            ("t.csv", table.read_rows),
            ("t.parquet", table.read_rows),
            ("i.png", load_image),
            ("c.json", read_json),
            ("c.yaml", lambda p: read_values(p, FinetuneConfig, "--config")),
        ],
    )
    def test_a_pipe_without_a_writer_is_refused_and_so_is_a_folder(
        self, tmp_path: Path, name: str, read: Callable[[Path], object]
    ) -> None:
        os.mkfifo(tmp_path / name)
        refused(lambda: read(tmp_path / name))
        (tmp_path / "f").mkdir()
        (tmp_path / "f" / name).mkdir()
        refused(lambda: read(tmp_path / "f" / name))

    def test_what_a_command_writes_into_a_pipe_is_a_config_all_the_same(self) -> None:
        out, into = os.pipe()
        writer = threading.Thread(target=lambda: (os.write(into, b"epochs: 3\n"), os.close(into)))
        writer.start()
        assert read_values(Path(f"/dev/fd/{out}"), FinetuneConfig, "--config") == {"epochs": 3}
        writer.join()
        os.close(out)


class TestTexts:
    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("a: " + "[" * 5000, "nested too deeply|levels"),
            ("{a: " * 5000, "nested too deeply|levels"),
            ("a: &a [*a]", "levels, or contains itself"),
            (
                "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
                + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(12)),
                "100,000 values",
            ),
            (
                "a: &a {x: 1}\n"
                + "".join(
                    f"{chr(98 + i)}: &{chr(98 + i)} {{<<: [{','.join(['*' + chr(97 + i)] * 10)}]}}\n" for i in range(12)
                ),
                "100,000",
            ),
            ("epochs: " + "9" * 5000, "epochs|integer"),
            ("epochs: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
            ("epochs: !!binary 'a'", "not valid YAML"),
            ("epochs: !!timestamp 2001-99-99", "not valid YAML"),
            ("lr: 1e999\nlr: .nan", "lr"),
            ("epochs: \0", "not valid YAML"),
        ],
    )
    def test_hostile_yaml_is_one_line(self, tmp_path: Path, text: str, match: str) -> None:
        (tmp_path / "c.yaml").write_text(text)
        refused(lambda: read_values(tmp_path / "c.yaml", FinetuneConfig, "--config"), match, UsageError)

    def test_yaml_with_a_mark_of_its_order_and_an_alias_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "c.yaml").write_bytes("\ufeffmean: &m [0.5, 0.5, 0.5]\nstd: *m\n".encode())
        found = read_values(tmp_path / "c.yaml", FinetuneConfig, "--config")
        assert found == {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}

    @pytest.mark.parametrize(
        "text", ["[" * 5000, '{"a":' * 5000, "9" * 5000, '{"a": 1, "a": 2}', "\ufeff{}", "", '"\\ud800']
    )
    def test_hostile_json_is_one_line(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "c.json").write_text(text)
        refused(lambda: read_json(tmp_path / "c.json"), "not valid JSON", DataError)

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            (("input", "mean"), [10**400] * 3),
            (("input", "crop_pct"), 10**400),
            (("input", "std"), [float("inf")] * 3),
            (("input", "std"), [float("nan")] * 3),
            (("input", "height"), 10**400),
            (("model", "kwargs"), {"depth": 10**400}),
            (("metrics", "top1"), [[]]),
            (("classes",), [["a"]]),
            (("regime", "batch_size"), 1 << 70),
            (("schema",), 10**400),
        ],
    )
    def test_impossible_numbers_of_a_card_are_one_line(self, place: tuple[str, ...], value: Any) -> None:
        card = json.loads((V0_1 / "digits-bf16" / "task.json").read_text())
        inner = card
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        refused(lambda: Card.from_json(json.dumps(card), "x"), "x", DataError)

    def test_tables_that_are_none(self, tmp_path: Path) -> None:
        for name, data in (
            ("a.csv", b"a.png," + b"x" * 200_000),
            ("b.csv", b'a.png,"' + b"y" * 200_000),
            ("c.parquet", b"PAR1" + b"\xff" * 100 + b"PAR1"),
            ("d.tsv", b"\xff\xfea"),
        ):
            (tmp_path / name).write_bytes(data)
            refused(lambda name=name: table.read_rows(tmp_path / name), name, DataError)

    def test_a_damaged_shard_of_a_named_set_is_one_line(self) -> None:
        def shard() -> Iterator[Any]:
            yield "image", 1
            raise EOFError("unexpected end of data")

        items = _guarded("wds/x", [shard()])
        assert next(items) == ("image", 1)
        refused(lambda: next(items), "wds/x.*unexpected end of data", DataError)


def test_a_message_is_not_as_long_as_what_it_quotes() -> None:
    card = json.loads((V0_1 / "digits-bf16" / "task.json").read_text())
    for name, value in (("x" * 9_000, 1), ("classes", ["y" * 9_000] * 2)):
        with pytest.raises(DataError) as caught:
            Card.from_dict({**card, name: value}, "c.json")
        assert str(caught.value).startswith("c.json: ") and len(str(caught.value)) < 400
    assert len(str(DataError("z" * 9_000))) == 3_000 and str(DataError("z")) == "z"


class TestWhatIsOnlyRemembered:
    def test_a_damaged_cache_is_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "c.json"
        monkeypatch.setattr(cache, "cache_path", lambda *_: path)
        for text in (
            "[" * 5000,
            "[]",
            "null",
            '{"format": 7}',
            "9" * 5000,
            '{"format":7,"pillow":null,"files":[[[]]]}',
        ):
            path.write_text(text)
            assert cache.load(tmp_path) == {}

    @pytest.mark.parametrize("text", [b"[" * 4000, b"{}", b"9" * 4090, b'{"pid":1e999}', b"\xff", b""])
    def test_a_damaged_lock_names_nobody(self, tmp_path: Path, text: bytes) -> None:
        (tmp_path / "lock").write_bytes(text)
        descriptor = os.open(tmp_path / "lock", os.O_RDONLY)
        assert _read(descriptor) is None
        os.close(descriptor)

    def test_an_answer_that_the_hubs_client_did_not_expect_is_one_line(self) -> None:
        for error in (TypeError("'NoneType' object is not iterable"), KeyError("sha"), AttributeError("siblings")):

            def answer(error: Exception = error) -> None:
                with translate_errors("me/x"):
                    raise error

            refused(answer, "the hub's answer about me/x cannot be used", DataError)
