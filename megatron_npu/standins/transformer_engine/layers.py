"""Implement the linear layers of ``transformer_engine.pytorch``, with and without a norm before them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_npu.base.errors import UsageError
from megatron_npu.ops import norm, residual_norm
from megatron_npu.standins.transformer_engine import parallel

_logger = logging.getLogger(__name__)
Initializer = Callable[[Tensor], Any]


class TransformerEngineBaseModule(torch.nn.Module):
    """Base class of the layers, which handles the tensor-parallel group and the parameters.

    Args:
        tp_group, tp_size: the ranks that share the weights; the size is used only without a group, which may
            be set later.
        sequence_parallel: whether each rank has its part of the sequence outside the layer.
        get_rng_state_tracker: returns the tracker whose states initialize weights. If None, torch's own state
            is used.
        rng_tracker_name: the name of the state. If None, the state of the model-parallel ranks is used.
        params_dtype: the dtype of the parameters. If None, torch's default.
        device: the device of the parameters; ``meta`` leaves them empty until ``reset_parameters``.
        fuse_wgrad_accumulation: whether to accumulate weight gradients into ``main_grad``.
        delay_wgrad_compute, symmetric_ar_type: not supported.
        others: names of communication buffers, which these layers do not have.

    Raises:
        UsageError: delayed weight gradients, a symmetric all-reduce or overlapped communication is requested.
    """

    def __init__(
        self,
        *,
        tp_group: Any = None,
        tp_size: int = 1,
        sequence_parallel: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        params_dtype: torch.dtype | None = None,
        device: Any = "cuda",
        fuse_wgrad_accumulation: bool = False,
        ub_name: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        _refuse_others(others)
        if tp_group is not None:  # upstream gives the configuration's size beside a group of another
            tp_size = tp_group.size()
        self.tp_group, self.tp_size = tp_group, tp_size
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.get_rng_state_tracker, self.rng_tracker_name = get_rng_state_tracker, rng_tracker_name
        self.params_dtype, self.device = params_dtype or torch.get_default_dtype(), device
        self.fuse_wgrad_accumulation, self.ub_name = fuse_wgrad_accumulation, ub_name
        self.fp8 = self.fp8_calibration = self.save_original_input = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self._initial: dict[str, tuple[Initializer, bool]] = {}
        self._register_load_state_dict_pre_hook(_complete_extra_state, with_module=True)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the group of tensor-parallel ranks of the layer."""
        self.tp_group = tp_group

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing, because fp8 is not supported."""

    def get_extra_state(self) -> Tensor:
        """Return an empty tensor of bytes, as TransformerEngine 2 does for a layer without fp8."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Ignore the extra state, because the layer does not use fp8.

        fp8 scales have no meaning for weights loaded in full precision.
        """
        if state is not None and getattr(state, "numel", lambda: 1)():
            _logger.info("%s: the fp8 state in the checkpoint is not used", type(self).__name__)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize all parameters."""
        if not defer_init:
            for name, (fill, random) in self._initial.items():
                with torch.no_grad(), self._random_state() if random else contextlib.nullcontext():
                    fill(getattr(self, name))

    def add_parameter(self, name: str, sizes: tuple[int, ...], fill: Initializer, random: bool) -> Any:
        """Register a parameter, and return it so that the caller can set attributes on it.

        Args:
            random: whether the parameter is initialized from the tracker's state.
        """
        parameter = Parameter(torch.empty(*sizes, dtype=self.params_dtype, device=self.device))
        self.register_parameter(name, parameter)
        self._initial[name] = (fill, random)
        return parameter

    def _random_state(self) -> Any:
        if self.get_rng_state_tracker is None:
            return contextlib.nullcontext()
        name = [self.rng_tracker_name] if self.rng_tracker_name else []
        return self.get_rng_state_tracker().fork(*name)


