"""Each adaptor against the stock function that it replaces, on the installed megatron-core.

Both run on the device of this process: the CPU, and the NPU under ``megatron-npu sim``.
"""

from __future__ import annotations

import inspect

import pytest
import torch

import megatron_npu
from megatron_npu.adaptors.megatron_core.layers import fusions, loss_and_embedding
from tests.adaptors.megatron_core.conftest import make_config
from tests.support.comparison import here, leaf, load_stock, same_gradients

pytestmark = pytest.mark.usefixtures("single_process")
core = "megatron.core"


# -- norm, activations, softmax ---------------------------------------------------------------------


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norm(normalization):
    from megatron.core.transformer import torch_norm

    config = make_config(normalization=normalization)
    stock = load_stock("megatron.core.transformer.torch_norm").WrappedTorchNorm(config, 32, 1e-5)
    ours = torch_norm.WrappedTorchNorm(config, 32, 1e-5).to(here())
    stock.to(here())
    assert ours.state_dict().keys() == {k for k, v in stock.state_dict().items() if v is not None}
    torch.nn.init.normal_(stock.weight)
    ours.load_state_dict(stock.state_dict())
    x = leaf(5, 2, 32)
    same_gradients(ours(x), stock(x), [x])


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_memory_efficient_norm_keeps_its_output(normalization):
    from megatron.core.transformer import torch_norm

    x = leaf(5, 2, 32)
    results = []
    for efficient in (True, False):
        config = make_config(normalization=normalization, memory_efficient_layer_norm=efficient)
        norm, kept = torch_norm.WrappedTorchNorm(config, 32, 1e-5).to(here()), []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: (kept.append(t.data_ptr()), t)[1], lambda t: t
        ):
            results.append(norm(x))
        assert (x.data_ptr() in kept) is not efficient
    same_gradients(*results, [x])


def test_norm_of_sequence_parallel_is_marked():
    from megatron.core.transformer import torch_norm

    config = make_config(tensor_model_parallel_size=2, sequence_parallel=True)
    norm = torch_norm.WrappedTorchNorm(config, 32)
    assert norm.weight.sequence_parallel
    assert norm.bias.sequence_parallel


def test_every_local_spec_has_our_norm():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import transformer_block

    from megatron_npu.adaptors.megatron_core.layers.norm import Norm

    for normalization in ("LayerNorm", "RMSNorm"):
        spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization=normalization).submodules
        attention = spec.self_attention.submodules
        assert {spec.input_layernorm, spec.pre_mlp_layernorm, attention.q_layernorm} == {Norm}
    assert transformer_block.LayerNormImpl is Norm


def test_bias_gelu():
    from megatron.core.fusions import fused_bias_gelu

    stock = load_stock("megatron.core.fusions.fused_bias_gelu")
    x, bias = leaf(4, 2, 9), leaf(9)
    same_gradients(fused_bias_gelu.bias_gelu_impl(x, bias), stock.bias_gelu_impl(x, bias), [x, bias])


@pytest.mark.parametrize("with_bias", [True, False])
def test_swiglu(with_bias):
    from megatron.core.fusions import fused_bias_swiglu

    stock = load_stock("megatron.core.fusions.fused_bias_swiglu")
    x = leaf(4, 2, 18)
    bias = leaf(18) if with_bias else None
    leaves = [x, bias] if with_bias else [x]
    same_gradients(fused_bias_swiglu.bias_swiglu_impl(x, bias), stock.bias_swiglu_impl(x, bias), leaves)


@pytest.mark.parametrize("with_bias", [True, False])
def test_geglu(with_bias):
    from megatron.core.fusions import fused_bias_geglu

    stock = load_stock("megatron.core.fusions.fused_bias_geglu")
    x = leaf(4, 2, 18)
    bias = leaf(18) if with_bias else None
    leaves = [x, bias] if with_bias else [x]
    same_gradients(fused_bias_geglu.bias_geglu_impl(x, bias), stock.bias_geglu_impl(x, bias), leaves)


