"""Kernel launches and activation memory of one transformer layer on a simulated NPU.

    megatron-npu sim -- python benchmarks/launches.py                    # megatron-core
    megatron-npu sim -- python benchmarks/launches.py --megatron PATH    # a checkout of Megatron-LM 285068c8

Forward pass, backward pass and optimizer step of a GPT in bf16: in GPT style (LayerNorm, GELU, learned
positions, biases) and, except with the tree of 2023, in Llama style (RMSNorm, SwiGLU, rotary positions,
grouped queries), and as a mixture of eight such experts, two per token. This project runs with gradient
accumulation fused into the weight gradients, which is the default in Megatron's scripts, and with
--moe-permute-fusion --moe-grouped-gemm. There are three variants: the redirection alone, which lets stock
Megatron run on an NPU like torch_npu's transfer_to_npu; the whole project; and the whole project with layers
under TransformerEngine's names (MEGATRON_NPU_TE=local). The mixture and the tree of 2023 have only the first
two; both of that tree's variants use stubs for apex, without which it does not start.

    megatron-npu sim -- python benchmarks/launches.py --optimizers       # Adam's memory, with megatron-core
    megatron-npu sim -- python benchmarks/launches.py --options          # single options of megatron-core

A layer is the difference between a model with 2 layers and one with 1, so that embedding, loss and the
optimizer's constant part do not count. Launches are calls at the lowest level of torch's dispatcher; only the
ratios are meaningful (docs/explanation/simulator.md). Results go to
benchmarks/results/launches{,-megatron-lm}.json.

With --optimizers, it measures the memory requested from the device's allocator and held after a step of
Megatron's distributed optimizer, in bytes per parameter (the attention mask of 4 MiB is 2 of them here), and
the launches of its step. For fp32 main weights the launches are also counted with one, two and four layers,
for the redirection and the project. Results go to benchmarks/results/optimizer-memory.json. The allocator
itself hands out more: it does not split off less than 1 MiB, up to 0.6 bytes per parameter for such a small
model.

With --options, it measures single options, without and with each: launches, peak memory and bytes moved to
the host and back in a whole model's third forward and backward pass, and whether the losses of all three
passes are bitwise identical. Results go to benchmarks/results/layer-options.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import report
from megatron_lm import OPERATIONS, write_vocabulary  # the benchmark beside this one

STYLES, VARIANTS = ("gpt", "llama", "moe"), ("redirection", "project", "te-names")
HIDDEN, HEADS, GROUPS, VOCABULARY = 256, 4, 2, 512

# Ways to keep what Adam needs, by name: options of Megatron's OptimizerConfig; the second is
# --swap-optimizer.
_AWARE = {"use_precision_aware_optimizer": True}
_BF16 = {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "fp32 main weights": {},
    "moments in the host's memory": {"swap_moments": True},
    "remainders": _AWARE,
    "remainders, bf16 moments": {**_AWARE, **_BF16},
    "fp16 main weights, bf16 moments": {**_AWARE, **_BF16, "main_params_dtype": "float16"},
}

# The patches that megatron-core does not run on an NPU without; "redirection" keeps these only.
NEEDED = ("megatron.core.jit", "megatron.core.tensor_parallel.random")
ROUTER = "megatron.core.transformer.moe.moe_utils:router_gating_linear"  # which 0.15 and 0.16 do not find

# On by default in Megatron's scripts; redirected alone, it asks for a kernel of apex.
FUSED = {"gradient_accumulation_fusion": True}
# Of the mixture; redirected alone, megatron-core 0.16 has neither of the fusions.
EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall"}
FUSED_EXPERTS = {"moe_permute_fusion": True, "moe_grouped_gemm": True}


class Option(NamedTuple):
    """An option, and the model with which it is measured: the whole project with and without the option.

    Attributes:
        style: one of ``STYLES``, or "mla" for multi-latent attention.
        given: the option, in megatron-core's configuration.
        always: the options of both models.
        layers, sequence: number of layers, and sequence length.
        redirected: compare with the redirection, which also has the option, instead of without the option.
    """

    style: str
    given: dict[str, Any]
    always: dict[str, Any]
    layers: int = 2
    sequence: int = 1024
    redirected: bool = False


def _recomputed(style: str, module: str, **always: Any) -> Option:
    return Option(style, {"recompute_granularity": "selective", "recompute_modules": [module]}, always)


def _offloaded(*modules: str) -> Option:
    given = {"fine_grained_activation_offloading": True, "offload_modules": list(modules)}
    return Option("llama", {**given, "min_offloaded_tensor_size": 1}, {}, layers=4, sequence=512)


_SHARED = {"moe_shared_expert_intermediate_size": 2 * HIDDEN}
_BALANCED = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
_GROUPS = {
    **{"num_moe_experts": 32, "moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
    **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    **{"moe_router_topk_scaling_factor": 2.5, "moe_router_dtype": "fp32"},
}
_LATENT = {
    **{"multi_latent_attention": True, "rope_type": "rope", "q_lora_rank": 128, "kv_lora_rank": 64},
    **{"qk_head_dim": 48, "qk_pos_emb_head_dim": 16, "v_head_dim": 64},
}
_ROUTER = {"moe_router_fusion": True}
OPTIONS = {
    "softmax off by one": Option("llama", {"softmax_type": "off-by-one"}, {}, redirected=True),
    "learnable sinks": Option("llama", {"softmax_type": "learnable"}, {}, redirected=True),
    "router, softmax": Option("moe", _ROUTER, FUSED_EXPERTS),
    "router, softmax, auxiliary loss": Option("moe", _ROUTER, {**FUSED_EXPERTS, **_BALANCED}),
    "router, sigmoid, groups, bias": Option("moe", _ROUTER, {**FUSED_EXPERTS, **_GROUPS}),
    "offload core_attn": _offloaded("core_attn"),
    "offload five modules": _offloaded("core_attn", "attn_proj", "attn_norm", "mlp_norm", "qkv_linear"),
    "recompute core_attn": _recomputed("llama", "core_attn"),
    "recompute layernorm": _recomputed("llama", "layernorm"),
    "recompute mlp": _recomputed("llama", "mlp"),
    "recompute mla_up_proj": _recomputed("mla", "mla_up_proj"),
    "recompute moe_act": _recomputed("moe", "moe_act", **FUSED_EXPERTS, **_SHARED),
    "recompute shared_experts": _recomputed("moe", "shared_experts", **FUSED_EXPERTS, **_SHARED),
    "recompute moe": _recomputed("moe", "moe", **FUSED_EXPERTS, **_SHARED),
}


@dataclass
class Cost:
    """The cost of one layer.

    Attributes:
        forward_backward: launches of the forward and backward pass.
        optimizer: launches of clipping and the optimizer step.
        activation_bytes: peak memory of the forward and backward pass, above the memory in use before.
    """

    forward_backward: int
    optimizer: int
    activation_bytes: int

    @property
    def launches(self) -> int:
        """The number of launches of the passes and the optimizer together."""
        return self.forward_backward + self.optimizer


def main() -> None:
    """Measure each style in all variants, each in a separate process, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--megatron", type=Path, metavar="PATH", help="a checkout of Megatron-LM 285068c8")
    parser.add_argument("--optimizers", action="store_true", help="measure the memory that Adam holds")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="measure only this one")
    parser.add_argument("--optimizer-launches", choices=VARIANTS[:2], help=argparse.SUPPRESS)
    parser.add_argument(
        "--options",
        nargs="*",
        choices=OPTIONS,
        help="measure individual options: all of them, or only those named",
    )
    parser.add_argument("--measured-options", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument(
        "--styles", nargs="+", choices=STYLES, default=STYLES, help="model styles of megatron-core to measure"
    )
    parser.add_argument(
        "--one", nargs=3, metavar=("STYLE", "VARIANT", "LAYERS"), help="measure only this combination"
    )
    arguments = parser.parse_args()
    if arguments.optimizer:
        print(json.dumps(measure_optimizer(arguments.optimizer, arguments.sequence)))
        return
    if arguments.optimizer_launches:
        print(json.dumps(measure_updates(arguments.optimizer_launches)))
        return
    if arguments.optimizers:
        write_optimizers(arguments)
        return
    if arguments.measured_options:
        variant, *names = arguments.measured_options
        print(json.dumps(measure_options(variant, names)))
        return
    if arguments.options is not None:
        write_options(arguments)
        return
    if arguments.one:
        style, variant, layers = arguments.one
        print(json.dumps(asdict(measure(style, variant, int(layers), arguments))))
        return
    sizes = {"sequence": arguments.sequence, "hidden": HIDDEN, "heads": HEADS, "dtype": "bf16"}
    result = {"upstream": "megatron_lm" if arguments.megatron else "megatron_core", **sizes, "styles": {}}
    for style in STYLES[:1] if arguments.megatron else arguments.styles:
        variants = VARIANTS[:2] if arguments.megatron or style == "moe" else VARIANTS
        costs = {variant: layer_cost(style, variant, arguments) for variant in variants}
        plain, ours = costs["redirection"], costs["project"]
        ratios = {
            "launches": ours.launches / plain.launches,
            "activation_bytes": ours.activation_bytes / plain.activation_bytes,
        }
        if "te-names" in costs:
            ratios["te_names_launches"] = costs["te-names"].launches / ours.launches
        result["styles"][style] = {**{name: asdict(cost) for name, cost in costs.items()}, "ratios": ratios}
        show(style, costs, ratios)
    from megatron_npu.upstream import megatrons

    name = "launches-megatron-lm.json" if arguments.megatron else "launches.json"
    if list(arguments.styles) != list(STYLES):
        name = f"launches-{'-'.join(arguments.styles)}.json"
    report.write(report.RESULTS / name, result, megatron=megatrons.find(arguments.megatron).version)


def show(style: str, costs: dict[str, Cost], ratios: dict[str, float]) -> None:
    """Print one style's rows."""
    for variant, cost in costs.items():
        print(
            f"{style:<6} {variant:<12} {cost.forward_backward:4} launches forward+backward, "
            f"{cost.optimizer:4} optimizer, {cost.activation_bytes / 2**20:8.1f} MiB"
        )
    print(f"{style:<6} project / redirection: launches {ratios['launches']:.2f}, ", end="")
    print(f"activation bytes {ratios['activation_bytes']:.2f}", flush=True)
    if "te_names_launches" in ratios:
        print(f"{style:<6} te-names / project: launches {ratios['te_names_launches']:.3f}", flush=True)


def layer_cost(style: str, variant: str, arguments: argparse.Namespace) -> Cost:
    """Return the cost of one layer."""
    one, two = (asdict(run_child(style, variant, layers, arguments)) for layers in (1, 2))
    return Cost(**{name: two[name] - one[name] for name in one})


def write_optimizers(arguments: argparse.Namespace) -> None:
    """Measure every way to store optimizer states, and write the result."""
    from megatron_npu.upstream import megatrons

    costs = {name: optimizer_cost(name, arguments) for name in OPTIMIZERS}
    result = {"upstream": "megatron_core", "hidden": HIDDEN, "dtype": "bf16", "optimizers": costs}
    result["launches_by_layers"] = {
        variant: in_child(arguments, "--optimizer-launches", variant) for variant in VARIANTS[:2]
    }
    print(result["launches_by_layers"])
    report.write(
        report.RESULTS / "optimizer-memory.json", result, megatron=megatrons.find(arguments.megatron).version
    )


def optimizer_cost(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure and print one way to store optimizer states."""
    cost = in_child(arguments, "--optimizer", name)
    print(f"{name:<32} {cost['launches']:3} launches, {cost['bytes_per_parameter']:.2f} bytes held, ", end="")
    print(f"{cost['swapped_bytes_per_parameter']:.2f} read and written on the host", flush=True)
    return cost


def write_options(arguments: argparse.Namespace) -> None:
    """Measure single options, without and with each; write the result, keeping rows that are not measured."""
    from megatron_npu.upstream import megatrons

    names = arguments.options or list(OPTIONS)
    project = in_child(arguments, "--measured-options", "project", *names)
    redirected = [name for name in names if OPTIONS[name].redirected]
    before = in_child(arguments, "--measured-options", "redirection", *redirected) if redirected else {}
    rows = {name: option_row(name, before.get(name, {}) | project[name]) for name in names}
    path = report.RESULTS / "layer-options.json"
    if arguments.options and path.exists():
        rows = json.loads(path.read_text())["options"] | rows
    result = {"upstream": "megatron_core", "hidden": HIDDEN, "dtype": "bf16", "options": rows}
    report.write(path, result, megatron=megatrons.find(arguments.megatron).version)


def option_row(name: str, costs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Print and return one option's row."""
    option = OPTIONS[name]
    losses = [costs[which].pop("losses") for which in ("without", "with")]
    apart = max(abs(a - b) for a, b in zip(*losses, strict=True))
    for which in ("without", "with"):
        cost = costs[which]
        print(
            f"{name:<32} {which:<8} {cost['launches']:5} launches, {cost['peak'] / 2**20:7.2f} MiB, "
            f"{cost['moved'] / 2**20:6.2f} moved"
        )
    print(f"{name:<32} losses differ by {apart:.2g}", flush=True)
    shape = {"style": option.style, "layers": option.layers, "sequence": option.sequence}
    before = "redirection" if option.redirected else "project"
    return {**shape, "before": before, **costs, "losses_differ_by": apart}


def run_child(style: str, variant: str, layers: int, arguments: argparse.Namespace) -> Cost:
    """Measure a whole model in a fresh process."""
    return Cost(**in_child(arguments, "--one", style, variant, str(layers)))


def in_child(arguments: argparse.Namespace, *what: str) -> dict[str, Any]:
    """Run this script in a fresh process; return the JSON that it prints."""
    options = ["--sequence", str(arguments.sequence)]
    options += ["--megatron", str(arguments.megatron)] if arguments.megatron else []
    command = [sys.executable, __file__, *options, *what]
    # Bytecode would be written into the checkout.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment["MEGATRON_NPU_TE"] = "local" if "te-names" in what else "none"
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(result.stdout.strip().splitlines()[-1])


@dataclass
class Training:
    """The parts of a training step, in order; ``forget`` drops the gradients of the previous step.

    ``parameters`` is the number of parameters, if requested.
    """

    forget: tuple[Callable[[], Any], ...]
    loss: Callable[[], Any]
    reduce: Callable[[], Any]
    update: Callable[[], Any]
    parameters: int = 0


def measure(style: str, variant: str, layers: int, arguments: argparse.Namespace) -> Cost:
    """Return the cost of a whole model's second step; the first one is a warm-up."""
    if variant == "redirection":
        keep_only_what_is_needed()
    if arguments.megatron:
        sys.path.insert(0, str(arguments.megatron))
    import megatron_npu
    from megatron_npu.sim import counting

    megatron_npu.install()
    if arguments.megatron:
        training = prepare_megatron_lm(layers, arguments.sequence)
    else:
        options = {} if variant == "redirection" else dict(FUSED)
        options |= FUSED_EXPERTS if style == "moe" and variant == "project" else {}
        training = prepare_megatron_core(style, layers, arguments.sequence, **options)
    for _ in range(2):
        for forget in training.forget:
            forget()
        with counting() as passes:
            training.loss().backward()
        training.reduce()
        with counting() as update:
            training.update()
    return Cost(passes.total_launches, update.total_launches, passes.peak)


def measure_optimizer(name: str, sequence: int) -> dict[str, float]:
    """Return the bytes per parameter that a GPT with two layers holds after a step, and the step's launches.

    Also returns the bytes of host memory that the NPU reads and writes in a step.
    """
    import megatron_npu

    megatron_npu.install()
    import torch

    from megatron_npu.ops.optimizers.adam import FusedAdam

    options = {
        option: getattr(torch, value) if isinstance(value, str) else value
        for option, value in OPTIMIZERS[name].items()
    }
    FusedAdam.swap_moments = options.pop("swap_moments", False)
    training = prepare_megatron_core("gpt", 2, sequence, optimizer=options, **FUSED)
    update = counted_update(training)
    held = torch.npu.memory_stats()["requested_bytes.all.current"] / training.parameters
    return {
        "launches": update.total_launches,
        "bytes_per_parameter": held,
        "swapped_bytes_per_parameter": update.swapped.bytes / training.parameters,
    }


def measure_options(variant: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """Return the cost of options with and without them; the redirection's cost counts as "without"."""
    fused = prepare_forks(variant)
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        option = OPTIONS[name]
        both = option.always | option.given
        if variant == "redirection":
            rows[name] = {"without": in_fork(measure_option, option, both)}
        else:
            rows[name] = {"with": in_fork(measure_option, option, both | fused)}
            if not option.redirected:
                rows[name]["without"] = in_fork(measure_option, option, option.always | fused)
    return rows


def prepare_forks(variant: str) -> dict[str, Any]:
    """Import everything once for all forks; return the options that the variant always has."""
    if variant == "redirection":
        keep_only_what_is_needed()
    import megatron_npu

    megatron_npu.install()
    import megatron.core.models.gpt.gpt_model  # noqa: F401

    return {} if variant == "redirection" else FUSED


def in_fork(measure: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of ``measure`` in a fork, which has imported everything and measured nothing yet."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            json.dump(measure(*arguments), pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        printed = pipe.read()
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{measure.__name__} of {arguments} failed")
    return json.loads(printed)


def measure_updates(variant: str) -> dict[int, int]:
    """Return the launches of the distributed optimizer's step for GPTs with one, two and four layers."""
    fused = prepare_forks(variant)
    return {layers: in_fork(measure_update, layers, fused) for layers in (1, 2, 4)}


def counted_update(training: Training) -> Any:
    """Return the cost of the optimizer's second step; the first one is a warm-up."""
    from megatron_npu.sim import counting

    for _ in range(2):
        for forget in training.forget:
            forget()
        training.loss().backward()
        training.reduce()
        with counting() as update:
            training.update()
    return update


def measure_update(layers: int, options: dict[str, Any]) -> int:
    """Return the launches of the second step with Megatron's distributed optimizer."""
    training = prepare_megatron_core("gpt", layers, 1024, optimizer={}, **options)
    return counted_update(training).total_launches


def measure_option(option: Option, options: dict[str, Any]) -> dict[str, Any]:
    """Return the cost of the third forward and backward pass, and the losses of all three."""
    import torch

    from megatron_npu.sim import counting

    torch.manual_seed(1)
    training = prepare_megatron_core(option.style, option.layers, option.sequence, **options)
    losses = []
    for _ in range(3):
        for forget in training.forget:
            forget()
        with counting() as counts:
            loss = training.loss()
            loss.backward()
        if "offload_modules" in options:  # as upstream's schedules
            from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

            offload.FineGrainedActivationOffloadingInterface.reset()
        training.reduce()
        training.update()
        losses.append(loss.item())
    moved = counts.transfers.bytes
    return {"launches": counts.total_launches, "peak": counts.peak, "moved": moved, "losses": losses}


def keep_only_what_is_needed() -> None:
    """Remove every patch that is not needed to run but only makes Megatron faster."""
    from megatron_npu import adaptors
    from megatron_npu.patching.registry import registry
    from megatron_npu.upstream import megatrons

    for name in megatrons.NAMES:
        adaptors.register(name)
    registry.keep(
        lambda patch: (
            patch.module in NEEDED
            or patch.target == ROUTER
            or (patch.upstream == "megatron_lm" and not patch.target.startswith(OPERATIONS))
        )
    )


def prepare_megatron_lm(layers: int, sequence: int) -> Training:
    """Return the parts of a training step with the tree of 2023: its own model, DDP and optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        write_vocabulary(Path(folder), VOCABULARY)
        # So small a limit always clips, as in build().
        sys.argv = f"""launches --num-layers {layers} --hidden-size {HIDDEN} --num-attention-heads {HEADS}
            --seq-length {sequence} --max-position-embeddings {sequence} --micro-batch-size 1
            --global-batch-size 1 --train-iters 2 --lr 1e-4 --clip-grad 1e-6 --bf16
            --vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt
            --no-masked-softmax-fusion""".split()
        from megatron.initialize import initialize_megatron

        initialize_megatron(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    import torch
    from megatron import get_args, get_timers
    from megatron.model import GPTModel, ModelType
    from megatron.training import setup_model_and_optimizer

    def provide(pre_process: bool = True, post_process: bool = True) -> GPTModel:
        return GPTModel(pre_process=pre_process, post_process=post_process)

    (model,), optimizer, _ = setup_model_and_optimizer(provide, ModelType.encoder_or_decoder)
    rest = get_args(), get_timers()
    tokens = torch.randint(0, VOCABULARY - 1, (1, sequence + 1), device="cuda")
    positions = torch.arange(sequence, device="cuda")[None]
    mask = torch.ones(1, 1, sequence, sequence, dtype=torch.bool, device="cuda").triu_(1)

    def loss() -> torch.Tensor:
        return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()

    return Training(
        (model.zero_grad_buffer, optimizer.zero_grad),
        loss,
        lambda: optimizer.reduce_model_grads(*rest),
        lambda: optimizer.step(*rest),
    )


def prepare_megatron_core(
    style: str,
    layers: int,
    sequence: int,
    vocabulary: int = VOCABULARY,
    optimizer: dict[str, Any] | None = None,
    **options: Any,
) -> Training:
    """Return the parts of a training step with megatron-core; ``options`` belong to its configuration.

    With ``optimizer``, which are options for it, Megatron's distributed optimizer is used.
    """
    import torch

    model, steps = build(style, layers, sequence, vocabulary, optimizer, **options)
    tokens = torch.randint(0, vocabulary, (1, sequence + 1), device="cuda")
    positions = torch.arange(sequence, device="cuda")[None]

    def loss() -> torch.Tensor:
        return model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float().mean()

    forget = (model.zero_grad_buffer, steps.zero_grad)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Training(forget, loss, model.finish_grad_sync, steps.step, parameters)


def build(
    style: str,
    layers: int,
    sequence: int,
    vocabulary: int,
    optimizer: dict[str, Any] | None,
    **options: Any,
) -> tuple:
    """Return a rank's bf16 model in Megatron's DDP, and Megatron's optimizer."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    if not torch.distributed.is_initialized():
        torch.cuda.set_device(0)
        store = torch.distributed.TCPStore("localhost", 0, 1, is_master=True)
        torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=store)
        parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = _config(style, layers, options)
    spec = _spec(style, config)
    model = GPTModel(
        config,
        spec,
        vocabulary,
        sequence,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute" if style == "gpt" else "rope",
    ).cuda()
    distributed = {"use_distributed_optimizer": optimizer is not None}
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **distributed)
    model = DistributedDataParallel(config, ddp, Float16Module(config, model))
    # So small a limit always clips: whether a random model's gradients need it must not decide the count.
    common = {"optimizer": "adam", "lr": 1e-4, "clip_grad": 1e-6, "bf16": True}
    kept = OptimizerConfig(**common, params_dtype=torch.bfloat16, **distributed, **(optimizer or {}))
    return model, get_megatron_optimizer(kept, [model])


def _config(style: str, layers: int, options: dict[str, Any]) -> Any:
    """Return Megatron's configuration for a style's layers in bf16, overridden by ``options``."""
    import torch
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    llama = style != "gpt"
    if style == "moe":
        options = {**EXPERTS, "moe_ffn_hidden_size": 2 * HIDDEN, **options}
    if style == "mla":
        options = _LATENT | options
    return (MLATransformerConfig if style == "mla" else TransformerConfig)(
        num_layers=layers,
        hidden_size=options.pop("hidden_size", HIDDEN),
        num_attention_heads=HEADS,
        num_query_groups=options.pop("num_query_groups", GROUPS if llama else HEADS),
        normalization="RMSNorm" if llama else "LayerNorm",
        gated_linear_unit=llama,
        activation_func=torch.nn.functional.silu if llama else torch.nn.functional.gelu,
        add_bias_linear=not llama,
        hidden_dropout=0.0 if llama else 0.1,
        attention_dropout=0.0 if llama else 0.1,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        apply_rope_fusion=False,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        **options,
    )


def _spec(style: str, config: Any) -> Any:
    """Return upstream's layers: its local ones, or those with TransformerEngine's names."""
    from megatron.core.models.gpt import gpt_layer_specs

    from megatron_npu.base import settings

    if settings.TE.get() == "local":
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
    return gpt_layer_specs.get_gpt_layer_local_spec(
        config.num_moe_experts,
        config.moe_grouped_gemm,
        multi_latent_attention=style == "mla",
        normalization=config.normalization,
    )


if __name__ == "__main__":
    main()
