"""Kernels of our own for a CPU against fp64, and what happens where there are none."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron_npu.base import settings
from megatron_npu.ops import activation, compiled, dispatch, linear_cross_entropy, norm
from megatron_npu.ops.compiled import building
from megatron_npu.ops.dropout import KEEP_LEVELS, keep_of_bits, most_of_kept
from megatron_npu.ops.products import weight_gradient
from tests.ops.test_norm import EPS, layer_formula, rms_formula, spread
from tests.support import processes
from tests.support.tolerances import assert_near

HERE = torch.empty(0)
needs_kernels = pytest.mark.skipif(not compiled.usable(HERE), reason="no g++, or threads not of libgomp")
# rows of several chunks; less than a vector, several with and without a rest
SHAPES = [(1, 1), (3, 7), (130, 16), (65, 300), (64, 48)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def without_kernels(monkeypatch):
    """Let operations do without the kernels, as where there is no compiler."""
    monkeypatch.setattr(compiled, "usable", lambda *tensors: False)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Let the library be looked for again, in a cache that is empty, and nothing be reported yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dispatch, "fallbacks", {})
    building.library.cache_clear()
    yield tmp_path
    building.library.cache_clear()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_exponentials(shape, dtype):
    values, reference = 5 * torch.randn(shape).to(dtype), torch.randn(shape[0])
    sums, exact = torch.ones(shape[0]), (values.double() - reference.double()[:, None]).exp()
    compiled.exponentials_(values, reference, sums)
    assert (values.double() / exact - 1).abs().max() < (5e-6 if dtype is torch.float32 else 4e-3)
    assert (sums.double() / (exact.sum(1) + 1) - 1).abs().max() < 5e-6  # also in bf16: not of rounded values


@needs_kernels
def test_exponentials_of_what_is_far():
    """Nothing under the range of fp32, more than any limit above, and what is not a number stays so."""
    values = torch.tensor([[-torch.inf, -200.0, 200.0, torch.nan, 0.0]])
    compiled.exponentials_(values, torch.zeros(1), sums := torch.zeros(1))
    assert values[0, :2].tolist() == [0.0, 0.0]
    assert values[0, 2] > 1e38
    assert values[0, 3].isnan()
    assert abs(values[0, 4] - 1) < 1e-6
    assert sums.isnan()


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_gelu(shape, dtype, biased):
    input, bias = 3 * torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype) if biased else None
    z = (input.double() + (0 if bias is None else bias.double())).requires_grad_()
    expected = F.gelu(z, approximate="tanh")
    output, slope = compiled.gelu(input, bias, with_slope=True)
    assert output.dtype is slope.dtype is dtype
    assert_near(output, expected, dtype)
    assert_near(slope, *torch.autograd.grad(expected.sum(), z), dtype)
    alone, nothing = compiled.gelu(input, bias, with_slope=False)
    assert nothing is None
    assert torch.equal(alone, output)  # activations that are computed again are the same bits


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_product_and_sum(shape, dtype):
    left, right = torch.randn(2, *shape).to(dtype)
    product, sums = compiled.product_and_sum(left, right)
    assert_near(product, left.double() * right.double(), dtype)
    assert_near(sums, (left.double() * right.double()).sum(0), torch.float32)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("rms", [False, True])
def test_norm_backward(shape, dtype, rms):
    x, dy = spread(shape, "cpu").to(dtype), torch.randn(shape).to(dtype)
    factor, bias = torch.randn(2, shape[1])
    leaves = [t.double().requires_grad_() for t in ((x, factor) if rms else (x, factor, bias))]
    expected = torch.autograd.grad((rms_formula if rms else layer_formula)(*leaves), leaves, dy.double())
    mean = torch.zeros(shape[0], 1) if rms else x.float().mean(1, keepdim=True)
    rstd = ((x.float() - mean).square().mean(1, keepdim=True) + EPS).rsqrt()
    found = compiled.norm_backward(dy, x, None if rms else mean, rstd, factor)
    assert found[0].dtype is dtype
    assert (found[2] is None) is rms
    for i, (ours, right) in enumerate(zip(found, expected, strict=False)):
        assert_near(ours, right, dtype if i == 0 else torch.float32, f"gradient {i}", 2)


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("hidden", [0, 1])
def test_softmax_and_its_gradient(shape, hidden):
    """Some keys are forbidden; scores may be far from zero."""
    scores, grad = 9 * torch.randn(shape) + 300, torch.randn(shape)
    scores[:, shape[1] - hidden * (shape[1] // 2) :] = -torch.inf
    exact = scores.double().softmax(1).requires_grad_()
    weights, rounded = torch.empty(shape), torch.empty(shape, dtype=torch.bfloat16)
    compiled.softmax(scores, None, rounded)
    assert_near(rounded, exact, torch.bfloat16)
    compiled.softmax(scores, weights, again := torch.empty_like(rounded))
    assert_near(weights, exact, torch.float32)
    assert torch.equal(again, rounded)
    assert torch.equal(again, weights.bfloat16())
    compiled.softmax_backward(grad, weights, rounded)
    expected = exact * (grad.double() - (exact * grad.double()).sum(1, keepdim=True))
    assert_near(rounded, expected, torch.bfloat16)


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("keep", [1, 40000, KEEP_LEVELS])
def test_softmax_of_which_some_is_dropped(shape, keep):
    """The same values as a mask of the same bits drops, in the gradient, too."""
    scores, grad = 9 * torch.randn(shape), torch.randn(shape)
    bits = torch.empty(-(-scores.numel() // 4), dtype=torch.int64).random_(-(1 << 63), None)
    mask = keep_of_bits(bits, shape, keep, torch.empty(shape)).double()
    kept = compiled.Kept(bits, most_of_kept(keep))
    exact = scores.double().softmax(1)
    weights, rounded = torch.empty(shape), torch.empty(shape, dtype=torch.bfloat16)
    compiled.softmax(scores, weights, rounded, kept)
    assert_near(weights, exact, torch.float32)
    assert_near(rounded, exact * mask, torch.bfloat16)
    compiled.softmax(scores, None, again := torch.empty_like(rounded), kept)
    assert torch.equal(again, rounded)
    compiled.softmax_backward(grad, weights, rounded, kept)
    given = grad.double() * mask
    assert_near(rounded, exact * (given - (exact * given).sum(1, keepdim=True)), torch.bfloat16)


@needs_kernels
def test_softmax_keeps_what_is_not_a_number():
    scores = torch.randn(2, 40)
    scores[1, 5] = torch.nan
    compiled.softmax(scores, None, rounded := torch.empty(2, 40, dtype=torch.bfloat16))
    assert rounded[0].isfinite().all()
    assert rounded[1].isnan().any()


@pytest.mark.parametrize("shape", [(5,), (3, 17), (4, 5, 20), (0, 3)])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.float32, torch.float32)])
def test_accumulate(shape, dtypes):
    total, part = torch.randn(shape, dtype=dtypes[0]), torch.randn(shape, dtype=dtypes[1])
    expected = total.double() + 0.5 * part.double()
    compiled.accumulate(total, part, 0.5)
    assert_near(total, expected, torch.float32)


def test_accumulate_in_views():
    """A part of each head's keys; columns, which are not contiguous, are left to torch."""
    total, part = torch.zeros(3, 8, 4), torch.randn(3, 5, 4).bfloat16()
    compiled.accumulate(total[:, :5], part)
    assert torch.equal(total[:, :5], part.float())
    assert not total[:, 5:].any()
    columns = torch.zeros(6, 4)
    compiled.accumulate(columns.mT, part[0, :4, :].new_ones(4, 6))
    assert torch.equal(columns, torch.ones(6, 4))