def test_weighted_swiglu_of_moe():
    from megatron.core.fusions import fused_bias_swiglu

    stock = load_stock("megatron.core.fusions.fused_bias_swiglu")
    x, weights = leaf(6, 18), torch.rand(6, 1, requires_grad=True, device=here())
    same_gradients(
        fused_bias_swiglu.weighted_bias_swiglu_impl(x, None, weights),
        stock.weighted_bias_swiglu_impl(x, None, weights),
        [x, weights],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_of_experts(dtype):
    from megatron.core.transformer.moe import moe_utils

    stock = load_stock("megatron.core.transformer.moe.moe_utils")
    if "te_general_gemm" not in vars(stock):  # before 0.17
        with pytest.raises(NameError, match="te_general_gemm"):
            stock.router_gating_linear(
                torch.ones(1, 2, device=here()), torch.ones(3, 2, device=here()), None, torch.float32
            )
    stock.te_general_gemm = None  # as upstream means it
    x = leaf(6, 2, 16, dtype=dtype)
    weight = leaf(4, 16, dtype=dtype)
    ours = moe_utils.router_gating_linear(x, weight, None, torch.float32)
    assert ours.dtype == torch.float32
    same_gradients(ours, stock.router_gating_linear(x, weight, None, torch.float32), [x, weight])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_bias_dropout_add(fused, with_bias):
    from megatron.core.fusions import fused_bias_dropout

    stock = load_stock("megatron.core.fusions.fused_bias_dropout")
    x, residual = (leaf(4, 2, 9) for _ in range(2))
    bias = leaf(9) if with_bias else None
    leaves = [x, residual, bias][: 2 + with_bias]
    for training, p in ((True, 0.0), (False, 0.5)):
        ours, theirs = (m.get_bias_dropout_add(training, fused) for m in (fused_bias_dropout, stock))
        same_gradients(ours((x, bias), residual, p), theirs((x, bias), residual, p), leaves)
    ours = fused_bias_dropout.get_bias_dropout_add(True, fused)
    dropped = (ours((x, bias), residual, 0.5) - residual).detach()
    assert 0 < (dropped == 0).sum() < dropped.numel()


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norm_of_a_residual_in_fp32(normalization: str) -> None:
    """--fp32-residual-connection: 16-bit products take what is normed, and its gradient is fp32."""
    from megatron_npu.adaptors.megatron_core.layers.norm import Norm

    x = leaf(4, 2, 32)
    norm = Norm(make_config(normalization=normalization), 32).to(device=x.device, dtype=torch.bfloat16)
    normed = norm(x)
    normed.sum().backward()
    assert normed.dtype is torch.bfloat16
    assert x.grad.dtype is torch.float32
    assert {weight.grad.dtype for weight in norm.parameters()} == {torch.bfloat16}
    exact = norm.float()(x)
    assert torch.equal(normed, exact.to(torch.bfloat16))


def test_residual_in_fp32():
    """Cast down to 16 bits before 0.17, kept since: whichever Megatron is here, ours does as it does."""
    from megatron.core.fusions import fused_bias_dropout

    stock = load_stock("megatron.core.fusions.fused_bias_dropout")
    x, bias, residual = leaf(4, 2, 9, dtype=torch.bfloat16), leaf(9, dtype=torch.bfloat16), leaf(4, 2, 9)
    ours, theirs = (
        m.get_bias_dropout_add(True, False)((x, bias), residual, 0.0) for m in (fused_bias_dropout, stock)
    )
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)
    kept = fusions.bias_dropout_add_in_residual_dtype((x, bias), residual, 0.0, True)  # 0.17's
    assert torch.equal(kept, residual + (x.float() + bias.float()))


def test_dropout_follows_the_tracker():
    from megatron.core.fusions import fused_bias_dropout
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    drop = fused_bias_dropout.get_bias_dropout_add(True, True)
    x, tracker = torch.ones(4, 2, 9, device=here()), get_cuda_rng_tracker()
    states, default = tracker.get_states(), torch.cuda.get_rng_state()
    with tracker.fork():
        first = drop((x, None), x, 0.5)
    assert torch.equal(torch.cuda.get_rng_state(), default)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(drop((x, None), x, 0.5), first)
        assert not torch.equal(drop((x, None), x, 0.5), first)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("latent", [False, True])
