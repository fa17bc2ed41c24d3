"""The CPU attention of the unrolled draft gives what sdpa gives with speculators' own mask."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_equals_sdpa_with_the_dense_mask(blocks):
    import torch
    from speculators.models.eagle3.attention import (
        create_combined_mask_mod,
        extend_dense_mask_for_draft_tokens,
    )
    from torch.nn.attention.flex_attention import create_mask

    from kimi_eagle.training.attention import unrolled_attention

    heads, kv_heads, length, size = 6, 2, 20, 16
    documents = torch.tensor([0] * 9 + [1] * 7 + [-1] * 4)
    mod = create_combined_mask_mod(documents, length)
    mask = create_mask(mod, B=None, H=None, Q_LEN=length, KV_LEN=length, device="cpu")
    for _ in range(blocks - 1):
        mask = extend_dense_mask_for_draft_tokens(mask, length)

    torch.manual_seed(0)
    query = torch.randn(1, heads, length, size, requires_grad=True)
    key = torch.randn(1, kv_heads, blocks * length, size, requires_grad=True)
    value = torch.randn(1, kv_heads, blocks * length, size, requires_grad=True)
    weight = torch.randn(1, length, heads, size)

    want = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    got, _ = unrolled_attention(None, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

    want_grads = torch.autograd.grad((want * weight).sum(), (query, key, value))
    got_grads = torch.autograd.grad((got * weight).sum(), (query, key, value))
    for a, b in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
