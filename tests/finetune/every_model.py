"""Small models of many architectures of text, trained by ``train`` and by plain Transformers.

``every_model.py --json FILE [--fused-ops] [--only KIND...]`` writes, after each model, the largest difference
of a loss from that of plain Transformers, relative, over three iterations. The suite runs a sample of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# Transformers' names of architectures, by the task that they are tried with
ENCODERS = (
    "albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie esm "
    "flaubert fnet funnel ibert layoutlm megatron-bert mobilebert modernbert mpnet nystromformer rembert "
    "roberta roberta-prelayernorm roc_bert roformer squeezebert xlm xlm-roberta xlm-roberta-xl xmod yoso"
).split()
DECODERS = (
    "bloom codegen cohere falcon gemma gemma2 gpt2 gpt_bigcode gpt_neo gpt_neox gptj granite llama mistral "
    "mixtral mpt olmo olmo2 opt phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe smollm3 stablelm starcoder2 xglm"
).split()
BOTH = (
    "bart blenderbot-small led longt5 m2m_100 marian mbart mt5 mvp pegasus prophetnet switch_transformers t5"
).split()

_WIDE = dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "n_embed"), 32)
_DEEP = dict.fromkeys(
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers".split(),
    2,
)
_HEADS = dict.fromkeys(
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads".split(),
    4,
)
_INNER = dict.fromkeys(
    "intermediate_size ffn_dim d_ff hidden_dim n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size "
    "moe_intermediate_size shared_expert_intermediate_size".split(),
    64,
)
_OTHER = {
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "rotary_dim"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts"), 4),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "attention_types": [[["global"], 2]],
    "default_language": "en_XX",
}
_PLACES = dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 80)


def task_of(kind: str) -> str:
    """Return the task that an architecture is tried with."""
    if kind in ENCODERS:
        return "sequence_classification"
    return "causal_lm" if kind in DECODERS else "seq2seq"


def write(folder: Path, kind: str) -> Path:
    """Write a small model with random weights and a tokenizer of the tests' words; return its folder."""
    import transformers

    from tests.support import tiny_models

    make = {
        "sequence_classification": tiny_models.bert,
        "causal_lm": tiny_models.gpt2,
        "seq2seq": tiny_models.t5,
    }
    make[task_of(kind)](folder)  # its tokenizer stays
    before = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    own = transformers.CONFIG_MAPPING[kind]
    plain = own().to_dict()
    sizes = _WIDE | _DEEP | _HEADS | _INNER | _OTHER | _PLACES | {"vocab_size": before["vocab_size"]}
    changes = {name: value for name, value in sizes.items() if name in plain}
    changes |= {name: 0.0 for name in plain if "drop" in name and isinstance(plain[name], float)}
    for name in ("pad", "bos", "eos", "decoder_start", "forced_eos", "cls", "sep", "mask"):
        if f"{name}_token_id" in plain or (name == "decoder_start" and kind in BOTH):
            changes[f"{name}_token_id"] = before.get(f"{name}_token_id") or 0
    config = own(**changes)
    for file in ("model.safetensors", "config.json", "generation_config.json"):
        (folder / file).unlink(missing_ok=True)
    tables = {
        "sequence_classification": transformers.AutoModelForSequenceClassification,
        "causal_lm": transformers.AutoModelForCausalLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
    }
    tables[task_of(kind)].from_config(config).save_pretrained(folder)
    return folder


def difference(kind: str, folder: Path, flags: list[str]) -> float:
    """Return the largest difference of three losses from those of plain Transformers, relative."""
    import torch

    from megatron_npu.finetune.data import loading
    from megatron_npu.finetune.run import ranks
    from tests.finetune import plain_tasks, tasks_data

    task = task_of(kind)
    argv = tasks_data.write(folder, task)
    name = write(folder / kind, kind)
    model = ["--pretrained-model-name-or-path", str(name), "--train-iters", "3"]
    _, outcome = tasks_data.train([*argv, *model, *flags])

    def batches(samples: list[Any], collate: Any) -> Iterator[Any]:
        alone = loading.Sampling(4, ranks.Ranks(), shuffle=True, whole=1, seed=1234)
        return iter(loading.Loader(samples, collate, sampling=alone, device=torch.device("cpu")))

    lines = (folder / task / "train.jsonl").read_text(encoding="utf-8").splitlines()
    plain = plain_tasks.losses(
        task, name, list(map(json.loads, lines)), batches, seed=1234, most=len(outcome.losses)
    )
    pairs = zip(outcome.losses, plain, strict=True)
    if plain[-1] == plain[0]:
        raise ValueError("the losses do not change")
    return max(abs(one - other) / abs(other) for one, other in pairs)


def main() -> int:
    """Try them one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--fused-ops", action="store_true")
    parser.add_argument("--only", nargs="+", default=[*ENCODERS, *DECODERS, *BOTH])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, float | str] = {}
    for kind in args.only:
        with tempfile.TemporaryDirectory() as folder:
            try:
                flags = ["--fused-ops"] if args.fused_ops else []
                found[kind] = difference(kind, Path(folder), flags)
            except Exception as error:
                found[kind] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        print(kind, found[kind], flush=True)
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
