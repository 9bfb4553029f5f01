"""Attention of a few queries without keys and values, against attention written out in fp64."""

import pytest
import torch
from torch import Tensor

from vtk.fused.attention_stage import few_queries


def written_out(q: Tensor, h: Tensor, w_k: Tensor, b_k: Tensor, w_v: Tensor, b_v: Tensor, head_dim: int) -> Tensor:
    k, v = h @ w_k.T + b_k, h @ w_v.T + b_v
    heads = []
    for first in range(0, q.shape[2], head_dim):
        part = slice(first, first + head_dim)
        heads.append(torch.softmax(q[..., part] @ k[..., part].mT, -1) @ v[..., part])
    return torch.cat(heads, -1)


@pytest.mark.parametrize(("batch", "queries", "tokens"), [(1, 1, 1), (1, 1, 197), (3, 1, 17), (2, 5, 33)])
@pytest.mark.parametrize(("heads", "head_dim", "channels"), [(1, 8, 8), (3, 16, 40), (6, 64, 192)])
def test_equals_attention(batch: int, queries: int, tokens: int, heads: int, head_dim: int, channels: int) -> None:
    generator = torch.Generator().manual_seed(tokens + heads)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    width = heads * head_dim
    q, h = draw(batch, queries, width), draw(batch, tokens, channels)
    w_k, w_v, b_k, b_v = draw(width, channels) / 8, draw(width, channels), draw(width), draw(width)
    expected = written_out(q, h, w_k, b_k, w_v, b_v, head_dim)
    found = few_queries(q, h, w_k, w_v, b_v, head_dim)
    assert found.shape == (batch, queries, width)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    single = few_queries(*(t.float() for t in (q, h, w_k, w_v, b_v)), head_dim)
    torch.testing.assert_close(single.double(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
