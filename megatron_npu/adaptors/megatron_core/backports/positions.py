"""Pass two rotary-position flags, which upstream's scripts ignore, to the models.

Upstream's scripts read these flags but do not use them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, backport
from megatron_npu.adaptors.megatron_core.options.script_arguments import script_arguments

# the arguments of a script, and what models call them
FACTORS = {
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "rope_scaling_factor": "rope_scaling_factor",
}
UPSTREAMS_FACTOR = 8.0  # by which its models scale where nobody says otherwise
_MODELS = "megatron.core.models"

_factors = partial(
    backport,
    until=NOT_FIXED,
    why="--rotary-seq-len-interpolation-factor and --rope-scaling-factor have no effect: the scripts do not "
    "pass them to the model, which does not divide the positions and always scales by 8",
)


def hand_factors_on(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Pass the rotary factors from the script's flags to a model, unless the script already passes them."""
    signature = inspect.signature(original)
    given = {**kwargs, **signature.bind_partial(self, *args).arguments}
    script = script_arguments()
    for flag, name in FACTORS.items():
        value = getattr(script, flag, None)
        if value is not None and given.get(name) is None and name in signature.parameters:
            kwargs[name] = value
    original(self, *args, **kwargs)


for _target, _versions in {
    "gpt.gpt_model:GPTModel": "",
    "bert.bert_model:BertModel": "",
    "T5.t5_model:T5Model": "",
    "mamba.mamba_model:MambaModel": "<0.18",
    "hybrid.hybrid_model:HybridModel": ">=0.18",
}.items():
    # outside of what refuses a Mamba without its package
    _factors(f"{_MODELS}.{_target}.__init__", versions=_versions, order=1)(hand_factors_on)
