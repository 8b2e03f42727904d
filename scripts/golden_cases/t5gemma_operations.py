"""Operations of T5Gemma and T5Gemma 2, computed by transformers' own functions in float64, with torch's gradients.

`t5gemma.safetensors`, every tensor in float64:
  `rope.NAME.x`, `.y`, `.dy`, `.dx`: rotary positions of (B, T, H K); a name is `BASE-FACTOR`;
  `norm.x`, `.weight`, `.y`, `.dy`, `.dx`, `.dweight`: a norm of heads with `1 + weight`;
  `CASE.q`, `.k`, `.v`, `.dout`, `.out`, `.dq`, `.dk`, `.dv`: attention, (B, T, H K) and (B, S, KH K); merged attention has
  `.source_k` and so on besides.
Lengths, windows and scales are those of `CASES`; the Rust test names them again.
"""

import torch
from safetensors.torch import save_file
from transformers import T5Gemma2TextConfig
from transformers.models.t5gemma2 import modeling_t5gemma2 as gemma

B, T, S, H, KH, K = 2, 9, 6, 4, 2, 8
# Every query sees a key in every case.
LENGTHS, SOURCE_LENGTHS = [9, 8], [6, 3]

# name: window, is causal, scale, cap, is merged
CASES = {
    "encoder": (5, False, 0.25, None, False),
    "even": (4, False, 0.25, None, False),
    "capped": (None, True, 0.3, 1.5, False),
    "merged": (3, True, 0.25, None, True),
}


def normal(generator, *shape):
    return torch.empty(shape, dtype=torch.float64).normal_(generator=generator).requires_grad_()


def by_heads(x):
    return x.view(B, x.shape[1], -1, K).transpose(1, 2)


def own_mask(window, causal):
    """True where a query sees a key, (B, 1, T, T)."""
    valid = torch.arange(T)[None, :] < torch.tensor(LENGTHS)[:, None]
    i, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
    seen = i >= j if causal else torch.ones(T, T, dtype=torch.bool)
    if window is not None:
        seen = seen & gemma.sliding_window_mask_function(window, is_causal=causal)(0, 0, i, j)
    return valid[:, None, None, :] & seen[None, None]


def attend(window, causal, scale, cap, merged, q, k, v, source_k, source_v):
    mask = own_mask(window, causal)
    keys, values = by_heads(k), by_heads(v)
    if merged:
        valid = torch.arange(S)[None, :] < torch.tensor(SOURCE_LENGTHS)[:, None]
        mask = torch.cat([mask, valid[:, None, None, :].expand(B, 1, T, S)], dim=3)
        keys, values = torch.cat([keys, by_heads(source_k)], dim=2), torch.cat([values, by_heads(source_v)], dim=2)

    class Module:
        num_key_value_groups = H // KH
        training = False

    # transformers takes the softmax in float32; float64 here, as the rest.
    softmax = torch.nn.functional.softmax
    torch.nn.functional.softmax = lambda x, dim, dtype: softmax(x, dim=dim)
    hidden = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    try:
        out, _ = gemma.eager_attention_forward(
            Module(), by_heads(q), keys, values, hidden, scaling=scale, softcap=cap
        )
    finally:
        torch.nn.functional.softmax = softmax
    return out.reshape(B, T, H * K)


def write(folder):
    generator = torch.Generator().manual_seed(60)
    tensors = {}
    for base, factor in [(1e4, 1.0), (1e6, 1.0), (1e6, 8.0)]:
        parameters = {"rope_theta": base, "rope_type": "default" if factor == 1.0 else "linear", "factor": factor}
        if factor == 1.0:
            del parameters["factor"]
        config = T5Gemma2TextConfig(head_dim=K, num_attention_heads=H, hidden_size=H * K, num_hidden_layers=6)
        config.rope_parameters = {"full_attention": parameters, "sliding_attention": dict(parameters)}
        rotary = gemma.T5Gemma2RotaryEmbedding(config)
        x, dy = normal(generator, B, T, H * K), normal(generator, B, T, H * K)
        cos, sin = rotary(x, torch.arange(T)[None], "full_attention")
        y, _ = gemma.apply_rotary_pos_emb(by_heads(x), by_heads(x), cos, sin)
        y = y.transpose(1, 2).reshape(B, T, H * K)
        y.backward(dy)
        name = f"rope.{base:.0f}-{factor:.0f}"
        tensors |= {f"{name}.x": x, f"{name}.y": y, f"{name}.dy": dy, f"{name}.dx": x.grad}

    norm = gemma.T5Gemma2RMSNorm(K).double()
    norm.weight.data = normal(generator, K).data
    # In float64 `float()` would round.
    forward = lambda x: norm._norm(x) * (1.0 + norm.weight)
    x, dy = normal(generator, B * T * H, K), normal(generator, B * T * H, K)
    y = forward(x)
    assert torch.allclose(y.float(), norm(x).float(), atol=1e-5)
    y.backward(dy)
    of = {"x": x, "weight": norm.weight, "y": y, "dy": dy, "dx": x.grad, "dweight": norm.weight.grad}
    tensors |= {f"norm.{name}": tensor for name, tensor in of.items()}

    for name, options in CASES.items():
        q, dout = normal(generator, B, T, H * K), normal(generator, B, T, H * K)
        k, v = normal(generator, B, T, KH * K), normal(generator, B, T, KH * K)
        source_k, source_v = normal(generator, B, S, KH * K), normal(generator, B, S, KH * K)
        out = attend(*options, q, k, v, source_k, source_v)
        out.backward(dout)
        of = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "dq": q.grad, "dk": k.grad, "dv": v.grad}
        if options[-1]:
            of |= {"source_k": source_k, "source_v": source_v}
            of |= {"source_dk": source_k.grad, "source_dv": source_v.grad}
        assert all(tensor.isfinite().all() for tensor in of.values())
        tensors |= {f"{name}.{key}": tensor for key, tensor in of.items()}
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "t5gemma.safetensors")
