"""Support ``--deepspeed``: train with the engine of a current DeepSpeed version."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from megatron_npu.adaptors.deepspeed import deepspeed_half
from megatron_npu.base.errors import UsageError
from megatron_npu.patching.registry import Recorder


def connect(recorder: Recorder, mpu: str) -> None:
    """Record patches for the code in which a Megatron-DeepSpeed checkout builds its engine.

    Args:
        recorder: the checkout's recorder.
        mpu: the name of the module that provides ranks and groups.
    """

    @recorder.around(
        "megatron.training:setup_model_and_optimizer",
        why="bigscience's tree passes the configuration to deepspeed.initialize twice, as values and as a "
        "file name, which DeepSpeed rejects since 0.7; DeepSpeed 0.19.8 clips a pipeline's fp32 "
        "gradients by a wrong norm; with wall_clock_breakdown it times the backward pass twice, which "
        "fails an assertion; in 16 bits without ZeRO it takes a step before the first one, keeps the "
        "loss scale elsewhere, divides by it without having multiplied, and after loading only the "
        "weights steps from others",
    )
    def initialise_engine(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``deepspeed.initialize`` without the name of the configuration file, and fix the engine
        that it returns.
        """
        deepspeed: Any = importlib.import_module("deepspeed")
        real = deepspeed.initialize

        def initialize(*, args: Any, **given: Any) -> Any:
            refuse_other_models(args, isinstance(given["model"], deepspeed.PipelineModule))
            path, args.deepspeed_config = args.deepspeed_config, None
            try:
                engine, *others = deepspeed_half.initialize(real, args=args, **given)
            finally:
                args.deepspeed_config = path
            engine.clip_fp32_gradients = lambda: clip_fp32_gradients(engine, importlib.import_module(mpu))
            show_loss_scale(engine.optimizer)
            if isinstance(engine.module, deepspeed.PipelineModule) and not engine.is_last_stage():
                time_backward_once(engine)
            return engine, *others

        deepspeed.initialize = initialize
        try:
            return original(*args, **kwargs)
        finally:
            deepspeed.initialize = real


def refuse_other_models(args: Any, pipeline: bool) -> None:
    """Reject a model for which upstream's training loop is unable to run a step with DeepSpeed's engine.

    Args:
        args: upstream's arguments, with ``--deepspeed``.
        pipeline: whether the model is a pipeline.

    Raises:
        UsageError: the model is not a pipeline, but upstream's loop asserts that it is.
    """
    # bigscience's tree has no --no-pipeline-parallel, from which deepspeedai's makes the other name
    if pipeline or not getattr(args, "ds_pipeline_enabled", True):
        return
    remedy = "Add --no-pipeline-parallel." if hasattr(args, "ds_pipeline_enabled") else "Remove --deepspeed."
    raise UsageError(
        "--deepspeed requires a model that upstream builds as a pipeline, such as GPT, because with this "
        "flag the training loop calls DeepSpeed's pipeline engine; upstream does not build models such as "
        f"BERT and T5 as a pipeline. {remedy}"
    )


def show_loss_scale(optimizer: Any) -> None:
    """Set ``cur_scale``, the attribute from which upstream's training loop reads the loss scale.

    Without ZeRO, the fp16 optimizers of DeepSpeed 0.19.8 keep the loss scale in ``loss_scale_config``.

    Args:
        optimizer: the optimizer of DeepSpeed's engine; None if the engine has no optimizer.
    """
    if hasattr(optimizer, "loss_scale_config") and not hasattr(optimizer, "cur_scale"):
        type(optimizer).cur_scale = property(lambda one: one.loss_scale_config.cur_scale)


def time_backward_once(engine: Any) -> None:
    """Time this stage's backward pass only once, in the pipeline code but not in DeepSpeed's hook.

    With ``"wall_clock_breakdown": true``, DeepSpeed 0.19.8 starts two timers when a stage's backward pass
    begins (``PipelineEngine._exec_backward_pass``), and starts them again in a hook (``_backward_prologue``).

    Args:
        engine: DeepSpeed's engine for any stage except the last. For the last stage, only the hook measures
            the backward pass.
    """
    engine.engine_timers.backward_timers = []
    engine.engine_timers.backward_inner_timers = []


@torch.no_grad()
def clip_fp32_gradients(engine: Any, mpu: Any) -> None:
    """Scale the gradients so that their norm over all stages is at most the configured limit.

    With ZeRO 0, DeepSpeed 0.19.8 (``runtime/utils.py``, ``clip_grad_norm_``) counts the tied embedding once
    for each stage that has it, and counts only the first stage's biases and norms.

    Args:
        engine: DeepSpeed's engine without an optimizer of its own (fp32, ZeRO 0).
        mpu: upstream's module of ranks and groups.
    """
    parameters = [parameter for parameter in engine.module.parameters() if parameter.grad is not None]
    grads = [parameter.grad for parameter in parameters]
    counted = [parameter.grad for parameter in parameters if _counts_here(parameter, mpu)]
    # a stage of nothing but what another one counts adds zero
    norms = torch._foreach_norm(counted) if counted else [grads[0].new_zeros(())]
    total = torch.stack(norms).square().sum()
    torch.distributed.all_reduce(total, group=mpu.get_model_parallel_group())
    torch._foreach_mul_(grads, torch.clamp(engine.gradient_clipping() / (total.sqrt() + 1e-6), max=1.0))


def _counts_here(parameter: torch.nn.Parameter, mpu: Any) -> bool:
    """Return True if this process counts the given parameter in the gradient norm.

    Only one replica of each parameter is counted.
    """
    split = getattr(parameter, "tensor_model_parallel", False)
    of_another_stage = getattr(parameter, "ds_pipe_replicated", False)  # tied: the embedding of the last
    return not of_another_stage and (split or mpu.get_tensor_model_parallel_rank() == 0)
