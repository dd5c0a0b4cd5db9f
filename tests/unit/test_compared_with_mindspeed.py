"""The comparison with MindSpeed names flags that exist, and the numbers that were measured."""

from __future__ import annotations

import json
import re
from typing import Any

from megatron_npu.pretrain.flags.arguments import parser
from tests.support.tiny import ROOT

_FLAG = r"--[a-z][a-z0-9-]+"
_NUMBER = re.compile(r"\d[\d,.]*\d|\d")


def rows() -> list[list[str]]:
    lines = (
        (ROOT / "docs" / "explanation" / "compared-with-mindspeed.md")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    tables = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")
    ]
    return [cells for cells in tables if cells[0] != "theirs" and not cells[0].startswith("---")]


def test_the_flags_that_the_driver_lacks_are_those_that_it_names() -> None:
    page = (ROOT / "docs" / "explanation" / "compared-with-mindspeed.md").read_text(encoding="utf-8")
    ours = {flag for action in parser()._actions for flag in action.option_strings}
    flags = {flag for cells in rows() for cell in cells[1:] for flag in re.findall(_FLAG, cell)}
    head = page[: page.index("## Optimizer")]
    assert {flag for flag in re.findall(_FLAG, head) if flag != "--cpu-offload"} == flags - ours


def results(name: str) -> dict[str, Any]:
    """Return ``benchmarks/results/NAME.json``."""
    text = (ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8")
    measured: dict[str, Any] = json.loads(text)
    return measured


def measured() -> list[list[str]]:
    """Return the numbers that belong together, of what was measured, as the page prints them."""
    options = results("layer-options")["options"]
    moe = results("launches")["styles"]["moe"]
    optimizer = results("optimizer-memory")
    tensor_parallel = results("messages")["layouts"]["tp2"]
    loss = results("loss-npu")["steps"]

    def launches(option: str) -> list[int]:
        return [options[option][way]["launches"] for way in ("without", "with")]

    def peaks(option: str) -> list[str]:
        return [f"{options[option][way]['peak'] / 2**20:.1f}" for way in ("without", "with")]

    def layer(way: str) -> list[object]:
        count = moe[way]["forward_backward"] + moe[way]["optimizer"]
        return [count, f"{moe[way]['activation_bytes'] / 2**20:.1f}"]

    def bytes_of(way: str) -> str:
        return f"{optimizer['optimizers'][way]['bytes_per_parameter']:.2f}"

    (plain, fused), sinks = launches("router, softmax"), launches("softmax off by one")
    peak_of_sinks = peaks("softmax off by one")
    offloaded = zip(launches("offload core_attn"), peaks("offload core_attn"), strict=True)
    redirected = optimizer["launches_by_layers"]["redirection"]
    found: list[list[object]] = [
        [plain, fused, *launches("router, softmax, auxiliary loss")],
        launches("router, sigmoid, groups, bias"),
        [sinks[0], peak_of_sinks[0], sinks[1], peak_of_sinks[1]],
        launches("learnable sinks"),
        *(peaks(f"recompute {name}") for name in ("mlp", "moe_act", "mla_up_proj")),
        [number for pair in offloaded for number in pair],
        [*layer("redirection"), *layer("project")],
        [bytes_of("fp32 main weights"), bytes_of("remainders")],
        [bytes_of("remainders, bf16 moments"), 64],
        [redirected["1"], redirected["2"]],
        [tensor_parallel["launches"], tensor_parallel["calls"], f"{tensor_parallel['bytes'] / 2**20:.1f}"],
        *([f"{loss[words]['peak_of_logits']:.3f}"] for words in ("50304", "131072")),
    ]
    return [[str(number) for number in numbers] for numbers in found]


def appear(numbers: list[str], paragraph: str) -> bool:
    """Return whether the numbers come in this order, whatever words and other numbers are between them."""
    printed = iter(_NUMBER.findall(paragraph))
    return all(number in printed for number in numbers)


def test_numbers_that_are_not_there_are_missed() -> None:
    assert appear(["12", "3.5"], "12 launches without, one with, and 3.5 MiB.")
    assert not appear(["3.5", "12"], "12 launches without, one with, and 3.5 MiB.")
    assert not appear(["2"], "12 launches")


def test_its_counts_and_those_of_its_record_are_those_that_were_measured() -> None:
    folders = ("explanation", "records")
    pages = [ROOT / "docs" / folder / "compared-with-mindspeed.md" for folder in folders]
    page = "\n\n".join(file.read_text(encoding="utf-8") for file in pages)
    rows_and_paragraphs = re.split(r"\n\n|\n(?=\|)", page)
    stale = [
        numbers for numbers in measured() if not any(appear(numbers, text) for text in rows_and_paragraphs)
    ]
    assert not stale, f"in no row and no paragraph, of what was measured: {stale}"
