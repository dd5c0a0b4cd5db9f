"""Tokens per second of a training step: this project compared with its peers, also compiled, and the matmuls.

    python benchmarks/train.py --model demo --dtype bf16

"project" is the built-in trainer, "project, one graph" the same with --cuda-graph-impl local, "whole run" the
same after a checkpoint and an evaluation (the few steps with another one do not move a median). "redirection"
is Megatron's own code with only the patches that it needs to run; "huggingface" is a GPT-2 in Transformers
and "nanogpt" one in sixty lines of plain torch, both also with torch.compile, after warm-up. The results also
have the seconds from the start of the process to the end of the first step (including compilation; for the
built-in trainer, until the gradients are complete), and the peak resident set; on a GPU the peak memory of
tensors and the fraction of its peak performance (MFU: 6 operations per parameter and token, 12 per pair of
tokens and hidden unit of a layer, as in PaLM; positions do not count as parameters).

Each variant runs in a separate process, and their steps alternate (``turns.py``): a ratio is the median over
neighbouring steps, because a machine's speed drifts. ``--together`` of them are in memory at once, always
including the project; with 1, as on a GPU, each runs alone, and a ratio is that of medians. ``--burst`` steps
make up a turn, within which nothing waits for the device but the training itself (for the built-in trainer,
with its log interval). Needs the extras core and hf. Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import report
import turns

MODELS = {
    "demo": {"layers": 8, "hidden": 320, "heads": 5, "seq": 256, "batch": 4},
    "gpt2-124m": {"layers": 12, "hidden": 768, "heads": 12, "seq": 512, "batch": 2},
    # for a GPU of 80 GB
    "gpt-345m": {"layers": 24, "hidden": 1024, "heads": 16, "seq": 1024, "batch": 16},
    "gpt-1.3b": {"layers": 24, "hidden": 2048, "heads": 16, "seq": 2048, "batch": 8},
    "tiny": {"layers": 1, "hidden": 32, "heads": 2, "seq": 16, "batch": 1},
}
# operations in a second of dense bf16, by what is in a device's name: from NVIDIA's data sheets
PEAKS = {"B200": 2.25e15, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
VOCABULARY = 50304
WARM_UP = 2  # steps that do not count
WHOLE_RUN = 6  # the same of a run whose last step but one saves and evaluates
VARIANTS = (
    *("project", "project, one graph", "whole run", "redirection", "huggingface", "huggingface compiled"),
    *("nanogpt", "nanogpt compiled", "floor"),
)
# What is left out in "redirection": everything that makes Megatron faster and not just run (in bf16 it does
# not run without fused_softmax, and the driver's checkpoints need our Adam).
FUSED = (
    "megatron.core.transformer.dot_product_attention",
    "megatron.core.transformer.torch_norm",
    "megatron.core.tensor_parallel.cross_entropy",
    "megatron.core.fusions.fused_bias_dropout",
    "megatron.core.fusions.fused_bias_gelu",
    "megatron.core.fusions.fused_cross_entropy",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.tensor_parallel.layers:VocabParallelEmbedding",
)


def main() -> None:
    """Measure all variants, or run one of them (in a child)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="demo")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--seq-length",
        type=int,
        help="sequence length to use instead of the model's; a batch keeps its number of tokens",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=12,
        help="number of counted steps of each variant; the variants take turns",
    )
    parser.add_argument(
        "--together", type=int, default=4, help="number of variants that are in memory at once"
    )
    parser.add_argument("--variant", choices=VARIANTS, help="run only this variant")
    parser.add_argument(
        "--only", nargs="+", choices=VARIANTS, help="measure only these variants, and write only to --output"
    )
    parser.add_argument(
        "--output", type=Path, help="write to this file instead of one in benchmarks/results/"
    )
    parser.add_argument(
        "--burst", type=int, default=1, help="number of steps between two readings of the clock"
    )
    arguments = parser.parse_args()
    if arguments.variant:
        started = MEASURES[arguments.variant](shape_of(arguments), arguments)
        said = {"start_seconds": started, "peak_bytes": peak_bytes(), "reserved_bytes": reserved_bytes()}
        print(json.dumps(said))
        return
    groups = []
    for names in groups_of(arguments.only or VARIANTS, arguments.together):
        group = [program(name, arguments) for name in names]
        turns.measure(group, arguments.steps)
        groups.append(group)
        for one in group:
            one.seconds = [seconds / arguments.burst for seconds in one.seconds]
            print(line_of(one, shape_of(arguments)), flush=True)
    if arguments.output or not arguments.only:
        write(arguments, groups)


