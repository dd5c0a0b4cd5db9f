"""The card of a trained model: which flags it lists."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_npu.finetune.run import model_card


def test_a_flag_whose_value_is_nought_is_listed() -> None:
    """0 equals False, which stands for a flag that is not given."""
    args = dict.fromkeys(model_card._FLAGS) | {"seed": 0, "weight_decay": 0.0, "lr": 1e-3}
    args |= {"lora_rank": False, "sharding": "none", "data_path": None, "data_name": None}
    lines = [
        *model_card._training(
            SimpleNamespace(all_flags=SimpleNamespace(**args), **args), SimpleNamespace(ledger=[])
        )
    ]
    assert [line for line in lines if line.startswith("| `")] == [
        "| `lr` | 0.001 |",
        "| `weight_decay` | 0.0 |",
        "| `seed` | 0 |",
    ]
