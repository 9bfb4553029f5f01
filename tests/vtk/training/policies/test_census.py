import json

import pytest

from vtk.training.policies import policy
from vtk.training.policies.census import take_census


@pytest.mark.parametrize("name", ["attn", "full", "head", "ffn"])
def test_counts_add_up_to_the_model(tiny, name):
    model = tiny()
    census = take_census(model, policy.select(model, name), name)
    assert census.total == sum(p.numel() for p in model.parameters())
    policy.apply(model, census.names)
    assert census.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(r.trained_tensors + r.frozen_tensors for r in census.rows) == len(list(model.parameters()))
    json.dumps(census.to_dict())


def test_groups_of_a_small_vit_by_hand(tiny):
    model = tiny()
    rows = {r.group: (r.trained, r.frozen) for r in take_census(model, policy.select(model, "attn"), "attn").rows}
    width, hidden = 32, 128
    assert rows == {
        "attention": (2 * (width * 3 * width + 3 * width + width * width + width), 0),
        "head": (width * 3 + 3, 0),
        "position": (5 * width, 0),
        "stem": (0, 3 * 16 * 16 * width + width),
        "ffn": (0, 2 * (2 * width * hidden + hidden + width)),
        "norm": (0, 5 * 2 * width),
        "other": (0, width),
    }


def test_the_table_says_what_is_trained(tiny, capsys):
    model = tiny()
    take_census(model, policy.select(model, "attn"), "attn").print()
    text = capsys.readouterr().out
    assert "--train attn" in text and "FFN" in text and "position table" in text
