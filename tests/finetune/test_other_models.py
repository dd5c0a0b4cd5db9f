"""What no task is for, by a template: pictures and speech; and architectures beside those of the tests."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from megatron_npu.commands import cli
from tests.finetune import every_model
from tests.support import tiny

SCRIPT = """
import torch, transformers
from rapidformer import Finetuner, RapidformerEngine

SIZES = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, num_labels=2)


def pictures():
    config = transformers.ViTConfig(**SIZES, image_size=16, patch_size=8)
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(8, 3, 16, 16)}


def speech():
    layers = dict(conv_dim=(16, 16), conv_stride=(4, 4), conv_kernel=(4, 4), num_feat_extract_layers=2)
    own = dict(num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=4, apply_spec_augment=False)
    config = transformers.Wav2Vec2Config(**SIZES, **layers, **own, classifier_proj_size=16)
    return transformers.Wav2Vec2ForSequenceClassification(config), {"input_values": torch.randn(8, 256)}


class Mine(Finetuner):
    def train_valid_test_datasets_provider(self):
        rows = [{name: value[row] for name, value in INPUTS.items()} for row in range(8)]
        return [{**one, "labels": row % 2} for row, one in enumerate(rows)], None, None, None

    def model_optimizer_lr_scheduler_provider(self):
        return MODEL, None, None

    def run_forward_step(self, batch, model):
        return model(**batch).loss


engine = RapidformerEngine()
MODEL, INPUTS = KIND()
Mine(engine).train()
"""


@pytest.mark.parametrize("kind", ["pictures", "speech"])
def test_a_template_trains_what_no_task_is_for(kind: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT.replace("KIND", kind))
    flags = f"--user-script {tmp_path}/mine.py --epochs 12 --lr 1e-2 --log-interval 1 --fused-ops"
    switches = "--mixed-precision bf16 --checkpoint-activations --json-log"
    assert cli.main(["train", *shlex.split(f"{flags} {switches} {tmp_path}/log")]) == 0
    losses = [row["loss"] for row in tiny.rows(tmp_path / "log")]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("kind", ["roberta", "llama", "bart"])
def test_an_architecture_trains_as_in_plain_transformers(kind: str, tmp_path: Path, monkeypatch) -> None:
    """Of those that ``every_model.py`` tries, one of each sort."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    assert every_model.difference(kind, tmp_path, []) < 1e-5
