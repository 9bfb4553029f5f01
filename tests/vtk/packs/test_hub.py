"""Packs on the hub: one commit up, a whole pack down, and one line for each way it can fail."""

import dataclasses
import json
import shlex
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.vtk.packs._fake_hub import FakeHub, Repo, raising, refusal
from vtk.__main__ import main
from vtk.errors import BaseError, DataError, UnavailableError, UsageError
from vtk.packs import load_task, read_card
from vtk.packs.base_files import BUNDLED
from vtk.packs.bundle import bundle_task
from vtk.packs.cards import CARD, HASHES, TENSORS
from vtk.packs.hub import pull_task, push_task
from vtk.packs.pack import update_card

Make = Callable[..., Path]
OWN = {CARD, HASHES, TENSORS}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return FakeHub(monkeypatch)


@pytest.fixture
def run_folder(make_pack: Make, tmp_path: Path) -> Path:
    """A run as finetune leaves it: packs, the state to resume from, rows; the card tells private paths."""
    run = tmp_path / "run"
    (run / "last").mkdir(parents=True)
    shutil.move(make_pack(), run / "task")
    command = shlex.join(["vtk", "finetune", str(tmp_path / "data"), "--weights", str(tmp_path / "vit.safetensors")])
    update_card(run / "task", dataclasses.replace(read_card(run / "task"), command=command))
    for name in ("last/optimizer.safetensors", "metrics.csv", "task/notes.txt", "task/model.pth"):
        (run / name).write_text("private")
    return run


def test_there_and_back(hub: FakeHub, run_folder: Path, tmp_path: Path, base_file: Path) -> None:
    pushed = push_task(run_folder, "me/pets")
    files = hub.files("me/pets")
    assert set(files) == OWN | {"README.md", ".gitattributes"} and hub.repos["me/pets"].commits == 1
    assert not any(str(tmp_path).encode() in content for content in files.values())
    assert files[TENSORS] == (run_folder / "task" / TENSORS).read_bytes()
    assert pushed.files == {name: len(files[name]) for name in (*sorted([*OWN, "README.md"]),)}
    assert (pushed.url, pushed.private, len(pushed.commit)) == ("https://huggingface.co/me/pets", False, 40)
    page = files["README.md"].decode()
    assert yaml.safe_load(page.split("---\n")[1])["library_name"] == "vit-toolkit"
    assert "vtk finetune PATH --weights vit.safetensors" in page
    pulled = pull_task("me/pets", tmp_path / "here")
    assert {p.name for p in (tmp_path / "here").iterdir()} == OWN == set(pulled.files)
    there, here = load_task(run_folder / "task"), load_task(tmp_path / "here", base=base_file)
    assert all(torch.equal(v, here.model.state_dict()[k]) for k, v in there.model.state_dict().items())
    assert pulled.card == here.card and here.card.classes == there.card.classes


def test_with_base_and_without_again(hub: FakeHub, make_pack: Make, base_file: Path, tmp_path: Path) -> None:
    pack = make_pack()
    push_task(pack, "me/pets", with_base=True)
    base_file.unlink()
    pulled = pull_task("me/pets", tmp_path / "here")
    assert set(pulled.files) == OWN | {BUNDLED} and load_task(tmp_path / "here").bundled
    push_task(tmp_path / "here", "me/other")  # a bundle stays one
    assert BUNDLED in hub.files("me/other")
    push_task(pack, "me/pets")  # the base of another pack must not stay behind
    assert BUNDLED not in hub.files("me/pets") and hub.repos["me/pets"].commits == 2
    with pytest.raises(BaseError):
        push_task(pack, "me/pets", with_base=True)


def test_a_merged_form_goes_up_beside_the_pack_and_goes_again_without_it(
    hub: FakeHub, make_pack: Make, tmp_path: Path
) -> None:
    pack = make_pack()
    update_card(pack, dataclasses.replace(read_card(pack), command=f"vtk finetune {tmp_path}/data"))
    push_task(pack, "me/pets", format="timm")
    files = hub.files("me/pets")
    assert set(files) == OWN | {"README.md", ".gitattributes", "config.json", "model.safetensors"}
    assert hub.repos["me/pets"].commits == 1 and not any(
        str(tmp_path).encode() in content for content in files.values()
    )
    page = files["README.md"].decode()
    assert yaml.safe_load(page.split("---\n")[1])["library_name"] == "timm" and "hf-hub:me/pets" in page
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(files[name])
    theirs, own = timm.create_model(f"local-dir:{folder}", pretrained=True), load_task(pack).model
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in own.state_dict().items())
    assert set(pull_task("me/pets", tmp_path / "here").files) == OWN
    push_task(pack, "me/pets")  # a model of another training must not stay beside the pack
    assert set(hub.files("me/pets")) == OWN | {"README.md", ".gitattributes"}


