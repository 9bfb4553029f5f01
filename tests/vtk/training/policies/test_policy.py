"""The tensors of each policy, against lists written by hand from the models' structure."""

import pytest
import timm
import torch
from timm.layers import Attention, Mlp
from torch import nn

from vtk.errors import UsageError
from vtk.training.policies import module_kinds as kinds
from vtk.training.policies import policy


def leaves(*names: str) -> set[str]:
    return {f"{n}.{leaf}" for n in names for leaf in ("weight", "bias")}


def attention(block: str) -> set[str]:
    return leaves(f"{block}.qkv", f"{block}.proj")


def test_attn_is_exactly_qkv_proj_head_and_position(tiny):
    expected = attention("blocks.0.attn") | attention("blocks.1.attn") | leaves("head") | {"pos_embed"}
    assert policy.select(tiny(), "attn") == expected


def test_paper_counts_for_vit_small():
    # code of Touvron et al. 2022: 7,096,320 in attention, 7,556,968 with position table and 1000-class head
    with torch.device("meta"):
        model = timm.create_model("vit_small_patch16_224")
    chosen = policy.select(model, "attn")
    counts = {n: p.numel() for n, p in model.named_parameters() if n in chosen}
    assert len(counts) == 51
    assert sum(counts.values()) == 7_556_968
    assert sum(v for n, v in counts.items() if ".attn." in n) == 7_096_320


