"""The surroundings of a run: a folder to write in, an environment, and what ranks share before the fork."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

from megatron_npu import plugin
from megatron_npu.base import settings
from megatron_npu.upstream import megatrons

# Imported once before the fork: otherwise it takes seconds for each rank of each file.
PRELOADED = """torch torch.distributed.checkpoint torch._dynamo transformers megatron.core megatron.training
    megatron.core.models.gpt megatron.core.models.gpt.gpt_layer_specs megatron.core.optimizer
    megatron.core.dist_checkpointing megatron.core.pipeline_parallel.schedules megatron.core.inference.engines
    megatron.training.training""".split()
PRELOADED_DEEPSPEED = "torch deepspeed transformers megatron megatron.initialize megatron.training".split()
# megatron.training of 0.18 and 0.19 takes a name of Python 3.12; by its path, as ``tests`` is upstream's here
PLUGINS = ("pytest_mock", "pytest_asyncio.plugin")  # those that upstream's tests use


def environment(device: str, checkout: Path, scratch: Path) -> None:
    """Make ``scratch`` ready and set the variables that ranks inherit.

    Ranks work in a folder of links to the checkout's entries: relative paths are read there and written here.
    """
    for name in ("tmp", "logs", "cwd", "results"):
        (scratch / name).mkdir(parents=True, exist_ok=True)
    for entry in checkout.iterdir():
        link = scratch / "cwd" / entry.name
        if not link.is_symlink() and entry.name != ".git":
            link.symlink_to(entry)
    os.environ |= {
        settings.DEVICE.name: device,
        settings.MEGATRON_PATH.name: str(checkout),
        settings.AUTOLOAD.name: "1",
        settings.SIM_HCCL_TIMEOUT.name: "60",
        **(
            {} if sys.pycache_prefix else {"PYTHONDONTWRITEBYTECODE": "1"}
        ),  # as tests/support/bytecode.py says
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TMPDIR": str(scratch / "tmp"),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "HF_HUB_OFFLINE": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # launchers, ninja
        "TORCH_GLOO_LAZY_INIT": "1",  # connect where a group is used: upstream makes two dozen per test
    }
    sys.dont_write_bytecode = sys.pycache_prefix is None
    tempfile.tempdir = None  # asks for TMPDIR again
    _put_vocabulary(checkout, scratch / "cwd" / "gpt2")


def _put_vocabulary(checkout: Path, folder: Path) -> None:
    """Write the vocabulary of bigscience's tests into a folder that is taken for the hub's ``gpt2``."""
    tiny = checkout / "tests" / "data" / "gpt2"
    if not (tiny / "gpt2-tiny-vocab.json").is_file():
        return
    folder.mkdir(exist_ok=True)
    shutil.copyfile(tiny / "gpt2-tiny-vocab.json", folder / "vocab.json")
    shutil.copyfile(tiny / "gpt2-tiny-merges.txt", folder / "merges.txt")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    values = {"tokenizer_class": "GPT2TokenizerFast", **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


def preload(checkout: Path, scratch: Path) -> None:
    """Import the checkout's Megatron, patched, and what it needs; ranks keep bytecode in ``scratch``."""
    sys.path.insert(0, str(checkout))
    plugin.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in PRELOADED if megatrons.find(checkout).name == "megatron_core" else PRELOADED_DEEPSPEED:
            try:
                importlib.import_module(name)
            except ImportError as error:
                if name == "torch":
                    raise
                print(f"not preloaded: {name}: {error}", file=sys.stderr)
    importlib.import_module(".rank", __package__)  # only now: it takes Megatron as it is then
    # Not before: with a prefix Python would not find the bytecode of torch either.
    sys.pycache_prefix, sys.dont_write_bytecode = sys.pycache_prefix or str(scratch / "bytecode"), False
    gc.freeze()  # what is here stays: ranks need not look through it, nor copy its pages


def pytest_arguments(checkout: Path) -> tuple[str, ...]:
    """Return pytest's options: upstream's plugins where installed, no others; nothing stored in the tree."""
    installed = [name for name in PLUGINS if importlib.util.find_spec(name.partition(".")[0])]
    left_out = ["no:cacheprovider", "no:unraisableexception"]  # the latter collects garbage after every test
    chosen = [part for name in [*installed, *left_out] for part in ("-p", name)]
    return (f"--rootdir={checkout}", "-o", "addopts=", "-rN", "-q", *chosen)


def torch_version() -> str:
    return importlib.metadata.version("torch").partition("+")[0]