def test_private_revision_license_and_token(
    hub: FakeHub, shared_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SECRET", "hf_secret")
    monkeypatch.chdir(tmp_path)
    flags = "--private --revision v2 --license mit --token-env SECRET --json".split()
    assert main(["tasks", "push", str(shared_pack), "pets", *flags]) == 0
    out = capsys.readouterr()
    made = json.loads(out.out)
    assert (made["repo_id"], made["private"], made["url"]) == (
        "me/pets",
        True,
        "https://huggingface.co/me/pets/tree/v2",
    )
    assert made["bytes"] == sum(made["files"].values()) and hub.repos["me/pets"].private
    assert set(hub.files("me/pets")) == {".gitattributes"} and CARD in hub.files("me/pets", "v2")
    assert yaml.safe_load(hub.files("me/pets", "v2")["README.md"].decode().split("---\n")[1])["license"] == "mit"
    assert main(["tasks", "pull", "me/pets", "--revision", "v2", "--token-env", "SECRET", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["path"] == str(Path("tasks/pets")) and (tmp_path / "tasks" / "pets" / CARD).is_file()
    assert got["classes"] == ["c0", "c1", "c2"] and not got["bundled"]
    assert hub.tokens == ["hf_secret"] * 2 and "hf_secret" not in out.out + out.err
    assert main(["tasks", "pull", "me/pets", "--out", "x", "--token-env", "hf_secret"]) == 2
    assert "hf_secret" not in capsys.readouterr().err


def test_what_is_refused_before_anything_is_sent(hub: FakeHub, make_pack: Make, tmp_path: Path) -> None:
    pack = make_pack()
    for repo_id in ("a/b/c", "../x", "me/a b", "https://huggingface.co/me/pets", "", "me/-x", "me/x.git"):
        with pytest.raises(UsageError, match="is not a repository name; give USER/NAME"):
            push_task(pack, repo_id)
        with pytest.raises(UsageError, match="is not a repository name"):
            pull_task(repo_id, tmp_path / "x")
    with pytest.raises(UsageError, match="--license"):
        push_task(pack, "me/pets", license="mit\nx: y")
    with pytest.raises(DataError, match="neither a pack nor a run"):
        push_task(tmp_path, "me/pets")
    with pytest.raises(DataError, match="is not a folder"):
        push_task(tmp_path / "absent", "me/pets")
    several = tmp_path / "several"
    shutil.copytree(pack, several / "cars" / "task")
    with pytest.raises(DataError, match=r"several tasks.*cars"):
        push_task(several, "me/pets")
    (pack / HASHES).write_text("{}")
    with pytest.raises(DataError, match="different bases"):
        push_task(pack, "me/pets")
    with pytest.raises(UsageError, match=r"`--out` .* exists"):
        pull_task("me/pets", pack)
    assert main(["tasks", "push", str(pack), "me/pets", "--base", "x.safetensors"]) == 2
    assert not hub.repos and not hub.tokens


def test_repositories_that_are_not_for_it(hub: FakeHub, shared_pack: Path) -> None:
    hub.repos["me/public"] = Repo(False)
    with pytest.raises(UsageError, match="exists and is public"):
        push_task(shared_pack, "me/public", private=True)
    hub.repos["me/bert"] = Repo(False, {"main": {"README.md": b"", "model.safetensors": b"", "LICENSE": b""}})
    with pytest.raises(UsageError, match=r"holds `model.safetensors` and no pack"):
        push_task(shared_pack, "me/bert")
    hub.repos["me/new"] = Repo(False, {"main": {"README.md": b"", "LICENSE.txt": b"", ".gitattributes": b""}})
    push_task(shared_pack, "me/new")
    assert [repo.commits for repo in hub.repos.values()] == [0, 0, 1]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: f.pop(CARD), "me/pets is not a task pack: it has no task.json"),
        (lambda f: f.pop(TENSORS), "it has no task.safetensors"),
        (lambda f: f.update({CARD: b"[]"}), r"me/pets.task\.json is not a vtk card"),
        (lambda f: f.update({HASHES: b"{}"}), "different bases"),
        (lambda f: f.update({TENSORS: b"\x80\x04."}), "safetensors"),
        (lambda f: f.update({TENSORS: f[TENSORS][:-9]}), "safetensors"),
        (lambda f: f.update({BUNDLED: f[TENSORS]}), "is absent"),
        (lambda f: f.update({CARD: f[CARD].replace(b'"trained": [', b'"trained": ["norm.weight",')}), "lacks `norm"),
    ],
    ids=["no-card", "no-tensors", "other-json", "other-base", "pickle", "cut", "wrong-bundle", "untrained"],
)
def test_what_is_no_pack_is_not_kept(
    hub: FakeHub, shared_pack: Path, tmp_path: Path, spoil: Callable[[dict[str, bytes]], Any], message: str
) -> None:
    push_task(shared_pack, "me/pets")
    spoil(hub.files("me/pets"))
    kept = shutil.copytree(shared_pack, tmp_path / "kept")
    with pytest.raises(DataError, match=message) as failure:
        pull_task("me/pets", kept, overwrite=True)
    assert "\n" not in str(failure.value) and "download" not in str(failure.value)
    assert (kept / TENSORS).read_bytes() == (shared_pack / TENSORS).read_bytes()
    assert not [p for p in tmp_path.iterdir() if ".tmp-" in p.name]


