"""Implement ``megatron-npu train``: parse the flags, start the ranks, and run the task or script."""

from __future__ import annotations

import traceback
from argparse import Namespace
from collections.abc import Sequence

from megatron_npu import devices, watchdog
from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.run import arguments, launch, ranks
from megatron_npu.finetune.run.flag_parts import BeginFlags
from megatron_npu.finetune.run.layout import ModelParallel
from megatron_npu.options.switch_rules import Place, meant, refuse
from megatron_npu.options.switches import FULLY, Switches
from megatron_npu.pretrain.checkpoint import save_folder
from megatron_npu.pretrain.flags.checks import logs_and_checkpoints
from megatron_npu.pretrain.run import last_words


def main(argv: Sequence[str]) -> int:
    """Run the command, and return its exit code.

    Raises:
        UsageError: the input is invalid on one of the ranks.
    """
    if ranks.launched():
        watchdog.end_with_launcher()  # before what takes time, too: imports, the user's script
    args = arguments.parse(argv)
    if not ranks.launched():
        local = launch.local_processes(args.nproc_per_node)
        together = arguments.with_ranks(args, ranks.Ranks(world_size=local * launch.machines()))
        if together.world_size > 1:
            _supported(together)
            return launch.start(argv, local)
    ranks.require_as_many(args.nproc_per_node)
    return _run(arguments.with_ranks(args, ranks.of_this_process()))


def _run(args: Namespace) -> int:
    """Run the training on this rank, and return the exit code."""
    try:
        train(args)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(last_words.what_is_saved(args.save)) from None
    except UsageError as error:
        if args.log_level == "debug":
            traceback.print_exception(error.__cause__ or error)
        if args.rank:
            watchdog.tell_others(error)
            last_words.wait_for_rank_0_to_report()
        raise
    except last_words.FAILURES as failure:
        return last_words.tell("train", failure)
    return 0


def train(args: Namespace) -> None:
    """Train in this process, which is one of the ranks, as specified by the flags.

    Args:
        args: the result of ``arguments.parse``, with the ranks from ``arguments.with_ranks``.

    Raises:
        UsageError: the input is invalid.
    """
    args = _supported(args, tells=args.rank == 0)
    logs_and_checkpoints.places(args)
    logs_and_checkpoints.fetched(args)
    from megatron_npu.finetune.rapidformer import engine, state, user_script
    from megatron_npu.finetune.run import checkpoint
    from megatron_npu.pretrain.run.initialize import silence_known_warnings

    checkpoint.require_there(BeginFlags.of(args))
    silence_known_warnings()
    state.set_args(args)
    try:
        with save_folder.owned(args.save, args.rank):
            if args.user_script:
                user_script.run(args.user_script)
            else:
                from megatron_npu.finetune.model import sharding
                from megatron_npu.finetune.tasks import template_for

                sharding.silence_views()
                template_for(args.task)(engine.RapidformerEngine(args)).train()
        watchdog.end()
    except Exception as error:
        if watchdog.failed(error.__cause__ if isinstance(error, UsageError) and error.__cause__ else error):
            raise SystemExit(1) from None
        raise
    finally:
        engine.leave()
        state.set_args(None)


def _supported(args: Namespace, *, tells: bool = False) -> Namespace:
    """Return the flags with each switch replaced by its equivalent on this device, if there is one.

    Args:
        args: the flags.
        tells: whether to print such replacements.

    Raises:
        UsageError: a combination of switches is not supported.
    """
    device, alone = devices.current().name, args.data_parallel_size == 1
    cut = ModelParallel.of(args).is_cut
    if not args.user_script:
        place = Place("transformers", device, alone=alone)
    else:  # no model but Megatron's is cut
        place = Place("megatron" if cut else "user", device, cut, alone)
    switches, line = meant(Switches.from_args(args), place)
    if line and tells:
        print(f"megatron_npu: {line}", flush=True)
    refuse(switches, place)
    if args.check_weight_hash_across_dp_replicas_interval and switches.sharding in FULLY:
        raise UsageError(
            f"--check-weight-hash-across-dp-replicas-interval cannot be used with {switches.sharding}, "
            "because with this sharding each rank has a different part of every weight and there are no "
            "replicas to compare. Remove it, or use --zero-1-memory-optimization."
        )
    meant_here = {"graph_optimization": switches.graph_optimization, "fused_ops": switches.fused_ops}
    return Namespace(**{**vars(args), **meant_here})
