"""Train Megatron's GPT on random tokens with the built-in trainer.

The layouts use tensor, pipeline and data parallelism, and sharding.
"""

from __future__ import annotations

from megatron_npu import plugin
from megatron_npu.measuring.job import Job
from megatron_npu.measuring.meter import Meter
from megatron_npu.pretrain.flags import arguments
from megatron_npu.pretrain.run import initialize, pretrain

PAD = 128  # the vocabulary is the same for every tensor-parallel size


def gpt_pretraining(job: Job, meter: Meter) -> int:
    """Train a GPT model, and return the number of parameters of the whole model."""
    initialize.silence_known_warnings()
    plugin.install()
    import megatron.core.models.gpt  # so that its import is no part of the memory that is measured
    import megatron.core.optimizer  # noqa: F401

    meter.start()
    summary = pretrain.train(arguments.parse(flags(job)), lambda iteration, chunks: meter.step())
    return summary.parameters


def flags(job: Job) -> list[str]:
    """Return the command line of ``megatron-npu pretrain`` that trains a row."""
    size, scheme = job.size, job.scheme
    options = {
        "num-layers": size.layers,
        "hidden-size": size.hidden,
        "num-attention-heads": size.heads,
        "seq-length": size.seq_length,
        "max-position-embeddings": size.seq_length,
        "tensor-model-parallel-size": scheme.tensor,
        "pipeline-model-parallel-size": scheme.pipeline,
        "micro-batch-size": job.micro_batch_size,
        "global-batch-size": job.global_batch_size,
        "train-iters": job.steps_in_all,
        "lr": 1e-4,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": size.vocabulary - 1,  # it adds one of its own
        "make-vocab-size-divisible-by": max(1, PAD // scheme.tensor),
        "eval-iters": 0,
        "num-workers": 0,  # generated tokens cost next to nothing
        "log-interval": job.steps_in_all,
        "seed": job.seed,
    }
    argv = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*argv, "--mock-data", "--no-plot", *_words(job)]


def _words(job: Job) -> list[str]:
    """Return the switches of a row with the names that the document uses."""
    scheme = job.scheme
    words = [f"--{job.mixed_precision}"] if scheme.mixed else []
    if scheme.sharding != "none":
        words.append(f"--{scheme.sharding}-memory-optimization")
    return [*words, "--cpu-offload"] if scheme.offload else words
