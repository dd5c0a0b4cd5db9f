"""Estimate the memory and time of a layout with closed formulas.

Layouts for a dry run are selected by memory.

The time estimate assumes that each operation of a layer takes its compute time or its memory-traffic time,
whichever is longer (a roofline model). Communication of tensor, expert and pipeline parallelism is exposed,
and data-parallel communication overlaps with the backward pass of the last micro batch. The idle time of the
pipeline follows from the order of passes that a dry run has recorded, or else from the formula for the 1F1B
schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_npu.planning import pipeline
from megatron_npu.planning.hardware import REACHED_FLOPS, REACHED_LINKS, REACHED_MEMORY, Hardware
from megatron_npu.planning.layouts import Layout
from megatron_npu.planning.shape import Shape

_HALF, _FULL = 2, 4  # bytes


@dataclass(frozen=True)
class Time:
    """The estimated duration of one iteration in seconds.

    Attributes:
        computing: the time for the operations of a stage, averaged over the stages.
        sending: the time for exposed communication.
        waiting: the time that a stage waits for the others, averaged over the stages.
        updating: the time for the optimizer.
        recorded: whether ``waiting`` follows from a recorded order, not from a formula.
    """

    computing: float
    sending: float
    waiting: float
    updating: float
    recorded: bool = False

    @property
    def total(self) -> float:
        return self.computing + self.sending + self.waiting + self.updating


@dataclass(frozen=True)
class Estimate:
    """The estimates for one layout of one model, computed with closed formulas.

    Attributes:
        per_node: the number of devices per machine.
    """

    shape: Shape
    layout: Layout
    hardware: Hardware
    per_node: int

    @property
    def layers(self) -> int:
        """The number of layers per pipeline stage."""
        return self.shape.layers // self.layout.pipeline

    @property
    def tokens(self) -> float:
        """The number of tokens in a micro-batch on one rank."""
        return self.layout.micro_batch * self.shape.length / self.layout.context

    @property
    def weights(self) -> float:
        """The number of weights of the first pipeline stage on one rank."""
        shape, layout = self.shape, self.layout
        experts = max(1, shape.experts / layout.expert)
        tables = 1 + (layout.pipeline == 1 and not shape.tied)
        return (self.layers * (shape.attention + experts * shape.mlp) + tables * shape.table) / layout.tensor

    def memory(self) -> float:
        """Return the memory in bytes of the first stage: weights, gradients, optimizer states,
        activations and logits.
        """
        shape, layout = self.shape, self.layout
        shares = layout.data * layout.context if layout.shared else 1
        lasting = self.weights * (_HALF + _FULL + 12 / shares)
        in_flight: float = min(layout.micro_batches, layout.pipeline)
        if layout.chunks > 1:
            in_flight *= 1 + (layout.pipeline - 1) / (layout.pipeline * layout.chunks)
        logits = self.tokens * shape.vocabulary / layout.tensor * 6 if layout.pipeline == 1 else 0
        return lasting + in_flight * self.layers * self._activations() + self._of_a_layer() + logits

    def _of_a_layer(self) -> float:
        """Return the number of bytes that a layer saves for its backward pass.

        Attention is assumed not to save its probabilities.
        """
        shape = self.shape
        attention = shape.channels * (2 * shape.heads + 2 * shape.groups)
        mlp = shape.chosen * shape.ffn * (shape.matrices + 1)
        return self.tokens * _HALF * (5 * shape.hidden + attention + mlp) / self.layout.tensor

    def _activations(self) -> float:
        if self.layout.recomputed == "full":
            return self.tokens * _HALF * self.shape.hidden / self.layout.tensor
        return self._of_a_layer()

    def time(self, orders: Sequence[pipeline.Order] | None = None) -> Time:
        """Return the estimated time for an iteration.

        Args:
            orders: the passes of each stage in the order in which a dry run has run them. If None, or if they
                do not fit together, the idle time is that of the 1F1B schedule, ``(p - 1) / v`` micro batches
                of the slowest stage.
        """
        layout = self.layout
        usual, last = self._stage(False), self._stage(True)
        slowest = max(sum(usual), sum(last))
        computing, sending = (
            layout.micro_batches * ((layout.pipeline - 1) * of_usual + of_last) / layout.pipeline
            for of_usual, of_last in zip(usual, last, strict=True)
        )
        whole = self._recorded(orders, slowest) if orders else None
        recorded = whole is not None
        if whole is None:
            whole = slowest * (layout.micro_batches + (layout.pipeline - 1) / layout.chunks)
        hidden = 2 * (layout.chunks - 1) * self._chunk(False)[0] + 2 * self._chunk(True)[0]
        exposed = max(0.0, self._reduced() - hidden)
        waiting = max(0.0, whole - computing - sending)  # without stages, only the rounding is left
        return Time(computing, sending + exposed, waiting, self._updated(), recorded)

    def _recorded(self, orders: Sequence[pipeline.Order], slowest: float) -> float | None:
        """Return the time in seconds for all micro-batches, assuming the slowest stage's time for those
        that were not run.
        """
        layout = self.layout
        if len(orders) != layout.pipeline:
            return None
        seconds = {
            (kind, is_last): sum(self._pass(kind, is_last))
            for kind in (pipeline.FORWARD, pipeline.BACKWARD)
            for is_last in (False, True)
        }

        def duration(kind: str, stage: int, chunk: int) -> float:
            return seconds[kind, (stage, chunk) == (layout.pipeline - 1, layout.chunks - 1)]

        found = pipeline.span(orders, duration)
        if found is None:
            return None
        return found + slowest * (layout.micro_batches - pipeline.micro_batches(orders))

    def _stage(self, has_last: bool) -> tuple[float, float]:
        """Return the time in seconds that a stage, with or without the last chunk, needs to compute and
        send a batch.
        """
        computing = sending = 0.0
        for kind in (pipeline.FORWARD, pipeline.BACKWARD):
            usual, last = self._pass(kind, False), self._pass(kind, has_last)
            computing += (self.layout.chunks - 1) * usual[0] + last[0]
            sending += (self.layout.chunks - 1) * usual[1] + last[1]
        return computing, sending

    def _pass(self, kind: str, is_last: bool) -> tuple[float, float]:
        """Return the time in seconds for computing and sending a micro-batch's pass through a chunk."""
        layout = self.layout
        forward, core, logits = self._chunk(is_last)
        sent, staged = self._sent()
        if kind == pipeline.FORWARD:
            return forward, sent + staged
        again = {"none": 0.0, "selective": core, "full": forward - logits}[layout.recomputed]
        return 2 * forward + again, sent * (2 if layout.recomputed == "full" else 1) + staged

    def _chunk(self, is_last: bool) -> tuple[float, float, float]:
        """Return the time in seconds for a chunk's forward pass, and how much of it attention and logits
        take.

        Args:
            is_last: whether it is the model's last chunk, which has the output layer.
        """
        shape, layout, tokens = self.shape, self.layout, self.tokens
        layers = self.layers / layout.chunks
        core = self._operation(
            2 * tokens * shape.length * shape.heads * shape.channels / layout.tensor,  # half is masked
            tokens * _HALF * shape.channels * 2 * (shape.heads + shape.groups) / layout.tensor,
        )
        attention = self._product(shape.attention / layout.tensor, tokens)
        mlp = self._product(shape.mlp / layout.tensor, tokens * shape.chosen)
        # norms, residuals and the activation function read and write what they work on
        rest = self._operation(
            0, tokens * _HALF * (10 * shape.hidden + 3 * shape.chosen * shape.ffn) / layout.tensor
        )
        logits = self._product(shape.table / layout.tensor, tokens) if is_last else 0.0
        return layers * (core + attention + mlp + rest) + logits, layers * core, logits

    def _product(self, weights: float, tokens: float) -> float:
        """Return the time in seconds for the matmul of tokens with a weight matrix."""
        return self._operation(2 * weights * tokens, _HALF * weights)

    def _operation(self, flops: float, bytes_: float) -> float:
        hardware = self.hardware
        return max(flops / (hardware.flops * REACHED_FLOPS), bytes_ / (hardware.memory * REACHED_MEMORY))

    def _sent(self) -> tuple[float, float]:
        """Return the time in seconds for the communication in a pass through a chunk, within layers and
        between stages.
        """
        shape, layout = self.shape, self.layout
        states = self.tokens * shape.hidden * _HALF
        tensor = 4 * states * self._ring(layout.tensor, 1)  # two all-reduces, each twice a ring
        pairs = 2 * self.tokens * shape.channels * shape.groups * _HALF / layout.tensor
        context = pairs * layout.context * self._ring(layout.context, layout.tensor)
        rows = 2 * states * shape.chosen / layout.tensor
        experts = rows * self._ring(layout.expert, layout.tensor) if shape.experts else 0.0
        staged = states / layout.tensor * self._ring(layout.pipeline, self._inner)
        return self.layers / layout.chunks * (tensor + context + experts), staged

    @property
    def _inner(self) -> int:
        """The difference between the ranks of adjacent pipeline stages."""
        return self.layout.tensor * self.layout.context * self.layout.data

    def _ring(self, ranks: int, apart: int) -> float:
        """Return the time in seconds per byte for passing a tensor around a ring of ranks at distance
        ``apart``.
        """
        if ranks == 1:
            return 0.0
        inside = ranks * apart <= self.per_node
        speed = self.hardware.link if inside else self.hardware.network
        return (ranks - 1) / ranks / (speed * REACHED_LINKS)

    def _reduced(self) -> float:
        """Return the time in seconds for reducing gradients and gathering weights in each iteration."""
        layout = self.layout
        ranks = layout.data * layout.context
        back = _HALF if layout.shared else _FULL
        return self.weights * (_FULL + back) * self._ring(ranks, layout.tensor)

    def _updated(self) -> float:
        layout = self.layout
        shares = layout.data * layout.context if layout.shared else 1
        return self._operation(0, self.weights * 28 / shares)
