"""What a script of the document lacks today is given to it: imports, and names of former versions."""

from __future__ import annotations

import importlib
import subprocess
import sys

import datasets
import pytest
import torch
import transformers

import rapidformer
from megatron_npu import finetune
from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data import loading, plain_padding
from megatron_npu.finetune.rapidformer import former_names, missing_imports, state
from tests.conftest import ROOT
from tests.support import processes, tiny


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(x):\n    return torch.zeros(x), [mpu for _ in x]", {"torch", "mpu"}),
        ("import torch\nprint(torch, __name__)", set()),
        ("class A(B):\n    def f(self):\n        return args.x, self.y", {"B", "args"}),
        ("def f():\n    global args\n    args = 1\ndef g():\n    return args", set()),
        (
            "for name in names:\n    print(name)\ntry:\n    pass\nexcept OSError as error:\n    error",
            {"names"},
        ),
    ],
)
def test_names_that_nobody_has(text: str, names: set[str]) -> None:
    assert missing_imports.unbound(text, "x.py") == names


def test_a_script_begins_with_what_it_uses_and_does_not_import(monkeypatch) -> None:
    monkeypatch.setattr(state, "get_args", lambda: "the flags")
    text = "partial(torch.zeros, args)\nFinetuner, AutoTokenizer, something_else\nmpu = 1"
    given = missing_imports.given(text, "x.py")
    assert set(given) == {"partial", "torch", "args", "Finetuner", "AutoTokenizer"}
    assert given["args"] == "the flags"
    assert given["Finetuner"] is finetune.Finetuner


def test_rapidformer_is_a_module_anywhere() -> None:
    """Not only under the launcher, and without torch until a name is asked for."""
    assert rapidformer.__all__ == finetune.__all__
    assert rapidformer.RapidformerEngine is finetune.RapidformerEngine
    with pytest.raises(AttributeError, match="'rapidformer' has no attribute 'Trainer'"):
        _ = rapidformer.Trainer  # type: ignore[attr-defined]
    program = "import sys, rapidformer; assert 'torch' not in sys.modules; rapidformer.get_args()"
    done = processes.run(
        [sys.executable, "-c", program], env=tiny.environment(), cwd=ROOT, stderr=subprocess.PIPE, check=False
    )
    assert b"Start the script with `megatron-npu train --user-script FILE ...`" in done.stderr


def test_former_names_are_put_where_they_are_absent(monkeypatch) -> None:
    for owner, name in ((datasets.Dataset, "rename_column_"), (datasets.DatasetDict, "rename_column_")):
        monkeypatch.delattr(owner, name, raising=False)
    now = importlib.import_module("transformers")  # another test may have imported it again
    monkeypatch.setattr(now, "AdamW", "its own", raising=False)
    assert former_names.supply("x = 1") == []
    supplied = former_names.supply("data.rename_column_('a', 'b')\nAdamW()")
    assert supplied == ["Dataset.rename_column_", "DatasetDict.rename_column_"]
    assert now.AdamW == "its own"
    one = datasets.Dataset.from_dict({"a": [1, 2]})
    parts = datasets.DatasetDict({"train": datasets.Dataset.from_dict({"a": [3]})})
    for data in (one, parts):
        assert data.rename_column_("a", "b") is None
    assert one[1] == {"b": 2}
    assert parts["train"][0] == {"b": 3}


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_that_of_former_transformers(decay: float) -> None:
    """Its two first steps by hand: decay behind the step, epsilon beside the uncorrected root."""
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = former_names.AdamW([weight], lr=0.1, eps=0.01, weight_decay=decay)
    expected, first, second = 1.0, 0.0, 0.0
    for step, grad in ((1, 2.0), (2, -1.0)):
        weight.grad = torch.tensor([grad])
        optimizer.step()
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        size = 0.1 * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
        expected -= size * first / (second**0.5 + 0.01)
        expected -= 0.1 * decay * expected
        assert weight.item() == pytest.approx(expected, rel=1e-6)
    with pytest.raises(
        UsageError, match=r"AdamW requires lr >= 0, eps >= 0 and betas in \[0, 1\), but got lr=-1"
    ):
        former_names.AdamW([weight], lr=-1)


def test_tokenized_samples_are_padded_without_a_tokenizer() -> None:
    samples = [{"input_ids": [5, 6, 7], "label": 1}, {"input_ids": [8], "label": 0}]
    batch = plain_padding.pad(samples)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [1, 0]
    words = plain_padding.pad([{"input_ids": [1, 2], "labels": [3, 4]}, {"input_ids": [1], "labels": [3]}])
    assert words["labels"].tolist() == [[3, 4], [3, -100]]


@pytest.mark.parametrize("kind", [dict, transformers.BatchEncoding])
def test_a_batch_may_be_moved_where_it_is(kind: type, monkeypatch) -> None:
    """As the document's loop does, for whose device there is no GPU here."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    batch = loading.on_device(kind({"x": torch.ones(2), "names": ["a"]}), torch.device("cpu"))
    assert batch.to("cpu") is batch
    assert batch.to(torch.device("cuda", 1)) is batch
    assert isinstance(batch, kind)
    assert batch.to("meta")["x"].device.type == "meta"
    assert batch["names"] == ["a"]