def test_rotary(interleaved, latent):
    from megatron.core.models.common.embeddings import rope_utils

    stock = load_stock("megatron.core.models.common.embeddings.rope_utils")
    x, angles = leaf(5, 2, 3, 12), torch.rand(5, 1, 1, 8, device=here()) * 9
    arguments = (angles, interleaved, latent, 0.7)
    same_gradients(
        rope_utils._apply_rotary_pos_emb_bshd(x, *arguments),
        stock._apply_rotary_pos_emb_bshd(x, *arguments),
        [x],
    )


def test_rotary_of_packed_sequences_and_fused():
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings import rope_utils

    stock = load_stock("megatron.core.models.common.embeddings.rope_utils")
    group = parallel_state.get_context_parallel_group()
    x, angles = leaf(9, 3, 8), torch.rand(5, 1, 1, 8, device=here()) * 9
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32, device=here())
    config = make_config(apply_rope_fusion=True)  # refused upstream without TransformerEngine
    for ours in (config, make_config()):
        same_gradients(
            rope_utils.apply_rotary_pos_emb(x, angles, ours, lengths, cp_group=group),
            stock._apply_rotary_pos_emb_thd(x, lengths, angles, cp_group=group),
            [x],
        )
    y = leaf(5, 2, 3, 8)
    same_gradients(
        rope_utils.apply_rotary_pos_emb(y, angles, config, cp_group=group),
        stock._apply_rotary_pos_emb_bshd(y, angles),
        [y],
    )


@pytest.mark.parametrize("scattered", [False, True])
def test_embedding(scattered):
    from megatron.core.tensor_parallel import VocabParallelEmbedding

    layer = VocabParallelEmbedding(
        16,
        6,
        init_method=torch.nn.init.normal_,
        reduce_scatter_embeddings=scattered,
        config=make_config(),
    ).to(here())
    ids = torch.randint(16, (3, 5), device=here())
    right = layer.weight[ids]
    same_gradients(layer(ids), right.transpose(0, 1) if scattered else right, [layer.weight])


@pytest.mark.parametrize("kind", ["causal", "padding"])
def test_scale_mask_softmax(kind):
    from megatron.core.fusions import fused_softmax
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.utils import attention_mask_func

    stock = load_stock("megatron.core.fusions.fused_softmax")
    arguments = (False, True, getattr(AttnMaskType, kind), True, attention_mask_func, True, 2.0)
    ours, theirs = (m.FusedScaleMaskSoftmax(*arguments) for m in (fused_softmax, stock))
    x = leaf(2, 3, 8, 8, dtype=torch.bfloat16)
    mask = None if kind == "causal" else torch.rand(2, 1, 8, 8, device=here()) < 0.3
    assert ours.is_kernel_available(mask, 2, 3, 8, 8)
    same_gradients(ours(x, mask), theirs.forward_torch_softmax(x, mask), [x], atol=1e-2, rtol=1e-2)


# -- loss -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(smoothing):
    from megatron.core import tensor_parallel

    stock = load_stock("megatron.core.tensor_parallel.cross_entropy")
    logits = leaf(6, 2, 50)
    target = torch.randint(50, (6, 2), device=here())
    same_gradients(
        tensor_parallel.vocab_parallel_cross_entropy(logits * 1, target, smoothing),
        stock.vocab_parallel_cross_entropy(logits * 1, target, smoothing),
        [logits],
    )


def test_fused_cross_entropy_keeps_fp32_gradients():
    from megatron.core import parallel_state
    from megatron.core.fusions import fused_cross_entropy

    group = parallel_state.get_tensor_model_parallel_group()
    logits = leaf(6, 2, 50)
    target = torch.randint(50, (6, 2), device=here())
    loss = fused_cross_entropy.fused_vocab_parallel_cross_entropy(logits * 1, target, group)
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="none"
    ).view(6, 2)
    same_gradients(loss, expected, [logits])


# -- generators -------------------------------------------------------------------------------------


