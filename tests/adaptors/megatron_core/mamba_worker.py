"""A hybrid of Mamba-2, attention and dense layers, of the megatron-core on the path, without mamba_ssm.

Run as a module with ``MEGATRON_NPU_TE=local``, in one process or in the two of a tensor-parallel group:

    python -m tests.adaptors.megatron_core.mamba_worker FOLDER

One process compares the scan with upstream's own steps of generation, and leaves a checkpoint and two losses
in FOLDER; two processes load it and compare theirs. On a simulated NPU it counts launches instead.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.adaptors.megatron_core import te_layers_worker as worker

PATTERN, HIDDEN = "M*M-", 32


def model(context: int = 1, changes: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return the model: two groups of b and c, 16 heads of 4 values, states of 16.

    Args:
        context: how many ranks share a sequence; the rest of them share the weights.
        changes: of its configuration.
        options: of ``MambaModel``.
    """
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
    from megatron.core.models.mamba.mamba_model import MambaModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = {
        **{"num_layers": len(PATTERN), "hidden_size": HIDDEN, "num_attention_heads": 4},
        **{"mamba_head_dim": 4, "mamba_state_dim": 16, "mamba_num_groups": 2, "mamba_num_heads": 16},
        **{"normalization": "RMSNorm", "add_bias_linear": False, "is_hybrid_model": True},
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0},
        **{"tensor_model_parallel_size": dist.get_world_size() // context},
        **{"context_parallel_size": context, **(changes or {})},
    }
    known = inspect.signature(TransformerConfig).parameters
    config = TransformerConfig(**{name: value for name, value in values.items() if name in known})
    taken = (
        inspect.signature(MambaModel.__init__).parameters
        | inspect.signature(MambaModel.__mro__[1].__init__).parameters
    )
    pattern = "hybrid_layer_pattern" if "hybrid_layer_pattern" in taken else "hybrid_override_pattern"
    torch.manual_seed(5)
    return MambaModel(
        config=config,
        mamba_stack_spec=mamba_stack_spec,
        vocab_size=worker.VOCABULARY,
        max_sequence_length=worker.LENGTH,
        **{pattern: PATTERN},
        **options,
    ).cuda()


def losses(built: Any) -> torch.Tensor:
    """Return on the host the loss, and that after a step of gradient descent, which every gradient moves."""
    first, _ = worker.loss_and_gradients(built)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter -= 0.1 * parameter.grad
    return torch.stack([first, worker.loss_and_gradients(built)[0]]).cpu()


def compare_with_steps(mixer: Any) -> None:
    """Demand of the scan what upstream's own generation gives, a token at a time, in plain torch."""
    channels = mixer.conv1d.weight.size(0)
    states = (
        torch.zeros(2, channels, mixer.conv1d.weight.size(2), device=mixer.conv1d.weight.device),
        torch.zeros(2, mixer.dt_bias.size(0), mixer.headdim, mixer.d_state, device=mixer.dt_bias.device),
    )
    hidden = torch.randn(worker.LENGTH, 2, HIDDEN, device=mixer.dt_bias.device)
    with torch.no_grad():
        whole, _ = mixer(hidden)
        steps = [mixer._decode(token, *states)[0] for token in hidden.split(1)]
    torch.testing.assert_close(whole, torch.cat(steps), rtol=1e-4, atol=1e-5)


def run(folder: Path) -> None:
    """Compare what the number of processes is for."""
    import megatron.core

    built = model()
    if dist.get_world_size() > 1:
        wanted = torch.load(folder / "losses.pt")
        torch.testing.assert_close(losses(worker.load(built, folder / "mamba")), wanted, rtol=1e-4, atol=0.0)
        return
    worker.disturb(built)
    worker.checkpoint(built, folder / "mamba")
    mixer = built.decoder.layers[0].mixer
    if megatron.core.__version__.startswith("0.16"):  # later ones need Triton, earlier ones name it otherwise
        compare_with_steps(mixer)
    found = losses(built)
    assert found[1] < found[0] - 0.01, found
    torch.save(found, folder / "losses.pt")


def compare_launches(_: Path) -> None:
    """Demand upstream's numbers, with biases in products and sums that come with the norms that read them."""
    from megatron_npu.adaptors.megatron_core.layers import transformer_layer
    from megatron_npu.sim import counting

    found: list[Any] = []
    weights, connect = None, transformer_layer._connect
    for way in (connect, lambda *_: None):
        transformer_layer._connect = way
        built = model(changes={"add_bias_linear": True, "bias_dropout_fusion": True})
        if weights is None:
            worker.disturb(built)
        weights = built.state_dict() if weights is None else weights
        built.load_state_dict(weights)
        worker.loss_and_gradients(built)  # the first pass makes attention's mask
        with counting() as counts:
            loss, gradients = worker.loss_and_gradients(built)
        found.append((loss, gradients, counts))
    (loss, gradients, ours), (wanted, theirs, plain) = found
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=0.0)
    for name, gradient in gradients.items():
        limit = 1e-4 * theirs[name].abs().max().item()
        torch.testing.assert_close(gradient, theirs[name], rtol=0.0, atol=limit, msg=name)
    assert ours.launches["npu::npu_add_rms_norm"].calls == len(PATTERN)
    assert "npu::npu_add_rms_norm" not in plain.launches
    print(f"{plain.total_launches} launches, {ours.total_launches}")
    # the bias behind attention, the two of an MLP, and each sum
    assert plain.total_launches - ours.total_launches == 3 + len(PATTERN)


if __name__ == "__main__":
    worker.main(compare_launches if os.environ.get("MEGATRON_NPU_SIM") == "1" else run)