@pytest.mark.parametrize(
    ("name", "policies"),
    [
        ("ffn", leaves("blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "blocks.1.mlp.fc1", "blocks.1.mlp.fc2", "head")),
        ("head", leaves("head")),
        (
            "attn+norm",
            attention("blocks.0.attn") | attention("blocks.1.attn") | leaves("head", "norm") | {"pos_embed"}
            | leaves("blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2"),
        ),
    ],
)  # fmt: skip
def test_other_policies(tiny, name, policies):
    assert policy.select(tiny(), name) == policies


def test_full_is_everything(tiny):
    model = tiny()
    assert policy.select(model, "full") == {n for n, _ in model.named_parameters()}


def test_all_parallel_branches(parallel):
    chosen = policy.select(parallel, "attn")
    expected = leaves("head") | {"pos_embed"}
    for block in range(2):
        for branch in range(3):
            expected |= attention(f"blocks.{block}.attns.{branch}.attn")
    assert chosen == expected


def test_deits_second_branch_by_type(tiny):
    # deit calls its second branch attn1, which the substring `.attn.` misses
    model = tiny()
    for block in model.blocks:
        block.attn1, block.mlp1 = Attention(32, num_heads=2, qkv_bias=True), Mlp(32, 64)
    expected = set()
    for block in ("blocks.0", "blocks.1"):
        expected |= attention(f"{block}.attn") | attention(f"{block}.attn1")
    assert policy.select(model, "attn") == expected | leaves("head") | {"pos_embed"}


def test_qk_norms_and_relative_tables_belong_to_attention(tiny):
    chosen = policy.select(tiny(qk_norm=True), "attn")
    assert leaves("blocks.0.attn.q_norm", "blocks.1.attn.k_norm") <= chosen
    relative = timm.create_model("test_vit_relpos", num_classes=3)
    chosen = policy.select(relative, "attn")
    tables = {n for n, _ in relative.named_parameters() if ".rel_pos." in n or n.startswith("shared_rel_pos")}
    assert tables and tables <= chosen


def test_latent_pool_is_attention_but_its_ffn_is_not():
    chosen = policy.select(timm.create_model("test_vit3", num_classes=3), "attn")
    assert leaves("attn_pool.q", "attn_pool.kv", "attn_pool.proj") | {"attn_pool.latent"} <= chosen
    assert not [n for n in chosen if n.startswith(("attn_pool.mlp", "attn_pool.norm"))]
    assert leaves("attn_pool.mlp.fc1") <= policy.select(timm.create_model("test_vit3", num_classes=3), "ffn")


FAMILIES = [
    "deit3_small_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_small_patch16_18x2_224",
    "deit_tiny_distilled_patch16_224", "swin_tiny_patch4_window7_224", "eva02_tiny_patch14_224",
]  # fmt: skip
MORE = [
    "beit_base_patch16_224", "cait_xxs24_224", "caformer_s18", "coat_lite_tiny", "convit_tiny", "crossvit_tiny_240",
    "davit_tiny", "gcvit_xxtiny", "hiera_tiny_224", "levit_128s", "maxvit_tiny_tf_224", "mvitv2_tiny", "nest_tiny",
    "pvt_v2_b0", "samvit_base_patch16", "swinv2_tiny_window8_256", "tiny_vit_5m_224", "twins_pcpvt_small",
    "visformer_tiny", "vit_base_patch16_rope_224", "volo_d1_224", "xcit_nano_12_p16_224",
]  # fmt: skip


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_families_train_attention_and_never_an_ffn(name):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=3)
    chosen = policy.select(model, "attn")
    groups = policy.group_names(model)
    # every attention block has a projection after it, whatever the family calls the rest
    attended = {n.rpartition(".")[0] for n, m in model.named_modules() if isinstance(m, kinds.attention_types())}
    assert attended
    assert {"ffn", "stem", "norm"}.isdisjoint(groups[n] for n in chosen)
    expected = {n for n, _ in model.named_parameters() if n.split(".")[-2:-1] in (["qkv"], ["proj"]) and ".attn." in n}
    assert expected <= chosen
    assert not [n for n in chosen if ".mlp." in n]


def test_resnets_squeeze_excitation_is_not_attention():
    with torch.device("meta"):
        model = timm.create_model("seresnet50", num_classes=3)
    with pytest.raises(UsageError, match="has no attention weights"):
        policy.select(model, "attn")
    assert policy.select(model, "head") == leaves("fc")


def test_a_shared_matrix_is_refused_by_name(tiny):
    from timm.models.vision_transformer import ParallelScalingBlock

    model = tiny(block_fn=ParallelScalingBlock)
    for name in ("attn", "ffn", "attn+norm"):
        with pytest.raises(UsageError, match=r"blocks\.0 is a ParallelScalingBlock, whose `in_proj`"):
            policy.select(model, name)
    assert policy.select(model, "head") == leaves("head")


class HomeMade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.to_qkv = 2, nn.Linear(32, 96)


def test_unknown_attention_is_refused_until_registered(tiny, monkeypatch):
    monkeypatch.setattr(kinds, "_registered", [])
    model = tiny()
    model.blocks[1].attn = HomeMade()
    with pytest.raises(UsageError, match=r"blocks\.1\.attn .*HomeMade.* looks like attention"):
        policy.select(model, "attn")
    kinds.register_attention(HomeMade)
    assert leaves("blocks.1.attn.to_qkv") <= policy.select(model, "attn")


def test_unknown_policy_and_no_head(tiny):
    with pytest.raises(UsageError, match="ia3 is not a policy of this version"):
        policy.select(tiny(), "ia3")
    with pytest.raises(UsageError, match="has no LoRA weights"):
        policy.select(tiny(), "lora")  # nothing has put factors there
    with pytest.raises(UsageError, match="no classifier"):
        policy.select(tiny(num_classes=0), "attn")


def test_every_policy_trains_what_a_transform_created(tiny):
    model = tiny()
    key_map = {n: n for n in model.state_dict()} | {"norm.weight": None, "head.weight": None, "pos_embed": None}
    created = policy.created_names(key_map, model)
    assert created == {"norm.weight"}
    for name in ("attn", "ffn", "head", "full"):
        assert "norm.weight" in policy.select(model, name, created)


def test_frozen_modules_with_buffers_stay_in_eval_mode(tiny):
    model = tiny()
    model.patch_embed.norm = nn.BatchNorm1d(4)
    policy.apply(model, policy.select(model, "attn"))
    for _ in range(2):
        policy.train_mode(model)
        assert not model.patch_embed.norm.training
        assert model.blocks[0].mlp.training and model.training
        model(torch.randn(5, 3, 32, 32))
        model.eval()
    assert float(model.patch_embed.norm.running_mean.abs().sum()) == 0
    assert int(model.patch_embed.norm.num_batches_tracked) == 0
    assert "patch_embed.norm.running_mean" not in policy.live_buffers(model)
    policy.apply(model, policy.select(model, "full"))
    policy.train_mode(model)
    assert model.patch_embed.norm.training
    assert "patch_embed.norm.running_mean" in policy.live_buffers(model)
