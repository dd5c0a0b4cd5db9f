"""Support ``--moe-grouped-gemm`` since 0.17 with our grouped linear layers in upstream's grouped MLP.

Patches ``models.backends``, whose provider of local layers always returns sequential experts, regardless of
what is requested. Upstream's class accepts any layers with its ``GroupedLinearFc1Interface`` and
``-Fc2Interface``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Module

from megatron_npu.adaptors.megatron_core.decorators import around
from megatron_npu.ops.experts.grouped_matmul import grouped_linear


class GroupedLinear(Module):
    """The linear layers of this rank's experts, computed as one grouped matmul.

    Its parameters are ``weight0``, ``weight1``, … ``[o, i]`` (and ``bias0``, …), named as in
    TransformerEngine. Upstream's parallel linear layers create them, so their sizes, initial values and marks
    match those of sequential experts, and so do their names in a sharded checkpoint.

    Args:
        num_local_experts: the number of experts on this rank.
        input_size, output_size: the sizes of one expert, over all expert-tensor-parallel ranks.
        config: the TransformerConfig.
        init_method: initializes a weight.
        bias: whether to create biases.
        skip_bias_add: whether to return the biases instead of adding them.
        is_expert: accepted for upstream's callers; always True.
        tp_comm_buffer_name, name: accepted for upstream's callers.
        pg_collection: the process groups.
    """

    split_axis = 0  # of a weight [o, i], where tensor-parallel ranks share it

    def __init__(
        self,
        num_local_experts: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        is_expert: bool = True,
        tp_comm_buffer_name: str | None = None,
        pg_collection: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self.num_local_experts, self.use_bias, self.skip_bias_add = num_local_experts, bias, skip_bias_add
        self.groups = pg_collection
        for expert in range(num_local_experts):
            layer = self._expert(input_size, output_size, config=config, init_method=init_method, bias=bias)
            self.register_parameter(f"weight{expert}", layer.weight)
            if bias:
                self.register_parameter(f"bias{expert}", layer.bias)
        self.register_load_state_dict_pre_hook(_without_extra_states)

    def _expert(self, *sizes: int, **options: Any) -> Any:
        from megatron.core.tensor_parallel import ColumnParallelLinear

        group = self.groups.expt_tp
        return ColumnParallelLinear(*sizes, gather_output=False, is_expert=True, tp_group=group, **options)

    def forward(self, rows: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, list[Tensor] | None]:
        """Apply each expert's linear layer to its tokens: map ``[t, i]``, sorted by expert, to ``[t, o]``.

        Biases that were not added are returned too.
        """
        biases = self._each("bias") if self.use_bias else None
        added = None if self.skip_bias_add else biases
        output = grouped_linear(rows, self._each("weight"), tokens_per_expert, added)
        return output, biases if self.skip_bias_add else None

    def backward_dw(self) -> None:
        """Do nothing, because the weight gradients are complete when the backward pass ends."""

    def get_extra_state(self) -> None:
        """Return None, because this layer has no extra state.

        TransformerEngine's layers have one, so that upstream calls this method.
        """

    def set_extra_state(self, state: Any) -> None:
        """Ignore the extra state, because this layer has none."""

    def _each(self, kind: str) -> list[Tensor]:
        return [getattr(self, f"{kind}{expert}") for expert in range(self.num_local_experts)]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sharded state dict, with each expert's parameters stored as in sequential experts.

        Args:
            prefix: the prefix of the names.
            sharded_offsets: the position of this layer among the preceding dimensions.
            metadata: how the checkpoint is sharded; ``singleton_local_shards`` names each expert separately.
        """
        described = metadata or {}
        result = {}
        for expert in range(self.num_local_experts):
            place = self.groups.ep.rank() * self.num_local_experts + expert
            total = self.groups.ep.size() * self.num_local_experts
            if described.get("singleton_local_shards", False):
                name, offsets = f"{place}.{prefix}", sharded_offsets
            else:
                name, offsets = prefix, (*sharded_offsets, (len(sharded_offsets), place, total))
            for kind, tensor in self._sharded(expert, name, offsets, described).items():
                tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
                first_has_no_number = kind == "_extra_state" and expert == 0
                result[f"{prefix}{kind}{'' if first_has_no_number else expert}"] = tensor
        return result

    def _sharded(
        self, expert: int, name: str, offsets: tuple[Any, ...], metadata: dict[str, Any]
    ) -> dict[str, Any]:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        kinds = ("weight", "bias") if self.use_bias else ("weight",)
        values = {kind: getattr(self, f"{kind}{expert}") for kind in kinds} | {"_extra_state": None}
        sharded = make_sharded_tensors_for_checkpoint(
            values,
            name,
            {"weight": self.split_axis, **({"bias": 0} if self.split_axis == 0 else {})},
            offsets,
            tp_group=self.groups.expt_tp,
            dp_cp_group=metadata.get("dp_cp_group"),
        )
        return {kind: sharded[f"{name}{kind}"] for kind in values}


def _without_extra_states(module: Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Remove the extra state that sharded checkpoints contain for every expert except the first."""
    for name in [name for name in state_dict if name.startswith(f"{prefix}_extra_state")]:
        if name != f"{prefix}_extra_state":
            del state_dict[name]


class RowGroupedLinear(GroupedLinear):
    """The second linear layer of this rank's experts, computed as one grouped matmul.

    Its input dimension is split over tensor-parallel ranks: ``[o, i / tp]``.
    """

    split_axis = 1

    def _expert(self, *sizes: int, **options: Any) -> Any:
        from megatron.core.tensor_parallel import RowParallelLinear

        return RowParallelLinear(
            *sizes,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=True,
            tp_group=self.groups.expt_tp,
            **options,
        )


@around(
    "megatron.core.models.backends:LocalSpecProvider.grouped_mlp_modules",
    versions=">=0.17",
    why="--moe-grouped-gemm without TransformerEngine silently runs the experts one after the other",
)
def grouped_experts(original: Callable[..., Any], self: Any, moe_use_grouped_gemm: bool) -> Any:
    """Return upstream's grouped experts with our linear layers if grouped experts are requested."""
    if not moe_use_grouped_gemm:
        return original(self, moe_use_grouped_gemm)
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    layers = GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=RowGroupedLinear)
    return partial(TEGroupedMLP, submodules=layers)