def test_nothing_but_a_pack_is_fetched(hub: FakeHub, shared_pack: Path, tmp_path: Path) -> None:
    push_task(shared_pack, "me/pets")
    hub.files("me/pets").update({"model.pth": b"", "run.py": b"", f"sub/{CARD}": b""})
    pull_task("me/pets", tmp_path / "here")
    assert {str(p.relative_to(tmp_path / "here")) for p in (tmp_path / "here").rglob("*")} == OWN


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (
            refusal(401, said="Invalid credentials in Authorization header"),
            DataError,
            r"requires a login \(401\); log in",
        ),
        (refusal(401), DataError, "no model repository me/pets that you can read"),
        (refusal(403, said="Forbidden: no write"), DataError, r"has no permission for this on me/pets \(403\)"),
        (refusal(403, "GatedRepo"), DataError, "me/pets is gated: ask for access"),
        (refusal(404, "RepoNotFound"), DataError, "no model repository me/pets that you can read"),
        (refusal(404, "RevisionNotFound"), DataError, "no revision `v2`"),
        (refusal(429, said="Too many"), DataError, r"\(429\): Too many"),
        (refusal(500), DataError, r"the hub refused me/pets \(500\)"),
    ],
)
def test_refusals_of_the_hub(
    hub: FakeHub, shared_pack: Path, tmp_path: Path, failure: Any, kind: type[Exception], message: str
) -> None:
    hub.failure = failure
    for call in (
        lambda: push_task(shared_pack, "me/pets", revision="v2"),
        lambda: pull_task("me/pets", tmp_path / "here", revision="v2"),
    ):
        with pytest.raises(kind, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "here").exists()


def test_faults_that_are_not_the_hubs_keep_their_traceback(hub: FakeHub, tmp_path: Path) -> None:
    hub.failure = raising(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        pull_task("me/pets", tmp_path / "here")
    hub.failure = raising(ValueError("Invalid metadata in README.md.\n- license is wrong"))
    with pytest.raises(DataError, match=r"refused me/pets: Invalid metadata in README.md. - license is wrong"):
        pull_task("me/pets", tmp_path / "here")


def test_no_network(shared_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client, which nothing here answers."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as taken:  # its port is bound, and refuses
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(UnavailableError, match="cannot be reached"):
            push_task(shared_pack, "me/pets", token="x")
        with pytest.raises(UnavailableError, match="cannot be reached"):
            pull_task("me/pets", tmp_path / "here")
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)

    def no_address(*_: object, **__: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    with pytest.raises(UnavailableError, match="its name has no address here"):
        pull_task("me/pets", tmp_path / "here")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UnavailableError, match="HF_HUB_OFFLINE is set"):
        push_task(shared_pack, "me/pets")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnavailableError, match="pip install huggingface_hub"):
        pull_task("me/pets", tmp_path / "here")


def test_int8_and_half_precision_bases(hub: FakeHub, make_pack: Make, base_file: Path, tmp_path: Path) -> None:
    save_file({k: v.half() for k, v in load_file(base_file).items()}, base_file)
    bundle_task(make_pack(dtype="int8"), tmp_path / "bundle")
    base_file.unlink()
    push_task(tmp_path / "bundle", "me/pets")
    pull_task("me/pets", tmp_path / "here")
    assert torch.equal(load_task(tmp_path / "here").model.head.weight, load_task(tmp_path / "bundle").model.head.weight)