def test_a_group_that_is_given_is_used_and_the_global_one_is_not_asked_for(monkeypatch):
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.fusions import fused_cross_entropy

    group = torch.distributed.new_group([0])
    monkeypatch.setattr(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", None)
    with pytest.raises(AssertionError, match="not initialized"):
        parallel_state.get_tensor_model_parallel_group()
    options = {"config": make_config(), "init_method": torch.nn.init.xavier_normal_, "tp_group": group}
    embedding = tensor_parallel.VocabParallelEmbedding(16, 8, **options).to(here())
    column = tensor_parallel.ColumnParallelLinear(8, 16, gather_output=False, **options).to(here())
    tokens = torch.randint(16, (2, 5), device=here())
    logits, _ = column(embedding(tokens))
    losses = [
        fused_cross_entropy.fused_vocab_parallel_cross_entropy(logits * 1, tokens, group),
        loss_and_embedding.vocab_parallel_cross_entropy_of_group(logits * 1, tokens, 0.0, group),
    ]
    torch.testing.assert_close(*losses)
    sum(losses).sum().backward()
    assert embedding.weight.grad.any()
    assert column.weight.grad.any()


def test_tracker_fork_sets_and_restores_now():
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    default = torch.cuda.get_rng_state()
    with tracker.fork():
        first = torch.rand(4, device=here())
    assert torch.equal(torch.cuda.get_rng_state(), default)
    with tracker.fork():
        second = torch.rand(4, device=here())
    assert not torch.equal(first, second)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(4, device=here()), first)


def test_fork_does_not_complain_of_the_host_generator(caplog):
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        torch.rand(4, device=here())
    assert "CPU RNG state changed" not in caplog.text


def test_weights_on_the_host_do_not_depend_on_device_draws():
    from megatron.core.tensor_parallel import ColumnParallelLinear

    def build(draws):
        torch.manual_seed(5)
        torch.rand(draws, device=here())
        config = make_config()
        return ColumnParallelLinear(
            8, 16, config=config, init_method=torch.nn.init.normal_, bias=False
        ).weight

    assert torch.equal(build(0), build(7))


# -- optimizer --------------------------------------------------------------------------------------


def make_optimizer(distributed, dtype=torch.float32):
    """Return a one-layer model wrapped for data parallelism, and its Megatron optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = make_config()
    layout = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, layout, torch.nn.Linear(4, 4).to(here(), dtype))
    settings_ = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=0.0,
        use_distributed_optimizer=distributed,
        clip_grad=1.0,
        fp16=dtype is torch.float16,
        params_dtype=dtype,
    )
    return model, get_megatron_optimizer(settings_, [model])


@pytest.mark.parametrize("distributed", [False, True])
def test_optimizer_is_the_fused_one(distributed):
    from megatron_npu.ops.optimizers.adam import FusedAdam

    model, optimizer = make_optimizer(distributed)
    inner = getattr(optimizer, "chained_optimizers", [optimizer])[0]
    assert isinstance(inner.optimizer, FusedAdam)
    before = model.module.weight.detach().clone()
    for parameter in model.parameters():
        parameter.main_grad.fill_(0.1)
    successful, norm, _ = optimizer.step()
    assert successful
    assert norm == pytest.approx(0.1 * 20**0.5, rel=1e-5)
    # the first Adam step moves each weight by the learning rate against its gradient
    torch.testing.assert_close(model.module.weight.detach(), before - 1e-2, atol=2e-4, rtol=0)
    assert inner.state_dict()  # fails upstream, before the first step even (distrib_optimizer.py)


@pytest.mark.parametrize("distributed", [False, True])
def test_what_is_saved_before_the_first_update_has_states(distributed):
    """As in a run of fp16 whose first gradients overflow; upstream saves none, and cannot load that."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    model, optimizer = make_optimizer(distributed, torch.float16)
    weights = {
        name: ShardedTensor.from_rank_offsets(name, parameter, replica_id=(0, 0, 0))
        for name, parameter in model.module.named_parameters()
    }
    layout = {"distrib_optim_sharding_type": "dp_reshardable"}  # as stock scripts save
    saved = optimizer.sharded_state_dict(weights, metadata=layout)
    keys = [each.key for each in nested_values(saved) if isinstance(each, ShardedTensor)]
    for state in ("exp_avg", "exp_avg_sq"):
        assert any(state in key.split(".") for key in keys), keys


