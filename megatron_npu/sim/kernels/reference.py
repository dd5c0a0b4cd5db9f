"""Reference implementations of torch_npu's fused ops, registered for DispatchKey.CPU.

The boxed PrivateUse1 kernel (compute.cpp) aliases NPU tensors as CPU tensors and redispatches here, so
torch_npu's own schemas, Python entry points and autograd formulas stay in charge."""
import math
import torch
import torch.nn.functional as F

from megatron_npu.sim.kernels.registry import kernel as ref


# ------------------------------------------------------------------ flash attention
def _to_bnsd(x, layout, n):
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    if layout == "BSH":
        b, s, h = x.shape
        return x.reshape(b, s, n, h // n).transpose(1, 2)
    if layout == "SBH":
        s, b, h = x.shape
        return x.reshape(s, b, n, h // n).permute(1, 2, 0, 3)
    raise RuntimeError(f"The input_layout should be BSH/SBH/BNSD/BSND/TND(case-insensitive), but got {layout}")


def _from_bnsd(x, layout):
    if layout == "BNSD":
        return x.contiguous()
    b, n, s, d = x.shape
    if layout == "BSND":
        return x.transpose(1, 2).contiguous()
    if layout == "BSH":
        return x.transpose(1, 2).reshape(b, s, n * d)
    return x.permute(2, 0, 1, 3).reshape(s, b, n * d)


def _drop(sq, skv, mode, mask, pre, nxt, prefix=None, b=None):
    """True = not attended. Shape broadcastable to [.., sq, skv] or None."""
    if mode in (2, 3, 4, 6):
        if mask is None or tuple(mask.shape[-2:]) not in ((2048, 2048), (3072, 2048)):
            raise RuntimeError(f"simulated NPU: sparse_mode={mode} needs the compressed 2048x2048 atten_mask, got {None if mask is None else tuple(mask.shape)}")
        if mode != 6 and not torch.equal(mask.bool(), torch.ones(2048, 2048, dtype=torch.bool).triu_(1)):
            raise RuntimeError(f"simulated NPU: sparse_mode={mode} needs atten_mask = triu(ones(2048, 2048), 1)")
    i = torch.arange(sq).view(-1, 1); j = torch.arange(skv).view(1, -1); o = skv - sq
    if mode == 0:
        if mask is None:
            return None
        m = mask.bool() if mask.dim() > 2 else mask.bool()[:sq, :skv]
        return m | (j > i + nxt) | (j < i - pre)
    if mode in (1, 5):
        if mask is None:
            raise RuntimeError(f"simulated NPU: sparse_mode={mode} needs a full atten_mask")
        return mask.bool() if mask.dim() > 2 else mask.bool()[:sq, :skv]
    if mode == 2:
        return j > i
    if mode == 3:
        return j > i + o
    if mode == 4:
        return (j > i + o + nxt) | (j < i + o - pre)
    if mode == 6:
        return (j > i + o) & (j >= prefix[b])
    raise NotImplementedError(f"simulated NPU: sparse_mode {mode}")


def _scores(q, k, scale, drop, pse, pse_type=1):
    g = q.shape[1] // k.shape[1]
    s = q.float() @ k.float().repeat_interleave(g, 1).transpose(-1, -2)
    s = (s + pse.float()) * scale if (pse is not None and pse_type == 0) else s * scale + (0 if pse is None else pse.float())
    if drop is not None:
        s = s.masked_fill(drop, float("-inf"))
    return s


def _keep(shape, keep_prob, seed, offset):
    g = torch.Generator().manual_seed((seed * 1000003 + offset) & 0x7fffffffffffffff)
    return torch.rand(shape, generator=g) < keep_prob


def _fa_fwd(q, k, v, scale, drop, pse, keep_prob, seed, offset, pse_type):
    s = _scores(q, k, scale, drop, pse, pse_type)
    mx = s.amax(-1, keepdim=True); mx = torch.where(torch.isinf(mx), torch.zeros_like(mx), mx)
    e = torch.exp(s - mx); sm = e.sum(-1, keepdim=True)
    p = e / torch.where(sm == 0, torch.ones_like(sm), sm)     # fully masked rows give 0
    if keep_prob < 1:
        p = p * _keep(p.shape, keep_prob, seed, offset) / keep_prob
    g = q.shape[1] // k.shape[1]
    return (p @ v.float().repeat_interleave(g, 1)).to(q.dtype), mx.expand(*mx.shape[:-1], 8).contiguous(), sm.expand(*sm.shape[:-1], 8).contiguous()


def _fa_bwd(q, k, v, dy, scale, drop, pse, mx, sm, out, keep_prob, seed, offset, pse_type):
    n, nk = q.shape[1], k.shape[1]; g = n // nk
    s = _scores(q, k, scale, drop, pse, pse_type)
    sm1 = sm[..., :1]
    p = torch.exp(s - mx[..., :1]) / torch.where(sm1 == 0, torch.ones_like(sm1), sm1)
    dy, vf = dy.float(), v.float().repeat_interleave(g, 1)
    dp = dy @ vf.transpose(-1, -2); pd = p
    if keep_prob < 1:
        m = _keep(p.shape, keep_prob, seed, offset) / keep_prob; dp = dp * m; pd = p * m
    dv = pd.transpose(-1, -2) @ dy
    ds = p * (dp - (out.float() * dy).sum(-1, keepdim=True))     # uses the saved attention_in, as the device does
    dq = ds @ k.float().repeat_interleave(g, 1) * scale
    dk = ds.transpose(-1, -2) @ q.float() * scale
    red = lambda x: x.view(x.shape[0], nk, g, *x.shape[2:]).sum(2)
    return dq.to(q.dtype), red(dk).to(k.dtype), red(dv).to(v.dtype), ds * (scale if pse_type == 0 else 1)


def _kv_heads(q, k, layout, n):
    if layout in ("BSH", "SBH"):
        return k.shape[2] // (q.shape[2] // n)
    return k.shape[1] if layout == "BNSD" else k.shape[2] if layout == "BSND" else k.shape[1]


def _check(q, k, v, n, layout, keep_prob, mode, ql, kl):
    if n <= 0:
        raise RuntimeError(f"head_num must > 0, but got {n}")
    for nm, t in (("query", q), ("key", k), ("value", v)):
        if t.dim() not in (3, 4):
            raise RuntimeError(f"The shapes of the input {nm} should be 3 or 4 dimensional, but got {t.dim()}-dimensional")
        if t.dtype not in (torch.float16, torch.bfloat16, torch.float32) or t.dtype != q.dtype:
            raise RuntimeError(f"simulated NPU: {nm} dtype {t.dtype} (query {q.dtype})")
    if not 0 < keep_prob <= 1:
        raise RuntimeError(f"The keep_prob value must be in range of (0, 1], but got {keep_prob}")
    if layout == "TND":
        if not ql or not kl or len(ql) != len(kl):
            raise RuntimeError("the size of actual_seq_qlen and actual_seq_kvlen must be the same and cannot be empty.")
        if ql[-1] != q.shape[0] or kl[-1] != k.shape[0]:
            raise RuntimeError(f"simulated NPU: actual_seq_*len must be cumulative and end at T: {ql[-1]} vs {q.shape[0]}, {kl[-1]} vs {k.shape[0]}")
    heads = {"BNSD": 1, "BSND": 2, "TND": 1}.get(layout)
    if heads is not None and q.shape[heads] != n:
        raise RuntimeError(f"simulated NPU: head_num {n} does not match query {tuple(q.shape)} in {layout}")


def _segments(q, k, v, n, layout, ql, kl):
    """yield (index, q, k, v) in BNSD; one item unless TND."""
    if layout != "TND":
        nk = _kv_heads(q, k, layout, n)
        yield None, _to_bnsd(q, layout, n), _to_bnsd(k, layout, nk), _to_bnsd(v, layout, nk)
        return
    a = c = 0
    for i, (x, y) in enumerate(zip(ql, kl)):
        yield (i, slice(a, x), slice(c, y)), *(t.transpose(0, 1).unsqueeze(0) for t in (q[a:x], k[c:y], v[c:y]))
        a, c = x, y


def _rng(keep_prob, numel):
    if keep_prob >= 1:
        return 0, 0
    g = torch.npu.default_generators[torch.npu.current_device()]
    off = g.get_offset(); g.set_offset(off + 4 * ((numel + 3) // 4))
    return g.initial_seed(), off


def _attention(q, k, v, n, layout, pse, mask, scale, keep_prob, pre, nxt, prefix, ql, kl, mode, seed, offset, pse_type=1, softmax_layout=""):
    layout = layout.upper(); _check(q, k, v, n, layout, keep_prob, mode, ql, kl)
    outs, mxs, sms, numels = [], [], [], 0
    for idx, a, b, c in _segments(q, k, v, n, layout, ql, kl):
        if mode == 6:
            drop = torch.stack([_drop(a.shape[2], b.shape[2], mode, mask, pre, nxt, prefix, x) for x in range(a.shape[0])]).unsqueeze(1)
        else:
            drop = _drop(a.shape[2], b.shape[2], mode, mask, pre, nxt)
        numels += a.shape[0] * n * a.shape[2] * b.shape[2]
        o, mx, sm = _fa_fwd(a, b, c, scale, drop, pse, keep_prob, seed, offset + (idx[0] if idx else 0), pse_type)
        outs.append(o); mxs.append(mx); sms.append(sm)
    if layout == "TND":
        o = torch.cat([x[0].transpose(0, 1) for x in outs]).contiguous()
        f = lambda l: torch.cat([x[0].transpose(0, 1) for x in l]).contiguous()   # [T, N, 8]
        return o, f(mxs), f(sms), numels
    return _from_bnsd(outs[0], layout), mxs[0], sms[0], numels


def _attention_grad(q, k, v, dy, n, layout, pse, mask, mx, sm, out, scale, keep_prob, pre, nxt, prefix, ql, kl, mode, seed, offset, pse_type=1):
    layout = layout.upper(); nk = _kv_heads(q, k, layout, n)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v); dpse = None
    for idx, a, b, c in _segments(q, k, v, n, layout, ql, kl):
        drop = (torch.stack([_drop(a.shape[2], b.shape[2], mode, mask, pre, nxt, prefix, x) for x in range(a.shape[0])]).unsqueeze(1)
                if mode == 6 else _drop(a.shape[2], b.shape[2], mode, mask, pre, nxt))
        if layout == "TND":
            i, sa, sc = idx; t = lambda x: x[sa].transpose(0, 1).unsqueeze(0)
            x, y, z, _ = _fa_bwd(a, b, c, t(dy), scale, drop, pse, t(mx), t(sm), t(out), keep_prob, seed, offset + i, pse_type)
            dq[sa] = x[0].transpose(0, 1); dk[sc] = y[0].transpose(0, 1); dv[sc] = z[0].transpose(0, 1)
        else:
            x, y, z, ds = _fa_bwd(a, b, c, _to_bnsd(dy, layout, n), scale, drop, pse, mx, sm, _to_bnsd(out, layout, n), keep_prob, seed, offset, pse_type)
            dq, dk, dv = _from_bnsd(x, layout), _from_bnsd(y, layout), _from_bnsd(z, layout)
            if pse is not None:
                dpse = ds.sum_to_size(pse.shape).to(pse.dtype)
    return dq, dk, dv, dpse


_I32 = 2147483647


@ref("npu_fusion_attention")
def npu_fusion_attention(query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1., keep_prob=1.,
                         pre_tockens=_I32, next_tockens=_I32, inner_precise=0, prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None,
                         sparse_mode=0, gen_mask_parallel=True, sync=False, softmax_layout="", sink=None, dropout_mask=None, seed=0, offset=0):
    if keep_prob < 1 and not seed:
        seed, offset = _rng(keep_prob, query.numel())
    o, mx, sm, n = _attention(query, key, value, head_num, input_layout, pse, atten_mask, scale, keep_prob, pre_tockens, next_tockens, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode, seed, offset)
    return o, mx, sm, query.new_empty(0), seed, offset, n


@ref("npu_fusion_attention_v2")
def npu_fusion_attention_v2(query, key, value, head_num, input_layout, *, pse=None, padding_mask=None, atten_mask=None, query_rope=None, key_rope=None, scale=1., keep_prob=1.,
                            pre_tokens=_I32, next_tokens=_I32, inner_precise=0, prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True,
                            sync=False, pse_type=1, q_start_idx=None, kv_start_idx=None, softmax_layout="", sink=None, dropout_mask=None, seed=0, offset=0):
    if query_rope is not None or pse_type > 1:
        raise NotImplementedError("simulated NPU: query_rope / pse_type 2, 3")
    if keep_prob < 1 and not seed:
        seed, offset = _rng(keep_prob, query.numel())
    o, mx, sm, n = _attention(query, key, value, head_num, input_layout, pse, atten_mask, scale, keep_prob, pre_tokens, next_tokens, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode, seed, offset, pse_type)
    return o, mx, sm, query.new_empty(0), seed, offset, n


def _cum(x):
    return None if x is None else [int(i) for i in x]


@ref("npu_fusion_attention_v3")
def npu_fusion_attention_v3(query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1., keep_prob=1., pre_tockens=_I32, next_tockens=_I32,
                            inner_precise=0, prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False, softmax_layout="", sink=None):
    seed, offset = _rng(keep_prob, query.numel())
    o, mx, sm, n = _attention(query, key, value, head_num, input_layout, pse, atten_mask, scale, keep_prob, pre_tockens, next_tockens, prefix, _cum(actual_seq_qlen), _cum(actual_seq_kvlen), sparse_mode, seed, offset)
    return o, mx, sm, query.new_empty(0), torch.tensor([seed], dtype=torch.long), torch.tensor([offset], dtype=torch.long)


@ref("npu_fusion_attention_grad")
def npu_fusion_attention_grad(query, key, value, dy, head_num, input_layout, *, pse=None, padding_mask=None, atten_mask=None, softmax_max=None, softmax_sum=None, softmax_in=None, attention_in=None,
                              scale_value=1., keep_prob=1., pre_tockens=_I32, next_tockens=_I32, inner_precise=0, seed=0, offset=0, numels=0, prefix=None, actual_seq_qlen=None,
                              actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False, softmax_layout="", sink=None):
    dq, dk, dv, dpse = _attention_grad(query, key, value, dy, head_num, input_layout, pse, atten_mask, softmax_max, softmax_sum, attention_in, scale_value, keep_prob, pre_tockens, next_tockens, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode, seed, offset)
    e = query.new_empty(0)
    return dq, dk, dv, e if dpse is None else dpse, e.clone()


@ref("npu_fusion_attention_grad_v2")
def npu_fusion_attention_grad_v2(query, key, value, dy, head_num, input_layout, *, pse=None, padding_mask=None, atten_mask=None, softmax_max=None, softmax_sum=None, softmax_in=None, attention_in=None,
                                 query_rope=None, key_rope=None, scale_value=1., keep_prob=1., pre_tokens=_I32, next_tokens=_I32, inner_precise=0, seed=0, offset=0, numels=0, prefix=None,
                                 actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False, pse_type=1, q_start_idx=None, kv_start_idx=None, softmax_layout="", sink=None):
    dq, dk, dv, dpse = _attention_grad(query, key, value, dy, head_num, input_layout, pse, atten_mask, softmax_max, softmax_sum, attention_in, scale_value, keep_prob, pre_tokens, next_tokens, prefix, actual_seq_qlen, actual_seq_kvlen, sparse_mode, seed, offset, pse_type)
    e = query.new_empty(0)
    return dq, dk, dv, e.clone(), e.clone(), e if dpse is None else dpse, e.clone()


@ref("npu_fusion_attention_grad_v3")
def npu_fusion_attention_grad_v3(query, key, value, dy, head_num, input_layout, *, pse=None, padding_mask=None, atten_mask=None, softmax_max=None, softmax_sum=None, softmax_in=None, attention_in=None,
                                 scale_value=1., keep_prob=1., pre_tockens=_I32, next_tockens=_I32, inner_precise=0, seed=None, offset=None, prefix=None, actual_seq_qlen=None,
                                 actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False, softmax_layout="", sink=None):
    s, o = (int(x) if x is not None and x.numel() else 0 for x in (seed, offset))
    dq, dk, dv, dpse = _attention_grad(query, key, value, dy, head_num, input_layout, pse, atten_mask, softmax_max, softmax_sum, attention_in, scale_value, keep_prob, pre_tockens, next_tockens, prefix, _cum(actual_seq_qlen), _cum(actual_seq_kvlen), sparse_mode, s, o)
    e = query.new_empty(0)
    return dq, dk, dv, e if dpse is None else dpse, e.clone()


@ref("npu_ring_attention_update")
def npu_ring_attention_update(o1, m1, s1, o2, m2, s2, *, actual_seq_qlen=None, input_layout="SBH", input_softmax_layout=""):
    m = torch.maximum(m1, m2); a, b = s1 * torch.exp(m1 - m), s2 * torch.exp(m2 - m); s = a + b
    w1, w2 = (a / s)[..., :1], (b / s)[..., :1]
    if input_layout == "SBH":          # softmax stats are [B, N, S, 8]
        B, N, S, _ = w1.shape
        f = lambda w: w.permute(2, 0, 1, 3).expand(S, B, N, o1.shape[2] // N).reshape(o1.shape)
    else:                              # TND: [T, N, 8]
        f = lambda w: w.expand_as(o1)
    return (o1.float() * f(w1) + o2.float() * f(w2)).to(o1.dtype), m, s


# ------------------------------------------------------------------ norms / activations / rope
@ref("npu_rms_norm")
def npu_rms_norm(input, gamma, epsilon=1e-6):
    d = tuple(range(input.dim() - gamma.dim(), input.dim())); x = input.float()
    r = torch.rsqrt(x.pow(2).mean(d, keepdim=True) + epsilon)
    return (x * r * gamma.float()).to(input.dtype), r


@ref("npu_rms_norm_backward")
def npu_rms_norm_backward(dy, input, gamma, rstd):
    d = tuple(range(input.dim() - gamma.dim(), input.dim())); x, g = input.float(), dy.float()
    xh = x * rstd; gg = g * gamma.float()
    dx = (gg - xh * (gg * xh).mean(d, keepdim=True)) * rstd
    return dx.to(input.dtype), (g * xh).sum(tuple(range(input.dim() - gamma.dim()))).reshape(gamma.shape)


@ref("npu_add_rms_norm")
def npu_add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    x = x1 + x2
    y, r = npu_rms_norm(x, gamma, epsilon)
    return y, r, x


@ref("npu_swiglu")
def npu_swiglu(input, dim=-1):
    a, b = input.float().chunk(2, dim)
    return (F.silu(a) * b).to(input.dtype)


@ref("npu_swiglu_backward")
def npu_swiglu_backward(grad_output, input, dim=-1):
    a, b = input.float().chunk(2, dim); g = grad_output.float(); s = torch.sigmoid(a)
    return torch.cat([g * b * s * (1 + a * (1 - s)), g * a * s], dim).to(input.dtype)


def _rot(x, mode):
    if mode == "half":
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _rot_t(x, mode):       # transpose of _rot
    return -_rot(x, mode)


@ref("npu_rotary_mul")
def npu_rotary_mul(input, r1, r2, rotary_mode="half", rotate=None):
    if input.dim() != 4 or r1.dim() != 4 or r2.shape != r1.shape:
        raise RuntimeError(f"simulated NPU: npu_rotary_mul needs 4-d tensors, got {tuple(input.shape)} {tuple(r1.shape)} {tuple(r2.shape)}")
    x = input.float()
    y = x @ rotate.float() if rotate is not None else _rot(x, rotary_mode)
    return (r1.float() * x + r2.float() * y).to(input.dtype)


@ref("npu_rotary_mul_backward")
def npu_rotary_mul_backward(grad, input, r1, r2, rotary_mode="half"):
    g, x = grad.float(), input.float()
    dx = r1.float() * g + _rot_t(r2.float() * g, rotary_mode)
    return dx.to(input.dtype), (g * x).sum_to_size(r1.shape).to(r1.dtype), (g * _rot(x, rotary_mode)).sum_to_size(r2.shape).to(r2.dtype)


@ref("npu_apply_rotary_pos_emb")
def npu_apply_rotary_pos_emb(query, key, cos, sin, layout="BSND", rotary_mode="half"):
    return npu_rotary_mul(query, cos, sin, rotary_mode), npu_rotary_mul(key, cos, sin, rotary_mode)


@ref("npu_scaled_masked_softmax")
def npu_scaled_masked_softmax(x, mask, scale=1, fixed_triu_mask=False):
    if x.dim() != 4 or any(not 32 <= s <= 4096 or s % 32 for s in x.shape[-2:]):
        raise RuntimeError(f"simulated NPU: npu_scaled_masked_softmax needs H, W in [32, 4096] and divisible by 32, got {tuple(x.shape)}")
    m = torch.ones(x.shape[-2:], dtype=torch.bool).triu_(1) if fixed_triu_mask else mask.bool()
    return torch.softmax((x.float() * float(scale)).masked_fill(m, -10000.0), -1).to(x.dtype)


@ref("npu_scaled_masked_softmax_backward")
def npu_scaled_masked_softmax_backward(y_grad, y, mask, scale, fixed_triu_mask):
    g, p = y_grad.float(), y.float()
    m = torch.ones(y.shape[-2:], dtype=torch.bool).triu_(1) if fixed_triu_mask else mask.bool()
    return ((g - (g * p).sum(-1, keepdim=True)) * p * float(scale)).masked_fill(m, 0).to(y_grad.dtype)


@ref("npu_fast_gelu", "fast_gelu")
def npu_fast_gelu(input):
    x = input.float()
    return (x * torch.sigmoid(1.702 * x)).to(input.dtype)


@ref("npu_fast_gelu_backward")
def npu_fast_gelu_backward(grad, input):
    x = input.float(); s = torch.sigmoid(1.702 * x)
    return (grad.float() * (s + 1.702 * x * s * (1 - s))).to(input.dtype)


@ref("npu_gelu")
def npu_gelu(input, *, approximate="none"):
    return F.gelu(input, approximate=approximate)


@ref("npu_gelu_backward")
def npu_gelu_backward(grad_output, input, *, approximate="none"):
    return torch.ops.aten.gelu_backward(grad_output, input, approximate=approximate)


@ref("npu_silu")
def npu_silu(input):
    return F.silu(input)


@ref("npu_silu_backward")
def npu_silu_backward(grad_output, x0, x1):
    return torch.ops.aten.silu_backward(grad_output, x0)


# ------------------------------------------------------------------ dropout, dtype / format casts, misc
@ref("_npu_dropout")
def _npu_dropout(input, p):
    m = (torch.rand(input.shape) >= p)
    return input * m / (1 - p if p < 1 else 1), m.to(torch.uint8)


@ref("npu_dropout_backward")
def npu_dropout_backward(grad_output, mask, p):
    return grad_output * mask.to(grad_output.dtype) / (1 - p if p < 1 else 1)


@ref("_npu_dtype_cast", "npu_dtype_cast")
def _npu_dtype_cast(input, dtype, input_dtype=None):
    return input.to(dtype, copy=True)


@ref("_npu_dtype_cast_backward", "npu_dtype_cast_backward")
def _npu_dtype_cast_backward(grad, dtype, grad_dtype=None, input_dtype=None):
    return grad.to(dtype, copy=True)


@ref("npu_format_cast", "_npu_format_cast")      # private formats are not simulated: data stays ND
def npu_format_cast(input, acl_format, *, customize_dtype=None, input_dtype=None):
    return input.clone()


@ref("npu_format_cast_.acl_format")
def npu_format_cast_(input, acl_format, **kw):
    return input


@ref("npu_confusion_transpose")
def npu_confusion_transpose(input, perm, shape, transpose_first):
    return (input.permute(perm).reshape(shape) if transpose_first else input.view(shape).permute(perm)).contiguous()


@ref("npu_confusion_transpose_backward")     # torch_npu passes the forward's input sizes and !transpose_first
def npu_confusion_transpose_backward(grad, perm, shape, transpose_first):
    inv = [0] * len(perm)
    for i, q in enumerate(perm):
        inv[q] = i
    if transpose_first:
        return grad.permute(inv).reshape(shape)
    return grad.reshape([shape[q] for q in perm]).permute(inv).contiguous()


@ref("npu_linear")
def npu_linear(input, weight, bias=None):
    return F.linear(input, weight, bias)


@ref("npu_linear_backward")
def npu_linear_backward(grad, input, weight):
    return grad @ weight, grad.reshape(-1, grad.shape[-1]).t() @ input.reshape(-1, input.shape[-1])


@ref("matmul_backward")      # no autograd here: kernels run below the autograd keys
def matmul_backward(grad, self, other, mask):
    a, b, g = self, other, grad
    if a.dim() == 1 and b.dim() == 1:
        return (g * b if mask[0] else None), (g * a if mask[1] else None)
    if a.dim() == 1:
        a = a.unsqueeze(0); g = g.unsqueeze(-2)
    if b.dim() == 1:
        b = b.unsqueeze(-1); g = g.unsqueeze(-1)
    ga = (g @ b.transpose(-1, -2)).sum_to_size(a.shape).reshape(self.shape) if mask[0] else None
    gb = None
    if mask[1]:
        if b.dim() == 2 and a.dim() > 2:
            gb = a.reshape(-1, a.shape[-1]).t() @ g.reshape(-1, g.shape[-1])
        else:
            gb = (a.transpose(-1, -2) @ g).sum_to_size(b.shape)
        gb = gb.reshape(other.shape)
    return ga, gb


@ref("repeat_interleave_backward_int")
def repeat_interleave_backward_int(grad, input, repeats, dim=None):
    x = input if dim is not None else input.reshape(-1); d = 0 if dim is None else dim % input.dim()
    return grad.reshape(*x.shape[:d], x.shape[d], repeats, *x.shape[d + 1:]).sum(d + 1).reshape(input.shape)


@ref("l1_loss_backward")
def l1_loss_backward(grad_output, input, target, reduction):
    g = torch.sign(input - target) * grad_output
    return g / input.numel() if reduction == 1 else g


@ref("kl_div_backward")
def kl_div_backward(grad_output, input, target, reduction=1, *, log_target=False):
    g = -(target.exp() if log_target else torch.where(target > 0, target, torch.zeros_like(target))) * grad_output
    return g / input.numel() if reduction == 1 else g


@ref("one_")
def one_(input):
    return input.fill_(1)


@ref("npu_alloc_float_status")
def npu_alloc_float_status(input):
    return torch.zeros(8)


@ref("npu_get_float_status", "npu_clear_float_status")
def npu_get_float_status(input, mode=0):
    return torch.zeros_like(input)        # INF_NAN mode: overflow shows as inf/nan in the data, never as a status bit


@ref("_amp_foreach_non_finite_check")
def _amp_foreach_non_finite_check(scaled_grads):
    return bool(sum(int(not torch.isfinite(g).all()) for g in scaled_grads))


# ------------------------------------------------------------------ optimizers
@ref("npu_apply_adam_w.out")
def npu_apply_adam_w_out(beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon, grad, max_grad_norm, amsgrad, maximize, *, out):
    var, m, v = out; g = (-grad if maximize else grad).float()
    mf = m.float() * beta1 + g * (1 - beta1); vf = v.float() * beta2 + g * g * (1 - beta2)
    m.copy_(mf); v.copy_(vf)
    den = vf
    if amsgrad:
        max_grad_norm.copy_(torch.maximum(max_grad_norm.float(), vf)); den = max_grad_norm.float()
    den = (den / (1 - beta2_power)).sqrt() + epsilon
    var.copy_(var.float() * (1 - lr * weight_decay) - lr * (mf / (1 - beta1_power)) / den)
    return var, m, v


# ------------------------------------------------------------------ MoE / cross entropy
@ref("npu_grouped_matmul")
def npu_grouped_matmul(x, weight, *, bias=None, group_list=None, split_item=0, group_type=None, group_list_type=0, **kw):
    gl = [int(i) for i in group_list] if group_list is not None else None
    if gl is not None and group_list_type == 0:
        gl = [b - a for a, b in zip([0] + gl[:-1], gl)]
    ws = list(weight)
    if gl is None:
        return [F.linear(a, w.t(), None if bias is None else bias[i]) for i, (a, w) in enumerate(zip(x, ws))]
    if group_type == 2:          # grouped along k: x [k, m]^T slices times weight slices
        xs = x[0]; xs = xs if xs.shape[1] == sum(gl) else xs.t(); outs, o = [], 0
        for n in gl:
            outs.append(xs[:, o:o + n] @ ws[0][o:o + n]); o += n
        return [torch.stack(outs)]
    if len(ws) == 1 and ws[0].dim() == 3:
        ws = list(ws[0])
    outs, o = [], 0
    xx = x[0] if len(x) == 1 else torch.cat(list(x))
    for i, n in enumerate(gl):
        y = xx[o:o + n] @ ws[i]
        outs.append(y if bias is None else y + (bias[i] if len(bias) > 1 else bias[0][i])); o += n
    return [torch.cat(outs)] if split_item in (2, 3) else outs


@ref("npu_moe_token_permute")
def npu_moe_token_permute(tokens, indices, num_out_tokens=None, padded_mode=False):
    k = indices.shape[1] if indices.dim() == 2 else 1
    order = torch.argsort(indices.reshape(-1), stable=True); n = num_out_tokens or order.numel()
    inv = torch.empty_like(order); inv[order] = torch.arange(order.numel())
    return tokens[order[:n] // k], inv.to(torch.int32)


@ref("npu_moe_token_permute_grad")
def npu_moe_token_permute_grad(tokens, grad_permuted_tokens, indices, sorted_indices, padded_mode=False):
    k = indices.shape[1] if indices.dim() == 2 else 1; idx = sorted_indices.long(); ok = idx < grad_permuted_tokens.shape[0]
    g = torch.zeros(idx.numel(), tokens.shape[1]); g[ok] = grad_permuted_tokens.float()[idx[ok]]
    return g.view(-1, k, tokens.shape[1]).sum(1).to(tokens.dtype)


@ref("npu_moe_token_permute_grad_v2")
def npu_moe_token_permute_grad_v2(grad_permuted_tokens, sorted_indices, tokens_size_0, tokens_dtype, num_topK, padded_mode=False):
    idx = sorted_indices.long(); ok = idx < grad_permuted_tokens.shape[0]; h = grad_permuted_tokens.shape[1]
    g = torch.zeros(idx.numel(), h); g[ok] = grad_permuted_tokens.float()[idx[ok]]
    return g.view(-1, num_topK, h).sum(1).to(tokens_dtype)


def _unpermute(permuted_tokens, sorted_indices, probs):
    k = probs.shape[1] if probs is not None else 1; idx = sorted_indices.long(); ok = idx < permuted_tokens.shape[0]
    x = torch.zeros(idx.numel(), permuted_tokens.shape[1]); x[ok] = permuted_tokens.float()[idx[ok]]
    return x.view(-1, k, permuted_tokens.shape[1]), idx, ok


@ref("npu_moe_token_unpermute")              # torch_npu < 2.13: a plain op
def npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    x, _, _ = _unpermute(permuted_tokens, sorted_indices, probs)
    return (x if probs is None else x * probs.float().unsqueeze(-1)).sum(1).to(permuted_tokens.dtype)


@ref("_npu_moe_token_unpermute")             # torch_npu >= 2.13: wrapper op over this one
def _npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    return npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs), permuted_tokens.clone()


@ref("npu_moe_token_unpermute_grad")
def npu_moe_token_unpermute_grad(permuted_tokens, grad_unpermuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    x, idx, ok = _unpermute(permuted_tokens, sorted_indices, probs); k = x.shape[1]
    g = grad_unpermuted_tokens.float().repeat_interleave(k, 0); gp = torch.zeros_like(permuted_tokens, dtype=torch.float32)
    gp[idx[ok]] = (g if probs is None else g * probs.float().reshape(-1, 1))[ok]
    if probs is None:
        return gp.to(permuted_tokens.dtype), permuted_tokens.new_empty(0)
    return gp.to(permuted_tokens.dtype), (x.reshape(g.shape) * g).sum(-1).view(probs.shape).to(probs.dtype)


@ref("npu_moe_token_unpermute_grad_v2")
def npu_moe_token_unpermute_grad_v2(grad_unpermuted_tokens, sorted_indices, permuted_tokens_size_0, permuted_tokens_dtype, probs=None, padded_mode=False, restore_shape=None, permuted_tokens=None):
    t = permuted_tokens if permuted_tokens is not None and permuted_tokens.numel() else torch.zeros(permuted_tokens_size_0, grad_unpermuted_tokens.shape[1], dtype=permuted_tokens_dtype)
    return npu_moe_token_unpermute_grad(t, grad_unpermuted_tokens, sorted_indices, probs)


@ref("npu_cross_entropy_loss")
def npu_cross_entropy_loss(input, target, weight=None, reduction="mean", ignore_index=-100, label_smoothing=0., lse_square_scale_for_zloss=0., return_zloss=False):
    lp = F.log_softmax(input.float(), -1).to(input.dtype)
    return F.nll_loss(lp.float(), target, weight, reduction=reduction, ignore_index=ignore_index).to(input.dtype), lp, input.new_zeros(1), torch.zeros(input.shape[0])


@ref("npu_cross_entropy_loss_backward")
def npu_cross_entropy_loss_backward(grad_loss, log_prob, target, weight=None, grad_zloss=None, lse_for_zloss=None, reduction="mean", ignore_index=-100, label_smoothing=0., lse_square_scale_for_zloss=0.):
    ok = target != ignore_index; g = torch.exp(log_prob.float()); g[torch.arange(len(target))[ok], target[ok]] -= 1
    g = g * ok.unsqueeze(1); w = grad_loss.float() / (ok.sum() if reduction == "mean" else 1)
    return (g * (w if reduction != "none" else w.unsqueeze(1))).to(log_prob.dtype)


@ref("repeat_interleave_backward_tensor")
def repeat_interleave_backward_tensor(grad, input, repeats, dim=None):
    x = input if dim is not None else input.reshape(-1); d = 0 if dim is None else dim % input.dim()
    idx = torch.repeat_interleave(torch.arange(x.shape[d]), repeats.expand(x.shape[d]))
    return torch.zeros_like(x).index_add_(d, idx, grad.reshape(*x.shape[:d], idx.numel(), *x.shape[d + 1:])).reshape(input.shape)


@ref("kl_div_target_backward")
def kl_div_target_backward(grad_output, self, target, reduction=1, log_target=False):
    g = (target.exp() * (target + 1 - self) if log_target else torch.where(target > 0, torch.log(target) + 1 - self, torch.zeros_like(target))) * grad_output
    return g / self.numel() if reduction == 1 else g