def _refuse_others(others: dict[str, Any]) -> None:
    for name in ("delay_wgrad_compute", "symmetric_ar_type"):
        if others.pop(name, None):
            raise UsageError(
                f"{name} requires TransformerEngine, which is not installed; the layers provided here "
                "compute weight gradients immediately and use the group's own reduction. Remove "
                f"--{name.replace('_', '-')}."
            )
    overlapped = [name for name, value in others.items() if name.startswith("ub_") and value]
    if overlapped:
        raise UsageError(
            f"{overlapped[0]} requires TransformerEngine, which is not installed; the layers provided here "
            "do not overlap communication with matmuls. Remove --tp-comm-overlap, whose buffers belong to "
            "TransformerEngine."
        )


def _complete_extra_state(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Accept checkpoints that have no ``_extra_state``, or one for each expert."""
    for name in [name for name in state_dict if name.startswith(f"{prefix}_extra_state")]:
        if name != f"{prefix}_extra_state":
            del state_dict[name]
    state_dict.setdefault(f"{prefix}_extra_state", None)


class Linear(TransformerEngineBaseModule):
    """Linear layer ``input @ weight.T + bias`` that performs the communication of its parallel mode.

    Args:
        in_features, out_features: the sizes over all tensor-parallel ranks.
        bias: whether to create a bias.
        init_method: initializes the weight.
        return_bias: whether to return the bias instead of adding it.
        parallel_mode: ``column`` splits the output over ranks, ``row`` splits the input, and None splits
            neither.
        options: the options of ``TransformerEngineBaseModule``.
    """

    weight: Parameter
    bias: Tensor  # without one it is empty, as TransformerEngine's

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init_method: Initializer | None = None,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.use_bias, self.return_bias, self.parallel_mode = bias, return_bias, parallel_mode
        self.apply_bias = bias and not return_bias
        self._takes_bias = False
        self.in_features = in_features // self.tp_size if parallel_mode == "row" else in_features
        self.out_features = out_features // self.tp_size if parallel_mode == "column" else out_features
        self.sequence_parallel = self.sequence_parallel and parallel_mode is not None
        self._add_norm()
        self._add_weights(init_method or normal_weights)
        self.reset_parameters(defer_init=str(self.device) == "meta")

    def _add_norm(self) -> None:
        """Register the parameters of the layer's norm, if it has one, before the weight is registered.

        This class has none.
        """

    def _add_weights(self, fill: Initializer) -> None:
        """Register all weights and biases of the layer.

        This class has one of each.
        """
        self.add_weights("", fill)

    def add_weights(self, number: str, fill: Initializer) -> None:
        """Register ``weight`` ``[o, i]`` and ``bias`` ``[o]``, with attributes that describe how they are
        sharded.

        Args:
            number: the suffix of the names, in a layer with several weights.
        """
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        sizes, mode = (self.out_features, self.in_features), self.parallel_mode
        weight = self.add_parameter(f"weight{number}", sizes, fill, random=True)
        set_tensor_model_parallel_attributes(weight, True, 1 if mode == "row" else 0, 1)
        if not self.use_bias:
            setattr(self, f"bias{number}", torch.empty(0, dtype=self.params_dtype))
            return
        vector = self.add_parameter(f"bias{number}", sizes[:1], torch.nn.init.zeros_, random=False)
        if mode == "row":  # finalize_model_grads all-reduces these over the tensor-parallel group
            vector.sequence_parallel = self.sequence_parallel
        elif mode == "column":
            set_tensor_model_parallel_attributes(vector, True, 0, 1)

    def take_bias(self) -> None:
        """Make the matmul add the bias from now on, if it supports this, instead of returning the bias.

        A row-parallel layer over several ranks does not do this, because its bias is added after the sum.
        """
        self._takes_bias = self.parallel_mode != "row" or self.tp_size == 1

    @property
    def adds_bias(self) -> bool:
        """True if the output includes the bias.

        The matmul does not add a bias if the weight is not trained.
        """
        taken = self.use_bias and self._takes_bias and self.weight.requires_grad
        return self.apply_bias or taken

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Compute the layer: map ``[s, b, i]`` to ``[s, b, o]``, partitioned as the parallel mode requires.

        The bias may be returned too.
        """
        output = self._linear(inp)
        return (output, self._left()) if self.return_bias else output

    def _left(self) -> Tensor | None:
        """Return the bias that the caller must add, or None."""
        return None if self.adds_bias else self.bias

    def _linear(self, inp: Tensor) -> Tensor:
        options: dict[str, Any] = {"group": self.tp_group, "fused": self.fuse_wgrad_accumulation}
        bias = self.bias if self.adds_bias else None
        if self.parallel_mode == "row":
            options |= {"size": self.tp_size, "sequence": self.sequence_parallel}
            return parallel.row(inp, self.weight, bias, **options)
        size = self.tp_size if self.parallel_mode == "column" else 1
        options |= {"size": size, "sequence": self.sequence_parallel}
        return parallel.column(inp, self.weight, bias, **options)


def normal_weights(weight: Tensor) -> None:
    """Initialize a weight as TransformerEngine 2.6 does if there is no ``init_method``."""
    torch.nn.init.normal_(weight, 0.0, 0.023)


class LayerNormLinear(Linear):
    """A norm followed by a linear layer.

    The parameters are ``layer_norm_weight``, ``layer_norm_bias``, ``weight`` and ``bias``.

    Args:
        eps: added to the variance.
        normalization: ``LayerNorm`` or ``RMSNorm``, which has no bias.
        zero_centered_gamma: whether the norm's factor is its weight + 1.
        return_layernorm_output: whether to return the norm's output too; the attribute
            ``return_layernorm_output_gathered`` requests the output for the whole sequence.
        options: the options of ``Linear``.

    Raises:
        UsageError: the normalization is not supported.
    """

    layer_norm_weight: Parameter
    layer_norm_bias: Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        **options: Any,
    ) -> None:
        if normalization not in ("LayerNorm", "RMSNorm"):
            raise UsageError(
                f"normalization must be LayerNorm or RMSNorm, but got {normalization}. Pass --normalization "
                "LayerNorm or RMSNorm."
            )
        self._norm = (eps, normalization, zero_centered_gamma)
        super().__init__(in_features, out_features, **options)
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered

    def _add_norm(self) -> None:
        self.eps, self.normalization, self.zero_centered_gamma = self._norm
        first = torch.nn.init.zeros_ if self.zero_centered_gamma else torch.nn.init.ones_
        sizes = (self.in_features,)
        weight = self.add_parameter("layer_norm_weight", sizes, first, random=False)
        weight.sequence_parallel = self.sequence_parallel
        if self.normalization == "RMSNorm":
            self.layer_norm_bias = None
            return
        bias = self.add_parameter("layer_norm_bias", sizes, torch.nn.init.zeros_, random=False)
        bias.sequence_parallel = self.sequence_parallel

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Compute the norm, and then the linear layer.

        With ``return_layernorm_output``, append the norm's result ``[s, b, i]``.
        """
        handed_on = residual_norm.result_of(self, inp)
        normed = self._normalise(inp) if handed_on is None else handed_on
        results: list[Any] = [self._linear(normed)]
        if self.return_bias:
            results.append(self._left())
        if self.return_layernorm_output:
            whole = self.return_layernorm_output_gathered and self.sequence_parallel
            results.append(parallel.gathered(normed, self.tp_group) if whole else normed)
        return tuple(results) if len(results) > 1 else results[0]

    def _normalise(self, inp: Tensor) -> Tensor:
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        return norm.norm_of_residual(inp, weight, bias, self.eps, self.zero_centered_gamma)


class LayerNormMLP(TransformerEngineBaseModule):
    """A norm followed by two linear layers with an activation between them.

    The class has no instances, but peft 0.20 compares layers with this class.

    Raises:
        UsageError: it is instantiated.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "transformer_engine.pytorch.LayerNormMLP cannot be used, because TransformerEngine is not "
            "installed. Use megatron-core's MLP, megatron.core.transformer.mlp.MLP, which is built from the "
            "layers provided here."
        )
