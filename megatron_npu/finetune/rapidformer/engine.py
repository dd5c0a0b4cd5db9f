"""Define ``RapidformerEngine``, which sets up the process group and the device, and accelerates models."""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from megatron_npu import devices, watchdog
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import disks
from megatron_npu.devices import gloo, loader_workers
from megatron_npu.finetune.data import plain_padding, vocabulary
from megatron_npu.finetune.data.loading import Collate, Loader, Sampling, require_length
from megatron_npu.finetune.data.padding import LONGEST, bucketed, buckets
from megatron_npu.finetune.model import pair_losses
from megatron_npu.finetune.model.prepare import AdamOptions, Prepared, prepare
from megatron_npu.finetune.rapidformer import gathering, providers, state
from megatron_npu.finetune.run import label_shares, ranks, schedule
from megatron_npu.finetune.run.flag_parts import MeetingFlags, RateFlags
from megatron_npu.finetune.run.run_plan import RunPlan
from megatron_npu.ops.compiled import building
from megatron_npu.options.switches import Switches
from megatron_npu.pretrain.checkpoint import save_folder

OptimizerFn = Callable[[Any], torch.optim.Optimizer]
SchedulerFn = Callable[[torch.optim.Optimizer], Any]


class RapidformerEngine:
    """Sets up the processes of a run, and prepares models, data and results.

    Args:
        args: the flags (``arguments.parse``). If None, the flags of the run are used.

    Attributes:
        args: the flags.
        device: the device of this process.
        switches: the enabled switches.
        prepared: the model prepared by ``compose`` or a template; None until then.
        vocabulary: the model's number of tokens; None if it is unknown or no model has been prepared.
        shifts_labels: whether the model compares labels with the previous outputs.
        pairs: object that splits the loss of a model with a next-sentence head; None for other models.
        used: whether the engine has been given data, a model, or a template that trains.

    Raises:
        UsageError: there are no flags, or the device is not available.
    """

    vocabulary: int | None = None
    shifts_labels = False
    pairs: pair_losses.PairLoss | None = None

    def __init__(self, args: Namespace | None = None) -> None:
        args = state.current().args if args is None else args
        self.args: Namespace = args.flags if isinstance(args, state.ScriptArgs) else args
        state.set_args(self.args)
        device = devices.current()
        device.set_current(self.args.local_rank)
        device.prepare()
        building.prepare()
        loader_workers.begin()
        self.device = device.torch_device()
        self.switches = Switches.from_args(self.args)
        self.prepared: Prepared | None = None
        self._loaders: list[Loader] = []
        self._told_lengths = False
        self.used = False
        meet(MeetingFlags.of(self.args))
        seed_everything(self.args.seed)
        state.current().engines.append(self)

    @property
    def place(self) -> ranks.Ranks:
        """The rank of this process among the processes that share the data."""
        return ranks.Ranks(self.args.rank, self.args.local_rank, self.args.world_size)

    def compose(
        self,
        model_obj: nn.Module,
        optimizer_fn: OptimizerFn | None = None,
        lr_scheduler_fn: SchedulerFn | None = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        """Return an accelerated model, its optimizer and its learning-rate scheduler.

        All three are used like ordinary objects: ``model(**batch)``, ``loss.backward()``,
        ``optimizer.step()``, ``lr_scheduler.step()``, ``optimizer.zero_grad()``. Gradients are averaged over
        the ranks.

        Args:
            model_obj: the model.
            optimizer_fn: function that creates an optimizer from parameters. If None, fused AdamW with the
                values from the flags is used.
            lr_scheduler_fn: function that creates a scheduler from an optimizer. If None, the schedule from
                the flags is used.

        Raises:
            UsageError: a switch needs a template, or the model is invalid.
        """
        if self.switches.mixed_precision == "fp16":
            raise UsageError(
                "--mixed-precision fp16 cannot be used with engine.compose, because fp16 needs loss "
                "scaling, which a custom loop does not provide. Pass --mixed-precision bf16, or train with "
                "a Finetuner."
            )
        prepared = self.prepare(model_obj, optimizer_fn, lr_scheduler_fn)
        if self.switches.mixed_precision:
            prepared.model.forward = _within(prepared.forward_context, prepared.model.forward)  # type: ignore[method-assign]
        return prepared.model, prepared.optimizer, prepared.lr_scheduler

    def prepare(
        self,
        model: nn.Module,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        plan: RunPlan | None = None,
    ) -> Prepared:
        """Prepare a model according to the switches, for training loops that need the complete result.

        Args:
            model: the model.
            optimizer: an optimizer, a function that creates one from parameters, or None for the default one.
            lr_scheduler: a scheduler, a function that creates one from an optimizer, or None for the schedule
                from the flags.
            plan: the training plan, whose length the schedule uses. If None, the length from the flags is
                used.

        Raises:
            UsageError: an argument is invalid, or cannot be combined with these switches.
        """
        self.used = True
        args = self.args if plan is None else plan.settled(self.args)
        of_flags = lr_scheduler is None and args.train_iters is not None
        if of_flags:
            lr_scheduler = schedule.scheduler_fn(RateFlags.of(args))
        module = providers.as_module(model)
        self.vocabulary = vocabulary.size_of(module)
        self.shifts_labels = label_shares.shifts_labels(module)
        scheduler_fn = providers.as_scheduler_fn(lr_scheduler, optimizer)
        self.prepared = prepare(
            module,
            optimizer,
            scheduler_fn,
            self.switches,
            device=self.device,
            clip_grad=args.clip_grad,
            adam=AdamOptions(
                lr=args.lr,
                weight_decay=args.weight_decay,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_eps,
            ),
        )
        self.prepared.flags_schedule = of_flags
        own = self.prepared.module
        self.pairs = pair_losses.PairLoss(own) if pair_losses.has_pairs(own) else None
        # weights were drawn alike on all ranks; what is dropped is drawn by each for itself
        devices.current().manual_seed((args.seed + 1 + args.rank) % 2**63)
        return self.prepared

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the tensors of all ranks, and return the result.

        All ranks must call this method. Samples that were repeated in a loader's last batch are removed, so
        that each sample of the dataset occurs once, in order. For tensors of different lengths, see
        ``gathering.gather``.
        """
        together = gathering.gather(tensor, self.args.world_size)
        for loader in self._loaders:
            rows = -(-loader.remainder // self.args.world_size)
            if loader.remainder and len(together) == rows * self.args.world_size:
                return together[: loader.remainder]
        return together

    def build_data_loader(
        self,
        dataset: Any,
        collate_fn: Collate | None = None,
        shuffle: bool = False,
        repeats: bool = False,
    ) -> Loader:
        """Return this rank's batches of ``--micro-batch-size`` samples on the rank's device.

        Args:
            dataset: a dataset with a length.
            collate_fn: creates a batch from a list of samples. If None, tokenized samples are padded by the
                tokenizer of ``--pretrained-model-name-or-path`` (or by ``plain_padding`` without one), and
                other samples use torch's default collate function.
            shuffle: whether to use a new order in each epoch.
            repeats: whether to reuse the same random numbers in each pass, as evaluation does.

        Raises:
            UsageError: the dataset has no length.
        """
        require_length(dataset, "the dataset passed to build_data_loader")
        self.used = True
        collate_fn = collate_fn or self._default_collate(dataset)
        loader = self.loader(dataset, collate_fn, shuffle=shuffle, repeats=repeats)
        self._loaders.append(loader)
        return loader

    def loader(self, dataset: Any, collate_fn: Collate | None, **sampling: Any) -> Loader:
        """Return a ``Loader`` of this rank's batches.

        With ``--dynamic-shape``, its batches have only a few different lengths.

        ``sampling`` is described in ``Sampling``.
        """
        args = self.args
        if args.dynamic_shape:
            collate_fn = self._bucketed(dataset, collate_fn)
        return Loader(
            dataset,
            collate_fn,
            sampling=Sampling(args.micro_batch_size, self.place, seed=args.seed, **sampling),
            device=self.device,
            workers=args.num_workers,
            look=lambda batch: vocabulary.require_known(batch, self.vocabulary),
        )

    def _bucketed(self, dataset: Any, collate: Collate | None) -> Collate | None:
        """Pad token batches to a small number of lengths (``--dynamic-shape``), and log these lengths
        once.
        """
        first = dataset[0] if len(dataset) else None
        if collate is None or not isinstance(first, Mapping) or "input_ids" not in first:
            return collate
        lengths = buckets(self.args.seq_length or LONGEST)
        if not self._told_lengths:
            self._told_lengths = True
            state.get_logger().info(
                "dynamic shape: each batch is padded to one of these lengths (in tokens): %s", lengths
            )
        tokenizer = getattr(collate, "tokenizer", None)
        return bucketed(
            collate,
            lengths,
            pad_token_id=getattr(tokenizer, "pad_token_id", None) or 0,
            left=getattr(tokenizer, "padding_side", "right") == "left",
        )

    def _default_collate(self, dataset: Any) -> Collate | None:
        first = dataset[0] if len(dataset) else None
        name = self.args.pretrained_model_name_or_path
        if not isinstance(first, dict) or "input_ids" not in first:
            return None
        if name is None:
            return plain_padding.pad
        from transformers import AutoTokenizer, DataCollatorWithPadding

        return DataCollatorWithPadding(AutoTokenizer.from_pretrained(name, trust_remote_code=False))


def made() -> int:
    """Return the number of engines that have been created in this run."""
    run = state.run()
    return 0 if run is None else len(run.engines)


def used() -> int:
    """Return the number of engines that have received data, a model, or a template that trains."""
    run = state.run()
    return 0 if run is None else sum(engine.used for engine in run.engines)


def meet(flags: MeetingFlags) -> None:
    """Create the process group according to a run's flags, and check that all ranks save to the same folder.

    Raises:
        UsageError: the group cannot be created (see ``join``), or the ranks save to different folders.
    """
    if dist.is_initialized():
        return
    join(flags.rank, flags.world_size, flags.distributed_timeout_minutes)
    if flags.world_size > 1:
        save_folder.require_shared(
            flags.save, per_machine=flags.save_per_machine, storage=flags.object_storage
        )
    else:
        disks.copy_to(flags.object_storage)


def join(rank: int, world_size: int, timeout_minutes: float) -> None:
    """Create the process group and start the watchdog; a single process needs no address.

    Raises:
        UsageError: other processes are missing, torchrun restarted the run with a stale store, or the limit
            of open files is too low.
    """
    watchdog.end_with_launcher()
    gloo.wait_at_exit()
    gloo.copy_with_one_thread()
    device = devices.current()
    # what lies in the host's memory (offloaded states, checkpoints) is exchanged there
    backend = device.backend if device.is_host else f"cpu:gloo,{device.name}:{device.backend}"
    timeout = timedelta(minutes=timeout_minutes)
    watchdog.require_open_files(world_size)
    if world_size == 1:
        with gloo.naming_interfaces():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        watchdog.begin()
        return
    watchdog.require_fresh_store()
    try:
        with watchdog.meeting(), gloo.naming_interfaces():
            dist.init_process_group(backend, timeout=timeout)
    except RuntimeError as error:  # another rank is gone already, and tells why
        raise UsageError(
            f"rank {rank} cannot connect to the other ranks: {str(error).partition(chr(10))[0]}. All "
            f"{world_size} ranks must connect to each other. See the messages of the other ranks for "
            "the cause."
        ) from error
    watchdog.begin()


def leave() -> None:
    """Destroy the process group if this process belongs to it."""
    if (run := state.run()) is not None:
        run.engines.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed Python, numpy, and the host and device generators identically on all ranks."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    device = devices.current()
    torch.manual_seed(seed)
    with device.host_rng():  # on the CPU the host has a generator of its own
        torch.default_generator.manual_seed(seed)
    device.manual_seed(seed % 2**63)


def _within(context: Callable[[], Any], call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **options: Any) -> Any:
        with context():
            return call(*args, **options)

    return called
