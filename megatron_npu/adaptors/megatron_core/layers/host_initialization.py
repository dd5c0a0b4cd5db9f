"""Initialize the weights that upstream creates on the host with the same values on every device.

Such weights are positions, routers and plain linear layers. Patches ``models.common.embeddings``,
``transformer.moe.router`` and ``transformer.utils``. On an NPU or a GPU, these weights come from the host's
generator, so with --use-cpu-initialization all weights of a model do. On a cpu, the default generator is the
device's, and the same seed would produce a different model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.decorators import around

_on_cpu = partial(
    around,
    devices=("cpu",),
    why=(
        "with --use-cpu-initialization the embedding is drawn from the host's generator on an NPU or a "
        "GPU, and later weights continue that sequence; on a cpu the default generator is the device's"
    ),
)
_EMBEDDINGS = "megatron.core.models.common.embeddings"


@_on_cpu(f"{_EMBEDDINGS}.language_model_embedding:LanguageModelEmbedding.__init__")
def embed(original: Callable[..., None], self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Create the word, position and token-type embeddings."""
    if not config.use_cpu_initialization:  # the words are the device's then
        return original(self, config, *args, **kwargs)
    with devices.current().host_rng():
        return original(self, config, *args, **kwargs)


@_on_cpu("megatron.core.transformer.moe.router:Router.reset_parameters")
def reset_router(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Initialize a router's weight."""
    if not self.config.use_cpu_initialization:
        return original(self, *args, **kwargs)
    with devices.current().host_rng():
        return original(self, *args, **kwargs)


@_on_cpu("megatron.core.models.common.embeddings.relative_pos_embedding:RelativePositionEmbedding.__init__")
@_on_cpu("megatron.core.transformer.utils:get_linear_layer")
def make_on_host(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Create the relative positions of T5, or one layer of BERT's heads, on the host.

    Their calls have no configuration.
    """
    with devices.current().host_rng():
        return original(*args, **kwargs)
