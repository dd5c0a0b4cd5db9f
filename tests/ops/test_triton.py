"""Triton kernels against formulas in fp64: on a GPU, or interpreted, where triton is installed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_npu.ops import activation, cross_entropy, dispatch, dropout, norm, residual_norm, rotary, triton
from tests.ops.against_fp64 import check, rows_of
from tests.ops.test_cross_entropy import formula
from tests.ops.test_norm import EPS, layer_formula, rms_formula, spread
from tests.support import interpreted
from tests.support.tolerances import assert_near

FEW = settings(max_examples=4)
widths = st.integers(1, 70) | st.sampled_from([1024, 1030])


@pytest.fixture
def on(monkeypatch) -> str:
    """Bind every operation to cuda, and let kernels take tensors of where Triton runs here."""
    device = interpreted.device()
    if device is None:
        pytest.skip("the case: triton is not installed")
    if device == "cpu":
        monkeypatch.setattr(triton, "refusal", lambda *_: None)
        monkeypatch.setattr(cross_entropy, "_by_kernel", lambda *_: True)
        monkeypatch.setattr(dropout, "_on_gpu", lambda _: True)
    for operation in dispatch.OPERATIONS:
        operation.bind("cuda")
    dispatch.fallbacks.clear()
    yield device
    assert not dispatch.fallbacks


@FEW
@given(shape=rows_of(widths), biased=st.booleans())
@example(shape=(5, 3, 1030), biased=True)
@example(shape=(1, 1, 1), biased=True)
def test_bias_gelu(on, dtype, shape, biased):
    torch.manual_seed(1)
    tensors = [2 * torch.randn(shape, device=on), *([torch.randn(shape[-1], device=on)] if biased else [])]
    check(activation.bias_gelu, lambda x, b=0: F.gelu(x + b, approximate="tanh"), tensors, dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, which interprets
def test_gelu_far_out(on, dtype):
    x = torch.tensor([[-torch.inf, -1e4, -60.0, 60.0, 1e4, torch.nan]], device=on).to(dtype).requires_grad_()
    y = activation.bias_gelu(x)
    (slope,) = torch.autograd.grad(y.nan_to_num().sum() + y.sum(), x)
    assert y[0, 1:5].tolist() == [0.0, 0.0, 60.0, x[0, 4].item()]
    assert slope[0, 1:5].tolist() == [0.0, 0.0, 2.0, 2.0]
    assert slope[0, 5].isnan()


@pytest.mark.parametrize("curve", ["swiglu", "geglu"])
@FEW
@given(shape=rows_of(widths.map(lambda width: 2 * width)), biased=st.booleans())
@example(shape=(5, 3, 2060), biased=True)
def test_gated(on, dtype, curve, shape, biased):
    def right(x, bias=0):
        gate, value = (x + bias).chunk(2, -1)
        return (F.silu(gate) if curve == "swiglu" else F.gelu(gate, approximate="tanh")) * value

    torch.manual_seed(1)
    tensors = [2 * torch.randn(shape, device=on), *([torch.randn(shape[-1], device=on)] if biased else [])]
    check(getattr(activation, curve), right, tensors, dtype)


@FEW
@given(shape=rows_of(st.integers(2, 70) | st.just(1030)), centered=st.booleans(), layer=st.booleans())
@example(shape=(6, 3, 1030), centered=True, layer=True)
@example(shape=(4, 300, 3), centered=False, layer=True)
def test_norms(on, dtype, shape, centered, layer):
    torch.manual_seed(1)
    vectors = torch.randn(2 if layer else 1, shape[-1], device=on)

    def ours(x, weight, bias=None):
        if bias is None:
            return norm.rms_norm(x, weight, EPS, centered)
        return norm.layer_norm(x, weight, bias, EPS, centered)

    right = layer_formula if layer else rms_formula
    x = spread(shape, on)
    check(ours, lambda *t: right(*t, centered), [x if layer else x.sign() + x, *vectors], dtype)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_weight_in_fp32_is_no_fallback(on, narrow):
    x = spread((5, 2, 40), on).to(narrow).requires_grad_()
    weight, bias = torch.randn(2, 40, device=on).requires_grad_().unbind()
    leaves = [x, *(t.detach().requires_grad_() for t in (weight, bias))]
    doubles = [t.detach().cpu().double().requires_grad_() for t in leaves]
    actual, expected = norm.layer_norm(*leaves, EPS), layer_formula(*doubles)
    assert actual.dtype is narrow
    assert_near(actual, expected, narrow)
    ours = torch.autograd.grad(actual, leaves, torch.ones_like(actual))
    right = torch.autograd.grad(expected, doubles, torch.ones_like(expected))
    assert [t.dtype for t in ours] == [narrow, torch.float32, torch.float32]
    for a, b in zip(ours[1:], right[1:], strict=True):
        assert_near(a, b, torch.float32, loose=5)


@FEW
@given(rows=st.integers(1, 5), words=st.integers(2, 70), smoothing=st.sampled_from([0.0, 0.1]))
@example(rows=3, words=70_001, smoothing=0.1)
@example(rows=2, words=4096, smoothing=0.0)
def test_cross_entropy_of_a_vocabulary(on, dtype, rows, words, smoothing):
    torch.manual_seed(2)
    leaf = (3 * torch.randn(rows, 2, words, device=on)).to(dtype).requires_grad_()
    target = torch.randint(words, (rows, 2), device=on)
    double = leaf.detach().cpu().double().requires_grad_()
    logits = leaf * 1
    loss = cross_entropy.vocab_parallel_cross_entropy(
        logits, target, vocab_start=0, vocab_size=words, label_smoothing=smoothing
    )
    expected = formula(double, target.cpu(), smoothing)
    assert loss.dtype is torch.float32
    assert_near(loss, expected, torch.float32)
    factor = torch.rand(expected.shape)
    places = [logits.data_ptr()]
    logits.register_hook(lambda grad: places.append(grad.data_ptr()))
    (ours,) = torch.autograd.grad(loss, leaf, factor.to(on), retain_graph=True)
    (right,) = torch.autograd.grad(expected, double, factor.double())
    assert_near(ours, right, dtype, "gradient")
    assert places[0] == places[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss.sum(), leaf)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_a_part(on, dtype, smoothing):
    """Two parts of a vocabulary, put together as ranks do."""
    from megatron_npu.ops.triton import cross_entropy as kernels

    torch.manual_seed(3)
    logits = torch.randn(7, 24, device=on).to(dtype)
    target = torch.randint(24, (7,), device=on)
    double = logits.detach().cpu().double().requires_grad_()
    expected = formula(double, target.cpu(), smoothing)
    share = smoothing * 24 / 23
    words = [kernels.Vocabulary(start, 24, share) for start in (0, 10)]
    parts = [logits[:, :10], logits[:, 10:]]
    found = [kernels.part(z, target, each) for z, each in zip(parts, words, strict=True)]
    normalizer = torch.stack([each[0] for each in found]).logsumexp(0)
    loss = normalizer - sum(each[1] for each in found)
    if smoothing:
        loss = (1 - share) * loss + share * (normalizer - sum(each[2] for each in found) / 24)
    assert_near(loss, expected, torch.float32)
    (right,) = torch.autograd.grad(expected.sum(), double)
    for z, each in zip(parts, words, strict=True):
        kernels.gradient(torch.ones(7, device=on), z, target, normalizer, each, z)
    assert_near(logits, right, dtype, "gradient")


@FEW
@given(rows=st.integers(1, 5), words=st.integers(2, 70))
@example(rows=3, words=66_000)
def test_cross_entropy_with_ignored_targets(on, dtype, rows, words):
    torch.manual_seed(2)
    leaf = (3 * torch.randn(rows, 2, words, device=on)).to(dtype).requires_grad_()
    target = torch.randint(words, (rows, 2), device=on)
    target[0, 0] = -100
    double = leaf.detach().cpu().double().requires_grad_()
    loss = cross_entropy.cross_entropy(leaf, target)
    expected = F.cross_entropy(double.flatten(0, 1), target.cpu().flatten(), reduction="none").view(rows, 2)
    assert_near(loss, expected, torch.float32)
    (ours,) = torch.autograd.grad(loss.sum(), leaf)
    (right,) = torch.autograd.grad(expected.sum(), double)
    assert not ours[0, 0].any()
    assert_near(ours, right, dtype, "gradient")


def test_logits_of_masked_words(on):
    logits = torch.tensor([[-torch.inf] * 3 + [1.0, 2.0], [500.0, -500.0, 499.0, 0.0, 0.0]], device=on)
    loss = cross_entropy.cross_entropy(logits.requires_grad_(), torch.tensor([3, 0], device=on))
    torch.testing.assert_close(loss.cpu(), torch.tensor([1.3132617, 0.3132617]))
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert grad.isfinite().all()
    assert not grad[0, :3].any()


@FEW
@given(shape=rows_of(st.integers(2, 70) | st.just(1030)), shifted=st.booleans(), layer=st.booleans())
@example(shape=(6, 3, 1030), shifted=True, layer=True)
def test_a_sum_and_its_norm(on, dtype, shape, shifted, layer):
    torch.manual_seed(1)
    x, residual = spread(shape, on), torch.randn(shape, device=on)
    vectors = torch.randn(3, shape[-1], device=on)
    leaves = [x, residual, *vectors[: 2 if layer else 1], *(vectors[2:] if shifted else [])]
    leaves = [t.to(dtype).requires_grad_() for t in leaves]
    doubles = [t.detach().cpu().double().requires_grad_() for t in leaves]

    def ours(x, residual, weight, *rest):
        shift = rest[-1] if shifted else None
        if layer:
            return residual_norm.add_layer_norm(x, residual, weight, rest[0], EPS, True, shift=shift)
        return residual_norm.add_rms_norm(x, residual, weight, EPS, True, shift=shift)

    def right(x, residual, weight, *rest):
        total = x + residual + (rest[-1] if shifted else 0)
        return (layer_formula(total, weight, rest[0], 1) if layer else rms_formula(total, weight, 1)), total

    found, expected = ours(*leaves), right(*doubles)
    grads = [torch.randn(shape).to(dtype) for _ in range(2)]
    for some in ((0, 1), (0,), (1,)):  # the other output is not used
        results = torch.autograd.grad(
            [found[i] for i in some],
            leaves,
            [grads[i].to(on) for i in some],
            retain_graph=True,
            allow_unused=True,
        )
        exact = torch.autograd.grad(
            [expected[i] for i in some],
            doubles,
            [grads[i].double() for i in some],
            retain_graph=True,
            allow_unused=True,
        )
        for i, (a, b) in enumerate(zip(results, exact, strict=True)):
            # the sum is rounded before it is normalised
            assert_near(
                torch.zeros_like(leaves[i]) if a is None else a,
                torch.zeros_like(doubles[i]) if b is None else b,
                dtype,
                f"gradient {i} of {some}",
                3.0,
            )
    for a, b in zip(found, expected, strict=True):
        assert_near(a, b, dtype, loose=2.0)


def _mask(p, shape, on, bias=None):
    """Return by what a dropout of the generator's state multiplies each value."""
    x, residual = torch.ones(shape, device=on), torch.zeros(shape, device=on)
    return dropout.bias_dropout_add(x, bias, residual, p, True)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_as_many_as_it_should_and_scales_them(on, p):
    torch.manual_seed(5)
    mask = _mask(p, (40, 1030), on)
    kept = (mask != 0).float().mean().item()
    assert abs(kept - (1 - p)) < 5 * (p * (1 - p) / mask.numel()) ** 0.5
    torch.testing.assert_close(mask[mask != 0], torch.full_like(mask[mask != 0], 1 / (1 - p)))
    for dim in (0, 1):  # no row or column is another's
        parts = (mask != 0).cpu().unbind(dim)
        assert not any(torch.equal(parts[0], other) for other in parts[1:])
    assert not torch.equal(mask, _mask(p, (40, 1030), on))
    torch.manual_seed(5)
    assert torch.equal(mask, _mask(p, (40, 1030), on))


