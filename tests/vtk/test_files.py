import os
import subprocess
import sys
from pathlib import Path

import pytest

from vtk import files, formats
from vtk.errors import DataError


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    formats.write_json(target, {"v": 1})
    with pytest.raises(ValueError, match="Out of range"):
        formats.write_json(target, {"v": float("nan")})
    with pytest.raises(RuntimeError), files.replace_file(target) as tmp:
        tmp.write_text("half")
        raise RuntimeError
    assert formats.read_json(target) == {"v": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "pack"
    for names in (("a", "b"), ("c",)):
        with files.replace_dir(target) as tmp:
            for name in names:
                (tmp / name).write_text(name)
        assert sorted(os.listdir(target)) == sorted(names)
    with pytest.raises(RuntimeError), files.replace_dir(target) as tmp:
        (tmp / "d").write_text("d")
        raise RuntimeError
    assert os.listdir(target) == ["c"]
    assert os.listdir(tmp_path) == ["pack"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
def test_files_are_as_readable_as_the_umask_says(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    with files.replace_dir(tmp_path / "pack") as tmp:
        (tmp / "private").touch(mode=0o600)
    with files.replace_file(tmp_path / "one") as tmp:
        tmp.touch(mode=0o600)
    assert (tmp_path / "pack" / "private").stat().st_mode == (tmp_path / "one").stat().st_mode == plain.stat().st_mode


def test_without_exchange_the_two_renames_still_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "exchange", lambda a, b: False)
    target = tmp_path / "pack"
    for name in ("a", "b"):
        with files.replace_dir(target) as tmp:
            (tmp / name).write_text(name)
    assert os.listdir(target) == ["b"]
    assert os.listdir(tmp_path) == ["pack"]


def test_a_reader_falls_back_to_the_old_folder(tmp_path: Path) -> None:
    (tmp_path / "pack.old").mkdir()
    assert files.existing_dir(tmp_path / "pack") == tmp_path / "pack.old"
    (tmp_path / "pack").mkdir()
    assert files.existing_dir(tmp_path / "pack") == tmp_path / "pack"


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="needs a small file system to fill")
def test_a_full_disk_is_one_clear_error_and_the_old_file_survives(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", mount], capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here")
    try:
        files.write_text(mount / "a", "old")
        with pytest.raises(DataError, match="No space left"):
            files.write_text(mount / "a", "x" * 200_000)
        assert (mount / "a").read_text() == "old"
        assert os.listdir(mount) == ["a"]
    finally:
        subprocess.run(["umount", mount], check=True)


def test_output_folders_are_refused_unless_empty_or_allowed(tmp_path: Path) -> None:
    files.prepare_output(tmp_path / "new")
    (tmp_path / "new" / "x").write_text("x")
    with pytest.raises(DataError, match=r"not empty; give another folder, or --overwrite"):
        files.prepare_output(tmp_path / "new")
    files.prepare_output(tmp_path / "new", overwrite=True)
    with pytest.raises(DataError, match="is a file"):
        files.prepare_output(tmp_path / "new" / "x")


def test_json_that_is_cut_large_or_absent_is_named(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"a": ')
    with pytest.raises(DataError, match="not valid JSON"):
        formats.read_json(tmp_path / "cut.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match="not valid JSON"):
        formats.read_json(tmp_path / "deep.json")
    with pytest.raises(DataError, match="at most 3"):
        formats.read_json(tmp_path / "cut.json", limit=3)
    with pytest.raises(DataError, match="cannot read"):
        formats.read_json(tmp_path / "none.json")


@pytest.mark.parametrize("write", ["safetensors", "torch"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's always-full device")
def test_a_full_disk_is_a_data_error_whoever_writes(write: str, tmp_path: Path) -> None:
    """Safetensors and torch.save raise kinds of their own, which are no OSError."""
    import torch
    from safetensors.torch import save_file

    target = tmp_path / "pack"
    formats.write_json(target / "a.json", 1)
    said = pytest.raises(DataError, match=r"cannot write .*pack: .*choose another folder")
    with said, files.replace_dir(target) as tmp:
        if write == "torch":
            (tmp / "full").symlink_to("/dev/full")
            torch.save({"x": torch.zeros(1 << 20)}, tmp / "full")
        else:
            save_file({"x": torch.zeros(9)}, tmp / "not-there" / "x.safetensors")
    assert os.listdir(tmp_path) == ["pack"]
    assert formats.read_json(target / "a.json") == 1


def test_names_that_are_not_utf8_are_escaped_in_json_and_kept_in_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    assert formats.to_json({"a": "ü"}) == '{"a": "ü"}'
    assert formats.to_json({"a": name}) == '{"a": "caf\\udce9"}'
    files.write_text(tmp_path / "t", name)
    assert (tmp_path / "t").read_bytes() == b"caf\xe9"


def test_what_killed_writers_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    dead = 2**22 - 3  # above what a system gives
    names = [f"a.tmp-{dead}", f"dir.tmp-{dead}", f"a.tmp-{os.getpid()}", f"strange.tmp-{dead}", "a.tmp-x", "a"]
    for name in names:
        (tmp_path / name).mkdir() if name.startswith("dir") else (tmp_path / name).touch()
    files.sweep(tmp_path, lambda name: name in ("a", "dir"), age=3600)
    assert sorted(os.listdir(tmp_path)) == sorted(names)  # they are new, and could be another machine's
    os.utime(tmp_path / names[0], (0, 0))
    files.sweep(tmp_path, lambda name: name in ("a", "dir"), age=3600)
    assert sorted(os.listdir(tmp_path)) == sorted(names[1:])
    files.sweep(tmp_path, lambda name: name in ("a", "dir"))
    assert sorted(os.listdir(tmp_path)) == sorted(names[2:])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' is there twice"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", "more than 64 levels"),
        ("1" * 5000, "not valid JSON"),
        ("\ufeff{}", "not valid JSON"),
    ],
)
def test_json_that_readers_would_understand_differently_or_choke_on(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        formats.read_json(tmp_path / "x.json")
    assert formats.parse_json('{"a": ' + "[" * 60 + "]" * 60 + "}", "x")["a"] == formats.parse_json(
        "[" * 60 + "]" * 60, "x"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes with names")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is not a regular file"):
        formats.read_json(tmp_path / "pipe")
    with pytest.raises(DataError, match="is not a regular file"):
        formats.check_safetensors(tmp_path / "pipe")


def test_tensors_of_any_strides_and_shared_memory_come_back(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    large = torch.arange(600.0).reshape(6, 4, 5, 5)
    tensors = {
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "rows": large[1:3], "columns": large[:, ::2], "turned": large[0, 0].t(), "all": large, "again": large,
        "spread": torch.ones(1).expand(7), "none": large[:0], "number": torch.tensor(3.0),
        "parameter": torch.nn.Parameter(large[2:4]),
    }  # fmt: skip
    formats.save_tensors(tmp_path / "t", tensors, {"who": "me"})
    found = load_file(tmp_path / "t")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[k], v) and found[k].is_contiguous() for k, v in tensors.items())


def test_equal_tensors_and_texts_are_equal_files(tmp_path: Path) -> None:
    """Safetensors itself writes the texts of a header in any order."""
    import torch
    from safetensors import safe_open

    texts = {name: f'{name} "quoted" \t é 图' for name in "zyxwvutsrq"}
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.ones(3, dtype=torch.bfloat16)}
    written = set()
    for i in range(8):
        formats.save_tensors(tmp_path / f"{i}", tensors, dict(sorted(texts.items(), key=lambda _: os.urandom(4))))
        written.add((tmp_path / f"{i}").read_bytes())
    assert len(written) == 1
    with safe_open(tmp_path / "0", "pt") as file:
        assert file.metadata() == {"format": "pt", **texts}
        assert all(torch.equal(file.get_tensor(name), value) for name, value in tensors.items())
