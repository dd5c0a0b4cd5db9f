"""Options that need TransformerEngine or CUDA graphs: off and said, or refused in one line."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

import pytest

from megatron_npu.adaptors.megatron_core.options import refused_options, unsupported_options
from megatron_npu.base.errors import UsageError
from megatron_npu.ops import dispatch
from megatron_npu.ops.dispatch import FallbackForbiddenError
from tests.adaptors.megatron_core.conftest import make_config
from tests.conftest import checkout
from tests.support.comparison import here
from tests.support.stock_core import losses, norms, pretrain

GRAPHS = [
    {"enable_cuda_graph": True},
    {"external_cuda_graph": True},
    {"cuda_graph_impl": "local"},
    {"cuda_graph_impl": "transformer_engine"},
]
# Exported for TransformerEngine, against upstream's default of --attention-backend.
SWITCHES = {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1"}


@pytest.fixture(autouse=True)
def armed() -> None:
    import megatron_npu

    megatron_npu.install()


def test_what_inference_would_capture_goes_with_the_graphs() -> None:
    """0.18 and newer refuse a scope of graphs that are not captured."""
    options = argparse.Namespace(cuda_graph_impl="local", inference_cuda_graph_scope="block")
    unsupported_options.do_without_cuda_graphs(options)
    assert vars(options) == {"cuda_graph_impl": "none", "inference_cuda_graph_scope": None}


@pytest.mark.parametrize("asked", GRAPHS, ids=lambda asked: "-".join(map(str, *asked.items())))
def test_no_graph_is_captured_without_cuda(asked, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "fallbacks", {})
    config = make_config(**asked, use_te_rng_tracker=True)
    assert not config.enable_cuda_graph
    assert not config.external_cuda_graph
    assert config.cuda_graph_impl == "none"
    assert not config.use_te_rng_tracker
    (name,) = asked
    assert {what for what, _ in dispatch.fallbacks} == {name.replace("_", "-"), "te-rng-tracker"}
    monkeypatch.setenv("MEGATRON_NPU_STRICT", "1")
    with pytest.raises(FallbackForbiddenError, match="no CUDA graphs on the"):
        make_config(**asked)


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"fp8": "hybrid"}, "--fp8-format hybrid"),
        ({"fp4": "e2m1"}, "--fp4-format e2m1"),
        ({"cross_entropy_fusion_impl": "te"}, "--cross-entropy-fusion-impl te"),
        ({"tp_comm_overlap": True, "tensor_model_parallel_size": 2}, "--tp-comm-overlap"),
    ],
)
def test_what_needs_transformer_engine_is_refused(asked, line) -> None:
    if "tp_comm_overlap" in asked and here().type == "npu":
        pytest.skip("the case: an NPU has operations for it")
    with pytest.raises(UsageError, match=f"^{line} is not supported without TransformerEngine[.] .*[.]$"):
        make_config(**asked)


def test_what_needs_nccl_is_refused() -> None:
    for field, flag in (("nccl_ub", "--use-nccl-ub"), ("use_sharp", "--use-sharp")):
        with pytest.raises(UsageError, match=f"^{flag} is not supported without CUDA[.] "):
            unsupported_options.refuse(
                argparse.Namespace(**{field: True}), unsupported_options.NEED_CUDA, "CUDA"
            )


def test_a_config_that_asks_for_nothing_is_left_alone(monkeypatch) -> None:
    monkeypatch.setenv("MEGATRON_NPU_STRICT", "1")
    assert make_config(cross_entropy_fusion_impl="native").cuda_graph_impl == "none"


def test_switches_of_transformer_engine_are_left_alone(monkeypatch, caplog) -> None:
    """Launch scripts export them; and upstream's own exports would keep a second model from being built."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.transformer.enums import AttnBackend

    for name, value in SWITCHES.items():
        monkeypatch.setenv(name, value)
    for backend in AttnBackend:
        model = argparse.Namespace(config=make_config(attention_backend=backend))
        LanguageModule._set_attention_backend(model)
    assert {name: os.environ[name] for name in SWITCHES} == SWITCHES
    assert "NVTE_UNFUSED_ATTN" not in os.environ
    assert len(caplog.messages) <= 1  # said once in the life of a process
    assert all("--attention-backend" in line for line in caplog.messages)


