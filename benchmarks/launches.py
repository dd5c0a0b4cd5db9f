"""Kernel launches and activation memory of one transformer layer on a simulated NPU.

    megatron-npu sim -- python benchmarks/launches.py

Forward, backward and optimizer step of a megatron-core GPT in bf16, GPT style (LayerNorm, GELU, learned
positions, biases) and Llama style (RMSNorm, SwiGLU, rotary positions, grouped queries). Two variants: the
redirection alone, which lets stock Megatron run on an NPU as torch_npu's transfer_to_npu does, and the whole
project. A layer is the difference between a model of 2 layers and one of 1, so that embedding, loss and the
optimizer's constant part do not count. Launches are calls at the lowest level of torch's dispatcher; only the
ratios mean something (docs/simulator.md). Results go to benchmarks/results/launches.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

STYLES, VARIANTS = ("gpt", "llama"), ("redirection", "project")
HIDDEN, HEADS, GROUPS, VOCABULARY = 256, 4, 2, 512
RESULT = Path(__file__).parent / "results" / "launches.json"

# The patches that Megatron does not run on an NPU without; "redirection" keeps these only.
NEEDED = ("megatron.core.jit", "megatron.core.tensor_parallel.random")


@dataclass
class Cost:
    """What one layer costs.

    Attributes:
        forward_backward: launches of the forward and backward pass.
        optimizer: launches of clipping and the optimizer's step.
        activation_bytes: memory at the peak of the forward and backward pass, above what was there before.
    """

    forward_backward: int
    optimizer: int
    activation_bytes: int

    @property
    def launches(self) -> int:
        """The sum of both."""
        return self.forward_backward + self.optimizer


def main() -> None:
    """Measure both styles in both variants, each in a process of its own, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--one", nargs=3, metavar=("STYLE", "VARIANT", "LAYERS"), help="measure this one")
    arguments = parser.parse_args()
    if arguments.one:
        style, variant, layers = arguments.one
        print(json.dumps(asdict(measure(style, variant, int(layers), arguments.sequence))))
        return
    result = {"sequence": arguments.sequence, "hidden": HIDDEN, "heads": HEADS, "dtype": "bf16", "styles": {}}
    for style in STYLES:
        costs = {variant: layer_cost(style, variant, arguments.sequence) for variant in VARIANTS}
        plain, ours = costs["redirection"], costs["project"]
        ratios = {
            "launches": ours.launches / plain.launches,
            "activation_bytes": ours.activation_bytes / plain.activation_bytes,
        }
        result["styles"][style] = {**{name: asdict(cost) for name, cost in costs.items()}, "ratios": ratios}
        show(style, costs, ratios)
    RESULT.write_text(json.dumps({**result, "date": date.today().isoformat()}, indent=2) + "\n")


def show(style: str, costs: dict[str, Cost], ratios: dict[str, float]) -> None:
    """Print one style's rows."""
    for variant, cost in costs.items():
        print(
            f"{style:<6} {variant:<12} {cost.forward_backward:4} launches forward+backward, "
            f"{cost.optimizer:4} optimizer, {cost.activation_bytes / 2**20:8.1f} MiB"
        )
    print(f"{style:<6} project / redirection: launches {ratios['launches']:.2f}, ", end="")
    print(f"activation bytes {ratios['activation_bytes']:.2f}", flush=True)


def layer_cost(style: str, variant: str, sequence: int) -> Cost:
    """Return the cost of one layer."""
    one, two = (asdict(run_child(style, variant, layers, sequence)) for layers in (1, 2))
    return Cost(**{name: two[name] - one[name] for name in one})


def run_child(style: str, variant: str, layers: int, sequence: int) -> Cost:
    command = [sys.executable, __file__, "--sequence", str(sequence), "--one", style, variant, str(layers)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Cost(**json.loads(result.stdout.strip().splitlines()[-1]))


def measure(style: str, variant: str, layers: int, sequence: int) -> Cost:
    """Return the cost of the second step of a whole model; the first one warms up."""
    if variant == "redirection":
        keep_only_what_is_needed()
    import torch

    import megatron_npu
    from megatron_npu.sim import counting

    megatron_npu.install()
    model, optimizer = build(style, layers, sequence)
    tokens = torch.randint(0, VOCABULARY, (1, sequence + 1), device="cuda")
    positions = torch.arange(sequence, device="cuda")[None]
    for _ in range(2):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        with counting() as passes:
            loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float().mean()
            loss.backward()
        model.finish_grad_sync()
        del loss
        with counting() as update:
            optimizer.step()
    return Cost(passes.total_launches, update.total_launches, passes.peak)


def keep_only_what_is_needed() -> None:
    """Leave out every patch that makes Megatron faster and not just run."""
    from megatron_npu.patching.record import Patch

    reason = Patch.reason_to_skip

    def skip(self: Patch, version: str, device: str) -> str | None:
        return reason(self, version, device) if self.module in NEEDED else "left out"

    Patch.reason_to_skip = skip


def build(style: str, layers: int, sequence: int) -> tuple:
    """Return a model in bf16 under Megatron's DDP, and Megatron's optimizer."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.cuda.set_device(0)
    store = torch.distributed.TCPStore("localhost", 0, 1, is_master=True)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=store)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    llama = style == "llama"
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS if llama else HEADS,
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
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        VOCABULARY,
        sequence,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope" if llama else "learned_absolute",
    ).cuda()
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, ddp, Float16Module(config, model))
    # So small a limit always clips: whether a random model's gradients need it must not decide the count.
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-4, clip_grad=1e-6, bf16=True, params_dtype=torch.bfloat16
    )
    return model, get_megatron_optimizer(settings, [model])


if __name__ == "__main__":
    main()