@needs_kernels
def test_sums_do_not_depend_on_threads():
    x, dy = torch.randn(2, 300, 40).bfloat16()
    mean, rstd = torch.zeros(300, 1), torch.ones(300, 1)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        of_norm = compiled.norm_backward(dy, x, mean, rstd, torch.ones(40))
        found.append((*of_norm, compiled.product_and_sum(x, dy)[1]))
    torch.set_num_threads(before)
    for one in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], one, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_operations_without_the_kernels(without_kernels, dtype):
    """What runs on machines without a compiler; the other tests of operations have the kernels."""
    for operation in dispatch.OPERATIONS:
        operation.bind("cpu")
    x, weight, bias = spread((70, 1, 40), "cpu").to(dtype), *torch.randn(2, 40).to(dtype)
    for function, formula, tensors in (
        (lambda *t: norm.layer_norm(*t, EPS), layer_formula, (x, weight, bias)),
        (lambda *t: norm.rms_norm(*t, EPS), rms_formula, (x, weight)),
        (activation.bias_gelu, lambda a, b: F.gelu(a + b, approximate="tanh"), (x.repeat(8, 1, 1), bias)),
    ):
        ours, right = ([t.to(d).requires_grad_() for t in tensors] for d in (dtype, torch.float64))
        output, expected = function(*ours), formula(*right)
        assert_near(output, expected, dtype)
        grads = torch.autograd.grad(output.sum(), ours), torch.autograd.grad(expected.sum(), right)
        for mine, exact in zip(*grads, strict=True):
            assert_near(mine, exact, dtype, loose=2)
    main_grad, grad = torch.zeros(40, 40), x.squeeze(1)
    weight_gradient.accumulate_weight_gradient(x, grad, main_grad)
    assert_near(main_grad, grad.double().T @ grad.double(), dtype)
    hidden, words, target = (
        torch.randn(9, 1, 40).to(dtype),
        torch.randn(50, 40).to(dtype),
        torch.arange(9)[:, None],
    )
    loss = linear_cross_entropy.linear_cross_entropy(hidden, words, target)
    logits = (hidden.double() @ words.double().T).flatten(0, 1)
    assert_near(loss.flatten(), F.cross_entropy(logits, target.flatten(), reduction="none"), dtype)