def groups_of(variants: Sequence[str], together: int) -> Iterator[list[str]]:
    """Yield groups of variants that take turns; the first variant is in each group, if possible."""
    if together == 1:
        yield from ([variant] for variant in variants)
        return
    first, *others = variants
    size = max(1, together - 1)
    for begin in range(0, max(1, len(others)), size):
        yield [first, *others[begin : begin + size]]


def program(variant: str, arguments: argparse.Namespace) -> turns.Program:
    """Return the program for a variant, with its number of warm-up steps."""
    command = [sys.executable, __file__, "--variant", variant, "--model", arguments.model]
    command += ["--dtype", arguments.dtype, "--steps", str(arguments.steps)]
    command += ["--burst", str(arguments.burst)]
    command += ["--seq-length", str(arguments.seq_length)] if arguments.seq_length else []
    return turns.Program(variant, command, before=WHOLE_RUN if variant == "whole run" else WARM_UP)


def line_of(one: turns.Program, model: dict[str, int]) -> str:
    """Return a line with a variant's results."""
    return (
        f"{one.name:<21} {rate_of(one, model):9.1f} tokens/s, "
        f"first step after {one.said['start_seconds']:5.1f} s, "
        f"{one.said['peak_bytes'] / 2**20:6.0f} MiB"
    )


def rate_of(one: turns.Program, model: dict[str, int]) -> float:
    """Return the tokens per second of the median step."""
    return model["batch"] * model["seq"] / statistics.median(one.seconds)


