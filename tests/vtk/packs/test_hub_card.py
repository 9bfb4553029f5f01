"""Model cards: text nobody can trust stays text, and nothing says where on a disk things lay."""

import dataclasses
import json
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from vtk.card import BaseRef, Card, InputSpec, ModelSpec, Transform
from vtk.packs.hub_card import base_model, front_matter, public_card, public_command, readme

NASTY = (
    "plain", "a|b", "`code`", "```\n# heading", "````", "---", "--- \nlicense: mit\n---", "a: [b", "'\"", "&lt;",
    "<script>alert(1)</script>", "![x](https://evil.example/x.png)", "[x](https://evil.example)", "*b*", "$x$",
    "cr\rlf\n", "\u202eesrever", "\u2028line", "\x1b[31m", "\udcff", "Füße 猫", " ", "~~~", "    indented",
)  # fmt: skip
BASE = BaseRef("hub:vit_small_patch16_224", "a" * 64)


def make_card(**options: Any) -> Card:
    values: dict[str, Any] = {
        "model": ModelSpec("vit_small_patch16_224"), "input": InputSpec(224, 192), "classes": ("cat", "dog"),
        "base": BASE, "metrics": {"top1": 0.9, "top5": 0.99, "loss": 0.31, "count": 50}, "versions": {"vtk": "1"},
    }  # fmt: skip
    return Card(**values | options)


def page(card: Card, **options: Any) -> tuple[dict[str, Any], str]:
    """Return the front matter as a YAML reader has it, and the rest."""
    text = readme(card, "me/pets", **{"tensors_bytes": 1000, "base_bytes": None} | options)
    text.encode()
    start, head, body = text.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(head), body


@pytest.mark.parametrize("license", [None, "apache-2.0"])
def test_front_matter_is_what_was_meant_whatever_the_card_holds(license: str | None) -> None:
    card = make_card(
        classes=NASTY, model=ModelSpec("x\n---\nlicense: mit", {"a": "`|\n---\n"}), command="x '\n---\nlicense: mit'",
        versions={"vtk\n---": "<b>"}, base=BaseRef("`\n---\n<i>", "b" * 64), transforms=(Transform("<u>", {"`": "`"}),),
    )  # fmt: skip
    head, body = page(card, license=license)
    assert head == front_matter(card, "pets", license)
    assert head.get("license") == license and "base_model" not in head
    assert "\n---" not in body
    results = ModelCard(readme(card, "me/pets", tensors_bytes=1, base_bytes=None, license=license)).data.eval_results
    assert [(r.metric_type, r.metric_value, r.task_type) for r in results] == [
        ("accuracy", 0.9, "image-classification"), ("top_5_accuracy", 0.99, "image-classification"),
    ]  # fmt: skip


def test_untrusted_text_is_shown_as_code_only() -> None:
    card = make_card(
        classes=NASTY, model=ModelSpec("<m>![x](https://evil.example)"), command="``` <c>\n# h",
        versions={"<v>": "[l](https://evil.example)"}, base=BaseRef("``<b>", "[i](https://evil.example)"),
        transforms=(Transform("*o*", {"k": "<a>|"}),),
    )  # fmt: skip
    _, body = page(card)
    tokens = MarkdownIt("commonmark").enable("table").parse(body)
    kinds = {t.type for t in tokens} | {child.type for t in tokens for child in t.children or ()}
    assert not kinds & {"html_block", "html_inline", "image", "link_open", "table_open", "em_open", "hr"}
    headings = [tokens[i + 1].content for i, t in enumerate(tokens) if t.type == "heading_open"]
    assert headings == [
        "pets", "Use", "Model", "Preprocessing", "Output", "Metrics", f"{len(NASTY)} classes", "How it was made",
    ]  # fmt: skip
    shown = next(t.content for t in tokens if t.type == "fence" and t.content.startswith("0 ")).splitlines()
    assert len(shown) == len(NASTY)
    for i, line in enumerate(shown):
        assert line.isprintable() and line.startswith(f"{i} ")
    # what JSON cannot hold in one printable line is escaped further; the rest reads back as it was
    plain = [name for name in NASTY if name.replace("\n", "").replace("\r", "").isprintable()]
    assert [json.loads(shown[NASTY.index(name)].split(" ", 1)[1]) for name in plain] == plain
    assert {shown[NASTY.index(name)].split(" ", 1)[1] for name in set(NASTY) - set(plain)} == {
        r'"\u202eesrever"', r'"\u2028line"', r'"\u001b[31m"', r'"\udcff"',
    }  # fmt: skip


def test_long_lists_are_folded_but_whole_and_bad_numbers_left_out() -> None:
    card = make_card(classes=tuple(f"c{i}" for i in range(700)), metrics={"top1": float("nan"), "count": 3})
    head, body = page(card)
    assert "model-index" not in head
    assert '698 "c698"\n699 "c699"\n```\n\n</details>' in body and "<summary>Show all 700</summary>" in body
    assert "top-1" not in body and "- images: 3\n" in body


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hub:vit_small_patch16_224", "timm/vit_small_patch16_224.augreg_in21k_ft_in1k"),
        ("hub:vit_tiny_patch16_224.augreg_in21k", "timm/vit_tiny_patch16_224.augreg_in21k"),
        ("hub:hf-hub:me/vit@v1", "me/vit"),
        ("hub:hf-hub:me/vit\nlicense: mit", None),
        ("hub:no_such_model", None),
        ("hub:vit_small_patch16_224.no_such_tag", None),
        ("vit.safetensors", None),
        ("random:0", None),
    ],
)
def test_the_base_is_named_where_it_is_on_the_hub(source: str, expected: str | None) -> None:
    card = make_card(base=BaseRef(source, "c"))
    assert base_model(card) == expected
    assert page(card)[0].get("base_model") == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("vtk finetune data/pets --lr 3e-5", "vtk finetune data/pets --lr 3e-5"),
        ("vtk finetune /home/eve/pets --epochs 3", "vtk finetune PATH --epochs 3"),
        ("vtk finetune '/home/eve/my pets/x'", "vtk finetune PATH"),
        ("vtk finetune d --weights /home/eve/vit.safetensors", "vtk finetune d --weights vit.safetensors"),
        ("vtk finetune d --weights=/home/eve/vit.pth", "vtk finetune d --weights=vit.pth"),
        (
            "vtk finetune --task pets=/home/eve/pets@384 --task a=b@48",
            "vtk finetune --task pets=PATH@384 --task a=b@48",
        ),
        ("vtk finetune --task a=/home/eve/a,b=/home/eve/b", "vtk finetune --task a=PATH"),
        (r"vtk finetune 'C:\Users\eve\pets' --weights 'D:\eve\v.pt'", "vtk finetune PATH --weights v.pt"),
        (r"vtk finetune '\\server\eve'", "vtk finetune PATH"),
        ("vtk finetune ../eve ~ ~eve ~/eve .. /", "vtk finetune PATH PATH PATH PATH PATH PATH"),
        ("vtk finetune file:///home/eve https://eve:secret@host/x", "vtk finetune PATH https:PATH"),
        ("vtk finetune '/home/eve", ""),
        ("", ""),
    ],
)
def test_commands_without_private_paths(command: str, expected: str) -> None:
    assert public_command(command) == expected
    assert public_command(expected) == expected


def test_a_public_card_keeps_what_the_model_is() -> None:
    card = make_card(
        base=BaseRef("/home/eve/vit.safetensors", "d" * 64), command="vtk finetune /home/eve/pets",
        data={"layout": "split", "seed": 1, "where": "/home/eve"}, pack={"trained": ["head.weight"], "dtype": "fp32"},
        metrics={"top1": 0.5, "notes": [{"file": "/home/eve/log"}]}, classes=("/", "a/b", "~"),
    )  # fmt: skip
    public = public_card(card)
    assert "eve" not in public.to_json()
    assert public.base == BaseRef("vit.safetensors", "d" * 64)
    same = dataclasses.replace(
        public, base=card.base, command=card.command, data=card.data, metrics=card.metrics
    )  # fmt: skip
    assert same == card
    assert public.metrics["top1"] == 0.5 and public.data["layout"] == "split"
    assert public_card(dataclasses.replace(card, base=BASE)).base == BASE
    assert public_card(public) == public
    assert Card.from_json(public.to_json(), "here") == public


def test_the_page_says_where_the_base_is() -> None:
    _, body = page(make_card(), base_bytes=2_000_000)
    assert "2.0 MB" in body and "nothing else is needed" in body
    assert "downloaded on first use" in page(make_card())[1]
    _, body = page(make_card(base=BaseRef("vit.safetensors", "e")), revision="two words")
    assert "`--base FILE`" in body and "`vit.safetensors`" in body
    assert "vtk tasks pull me/pets --revision 'two words' --out tasks/pets" in body
