"""Pushes packs to the Hugging Face hub in one commit with a model card, and pulls them."""

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vtk import __version__
from vtk.card import Card
from vtk.errors import DataError, UsageError
from vtk.files import replace_dir
from vtk.packs.base_files import BUNDLED, base_keys, bundled_base
from vtk.packs.bundle import PACK_FILES, PACK_MARKS, bundle_task, claim_out
from vtk.packs.cards import CARD, HASHES, TENSORS, find_pack
from vtk.packs.config import FolderFormat
from vtk.packs.factors import read_pack
from vtk.packs.hub_card import LIBRARY, public_card, readme
from vtk.packs.hub_errors import check_online, check_repo_id, client, translate_errors
from vtk.packs.load import base_needs, load_task
from vtk.packs.merged_folder import FOLDER_FILES, Form, write_form
from vtk.packs.pack import update_card

README = "README.md"
OWN_FILES = PACK_FILES | FOLDER_FILES
"""Files beside the README that a push uploads, and deletes if it has them no more."""
# files that a repository may hold without being another model
_NEUTRAL = re.compile(r"\.git\w*|README\.md|LICEN[CS]E(\.\w+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Upload:
    """A finished upload.

    Attributes:
        repo_id: ``USER/NAME``, with the user, also if only a name was given.
        url: its page.
        commit: of the upload.
        files: bytes by name.
        private: only its owners see it.
    """

    repo_id: str
    url: str
    commit: str
    files: dict[str, int]
    private: bool


@dataclass(frozen=True)
class Download:
    """A finished download: the pack's folder, its card, bytes by name."""

    path: Path
    card: Card
    files: dict[str, int]


def push_task(
    path: Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    license: str | None = None,
    with_base: bool = False,
    format: FolderFormat | None = None,
    base: Path | None = None,
    token: str | None = None,
) -> Upload:
    """Upload a pack in one commit; the repository is created if it does not exist.

    Only the files of the pack, with ``format`` those of the merged model, and a ``README.md`` are uploaded, the card
    without private paths. Files of an earlier push that this one lacks are deleted in the same commit.

    Args:
        path: a pack, a bundle, or a run folder (its best pack).
        repo_id: ``USER/NAME``, or ``NAME`` for the user of the token.
        private: make a new repository private. An existing public one is refused, since its files would be public.
        revision: branch to commit to, created if it does not exist.
        license: license identifier for the model card, such as ``apache-2.0``.
        with_base: also upload the base tensors that the pack needs (`vtk.packs.bundle.bundle_task`).
        format: also upload the merged model for timm and transformers (`vtk.packs.merged_folder.merge_folder`).
        base: file with the base weights for ``with_base`` and ``format``; by default they are looked up.
        token: of the hub; by default that of its login or ``HF_TOKEN``.

    Raises:
        UsageError: an invalid name, or the repository holds another model.
        DataError: the pack is damaged, or the hub refused.
        BaseError: no base fits.
        VerificationError: timm or transformers does not load the merged model as it is.
        UnavailableError: the hub cannot be reached.
    """
    check_repo_id(repo_id)
    if license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", license):
        raise UsageError(
            f"`--license` {license!r} is not a license identifier; give one of the hub's, such as apache-2.0"
        )
    with tempfile.TemporaryDirectory(prefix="vtk-push-") as folder:
        copy = Path(folder) / "pack"
        _copy(find_pack(path), copy, with_base=with_base, base=base)
        card = public_card(check_pack(copy))
        form = None if format is None else write_form(copy, card, load_task(copy, base=base).model, format)
        check_online()
        with translate_errors(repo_id, revision):
            return _upload(copy, card, repo_id, form, private=private, revision=revision, license=license, token=token)


def pull_task(
    repo_id: str,
    out: Path | None = None,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    token: str | None = None,
) -> Download:
    """Download a pack or a bundle. Only the files of a pack are fetched, none of which is a pickle.

    Args:
        repo_id: ``USER/NAME``.
        out: folder to write, by default ``tasks/NAME``; it is created after all files were checked.
        revision: branch, tag or commit.
        overwrite: replace an existing pack or bundle.
        token: of the hub; by default that of its login or ``HF_TOKEN``.

    Raises:
        UsageError: an invalid name, or ``out`` exists.
        DataError: there is no such repository, or it holds no valid pack.
        UnavailableError: the hub cannot be reached.
    """
    check_repo_id(repo_id)
    out = Path("tasks") / repo_id.rpartition("/")[2] if out is None else out
    with claim_out(out, PACK_MARKS, overwrite=overwrite):
        check_online()
        with replace_dir(out) as tmp:
            arrived = tmp / "download"
            with translate_errors(repo_id, revision):
                client().snapshot_download(
                    repo_id, revision=revision, local_dir=arrived, allow_patterns=sorted(PACK_FILES), token=token,
                    library_name=LIBRARY, library_version=__version__,
                )  # fmt: skip
            try:
                card = check_pack(arrived)
            except DataError as error:
                raise type(error)(f"{repo_id} is not used: {str(error).replace(str(arrived), repo_id)}") from error
            files = {name: (arrived / name).stat().st_size for name in sorted(PACK_FILES) if (arrived / name).is_file()}
            for name in files:
                (arrived / name).rename(tmp / name)
            shutil.rmtree(arrived)
        return Download(out, card, files)


def check_pack(folder: Path) -> Card:
    """Check a pack as far as possible without its base, and a bundle with its base.

    Raises:
        DataError: a file is absent, damaged or of another pack.
        BaseError: a bundle's base is not the one the pack was trained on.
    """
    for name in (CARD, HASHES, TENSORS):
        file = folder / name
        if not file.is_file() or file.is_symlink():
            raise DataError(f"{folder} is not a task pack: it has no {name}")
    pack = read_pack(folder)
    needed, starts = base_needs(pack, base_keys(pack.card, folder))
    if (folder / BUNDLED).is_file():
        bundled_base(folder, pack.card, pack.hashes, needed, starts)
    return pack.card


def _copy(pack: Path, copy: Path, *, with_base: bool, base: Path | None) -> None:
    """Copy a pack's files, so that a training run may replace the pack during the upload."""
    if with_base:
        bundle_task(pack, copy, base=base)
        return
    copy.mkdir()
    for name in sorted(PACK_FILES):
        if (pack / name).is_file():
            shutil.copyfile(pack / name, copy / name)


def _upload(
    copy: Path, card: Card, repo_id: str, form: Form | None, *, private: bool, revision: str | None,
    license: str | None, token: str | None,
) -> Upload:  # fmt: skip
    hub = client()
    api = hub.HfApi(token=token, library_name=LIBRARY, library_version=__version__)
    url = api.create_repo(repo_id, private=True if private else None, exist_ok=True)
    repo_id = url.repo_id
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    info = api.model_info(repo_id, revision=revision)
    there = {file.rfilename for file in info.siblings or ()}
    if private and not info.private:
        raise UsageError(f"{repo_id} exists and is public; make it private on its page, or leave out --private")
    foreign = sorted(name for name in there if not _NEUTRAL.fullmatch(name))
    if foreign and CARD not in there:
        raise UsageError(f"{repo_id} holds `{foreign[0]}` and no pack; choose another repository name")
    update_card(copy, card)
    base_bytes = (copy / BUNDLED).stat().st_size if (copy / BUNDLED).is_file() else None
    (copy / README).write_text(
        readme(
            card, repo_id, tensors_bytes=(copy / TENSORS).stat().st_size, base_bytes=base_bytes, revision=revision,
            license=license, form=form,
        ),
        encoding="utf-8", newline="\n",
    )  # fmt: skip
    files = {file.name: file.stat().st_size for file in sorted(copy.iterdir())}
    # upload_folder may split an upload into several commits; a reader must never see files of two packs
    operations = [hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(copy / name)) for name in files]
    operations += [hub.CommitOperationDelete(path_in_repo=name) for name in sorted(there & OWN_FILES - files.keys())]
    commit = api.create_commit(
        repo_id, operations, commit_message=f"Task pack of {LIBRARY} {__version__}", revision=revision
    )
    page = f"{url}/tree/{revision}" if revision else str(url)
    return Upload(repo_id, page, commit.oid, files, bool(info.private))
