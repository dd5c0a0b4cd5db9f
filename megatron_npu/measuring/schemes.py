"""Define the four tables of the document: how each row is trained, and the values published for it.

The document is "Accelerating PyTorch deep-learning training with Rapidformer". The document used 4 GPUs of 32
GB, and reports samples per second as mean and standard deviation, and peak memory in MB.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_npu.measuring.sizes import BERT, GPT, Family


@dataclass(frozen=True)
class Printed:
    """The values that the document gives for a row.

    Attributes:
        throughput: the mean number of samples per second; if None, see ``word``.
        peak: the peak memory in MB; if None, see ``word``.
        word: ``OOM``, ``NA``, or empty if the document does not have the row.
    """

    throughput: float | None = None
    peak: float | None = None
    word: str = ""


@dataclass(frozen=True)
class Scheme:
    """A row of a table, which describes one way of training.

    Attributes:
        cells: its first columns, as printed.
        printed: the document's values.
        mixed: whether matmuls are in 16 bits with fp32 main weights; otherwise, everything is in fp32.
        sharding: one of ``switches.SHARDINGS``.
        offload: whether optimizer states are in host memory.
        graph: whether the blocks are compiled.
        tensor, pipeline: the tensor-parallel size, and the number of pipeline stages.
        note: a remark for a footnote.
    """

    cells: tuple[str, ...]
    printed: Printed = Printed()
    mixed: bool = False
    sharding: str = "none"
    offload: bool = False
    graph: bool = False
    tensor: int = 1
    pipeline: int = 1
    note: str = ""

    @property
    def name(self) -> str:
        """The first columns of the row, joined into one string."""
        return " x ".join(self.cells)


@dataclass(frozen=True)
class Suite:
    """A table of the document.

    Attributes:
        name: the value of ``--suite``.
        title: what is trained.
        workload: the training function, ``module:function`` of ``workloads``.
        family: the models' family.
        columns: the headers of the first columns.
        micro_batch_size: the document's value, per device.
        small_micro_batch_size: the value for a CPU.
        schemes: the rows in the document's order.
    """

    name: str
    title: str
    workload: str
    family: Family
    columns: tuple[str, ...]
    micro_batch_size: int
    small_micro_batch_size: int
    schemes: tuple[Scheme, ...]


_ZERO_1 = "shards the optimizer states, as the document's fairscale OSS does (6.02 samples/s, 22077 MB)"
_ZERO_2 = (
    "shards the optimizer states and gradients, as the document's fairscale OSS + SDP does "
    "(7.01 samples/s, 17113 MB)"
)
_ZERO_3 = "uses Megatron's own FSDP (optim_grads_params)"
_FSDP = "shards the same states as the document's fairscale FSDP; uses fully_shard, torch's successor of it"
_FOUR_BY_FOUR = (
    "the document reports 4 x 4 on 4 GPUs, although that layout needs 16; its peak equals that "
    "of 4 x 1. The values here were measured on 16 devices"
)


def _layout(tensor: int, pipeline: int, throughput: float, peak: float, note: str = "") -> Scheme:
    return Scheme(
        (str(tensor), str(pipeline)),
        Printed(throughput, peak),
        mixed=True,
        tensor=tensor,
        pipeline=pipeline,
        note=note,
    )


SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "mixed-precision",
            "pre-training of Hugging Face's BERT (masked words, next sentence)",
            "huggingface:bert_pretraining",
            BERT,
            ("scheme",),
            16,
            4,
            (
                Scheme(("fp32",), Printed(103.07, 17025)),
                Scheme(("mixed",), Printed(178.15, 12698), mixed=True),
            ),
        ),
        Suite(
            "sharding",
            "pre-training of Megatron's GPT, model states sharded over data-parallel ranks",
            "megatron:gpt_pretraining",
            GPT,
            ("scheme",),
            1,
            1,
            (
                Scheme(("none (fp32)",), Printed(word="OOM")),
                Scheme(("mixed",), Printed(9.57, 25061), mixed=True),
                Scheme(("mixed + zero-1",), Printed(12.88, 15709), True, "zero-1", note=_ZERO_1),
                Scheme(("mixed + zero-2",), Printed(10.27, 15693), True, "zero-2", note=_ZERO_2),
                Scheme(("mixed + zero-3",), Printed(word="NA"), True, "zero-3", note=_ZERO_3),
                Scheme(("mixed + fsdp",), Printed(word="NA"), True, "fsdp", note=_FSDP),
                Scheme(("mixed + offload",), Printed(), True, offload=True, note="not in the document"),
            ),
        ),
        Suite(
            "3d",
            "pre-training of Megatron's GPT, tensor and pipeline parallel",
            "megatron:gpt_pretraining",
            GPT,
            ("tensor parallel", "pipeline parallel"),
            1,
            1,
            (
                _layout(1, 1, 9.63, 25061),
                _layout(2, 1, 7.59, 11300),
                _layout(4, 1, 6.16, 5673),
                _layout(1, 2, 8.46, 12375),
                _layout(1, 4, 8.03, 8141),
                _layout(2, 2, 7.37, 6211),
                _layout(4, 4, 6.24, 5673, _FOUR_BY_FOUR),
            ),
        ),
        Suite(
            "graph",
            "fine-tuning of Hugging Face's BERT (classes of sentences), blocks compiled by torch.compile",
            "huggingface:bert_finetuning",
            BERT,
            ("scheme",),
            16,
            4,
            (
                Scheme(("fp32",), Printed(479.15, 2112)),
                Scheme(("mixed",), Printed(589.66, 2127), mixed=True),
                Scheme(("graph",), Printed(554.24, 2430), graph=True),
                Scheme(("graph + mixed",), Printed(614.70, 2289), mixed=True, graph=True),
            ),
        ),
    )
}
