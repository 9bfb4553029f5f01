"""``vtk tasks compress``, ``calibrate``, ``bundle``, ``convert``, ``to-peft``, ``from-peft``: conversions of packs."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from vtk import console
from vtk.commands import _cli
from vtk.errors import DataError
from vtk.packs.config import BundleConfig, CalibrateConfig, CompressConfig, ConvertConfig, FromPeftConfig, ToPeftConfig

HELP = {
    "compress": "store a pack's changes as low-rank factors of about a megabyte; a lossy copy, measured",
    "calibrate": "fit the temperature of a pack's probabilities on held-out images; changes its card alone",
    "bundle": "bundle a pack with the base tensors it needs, for a machine without the base",
    "convert": "convert a pack to fp32, bf16 or int8, and report the rounding error",
    "to-peft": "convert to an adapter that timm and PEFT load without this toolkit",
    "from-peft": "convert an adapter of PEFT (LoRA, LN_TUNING, …) to a pack",
}

_COMPRESS = """Store the changes of a pack's matrices as low-rank factors; what is lost is measured and printed.

The changes are cut by singular values. One threshold divides the ranks over all matrices. With --data, training images
weigh the components by the gradients of the logits, and the pack is compared with the full one on held-out images.
--rank auto finds the smallest pack within --max-drop on one half of these, and the other half judges it, with a 95 %
interval. Classifier, biases, norms and prefix tokens stay exact; position tables become factors, too."""


def run(name: str, argv: list[str]) -> int:
    """Run one of the commands of `HELP`."""
    commands = {
        "compress": _compress, "calibrate": _calibrate, "bundle": _bundle,
        "convert": _convert, "to-peft": _to_peft, "from-peft": _from_peft,
    }  # fmt: skip
    return commands[name](argv)


def _compress(argv: list[str]) -> int:
    config = _cli.parse(
        CompressConfig, argv, prog="vtk tasks compress", description=_COMPRESS, positional=("pack",),
        examples=(
            "vtk tasks compress runs/pets/task --data data/pets --out pets-small",
            "vtk tasks compress runs/pets/task --data data/pets --tune 200 --pack-dtype int8 --out pets-small",
            "vtk tasks compress runs/pets/task --rank 16 --out pets-16",
        ),
    )  # fmt: skip
    from vtk.runtime.compression import compress_task

    console.emit_json(compress_task(config).to_dict())
    return 0


def _calibrate(argv: list[str]) -> int:
    config = _cli.parse(
        CalibrateConfig, argv, prog="vtk tasks calibrate", description=HELP["calibrate"], positional=("pack",),
        examples=("vtk tasks calibrate runs/pets/task --data data/pets",),
    )  # fmt: skip
    from vtk.runtime.calibration import calibrate_task

    console.emit_json(calibrate_task(config).to_dict())
    return 0


def _bundle(argv: list[str]) -> int:
    config = _cli.parse(
        BundleConfig, argv, prog="vtk tasks bundle", description=HELP["bundle"], positional=("pack",),
        examples=("vtk tasks bundle runs/pets/task --out pets.vtkbundle",),
    )  # fmt: skip
    from vtk.packs.base_files import BUNDLED
    from vtk.packs.bundle import bundle_task
    from vtk.packs.cards import pack_bytes

    task = bundle_task(config.pack, config.out, base=config.base, overwrite=config.overwrite)
    size, base = pack_bytes(config.out), (config.out / BUNDLED).stat().st_size
    console.say(
        f"wrote {config.out} ({console.size(size)}, {console.size(base)} of it {len(task.needed)} base tensors); "
        "every command takes it as a pack, without --base"
    )
    console.emit_json({
        "path": str(config.out), "bundle_bytes": size, "base_bytes": base, "base_tensors": len(task.needed),
    })  # fmt: skip
    return 0


def _convert(argv: list[str]) -> int:
    config = _cli.parse(
        ConvertConfig, argv, prog="vtk tasks convert", description=HELP["convert"], positional=("pack",),
        examples=("vtk tasks convert runs/pets/task --pack-dtype int8 --out pets-int8",),
    )  # fmt: skip
    from vtk.packs.bundle import convert_task
    from vtk.packs.cards import pack_bytes

    card = convert_task(config.pack, config.out, config.pack_dtype, base=config.base, overwrite=config.overwrite)
    size = pack_bytes(config.out)
    console.say(f"wrote {config.out} ({console.size(size)}, before {console.size(pack_bytes(config.pack))})")
    drift: dict[str, Any] = card.pack.get("drift", {})
    if drift:
        worst = sorted(drift["max_relative"].items(), key=lambda item: -item[1])
        rows = [(name, f"{value:.2e}") for name, value in worst[:5]]
        console.table("largest rounding errors", ("tensor", "largest error / largest value"), rows)
        console.say(
            f"logits of random images: cosine ≥ {drift['logits_cosine']:.7f}, largest error "
            f"{drift['logits_relative']:.1e} of the largest logit; the card's metrics are from before: run `vtk eval`"
        )
    console.emit_json({"path": str(config.out), "pack_bytes": size, "pack_dtype": config.pack_dtype, "drift": drift})
    return 0


def _to_peft(argv: list[str]) -> int:
    config = _cli.parse(
        ToPeftConfig, argv, prog="vtk tasks to-peft", description=HELP["to-peft"], positional=("pack",),
        examples=("vtk tasks to-peft runs/pets/task --out pets-peft",),
    )  # fmt: skip
    from vtk.packs.to_peft import to_peft

    made = to_peft(
        config.pack, config.out, base=config.base, adapter_only=config.adapter_only, overwrite=config.overwrite
    )  # fmt: skip
    apart = console.deviation("the pack's", made.max_difference)
    whole = [name for name in made.modules if name not in made.ranks]
    with_factors = len(made.ranks) or len(whole)
    console.say(
        f"wrote {config.out}: {made.tuner} adapter {console.size(made.adapter_bytes)} for "
        f"{with_factors} module{'s' * (with_factors != 1)}"
        + (f" of rank {_range(made.ranks.values())}" if made.ranks else "")
        + (f", and {_names(whole)} whole" if made.ranks and whole else "")
        + (f", base.safetensors {console.size(made.base_bytes)}" if made.base_bytes else "")
        + f"; its logits {apart}"
    )
    if made.in_base:
        console.say(f"not expressible as an adapter, so stored in base.safetensors: {', '.join(made.in_base)}")
    console.say("in that folder, load it with timm and PEFT:", *made.code.splitlines())
    console.emit_json({
        "path": str(config.out), "tuner": made.tuner, "modules": list(made.modules), "ranks": dict(made.ranks),
        "in_base": list(made.in_base),
        "adapter_bytes": made.adapter_bytes, "base_bytes": made.base_bytes, "max_difference": made.max_difference,
        "code": made.code,
    })  # fmt: skip
    return 0


def _from_peft(argv: list[str]) -> int:
    config = _cli.parse(
        FromPeftConfig, argv, prog="vtk tasks from-peft", description=HELP["from-peft"], positional=("adapter",),
        examples=(
            "vtk tasks from-peft pets-peft --out pets",
            "vtk tasks from-peft lora --base vit.safetensors --model vit_small_patch16_224 --classes cat dog --out new",
        ),
    )  # fmt: skip
    from vtk.models.arguments import parse_model_kwargs
    from vtk.packs.cards import pack_bytes
    from vtk.packs.from_peft import ModelDescription, from_peft

    told = ModelDescription(
        config.card, config.model, parse_model_kwargs(config.model_kwargs), _classes(config.classes), config.img_size
    )  # fmt: skip
    card = from_peft(config.adapter, config.out, base=config.base, described=told, overwrite=config.overwrite)
    size = pack_bytes(config.out)
    console.say(
        f"wrote {config.out} ({console.size(size)}, {len(card.classes)} classes, {len(card.pack['trained'])} tensors "
        "that differ from the base); it has no metrics yet: run `vtk eval`"
    )
    console.emit_json({
        "path": str(config.out), "pack_bytes": size, "classes": list(card.classes), "trained": card.pack["trained"],
    })  # fmt: skip
    return 0


def _names(modules: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in modules[:3])
    return f"{shown} and {len(modules) - 3} more" if len(modules) > 3 else shown


def _range(ranks: Collection[int]) -> str:
    least, most = min(ranks), max(ranks)
    return str(least) if least == most else f"{least}–{most}"


def _classes(words: Sequence[str]) -> tuple[str, ...]:
    """Return class names given as words, or as one text file with a name per line."""
    if len(words) != 1 or not words[0].endswith(".txt"):
        return tuple(words)
    try:
        lines = Path(words[0]).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"`--classes` {words[0]} cannot be read: {error}; give one name per line") from error
    return tuple(line.strip() for line in lines if line.strip())