def test_the_stock_script_trains_without_graphs_and_twice_alike(tmp_path: Path) -> None:
    tree = checkout("megatron_core", "0.16.1")
    graphs = "--enable-cuda-graph --te-rng-tracker --transformer-impl inference_optimized".split()
    few = "--deterministic-mode --train-iters 2 --eval-iters 0".split()
    done = pretrain(tree, tmp_path, *graphs, *few, **SWITCHES)
    again = pretrain(tree, tmp_path, *graphs, *few, **SWITCHES)
    assert len(losses(done)) == 2
    assert (losses(again), norms(again)) == (losses(done), norms(done))  # to the digits that it prints
    said = done.stdout + done.stderr
    assert "NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=1 has no effect" in said
    for option in ("enable-cuda-graph", "te-rng-tracker"):
        assert f"{option} is ignored: " in done.stdout
    assert "transformer_engine falls back: " in done.stdout


@pytest.mark.parametrize(
    ("version", "flags", "said"),
    [
        (
            "0.16.1",
            "--fp8-format hybrid",
            "--fp8-format hybrid is not supported without TransformerEngine",
        ),
        ("0.12.1", "--tp-comm-overlap", "--tp-comm-overlap is not supported without TransformerEngine"),
        ("0.16.1", "--recompute-granularity selective --recompute-modules mla_up_proj", "mla_up_proj in"),
        ("0.16.1", "--cp-comm-type a2a+p2p", "--hierarchical-context-parallel-sizes must be set when"),
        ("0.16.1", "--num-experts 4 --moe-grouped-gemm", "--moe-grouped-gemm without --bf16 requires"),
    ],
)
def test_the_stock_script_refuses_in_one_line(version: str, flags: str, said: str, tmp_path: Path) -> None:
    """What cannot be without TransformerEngine, and what upstream's configuration and arguments refuse."""
    done = pretrain(checkout("megatron_core", version), tmp_path, *flags.split())
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("megatron-npu")
    assert said in last


def test_attention_of_other_layers_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.delenv("MEGATRON_NPU_TE", raising=False)
    given = {"transformer_impl": "local", "rotary_interleaved": False, "multi_latent_attention": True}
    args = argparse.Namespace(experimental_attention_variant="dsa", **given)
    with pytest.raises(
        UsageError,
        match="--experimental-attention-variant dsa requires TransformerEngine, which is not installed",
    ):
        unsupported_options.take_local_implementation(args)


def test_what_upstream_refuses_is_still_of_its_kind() -> None:
    """Programs that catch upstream's ValueError go on doing so."""
    with pytest.raises(ValueError, match=r"^Megatron rejects these options: .* Change the options") as caught:
        make_config(recompute_granularity="selective", recompute_modules=["mla_up_proj"])
    assert isinstance(caught.value, UsageError)
    with pytest.raises(AssertionError, match=r"^$"), refused_options.in_one_line():
        raise AssertionError


@pytest.mark.parametrize("size", ["total_model_size=4", "encoder_model_size=0 + decoder_model_size=4"])
def test_too_few_processes_are_answered_with_the_command_that_starts_more(size: str) -> None:
    said = f"world size (2) is not divisible by total_model_size ({size})"
    with (
        pytest.raises(
            UsageError, match=r"such as `torchrun --nproc-per-node 4 -m megatron_npu run SCRIPT …`"
        ),
        refused_options.in_one_line(),
    ):
        raise AssertionError(said)


def test_the_dynamic_engine_is_refused_without_flash_attn() -> None:
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("the case: flash-attn is installed")
    from megatron.core.transformer import attention

    with pytest.raises(
        UsageError,
        match="the dynamic inference engine requires flash-attn, which is not installed and requires CUDA",
    ):
        attention.is_fa_min_version("2.7.3")


def test_mamba_is_refused_without_its_kernels() -> None:
    if importlib.util.find_spec("mamba_ssm"):
        pytest.skip("the case: mamba-ssm is installed")
    from megatron.core.models.mamba.mamba_model import MambaModel

    with pytest.raises(UsageError, match="a Mamba model requires the packages mamba-ssm and causal-conv1d"):
        MambaModel(make_config(), None, vocab_size=8, max_sequence_length=8)
