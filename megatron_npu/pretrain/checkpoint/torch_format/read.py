"""Assemble a model from the checkpoint files of all ranks, regardless of its layout in training."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.checkpoint.torch_format import files, names, shards
from megatron_npu.pretrain.checkpoint.weights import row_shards
from megatron_npu.pretrain.model.gpt import unwrap

_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_LARGEST = 2**53  # iterations, samples, layers: what JSON keeps exactly
_HEAD = 64  # channels of a head in every GPT-2, and in the models that NVIDIA has released without arguments

# What Megatron's tool that changes the layout of a checkpoint (tools/checkpoint_util.py at 285068c8) writes
# into it, whatever the training had.
_OF_THE_TOOL = {
    "bias_gelu_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "perform_initialization": False,
}

_logger = logging.getLogger(__name__)


@functools.cache
def _say(message: str) -> None:
    """Log an assumption about a checkpoint once, even if the checkpoint is read several times."""
    _logger.warning(message)


class Checkpoint:
    """The complete weights of a checkpoint under megatron-core's names, with the checkpoint's description.

    Args:
        path: the checkpoint's directory.

    Attributes:
        args: the ``args`` that the run saved; inferred if the file has none.
        iteration, train_samples, valid_samples: the progress of the run.

    Raises:
        UsageError: files are missing or damaged, or contain something other than plain values.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        found = files.ranks(path)
        first = files.read(found.paths[0, 0])
        self._version = self._number(first, "checkpoint_version")
        self.args = files.arguments(first) or {}
        files.require_layout(found, path, self.args)
        self._parts: dict[str, list[Tensor]] = {}
        self._tensor = found.tensor
        self._gather(found)
        self.args = self.args or self._deduced()
        self._assume_fused_gelu()
        self.args["padded_vocab_size"] = self.whole(_VOCABULARY[0]).size(0)
        self._require_all_layers()
        self.iteration = int(self._number(first, "iteration" if "iteration" in first else "total_iters"))
        self.train_samples, self.valid_samples = (
            int(self._number(self.args, f"consumed_{kind}_samples")) for kind in ("train", "valid")
        )

    def _number(self, values: Mapping[str, Any], name: str) -> float:
        """Return a number from the checkpoint's description, or 0 if it is missing."""
        value = values.get(name) or 0
        if not isinstance(value, int | float) or not 0 <= value < _LARGEST:
            raise self._damaged(f"{name} must be at least 0 and less than {_LARGEST}, but it is {value!r}")
        return value

    def _require_tables(self, stages: list[Any]) -> None:
        if len({len(chunks) for chunks in stages}) != 1 or not stages[0]:
            raise self._damaged("the pipeline stages have different numbers of model chunks")
        if not all(isinstance(chunk, Mapping) for chunks in stages for chunk in chunks):
            raise self._damaged("the stored model is not a mapping of names to weights")

    def _gather(self, found: files.RankFiles) -> None:
        """Collect the parts of every weight from all ranks, and number the layers for the whole model."""
        for tensor in range(found.tensor):
            stages = [_chunks(files.read(found.paths[tensor, stage])) for stage in range(found.pipeline)]
            self._require_tables(stages)
            before = 0  # interleaved: the first chunk of each stage, then the second of each
            for chunk in (chunks[number] for number in range(len(stages[0])) for chunks in stages):
                weights = names.of_core(chunk)
                for name, weight in weights.items():
                    self._parts.setdefault(names.renumbered(name, before), []).append(weight)
                before += len(names.layers_in(weights))

    def names(self) -> set[str]:
        """Return the names of all weights.

        Tied weights have one name.
        """
        extra = set() if self.args.get("untie_embeddings_and_output_weights") else {_VOCABULARY[1]}
        return self._parts.keys() - extra

    def whole(self, name: str) -> Tensor:
        """Return a complete weight, assembled in host memory.

        Raises:
            UsageError: the checkpoint has no such weight, or some ranks' parts are missing.
        """
        parts = self._parts.get(name, [])
        if len(parts) != self._tensor or not all(isinstance(part, Tensor) for part in parts):
            raise self._damaged(
                f"the weight {name} has {len(parts)} parts for {self._tensor} tensor-parallel ranks"
            )
        try:
            return shards.join(
                name, [self._ordered(name, part) for part in parts], gated=bool(self.args.get("swiglu"))
            )
        except (RuntimeError, IndexError) as error:
            raise self._damaged(
                f"the parts of the weight {name} have shapes that cannot be joined"
            ) from error

    def _ordered(self, name: str, part: Tensor) -> Tensor:
        if self._version >= 2:
            return part
        heads = int(self._number(self.args, "num_attention_heads")) // self._tensor
        return names.in_todays_order(name, part, self._version, heads)

    def _deduced(self) -> dict[str, Any]:
        """Return the arguments of a GPT-2 model, deduced from the shapes of its weights.

        Old files contain no arguments.
        """
        layers = names.layers_in(self._parts)
        positions, hidden = self.whole("embedding.position_embeddings.weight").shape
        _say(
            f"{self.path} has no arguments; it is assumed to have {len(layers)} layers of "
            f"hidden size {hidden} and {hidden // _HEAD} heads of size {_HEAD}, as in GPT-2"
        )
        return {
            "num_layers": len(layers),
            "hidden_size": hidden,
            "num_attention_heads": hidden // _HEAD,
            "ffn_hidden_size": self.whole("decoder.layers.0.mlp.linear_fc1.bias").size(0),
            "max_position_embeddings": positions,
            "seq_length": positions,
            "tokenizer_type": "GPT2BPETokenizer",
        }

    def _assume_fused_gelu(self) -> None:
        """Assume the default value, the fused GELU, if Megatron's conversion tool has dropped the flag."""
        if all(self.args.get(name) is value for name, value in _OF_THE_TOOL.items()):
            self.args["bias_gelu_fusion"] = True
            _say(
                f"{self.path} was written by Megatron's checkpoint conversion tool, which does "
                "not store --no-bias-gelu-fusion and --layernorm-epsilon; their defaults are "
                "assumed"
            )

    def _require_all_layers(self) -> None:
        found, wanted = names.layers_in(self._parts), self._number(self.args, "num_layers")
        if len(found) != wanted or max(found, default=-1) != wanted - 1:
            raise self._damaged(
                f"the files have {len(found)} layers, but the arguments in the files specify {wanted}"
            )

    def _damaged(self, reason: str) -> UsageError:
        return UsageError(
            f"the checkpoint {self.path} cannot be read: {reason}",
            remedy="Get the missing files of all ranks, or load another checkpoint.",
        )


