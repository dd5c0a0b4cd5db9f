"""Tokens per second in generation: this project with and without its cache, and Transformers' generate.

    python benchmarks/generate.py --model gpt2-124m --rounds 3 --threads 1

The weights are the same: a GPT-2 with random weights, converted. Each variant is a separate process that
loads once (Transformers' without the plug-in) and generates on request, in turn, so that changes in the
machine's speed affect all of them equally; quote the ratios. With --clock cpu the result is the process's CPU
time (with one thread, about the time on an otherwise idle machine). All use greedy decoding, and the tokens
must be equal. Needs the extras core and hf. Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import report

MODELS = {
    "demo": {"n_layer": 8, "n_embd": 320, "n_head": 5},
    "gpt2-124m": {"n_layer": 12, "n_embd": 768, "n_head": 12},
}
VOCABULARY, POSITIONS = 50257, 1024
BATCHES = (1, 8)
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
VARIANTS = ("project", "recompute", "huggingface")
Draw = Callable[[list[list[int]], int], list[list[int]]]  # prompts, tokens to add -> those that were added
_HELD = contextlib.ExitStack()  # the model, to the end of the process


def main() -> None:
    """Measure all variants, or serve one of them (in a child)."""
    arguments = _arguments()
    if arguments.variant:
        with _HELD:
            _serve(_drawer(arguments.variant, arguments.folder), CLOCKS[arguments.clock])
        return
    with tempfile.TemporaryDirectory() as name:
        _make_model(Path(name), arguments)
        results = _measure(Path(name), arguments)
    versions = {name: importlib.metadata.version(name) for name in ("megatron-core", "transformers")}
    report.write(report.RESULTS / f"generate-{arguments.model}-cpu.json", results, **versions)
    print(json.dumps(results, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="gpt2-124m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64, help="number of tokens in each prompt")
    parser.add_argument(
        "--tokens", type=int, default=128, help="number of tokens to generate for each prompt"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--variant", choices=VARIANTS, help="serve this variant")
    parser.add_argument("--folder", type=Path, help="folder that contains the models")
    return parser.parse_args()


def _make_model(folder: Path, arguments: argparse.Namespace) -> None:
    """Write a GPT-2 with random weights as a Hugging Face checkpoint and as one of the built-in trainer."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=POSITIONS, **MODELS[arguments.model])
    model = GPT2LMHeadModel(config)
    with torch.no_grad():  # as drawn, the likeliest token is always the last one again
        for name, weight in model.named_parameters():
            if name.startswith("transformer.h."):
                weight.mul_(3)
    model.save_pretrained(folder / "hf")
    line = ["convert", "--from", "hf", "--to", "megatron", "--tokenizer-type", "NullTokenizer"]
    _run_own([*line, "--proof", "tensors", str(folder / "hf"), str(folder / "megatron")])


def _run_own(line: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "megatron_npu", *line], check=True, stdout=subprocess.DEVNULL)


def _measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the medians over the rounds; in each round the variants run one after another."""
    children = {variant: _Child(variant, folder, arguments) for variant in VARIANTS}
    cases = []
    for batch in BATCHES:
        speeds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        tokens = {}
        for number in range(-1, arguments.rounds):  # the first one warms up
            for variant, child in children.items():
                count = arguments.tokens if variant != "recompute" else max(arguments.tokens // 8, 1)
                drawn, seconds = child.draw(batch, arguments.prompt, count)
                tokens[variant] = drawn
                if number >= 0:
                    speeds[variant].append(batch * count / seconds)
        cases.append(_case(batch, speeds, tokens))
    for child in children.values():
        child.end()
    return {
        "model": {"name": arguments.model, "dtype": "fp32", **MODELS[arguments.model]},
        "prompt_tokens": arguments.prompt,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        "clock": arguments.clock,
        "batches": cases,
    }


def _case(batch: int, speeds: dict[str, list[float]], tokens: dict[str, list[list[int]]]) -> dict[str, Any]:
    medians = {variant: statistics.median(values) for variant, values in speeds.items()}
    ratios = {
        other: statistics.median(a / b for a, b in zip(speeds["project"], speeds[other], strict=True))
        for other in VARIANTS[1:]
    }
    short = len(tokens["recompute"][0])
    return {
        "batch": batch,
        "tokens_per_second": {variant: round(value, 2) for variant, value in medians.items()},
        "project_over": {other: round(value, 3) for other, value in ratios.items()},
        "tokens_equal": tokens["project"] == tokens["huggingface"]
        and [row[:short] for row in tokens["project"]] == tokens["recompute"],
    }


class _Child:
    """A process that has loaded one variant."""

    def __init__(self, variant: str, folder: Path, arguments: argparse.Namespace) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "MEGATRON_NPU_DEVICE": "cpu"}
        if variant == "huggingface":
            environment["MEGATRON_NPU_AUTOLOAD"] = "0"
        line = [sys.executable, __file__, "--variant", variant, "--folder", str(folder)]
        line += ["--clock", arguments.clock]
        self._process = subprocess.Popen(
            line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def draw(self, batch: int, prompt: int, count: int) -> tuple[list[list[int]], float]:
        """Return the tokens that follow prompts of equal length, and the time in seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([batch, prompt, count]), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith('{"tokens"'):
                answer = json.loads(line)
                return answer["tokens"], answer["seconds"]
        raise RuntimeError("the process has ended")

    def end(self) -> None:
        """End the process."""
        self._process.communicate()


def _serve(draw: Draw, clock: Callable[[], float]) -> None:
    """Generate a continuation for each line of the input, and print the tokens and the seconds."""
    import torch

    for line in sys.stdin:
        batch, prompt, count = json.loads(line)
        generator = torch.Generator().manual_seed(7)
        prompts = torch.randint(VOCABULARY - 1, (batch, prompt), generator=generator).tolist()
        begin = clock()
        tokens = draw(prompts, count)
        print(json.dumps({"tokens": tokens, "seconds": clock() - begin}), flush=True)


def _drawer(variant: str, folder: Path) -> Draw:
    return _transformers(folder) if variant == "huggingface" else _ours(folder, variant == "recompute")


def _transformers(folder: Path) -> Draw:
    """Return a function that generates with Transformers."""
    import torch
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(folder / "hf").eval()
    model.generation_config.eos_token_id = None  # all draw the same number of tokens

    def draw(prompts: list[list[int]], count: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        with torch.no_grad():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=VOCABULARY - 1
            )
        return out[:, ids.size(1) :].tolist()

    return draw


def _ours(folder: Path, recompute: bool) -> Draw:
    """Return a function that generates with this project."""
    from megatron_npu.generation import trained_model
    from megatron_npu.generation.sampling.options import Options
    from megatron_npu.pretrain.checkpoint.restore import restored

    args, model, _ = _HELD.enter_context(restored(str(folder / "megatron")))
    endless = SimpleNamespace(eod=-1, vocab_size=VOCABULARY)  # no token ends a text
    sampler = trained_model.of(args, model, endless).sampler

    def draw(prompts: list[list[int]], count: int) -> list[list[int]]:
        options = Options(num_tokens=count, temperature=0, recompute=recompute)
        return [sample.tokens for sample in sampler.sample(prompts, options)]

    return draw


if __name__ == "__main__":
    main()
