"""Train Hugging Face's BERT on random tokens with the switches of ``megatron-npu train``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from megatron_npu import devices
from megatron_npu.finetune.data.labels import IGNORED
from megatron_npu.finetune.model.prepare import Prepared, prepare
from megatron_npu.finetune.rapidformer import engine
from megatron_npu.measuring.job import Job
from megatron_npu.measuring.meter import Meter

MASKED = 0.15  # part of the words that BERT's pre-training hides
CLASSES = 2
_BATCHES = 4  # made beforehand, and used in turn

Batch = dict[str, Tensor]


def bert_pretraining(job: Job, meter: Meter) -> int:
    """Train BERT on masked words and next sentences.

    Return the number of parameters.
    """
    from transformers import BertConfig, BertForPreTraining

    def batch() -> Batch:
        tokens = _tokens(job)
        hidden = torch.rand(tokens.shape) < MASKED
        hidden[:, 0] = True  # one at least: a loss over no word is no number
        return {
            **_of_a_pair(tokens),
            "labels": tokens.masked_fill(~hidden, IGNORED),
            "next_sentence_label": torch.randint(2, (job.micro_batch_size,)),
        }

    return _train(job, meter, lambda: BertForPreTraining(_bert(job, BertConfig)), batch)


def bert_finetuning(job: Job, meter: Meter) -> int:
    """Train BERT for sentence classification.

    Return the number of parameters.
    """
    from transformers import BertConfig, BertForSequenceClassification

    def batch() -> Batch:
        labels = torch.randint(CLASSES, (job.micro_batch_size,))
        return {**_of_a_pair(_tokens(job)), "labels": labels}

    def model() -> nn.Module:
        return BertForSequenceClassification(_bert(job, BertConfig, num_labels=CLASSES))

    return _train(job, meter, model, batch)


def _train(job: Job, meter: Meter, build: Callable[[], nn.Module], make: Callable[[], Batch]) -> int:
    """Train a model with the same weights but different tokens on each rank.

    Return the number of parameters.
    """
    rank, device = int(os.environ["RANK"]), devices.current()
    device.set_current(int(os.environ["LOCAL_RANK"]))
    engine.join(rank, job.ranks, timeout_minutes=10)
    engine.seed_everything(job.seed)
    if job.scheme.graph:
        import torch._inductor.compile_fx  # noqa: F401  (no part of the memory that is measured)

    meter.start()
    model = build()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    prepared = prepare(model.train(), None, None, job.switches, device=device.torch_device(), clip_grad=1.0)
    print("\n".join(prepared.ledger), flush=True)
    engine.seed_everything(job.seed + 1 + rank)
    batches = _in_turn([_on(device.torch_device(), make()) for _ in range(_BATCHES)])
    for _ in range(job.steps_in_all):
        _step(prepared, batches, job.micro_batches)
        meter.step()
    if job.scheme.graph:
        _must_have_compiled()
    engine.leave()
    return parameters


def _step(prepared: Prepared, batches: Iterator[Batch], micro_batches: int) -> None:
    for number in range(1, micro_batches + 1):
        with prepared.accumulating(last=number == micro_batches):
            with prepared.forward_context():
                loss = prepared.model(**next(batches)).loss / micro_batches
            prepared.backward(loss)
    prepared.step()


def _must_have_compiled() -> None:
    """Raise an error if torch.compile has not compiled any graph, because torch itself does not report
    this.
    """
    from torch._dynamo.utils import counters

    if not counters["frames"]["ok"]:
        raise RuntimeError("torch.compile did not compile anything")


def _bert(job: Job, config: Callable[..., object], **options: int) -> object:
    size = job.size
    return config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.hidden,
        max_position_embeddings=size.seq_length,
        **options,
    )


def _tokens(job: Job) -> Tensor:
    """Return random tokens, ``[b, s]``."""
    return torch.randint(job.size.vocabulary, (job.micro_batch_size, job.size.seq_length))


def _of_a_pair(tokens: Tensor) -> Batch:
    """Return BERT's inputs for two sentences of equal length, which fill the sequence without padding."""
    kinds = torch.zeros_like(tokens)
    kinds[:, tokens.shape[1] // 2 :] = 1
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "token_type_ids": kinds}


def _on(device: torch.device, batch: Batch) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _in_turn(batches: list[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches
