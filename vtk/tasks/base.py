"""Finding the base of a pack, and keeping a copy of it: ``$VTK_HOME/bases/<id>.safetensors``."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file

from vtk import files
from vtk.card import Card
from vtk.errors import BaseError, DataError, UsageError
from vtk.models.base import Base
from vtk.models.weights import GRID, hub_base, read_base

Read = Callable[[], Base]


def stored_base(base_id: str) -> Path:
    """Return where the copy of a base lives. This is not a cache: packs need it."""
    return files.home() / "bases" / f"{base_id}.safetensors"


def store_base(base: Base) -> Path:
    """Keep a copy of a base for the packs that need it, at its stored dtype; one copy per id.

    Raises:
        DataError: the folder cannot be written.
    """
    path = stored_base(base.ref.id)
    if not path.exists():
        tensors = {k: v.detach().cpu().contiguous() for k, v in base.tensors.items()}
        metadata = {"format": "pt", "vtk_base": base.ref.id}
        if base.grid is not None:
            metadata[GRID] = f"{base.grid[0]}x{base.grid[1]}"
        with files.replace_file(path) as tmp:
            save_file(tensors, tmp, metadata=metadata)
    return path


def find_base(card: Card, hashes: Mapping[str, str], needed: frozenset[str], given: Path | None = None) -> Base:
    """Find base weights that fit a pack: ``given``, else the recorded path, ``$VTK_HOME``, the hub.

    Args:
        card: of the pack.
        hashes: sha256 of every base tensor when the pack was trained.
        needed: base keys the pack does not carry itself.
        given: ``--base``; if it does not fit, nothing else is tried.

    Raises:
        BaseError: none fits; the message names every place and what was wrong there.
    """
    if card.base is None:
        raise BaseError("the pack's card names no base; it cannot be completed")
    tried = []
    for place, read in _places(card, given):
        try:
            base = read()
        except (DataError, UsageError) as error:
            where, _, reason = str(error).partition(": ")
            tried.append(f"{place}: {reason if where in place else error}")
            continue
        wrong = next((k for k in sorted(needed) if base.hashes.get(k) != hashes.get(k) or k not in hashes), None)
        if wrong is None:
            return base
        differs = f"`{wrong}` differs" if wrong in base.hashes else f"`{wrong}` is absent"
        tried.append(f"{place}: is base {base.ref.id[:12]}, the pack needs {card.base.id[:12]} ({differs})")
    if given is not None:
        raise BaseError(f"`--base` {tried[0]}")
    raise BaseError(f"no base {card.base.id[:12]} for this pack; tried {'; '.join(tried)}; give --base FILE")


def _places(card: Card, given: Path | None) -> Iterator[tuple[str, Read]]:
    assert card.base is not None
    name, kwargs, source = card.model.name, card.model.kwargs, card.base.source

    def file(path: Path) -> Read:
        return lambda: read_base(name, kwargs, path)[0]

    if given is not None:
        yield str(given), file(given)
        return
    recorded = None if source.startswith(("hub:", "random:")) else Path(source)
    if recorded is not None:
        yield f"the recorded path {recorded}", file(recorded)
    copy = stored_base(card.base.id)
    yield f"$VTK_HOME ({copy})", file(copy)
    if source.startswith("hub:"):
        yield "the hub", lambda: hub_base(name, kwargs)
    else:
        yield "the hub", _not_on_hub


def _not_on_hub() -> Base:
    raise BaseError("these weights did not come from there")