def test_gradient_norm_and_scaling():
    from megatron.core import parallel_state
    from megatron.core.optimizer import clip_grads

    stock = load_stock("megatron.core.optimizer.clip_grads")
    grads = [torch.randn(n, device=here()) for n in (3, 50)]
    group = parallel_state.get_model_parallel_group()
    ours = clip_grads.get_grad_norm_fp32(grads, 2, group)
    assert ours == pytest.approx(stock.get_grad_norm_fp32(grads, 2, group), rel=1e-6)
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    clip_grads.clip_grad_by_total_norm_fp32(parameters, 0.5, ours)
    clipped = torch.cat([p.grad for p in parameters]).norm().item()
    assert clipped == pytest.approx(0.5, rel=1e-4)


# -- the whole --------------------------------------------------------------------------------------


@pytest.mark.parametrize("flagged", [True, False])
def test_main_parameters_are_copied_at_once(flagged):
    from megatron.core.optimizer import optimizer

    stock = load_stock("megatron.core.optimizer.optimizer")
    main = [torch.randn(shape, device=here()) for shape in ((3, 5), (0,), (7,))]
    results = []
    for module in (optimizer, stock):
        flag = torch.ones(1, dtype=torch.int32, device=here()) if flagged else None
        model = [torch.zeros_like(t, dtype=torch.bfloat16) for t in main]
        module._multi_tensor_copy_this_to_that(main, model, flag)
        module._multi_tensor_copy_this_to_that([], [], flag)
        assert flag is None or flag.item() == 0
        results.append(model)
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_functions_keep_upstreams_signatures():
    """Callers may pass by name: every replacement of a function has the parameters of the original."""
    from megatron_npu.patching.registry import registry
    from megatron_npu.patching.versions import admits
    from megatron_npu.upstream import megatrons

    version = megatrons.find().version
    checked = 0
    for patch in registry.patches:
        if not admits(patch.versions, version):
            continue
        if patch.kind != "replace" or not inspect.isfunction(patch.make):
            continue
        if not patch.module.startswith("megatron.core") or patch.qualname == "jit_fuser":
            continue  # upstream binds jit_fuser to torch.compile, and uses it as a bare decorator
        owner = load_stock(patch.module)
        for name in patch.qualname.split("."):
            owner = getattr(owner, name)
        target = inspect.unwrap(owner, stop=lambda f: not hasattr(f, "__wrapped__"))
        takes = inspect.signature(patch.make).parameters.values()
        if not inspect.isfunction(target) or [each.kind for each in takes] == [
            inspect.Parameter.VAR_POSITIONAL
        ]:
            continue  # one that is called by position alone may stand for all versions of a signature
        assert list(inspect.signature(patch.make).parameters) == list(inspect.signature(target).parameters), (
            patch.target
        )
        checked += 1
    assert checked >= 6


def test_ledger_has_nothing_wrong():
    states = {row.target: (row.state, row.reason) for row in megatron_npu.ledger().rows}
    wrong = {target: state for target, state in states.items() if state[0] in ("failed", "drifted")}
    assert not wrong


def test_a_parameter_that_a_recomputed_function_returns_stays_a_leaf() -> None:
    """An MLP returns its bias unadded. Stock makes it an output of the checkpoint, which calls itself."""
    from megatron.core import tensor_parallel

    weight, bias = (torch.nn.Parameter(torch.randn(shape, device=here())) for shape in ((4, 4), (4,)))
    x = torch.randn(3, 4, device=here(), requires_grad=True)

    def mlp(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ weight, bias

    gradients = []
    for output, unadded in (mlp(x), tensor_parallel.checkpoint(mlp, False, x)):
        assert bias.is_leaf  # or the backward pass below never ends
        (output + unadded).square().sum().backward()
        gradients.append([tensor.grad.clone() for tensor in (x, weight, bias)])
        x.grad = weight.grad = bias.grad = None
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