def test_everything_may_be_dropped(on):
    x = torch.randn(3, 5, device=on, requires_grad=True)
    out = dropout.bias_dropout_add(x, None, torch.ones_like(x), 1.0, True)
    assert out.eq(1).all()
    assert not torch.autograd.grad(out.sum(), x)[0].any()


@FEW
@given(shape=rows_of(st.integers(1, 70) | st.just(1030)), p=st.sampled_from([0.0, 0.3]), biased=st.booleans())
def test_bias_dropout_add(on, dtype, shape, p, biased):
    """Backward drops what forward has dropped; so does the operation with a norm, of the same state."""
    torch.manual_seed(7)
    tensors = [torch.randn(shape, device=on) for _ in range(2)] + [torch.randn(shape[-1], device=on)] * biased
    torch.manual_seed(8)
    mask = _mask(p, shape, on).cpu().double() if p else 1.0

    def ours(x, residual, bias=None):
        torch.manual_seed(8)
        return dropout.bias_dropout_add(x, bias, residual, p, True)

    check(ours, lambda x, residual, bias=0: residual + (x + bias) * mask, tensors, dtype)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_sum_with_dropout_and_its_norm(on, p):
    torch.manual_seed(7)
    leaves = [torch.randn(s, device=on, requires_grad=True) for s in [(3, 4, 70)] * 2 + [(70,)] * 3]
    x, residual, weight, bias, shift = leaves
    torch.manual_seed(8)
    out, total = residual_norm.add_layer_norm(x, residual, weight, bias, EPS, shift=shift, p=p)
    torch.manual_seed(8)
    total_apart = dropout.bias_dropout_add(x, shift, residual, p, True)
    apart = norm.layer_norm(total_apart, weight, bias, EPS)
    torch.testing.assert_close(total, total_apart)
    torch.testing.assert_close(out, apart)
    grad = torch.randn_like(x)
    for a, b in zip(
        torch.autograd.grad([out, total], leaves, [grad, 2 * grad]),
        torch.autograd.grad([apart, total_apart], leaves, [grad, 2 * grad]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_recomputation_drops_the_same(on):
    x = torch.randn(5, 70, device=on, requires_grad=True)
    seen = []

    def layer(x):
        seen.append(dropout.bias_dropout_add(x, None, x, 0.5, True))
        return seen[-1] * 2

    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True).sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


def _adams(on, monkeypatch, copies=torch.bfloat16, **options):
    """Two optimizers of equal parameters: by the kernel, and by torch's; and 16-bit copies of the first's."""
    from megatron_npu.ops.optimizers import adam, adam_update

    monkeypatch.setattr(adam_update, "has_kernel", lambda _: True)
    torch.manual_seed(3)
    memory = torch.randn(20_000, device=on)
    # the second lies across the 16 bytes of a load
    weights = [memory[:9000].view(90, 100), memory[9001:9031], memory[9040:9041], memory[10_000:18_192]]
    ours, theirs = ([torch.nn.Parameter(w.clone() if o else w) for w in weights] for o in (0, 1))
    twins = {w: w.detach().to(copies) for w in ours} if copies else {}
    one, other = (adam.FusedAdam(ps, lr=0.1, weight_decay=0.1, **options) for ps in (ours, theirs))
    one.copies = twins
    return one, other, ours, theirs, twins


@pytest.mark.parametrize("copies", [torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("decoupled", [True, False])
def test_adam(on, monkeypatch, copies, decoupled):
    from megatron_npu.ops.optimizers import adam_update

    one, other, ours, theirs, twins = _adams(on, monkeypatch, copies, adam_w_mode=decoupled)
    for factor in (1.0, 0.25, 1.0):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad * factor
        grads = [a.grad.clone() for a in ours]
        if factor != 1.0:
            one.multiply_gradients(factor)
        one.step()
        with monkeypatch.context() as patch:
            patch.setattr(adam_update, "has_kernel", lambda _: False)
            other.step()
        assert all(torch.equal(a.grad, grad) for a, grad in zip(ours, grads, strict=True))
        assert one.written == set(twins)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(one.state[a][name], other.state[b][name], rtol=1e-5, atol=1e-7)
        for a, twin in twins.items():  # the interpreter cuts bits off where a GPU rounds
            torch.testing.assert_close(twin.float(), a.detach(), rtol=2.0**-7, atol=0)
            assert on == "cpu" or torch.equal(twin, a.detach().to(copies))


def test_adam_of_what_the_kernel_does_not_take(on, monkeypatch):
    """bf16 weights with main weights are the kernel's, and such without torch's; the factor is for both."""
    from megatron_npu.ops.optimizers import adam, adam_update

    monkeypatch.setattr(adam_update, "has_kernel", lambda _: True)
    for options in ({"master_weights": True}, {}):
        torch.manual_seed(3)
        weight = torch.nn.Parameter(torch.randn(50, device=on).bfloat16())
        twin = torch.nn.Parameter(weight.detach().clone())
        weight.grad = torch.randn(50, device=on).bfloat16()
        twin.grad = weight.grad / 4
        one, other = (adam.FusedAdam([each], lr=0.1, **options) for each in (weight, twin))
        one.multiply_gradients(0.25)
        one.step()
        monkeypatch.setattr(adam_update, "has_kernel", lambda _: False)
        other.step()
        monkeypatch.setattr(adam_update, "has_kernel", lambda _: True)
        assert torch.equal(weight, twin)
        one.step()  # the factor was for one step
        assert one._factor == 1.0


def test_results_repeat_to_the_bit(on):
    x, weight, bias = torch.randn(300, 70, device=on), torch.randn(70, device=on), torch.randn(70, device=on)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    first, again = (
        torch.autograd.grad(norm.layer_norm(*leaves, EPS).square().sum(), leaves) for _ in range(2)
    )
    assert all(map(torch.equal, first, again))


def test_without_values_nothing_is_launched(on):
    """Fake tensors, by which memory is planned, and empty ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        x, vector = torch.randn(4, 70, device=on).requires_grad_(), torch.ones(70, device=on)
        out, total = residual_norm.add_layer_norm(x, x * 1, vector, vector, EPS, shift=vector, p=0.1)
        activation.bias_gelu(out + total, vector).sum().backward()
        loss = cross_entropy.vocab_parallel_cross_entropy(
            x * 1, torch.zeros(4, dtype=torch.int64, device=on), vocab_start=0, vocab_size=70
        )
        loss.sum().backward()
        assert x.grad.shape == x.shape
    empty = torch.randn(0, 70, device=on, requires_grad=True)
    activation.bias_gelu(norm.rms_norm(empty, torch.ones(70, device=on), EPS)).sum().backward()
    assert empty.grad.shape == empty.shape


def test_a_call_that_no_kernel_takes_is_told_once(on, caplog):
    x = torch.randn(3, 8, device=on, requires_grad=True)
    for _ in range(2):
        activation.bias_gelu(x, torch.randn(3, 8, device=on))
    told = [record.message for record in caplog.records if "bias_gelu" in record.message]
    assert told == [
        "bias_gelu runs on torch's kernels: the bias (3, 8) does not match the last dimension of (3, 8)"
    ]
    assert list(dispatch.fallbacks.values()) == [2]
    dispatch.fallbacks.clear()


@FEW
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)),
    turned=st.integers(1, 9).map(lambda half: 2 * half),
    rest=st.sampled_from([0, 3]),
    interleaved=st.booleans(),
    of_batch=st.booleans(),
)
def test_rotary(on, dtype, sizes, turned, rest, interleaved, of_batch):
    """Of a part of wider heads, as attention has it, and by tables of all sequences or of each."""
    torch.manual_seed(4)
    angles = torch.randn(*(sizes[:2] if of_batch else (sizes[0], 1)), 1, turned, device=on)
    x = torch.randn(*sizes, turned + rest, device=on)

    def ours(x):
        wide = torch.cat((x, x), -1)[..., : x.size(-1)]
        return rotary.rotary(wide, angles, interleaved)

    def right(x):
        exact = angles.cpu().double()
        return rotary._reference(x, exact.cos(), exact.sin(), interleaved)

    check(ours, right, [x], dtype)


def test_why_no_kernel_runs(monkeypatch):
    """Of the reasons the first; nothing here asks for a GPU that is not there."""
    monkeypatch.setattr(triton, "is_installed", lambda _: False)
    triton.absence.cache_clear()
    assert triton.absence() == "triton is not installed"
    assert triton.not_to_be_expected() == "triton is not installed"
    monkeypatch.setattr(triton, "is_installed", lambda _: True)
    for capability, told in (((7, 5), "compute capability 7.5, older than 8.0"), ((9, 0), "no compiler")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        monkeypatch.setattr(triton, "_trouble", lambda: "no compiler")
        triton.absence.cache_clear()
        assert told in triton.absence()
    triton.absence.cache_clear()


def test_tensors_that_no_kernel_takes(monkeypatch):
    monkeypatch.setattr(triton, "absence", lambda: None)
    host = torch.ones(2)
    assert triton.refusal(host) == "our kernels support GPU tensors, not tensors on cpu"
    assert triton.refusal(None, host.double()) == "our kernels do not support torch.float64"
    assert triton.refusal() is None
