"""The commands of the guide, in the folders that it describes: this project cloned inside Megatron-LM.

They are run one after another as they stand in the guide's own text, where that is at hand, and in our page
about it (docs/tutorials/ascend-gpt.md), which has them all. What they would get from the network is a sample
made here; sizes come from the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from megatron_npu.data.preprocessing import indexed_dataset
from tests.adaptors.megatron_lm.test_runs import load
from tests.support import stock_lm, walk, warm
from tests.support.tiny import ROOT

DOCUMENT = next(iter((ROOT.parent / "shared" / "seeds").glob("003_*.txt")), None)  # the guide's own text
PAGE = ROOT / "docs" / "tutorials" / "ascend-gpt.md"
OUR_CLONE = re.compile(r"git clone \S+ megatron_npu\b")

SIZES = {
    "SEQ_LENGTH": "64",
    "NUM_LAYERS": "1",
    "NUM_HEADS": "2",
    "HIDDEN_SIZE": "32",
    "TRAIN_ITERS": "30",
    "LR": "2e-2",
    "INITIAL_LOSS_SCALE": "4096",
}
WORD = 257  # " a", nine in ten words of the texts: what a model learns first


# -- the text -----------------------------------------------------------------------------------------------


def commands_of_document(text: str) -> list[str]:
    """Return the lines of the guide's text that begin with a program, in order."""
    programs = "git|cd|pip|pip3|wget|bzip2|python3|bash|mv"
    return re.findall(rf"^\s*((?:{programs}) .*)$", text, re.M)


PAGE_COMMANDS = walk.commands_of_page(PAGE.read_text(encoding="utf-8"))
COMMANDS = commands_of_document(DOCUMENT.read_text(encoding="utf-8")) if DOCUMENT else PAGE_COMMANDS
SAMPLE = "bash test_gpt_distributed_sample.sh"


# -- walking through it -------------------------------------------------------------------------------------


def through(commands: list[str], checkout: Path, folder: Path, run: walk.Run, **sizes: str) -> walk.Walk:
    """Return a walk through the guide's commands with the tiny preset, of which ``sizes`` change some."""
    settings: Mapping[str, str] = {"WORKERS": "1", "PRESET": "tiny", **sizes}
    return walk.Walk(commands, {"": checkout}, folder, run, settings, _told)


def _told(command: str, home: Path) -> None:
    """Do what the guide tells in words: get the passages, and NVIDIA's model."""
    if "main.py" in command:
        walk.write_lambada(scripts_in(home) / "lambada_test.json")
    elif command.startswith(SAMPLE):
        write_release(scripts_in(home))


def imported(folder: Path) -> tuple[tuple[str, ...], Path | None]:
    """Return what is imported before a command, and from which tree: nothing before the first training.

    Its scripts let Python write no bytecode: each process would compile Megatron anew.
    """
    home = folder / "home"
    trained = (scripts_in(home) / "checkpoint").is_dir()
    return (warm.STOCK, home / "Megatron-LM") if trained else ((), None)


def project_in(home: Path) -> Path:
    """Return the folder of this project, inside Megatron-LM."""
    return home / "Megatron-LM" / "megatron_npu"


def scripts_in(home: Path) -> Path:
    """Return the folder of the guide's scripts."""
    return project_in(home) / "tests_gpt"


# -- folders and files --------------------------------------------------------------------------------------


def write_dataset(folder: Path) -> None:
    """Write the vocabulary and the dataset where the scripts look for them."""
    folder.mkdir(parents=True)
    walk.write_gpt_vocabulary(folder)
    generator = np.random.RandomState(0)
    with indexed_dataset.Writer(str(folder / "my-gpt_text_document"), np.dtype(np.uint16)) as writer:
        for _ in range(200):
            words = np.where(generator.rand(200) < 0.9, WORD, generator.randint(256, size=200))
            writer.add(words.astype(np.uint16).tobytes(), np.array([200], np.int32), np.array([1], np.int64))
        writer.finish()
        indexed_dataset.publish([writer])


def write_release(scripts: Path) -> None:
    """Write the model of ``pretrain_gpt_distributed.sh`` where the guide wants the one that NVIDIA released.

    Its names and the order of query, key and value are those of 2020; it has no arguments in it.
    """
    release = scripts / "checkpoint_dist_test" / "mp_rank_00" / "model_optim_rng.pt"
    release.parent.mkdir(parents=True, exist_ok=True)
    (trained,) = (scripts / "checkpoint" / "fp16").glob("iter_*/mp_rank_00/model_optim_rng.pt")
    content = load(trained)
    torch.save({"iteration": content["iteration"], "model": as_released(content["model"])}, release)


def as_released(model: dict) -> dict:
    """Return the weights of a model under the names and in the order of 2020."""
    language_model = dict(model["language_model"])
    heads = int(SIZES["NUM_HEADS"])
    layers = {}
    for name, weight in language_model.pop("encoder").items():
        if "query_key_value" in name:  # [n, 3, h/n] rows become [3, n, h/n]
            apart = weight.view(heads, 3, -1, *weight.shape[1:])
            weight = apart.transpose(0, 1).reshape(weight.shape).clone()
        layers[name.replace("self_attention", "attention")] = weight
    return {"language_model": {**language_model, "transformer": layers}}


# -- what came of it ----------------------------------------------------------------------------------------


def check(walking: walk.Walk, number: int, device: str, iterations: int = 30) -> None:
    """Check that a command has done what the guide says it does."""
    output, command = walking.output(number), walk.bare(walking.commands[number])
    if "pretrain_gpt_" in command or "pretrain_t5_" in command:
        assert f"Tiny preset on 1 x {device}" in output
        assert "megatron_lm 285068c8" in output
        losses = stock_lm.losses(output)
        assert sorted(losses) == list(range(1, 1 + iterations)), "no step is skipped"
        last = sorted(losses[number] for number in range(iterations - 4, iterations + 1))
        assert last[2] < 0.6 * losses[1]
    elif "test_gpt_" in command:
        check_figures(stock_lm.accuracy(output))
    elif "dataset_preprocess" in command:
        made = sorted(path.name for path in (project_in(walking.home) / "dataset" / "en_wiki").iterdir())
        assert made == ["bert-large-uncased-vocab.txt", "my-t5_text_sentence.bin", "my-t5_text_sentence.idx"]


def check_figures(figures: tuple[int, int]) -> None:
    """Check (right, examples) of a model that begins to know the commonest word; untrained it knows none."""
    right, examples = figures
    assert examples == len(walk.LINES)
    assert 0 < right <= len(walk.KNOWN)


def losses_of(walking: walk.Walk, *words: str) -> list[dict[int, float]]:
    """Return the losses of each training command that has all of ``words`` in it."""
    return list(map(stock_lm.losses, walking.outputs(*words)))
