"""What asks for TransformerEngine's layers is, since 0.17, answered by our provider: spec_provider_worker.py.

Each spec is the local one, in the modules that it names, and upstream's protocol has no method that the
provider lacks.
"""

from __future__ import annotations

import inspect
from typing import Any

import megatron_npu

megatron_npu.install()

from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider  # noqa: E402
from megatron.core.models import backends  # noqa: E402
from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs  # noqa: E402
from megatron.core.transformer import multi_token_prediction  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_npu.adaptors.megatron_core.te.spec_provider import spec_provider  # noqa: E402
from tests.adaptors.megatron_core.te_fallback_worker import heard  # noqa: E402


def plain(value: Any) -> Any:
    """Return a spec as values that compare: a partial function is what it calls, and with what."""
    if hasattr(value, "func"):
        return (value.func, plain(value.args), plain(value.keywords))
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if hasattr(value, "__dataclass_fields__"):
        return (type(value), {name: plain(getattr(value, name)) for name in value.__dataclass_fields__})
    return value


def both(function: Any, *given: Any, flag: str = "use_transformer_engine", **named: Any) -> None:
    """Check that ``function`` gives the same with and without TransformerEngine."""
    asked = heard()
    with_it, without = (plain(function(*given, **{flag: value}, **named)) for value in (True, False))
    assert with_it == without, (function.__name__, with_it, without)
    assert asked() >= 1, function.__name__


def main() -> None:
    """Compare all."""
    provider = spec_provider()
    for place in (TESpecProvider, gpt_layer_specs.TESpecProvider, multi_token_prediction.TESpecProvider):
        assert place is provider
    protocol = {name for name in vars(backends.BackendSpecProvider) if not name.startswith("_")}
    ours = provider()
    assert protocol <= set(dir(ours))
    for name in protocol:  # as a caller gives them
        theirs = inspect.signature(getattr(backends.LocalSpecProvider, name))
        assert inspect.signature(getattr(provider, name)).parameters.keys() == theirs.parameters.keys(), name
    assert ours.layer_norm(has_residual=True) is WrappedTorchNorm

    layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    config = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "normalization": "RMSNorm"}
    for more in ({}, {"num_moe_experts": 4, "moe_layer_freq": [1, 0], "add_bias_linear": False}):
        built = TransformerConfig(**config, **more, mtp_num_layers=1, use_cpu_initialization=True)
        one = {"pp_rank": 0, "normalization": "RMSNorm"}
        both(gpt_layer_specs.get_gpt_decoder_layer_specs, built, **one)
    both(gpt_layer_specs.get_mlp_module_spec, flag="use_te")
    both(moe_module_specs.get_moe_module_spec, flag="use_te", num_experts=4)
    mine, local = multi_token_prediction.get_mtp_layer_spec(layer, True), None
    local = multi_token_prediction.get_mtp_layer_spec_for_backend(layer, backends.LocalSpecProvider())
    assert plain(mine) == plain(local)
    own = gpt_layer_specs.get_mlp_module_spec_for_backend(provider())  # a spec of one's own
    assert plain(own) == plain(gpt_layer_specs.get_mlp_module_spec(use_te=False))
    bad = [row for row in megatron_npu.ledger().rows if row.state in ("failed", "drifted")]
    assert not bad, bad


if __name__ == "__main__":
    main()
