"""A run that goes on with one changed flag, for each flag of ``pretrain``: said, refused, in effect, or not?

python -m tests.campaign.resume: of each flag another value is made of its default. It is noticed if the run
is refused, says or computes something else, or writes other files. What remains is in ``SILENT``
with the reason why nothing can be seen here; everything else that nobody notices is a fault.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_npu.pretrain.flags import arguments
from tests.campaign.outcomes import Outcome, last_line, main
from tests.support import tiny

AT, END = 2, 6
RUN = "--eval-iters 1 --no-plot --log-interval 1 --weight-decay 0.1 --lr-decay-style constant"
# what the flags of a run are whose change says where it reads and writes, not what it does
PLACES = {"load", "save", "train_iters", "data_path", "help", "version"}
# Of whose change nothing is to be seen here, by the reason.
_SILENT = {
    "of the first weights alone": "init_method_std use_cpu_initialization",
    "the same numbers in fp32 and with one process": "attention_softmax_in_fp32 "
    "apply_query_key_layer_scaling sequence_parallel overlap_grad_reduce overlap_p2p_comm "
    "accumulate_allreduce_grads_in_fp32 calculate_per_token_loss "
    "make_vocab_size_divisible_by add_attention_bias",
    "another way to the same numbers": "use_flash_attn deterministic_mode masked_softmax_fusion "
    "bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion gradient_accumulation_fusion "
    "cross_entropy_loss_fusion num_workers async_save dist_ckpt_optim_fully_reshardable shape_order",
    "nothing happens that it is for": "distributed_timeout_minutes exit_interval exit_duration_in_mins "
    "exit_signal_handler check_for_nan_in_loss_and_grad rerun_mode load_last_good verify_checkpoint plot",
    "of another flag, as its help says": "num_query_groups recompute_num_layers min_offloaded_tensor_size "
    "lr_wsd_decay_style lr_wsd_decay_iters loss_scale min_loss_scale loss_scale_window hysteresis "
    "sample_tokens sample_temperature",
    "the schedule is the same": "override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
    "it says what is loaded in any case": "ckpt_step",
    "times are omitted": "log_throughput",
    "the causal mask holds in any case": "next_tokens",
}
SILENT = {name: why for why, names in _SILENT.items() for name in names.split()}
_TIMES = re.compile(r"\d{4}-\d\d-\d\d [\d:.]+|(elapsed|throughput|tokens per|peak memory|device util)[^|]*\|")


def flags(of: argparse.Namespace) -> dict[argparse.Action, list[str]]:
    """Return the flags of ``pretrain``, each with the words that give it another value than a run has."""
    found = [each for each in arguments.parser()._actions if each.option_strings]
    return {each: made for each in found if each.dest not in PLACES and (made := words(each, of))}


def words(flag: argparse.Action, of: argparse.Namespace) -> list[str]:
    """Return the words that give a flag another value than a run has; none: nobody can make one up."""
    default = getattr(of, flag.dest, flag.default)
    name = max(flag.option_strings, key=len)
    if flag.nargs == 0:
        return [name]
    if flag.choices:
        other = [str(choice) for choice in flag.choices if choice != default]
        return [name, other[-1]] if other else []
    if flag.nargs is not None:
        return []
    for value in _others(default):
        try:
            kind: Any = flag.type or str
            if kind(str(value)) != default and kind is not str:
                return [name, str(value)]
        except (TypeError, ValueError, argparse.ArgumentTypeError):
            continue
    return []


def _others(default: object) -> list[object]:
    if isinstance(default, float):
        return [default / 2 if default else 0.25, 0.5, 1]
    if isinstance(default, int) and not isinstance(default, bool):
        return [default * 2, default + 1, 1]
    return [2, 0.5, 1]


def trials(place: Path, chance: random.Random, only: set[str] | None = None) -> Iterator[Outcome]:
    """Train to the middle, then go on with each flag; ``only``: with these alone."""
    data = tiny.write_dataset(place / "text", documents=40)
    common = [*tiny.flags_for(data), *RUN.split(), "--train-iters", str(END)]
    saved = place / "saved"
    done = tiny.run("pretrain", *common, "--save", str(saved), "--exit-interval", str(AT))
    assert done.returncode == 0, done.stderr
    plain = _seen(place, saved, common)
    assert plain[0] == 0, plain
    for flag, changed in flags(arguments.parse(common)).items():
        if only is None or flag.dest in only:
            yield Outcome(
                "resume", " ".join(changed), _verdict(_seen(place, saved, common, *changed), plain, flag)
            )


Seen = tuple[int, str, str, list[str]]


def _seen(place: Path, saved: Path, common: list[str], *changed: str) -> Seen:
    """Return exit code, what was said, and names of files of a run that goes on."""
    out = place / "out"
    done = tiny.run("pretrain", *common, "--load", str(saved), "--save", str(out), *changed)
    names = sorted(_named(path, out) for path in out.rglob("*") if path.is_file())
    rows = (out / "metrics.jsonl").read_text() if (out / "metrics.jsonl").exists() else ""
    keys = sorted(set(re.findall(r'"(\w+)":', rows)))
    _remove(out)
    return done.returncode, _TIMES.sub("", done.stdout), done.stderr, [*names, *keys]


def _named(path: Path, out: Path) -> str:
    """Return the name of a file, of a shard of a checkpoint with its size in KiB."""
    size = path.stat().st_size >> 10 if path.suffix == ".distcp" else ""
    return f"{path.relative_to(out)} {size}"


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def _verdict(seen: Seen, plain: Seen, flag: argparse.Action) -> str:
    code, out, err, files = seen
    if "Traceback" in err:
        return ""
    if code:
        return f"refused: {last_line(err)}"
    if "changed since" in out:
        return "said"
    if out != plain[1] or err != plain[2]:
        return "in effect: it prints something else"
    if files != plain[3]:
        return "in effect: it writes something else"
    return f"(silent: {SILENT[flag.dest]})" if flag.dest in SILENT else ""


if __name__ == "__main__":
    sys.exit(main(trials, __doc__))