def shape_of(arguments: argparse.Namespace) -> dict[str, int]:
    """Return the model's sizes, with the requested sequence length."""
    model = MODELS[arguments.model]
    seq = arguments.seq_length or model["seq"]
    return {**model, "seq": seq, "batch": max(1, model["batch"] * model["seq"] // seq)}


def peak_bytes() -> int:
    """Return the peak resident set of this process; on a GPU the peak memory of its tensors."""
    from megatron_npu import devices

    device = devices.current()
    if device.is_host:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return device.memory().peak


def reserved_bytes() -> int:
    """Return the peak memory held by the GPU's allocator; 0 on a CPU, which has none."""
    from megatron_npu import devices

    device = devices.current()
    return 0 if device.is_host else torch_device_module(device.name).max_memory_reserved()


def torch_device_module(name: str) -> Any:
    """Return ``torch.cuda``, or the corresponding module of another device."""
    import torch

    return torch.get_device_module(name)


def device_name() -> str:
    """Return the name of the hardware; empty on a CPU, which the report names."""
    from megatron_npu import devices

    device = devices.current()
    return "" if device.is_host else torch_device_module(device.name).get_device_name()


def shares_of_peak(rates: dict[str, float], model: dict) -> dict[str, float]:
    """Return the MFU of each variant from its tokens per second; empty for unknown hardware."""
    name = device_name()
    peak = next((peak for chip, peak in PEAKS.items() if chip in name), None)
    return {} if peak is None else {key: rate * operations_of(model) / peak for key, rate in rates.items()}


def operations_of(model: dict) -> float:
    """Return the floating-point operations per token in a step."""
    hidden, layers = model["hidden"], model["layers"]
    parameters = layers * (12 * hidden**2 + 13 * hidden) + VOCABULARY * hidden + 2 * hidden
    return 6 * parameters + 12 * layers * hidden * model["seq"]


def write(arguments: argparse.Namespace, groups: list[list[turns.Program]]) -> None:
    """Print the ratios, and write everything as JSON with a description of the machine."""
    import transformers

    from megatron_npu import devices
    from megatron_npu.upstream import megatrons

    model = shape_of(arguments)
    rates: dict[str, list[float]] = {}
    said: dict[str, dict[str, list[float]]] = {"start_seconds": {}, "peak_bytes": {}, "reserved_bytes": {}}
    ratios: dict[str, float] = {}
    for group in groups:
        for one in group:
            rates.setdefault(one.name, []).append(rate_of(one, model))
            for name, values in said.items():
                values.setdefault(one.name, []).append(one.said[name])
        ratios |= {one.name: turns.ratio(group[0], one) for one in group[1:]}
        if group[0].name != (first := groups[0][0]).name:  # each was alone
            ratios[group[0].name] = statistics.median(group[0].seconds) / statistics.median(first.seconds)
    device = devices.current()
    results = {
        "model": {"name": arguments.model, **model},
        "dtype": arguments.dtype,
        "tokens_per_second": rates,
        **said,
        "step_seconds": [{one.name: one.seconds for one in group} for group in groups],
        "project_over": ratios,
    }
    if not device.is_host:
        medians = {variant: statistics.median(values) for variant, values in rates.items()}
        results |= {"device": device_name(), "mfu": shares_of_peak(medians, model)}
    versions = {"megatron_core": megatrons.find().version, "transformers": transformers.__version__}
    length = f"-{arguments.seq_length}-tokens" if arguments.seq_length else ""
    default = report.RESULTS / f"train-{arguments.model}-{arguments.dtype}{length}-{device.name}.json"
    report.write(arguments.output or default, results, **versions)
    for other, ratio in ratios.items():
        print(f"project / {other:<21} {ratio:.2f}")


def since_start() -> float:
    """Return the seconds since this process was started (Linux only)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def take_steps(step: Callable[[], Any], count: int, burst: int = 1) -> float:
    """Take the warm-up turns and ``count`` more, of ``burst`` steps each; return when the first one ended."""
    from megatron_npu import devices

    turn, started = turns.Turn(), 0.0
    for _ in range(WARM_UP + count):
        for _ in range(burst):
            step()
        devices.current().synchronize()
        started = started or since_start()
        turn.take()
    return started


def measure_project(
    model: dict, arguments: argparse.Namespace, before: int | None = None, more: tuple[str, ...] = ()
) -> float:
    """The built-in trainer with every patch; its turn ends when the gradients of a step are complete."""
    from megatron_npu import devices

    turn, burst = turns.Turn(), arguments.burst
    ended: list[float] = []

    def take(*_: object) -> None:
        is_last = not (len(ended) + 1) % burst
        # with one step in a turn, later ones wait for the device by themselves: for the gradient's norm
        if not ended or (burst > 1 and is_last):
            devices.current().synchronize()
        ended.append(since_start())
        if is_last:
            turn.take()

    more = ("--log-interval", str(burst), *more)
    trained(model, arguments, ((before or WARM_UP) + arguments.steps) * burst, more, take)
    return ended[0]


def trained(
    model: dict,
    arguments: argparse.Namespace,
    steps: int | None = None,
    more: tuple[str, ...] = (),
    on_step: Callable[..., None] | None = None,
) -> list[dict[str, float]]:
    """Train with the built-in trainer; return what it logged for each step (on the ranks that log)."""
    from megatron_npu.process import collector

    collector.rest()  # as the command does
    from megatron_npu.pretrain.flags import arguments as flags
    from megatron_npu.pretrain.run import pretrain

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "metrics.jsonl"
        options = {
            "num-layers": model["layers"],
            "hidden-size": model["hidden"],
            "num-attention-heads": model["heads"],
            "seq-length": model["seq"],
            "max-position-embeddings": model["seq"],
            "micro-batch-size": model["batch"],
            "global-batch-size": model["batch"],
            "train-iters": steps or arguments.steps + 2,
            "lr": 1e-4,
            "tokenizer-type": "NullTokenizer",
            "vocab-size": VOCABULARY - 1,
            "attention-dropout": 0,
            "hidden-dropout": 0,
            "eval-iters": 0,
            "log-interval": 1,
            "json-log": log,
        }
        argv = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        argv += ["--mock-data", "--no-plot", *(["--bf16"] if arguments.dtype == "bf16" else []), *more]
        with open(os.devnull, "w") as quiet:
            out, sys.stdout = sys.stdout, quiet
            try:
                pretrain.train(flags.parse(argv), on_step)
            finally:
                sys.stdout = out
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [row for row in rows if "tokens_per_second" in row]


def measure_whole_run(model: dict, arguments: argparse.Namespace) -> float:
    """The built-in trainer after it has saved and evaluated, before the measured steps."""
    with tempfile.TemporaryDirectory() as folder:
        end = WHOLE_RUN - 1
        options = {"save": folder, "save-interval": end, "eval-interval": end, "eval-iters": 2}
        more = tuple(word for name, value in options.items() for word in (f"--{name}", str(value)))
        return measure_project(model, arguments, WHOLE_RUN, more)


def measure_redirection(model: dict, arguments: argparse.Namespace) -> float:
    """The built-in trainer on Megatron's own unfused code, with only the patches needed to run."""
    only_redirect()
    return measure_project(model, arguments)


def only_redirect() -> None:
    """Remove every patch in this process that Megatron does not need to run."""
    from megatron_npu import adaptors
    from megatron_npu.base import settings
    from megatron_npu.patching.registry import registry

    os.environ[settings.KEEP_MEMORY.name] = "0"
    adaptors.register("megatron_core")
    registry.keep(lambda patch: not patch.target.startswith(FUSED))


def measure_huggingface(model: dict, arguments: argparse.Namespace, compiled: bool = False) -> float:
    """GPT2LMHeadModel with sdpa attention and torch's fused AdamW; bf16 through autocast."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=model["seq"],
        n_embd=model["hidden"],
        n_layer=model["layers"],
        n_head=model["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="sdpa",
    )
    network = GPT2LMHeadModel(config)
    return plain_training(network, lambda run, x: run(input_ids=x, labels=x).loss, model, arguments, compiled)


def measure_nanogpt(model: dict, arguments: argparse.Namespace, compiled: bool = False) -> float:
    """A GPT-2 in plain torch, in nanoGPT's style: one matmul for q, k and v, tied embeddings, sdpa."""
    import nano_gpt

    network = nano_gpt.GPT(VOCABULARY, model["seq"], model["hidden"], model["layers"], model["heads"])
    return plain_training(network, lambda run, x: run(x, x), model, arguments, compiled)


def plain_training(
    network: Any,
    loss_of: Callable[[Any, Any], Any],
    model: dict,
    arguments: argparse.Namespace,
    compiled: bool,
) -> float:
    """Train with torch's fused AdamW; bf16 through autocast."""
    import torch

    from megatron_npu import devices

    device = devices.current().torch_device()
    network.to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(VOCABULARY, (model["batch"], model["seq"]), device=device)
    run = torch.compile(network) if compiled else network

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=arguments.dtype == "bf16"):
            loss = loss_of(run, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return take_steps(step, arguments.steps, arguments.burst)


def measure_floor(model: dict, arguments: argparse.Namespace) -> float:
    """Only the matmuls of the step: forward, gradient of the input, gradient of the weight."""
    import torch

    from megatron_npu import devices

    dtype = torch.bfloat16 if arguments.dtype == "bf16" else torch.float32
    make = functools.partial(torch.randn, dtype=dtype, device=devices.current().torch_device())
    hidden, tokens = model["hidden"], model["batch"] * model["seq"]
    sizes = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
    products = [(*size, model["layers"]) for size in sizes] + [(hidden, VOCABULARY, 1)]
    operands = [[make(shape) for shape in ((tokens, i), (o, i), (tokens, o))] for i, o, _ in products]
    heads = make(model["batch"] * model["heads"], model["seq"], hidden // model["heads"])
    scores = make(model["batch"] * model["heads"], model["seq"], model["seq"])

    def step() -> None:
        for (x, weight, grad), (_, _, times) in zip(operands, products, strict=True):
            for _ in range(times):
                x @ weight.t()
                grad @ weight
                grad.t() @ x
        for _ in range(3 * model["layers"]):  # forward and the two gradients of each product
            heads @ heads.transpose(1, 2)
            scores @ heads

    return take_steps(step, arguments.steps, arguments.burst)


MEASURES: dict[str, Callable[..., float]] = {
    "project": measure_project,
    "project, one graph": functools.partial(measure_project, more=("--cuda-graph-impl", "local")),
    "whole run": measure_whole_run,
    "redirection": measure_redirection,
    "huggingface": measure_huggingface,
    "huggingface compiled": functools.partial(measure_huggingface, compiled=True),
    "nanogpt": measure_nanogpt,
    "nanogpt compiled": functools.partial(measure_nanogpt, compiled=True),
    "floor": measure_floor,
}


if __name__ == "__main__":
    main()