def _chunks(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the model chunks in the file of one rank.

    With interleaved pipeline stages, there are several.
    """
    if "model" in content:
        return [content["model"]]
    return [content[f"model{number}"] for number in range(len(content)) if f"model{number}" in content]


@torch.no_grad()
def load_weights(model: Sequence[torch.nn.Module], path: Path) -> None:
    """Load the weights of a checkpoint into this rank's chunks of a model with any layout.

    Vocabulary rows that are missing from the checkpoint are set to zero.

    Raises:
        UsageError: files are missing or damaged, or the weights belong to another model.
    """
    from megatron.core import parallel_state

    found = Checkpoint(path)
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    used = set()
    for chunk in map(unwrap, model):
        for name, parameter in chunk.named_parameters():
            name = _in_whole_model(chunk, name)
            used.add(name)
            tied = name == _VOCABULARY[1] and name not in found.names()
            tensor = found.whole(_VOCABULARY[0] if tied else name)
            if name in _VOCABULARY:
                tensor = shards.with_rows(tensor, parameter.size(0) * size)
            part = shards.cut(name, tensor, size, gated=bool(found.args.get("swiglu")))[rank]
            _copy(parameter, part, name, path)
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        _require_all_used(found.names() - used, path)


def _in_whole_model(chunk: Any, name: str) -> str:
    """Convert the name of a weight in a chunk to its name in the whole model."""
    numbers = sorted(names.layers_in({name: None}))
    if not numbers:
        return name
    return names.renumbered(name, chunk.decoder.layers[numbers[0]].layer_number - 1 - numbers[0])


def _copy(parameter: Tensor, part: Tensor, name: str, path: Path) -> None:
    if part.shape != parameter.shape:
        raise UsageError(
            f"{path}: {name} must have the shape {list(parameter.shape)}, which the checkpoint's arguments "
            f"imply, but has {list(part.shape)}",
            remedy="Load another checkpoint.",
        )
    rows, where = row_shards.rows_of_rank(parameter)
    rows.copy_(part[where])


def _require_all_used(rest: set[str], path: Path) -> None:
    if rest:
        more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
        raise UsageError(
            f"{path} has the unexpected tensor {min(rest)}{more}, which is not a weight of the plain GPT "
            "that its arguments describe",
            remedy="Load a checkpoint of a plain GPT.",
        )