def test_no_compiler_is_said(fresh, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    assert not compiled.usable(HERE)
    ((name, reason),) = dispatch.fallbacks
    assert (name, reason) == (
        "compiled kernels",
        "there is no g++ on PATH; a compiler that supports C++17 is required",
    )
    monkeypatch.setenv(settings.STRICT.name, "1")
    building.library.cache_clear()
    with pytest.raises(dispatch.FallbackForbiddenError, match="Install g"):
        compiled.usable(HERE)


def test_a_compiler_that_fails_is_said(fresh, monkeypatch):
    monkeypatch.setattr(building, "_FLAGS", ("-no-such-flag",))
    if shutil.which("g++") is None:
        pytest.skip("no g++ that could fail")
    assert not compiled.usable(HERE)
    ((_, reason),) = dispatch.fallbacks
    assert "cannot compile the sources" in reason
    assert "no-such-flag" in reason
    assert not list(fresh.rglob("*.so*"))


def test_switched_off_is_not_reported(fresh, monkeypatch):
    monkeypatch.setenv(settings.COMPILED.name, "0")
    assert not compiled.usable(HERE)
    assert not dispatch.fallbacks


@needs_kernels
def test_a_library_that_others_may_write_is_not_loaded(fresh, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    library = building.library()
    there = Path(os.readlink(library._name))
    assert there.stat().st_mode & 0o077 == 0
    building.library.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh))
    building.folder().mkdir(parents=True)
    Path(shutil.copy(there, building.folder())).chmod(0o722)
    assert not compiled.usable(HERE)
    assert "others may write" in next(iter(dispatch.fallbacks))[1]


_SECOND_OPENMP = """
import ctypes, sys
if sys.argv[2] == "before":
    ctypes.CDLL(sys.argv[1])
import torch
if sys.argv[2] == "after":
    ctypes.CDLL(sys.argv[1])
from megatron_npu.ops import dispatch
from megatron_npu.ops.compiled import building
library = building.library()
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "libgom" in line}
ours = building._file_of(library._name, "GOMP_parallel") if library else dispatch.fallbacks
print(len(loaded), ours == str(building._openmp()) != sys.argv[1], ours)
"""


@needs_kernels
@pytest.mark.parametrize("when", ["before", "after"])
def test_another_openmp_in_the_process_switches_nothing_off(tmp_path, when):
    """As scikit-learn's wheel brings one under a name of its own, which Transformers imports where it is."""
    content = building._openmp().read_bytes()
    assert b"libgomp.so.1" in content
    second = tmp_path / "libgomx.so.1"
    second.write_bytes(content.replace(b"libgomp.so.1", b"libgomx.so.1"))
    result = processes.run(
        [sys.executable, "-c", _SECOND_OPENMP, str(second), when], capture_output=True, text=True, check=False
    )
    assert result.stdout.startswith("2 True"), result.stdout + result.stderr


def test_threads_of_another_kind_are_said(fresh, monkeypatch):
    monkeypatch.setattr(building, "_file_of", lambda library, symbol: "/opt/lib/libiomp5.so")
    assert not compiled.usable(HERE)
    ((_, reason),) = dispatch.fallbacks
    said = "torch must be linked against libgomp, as torch's Linux wheels are, but it uses threads from "
    assert reason == said + "/opt/lib/libiomp5.so"


@needs_kernels
def test_what_to_do_is_said_for_each_reason(fresh, monkeypatch, caplog):
    """Without strict mode, too; and not to install a compiler where there is one."""
    building.folder().mkdir(parents=True, mode=0o700)
    building.folder().chmod(0o770)
    assert not compiled.usable(HERE)
    assert "others may write" in caplog.text
    assert "Set another folder with XDG_CACHE_HOME, or set MEGATRON_NPU_COMPILED=0" in caplog.text
    assert "Install" not in caplog.text


def test_what_is_no_memory_of_a_cpu_is_left_alone():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert not compiled.usable(torch.empty(3, 4))
    assert not compiled.usable(torch.empty(3, 4, dtype=torch.float16))
    assert not compiled.usable(torch.empty(3, 4).T)
    assert not compiled.usable(torch.empty(3), torch.empty(3, dtype=torch.bfloat16))


def test_the_source_is_packaged():
    assert all(path.is_file() for path in building.SOURCES)
    assert '["*.cpp", "*.h"]' in Path(building.__file__).parents[3].joinpath("pyproject.toml").read_text()
    assert os.path.basename(building.folder()) == "kernels"
