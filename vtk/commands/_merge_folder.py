"""``vtk tasks merge --format timm|hf``: a merged model as a folder for other libraries."""

from vtk import console
from vtk.packs.config import MergeConfig


def run(config: MergeConfig) -> int:
    """Write the folder and print how it is loaded."""
    from vtk.packs.merged_folder import merge_folder

    assert config.format != "file"
    task, form = merge_folder(config.pack, config.out, config.format, base=config.base, overwrite=config.overwrite)
    files = {file.name: file.stat().st_size for file in sorted(config.out.iterdir())}
    console.say(f"wrote {config.out} ({console.size(sum(files.values()))}); its README.md shows how to use it")
    if form.reason:
        console.say(f"no class of transformers' own ({form.reason}), so it is in timm's form, which transformers wraps")
    loads = []
    if not form.native:
        loads.append(f'timm.create_model("local-dir:{config.out}", pretrained=True)')
    loads.append(f'AutoModelForImageClassification.from_pretrained("{config.out}")')
    console.say("load it with:", *loads)
    if form.verified:
        console.say(f"loaded here by {' and '.join(form.verified)}: logits agree")
    if config.format == "hf" and "transformers" not in form.verified:
        console.warn("transformers is not installed here, so whether it loads the folder was not tried")
    console.emit_json({
        "path": str(config.out), "format": config.format, "native": form.native, "reason": form.reason,
        "verified": list(form.verified), "files": files, "classes": list(task.card.classes),
    })  # fmt: skip
    return 0
