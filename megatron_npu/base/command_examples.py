"""Provide the examples that end the ``--help`` of each command.

The test suite parses every example.
"""

from __future__ import annotations

EXIT_CODES = (
    "exit codes: 0 success; 1 failure; 2 bad input; 130 Ctrl-C; 143 SIGTERM (docs/reference/exit-codes.md)"
)

EXAMPLES: dict[str, tuple[str, ...]] = {
    "megatron-npu run": (
        "megatron-npu run Megatron-LM/pretrain_gpt.py --num-layers 12 ...",
        "torchrun --nproc-per-node 8 -m megatron_npu run Megatron-LM/pretrain_gpt.py ...",
        "megatron-npu run --redirect train.py",
    ),
    "megatron-npu pretrain": (
        "megatron-npu pretrain --preset gpt2-124m --micro-batch-size 4 --train-iters 1000 --lr 6e-4 --bf16 "
        "--data-path data/text_text_document --vocab-file vocab.json --merge-file merges.txt "
        "--save checkpoints/gpt --load checkpoints/gpt",
        "torchrun --nproc-per-node 2 -m megatron_npu pretrain --config run.yaml --bf16",
        "megatron-npu pretrain --help=optimizer",
    ),
    "megatron-npu train": (
        "megatron-npu train --task sequence_classification --pretrained-model-name-or-path bert/ "
        "--data-path reviews/ --epochs 3 --mixed-precision --save checkpoints/bert",
        "megatron-npu train --user-script train.py --zero-2-memory-optimization",
    ),
    "megatron-npu dashboard": ("megatron-npu dashboard checkpoints/gpt --port 8080",),
    "megatron-npu preprocess": (
        "megatron-npu preprocess --input text.jsonl --output-prefix data/text --vocab-file vocab.json "
        "--merge-file merges.txt --append-eod --workers 4",
    ),
    "megatron-npu data": (
        "megatron-npu data inspect data/text_text_document",
        "megatron-npu data decode data/text_text_document --document 3",
        "megatron-npu data merge a_text_document b_text_document --output-prefix both",
    ),
    "megatron-npu plan": (
        "megatron-npu plan --devices 1024 --memory 64G -- pretrain --num-layers 32 ...",
        "megatron-npu plan --devices 64 --search -- pretrain --num-layers 32 --global-batch-size 512 ...",
        "megatron-npu plan --devices 8 --memory 80G --device cuda -- pretrain --num-layers 24 ...",
    ),
    "megatron-npu generate": (
        'megatron-npu generate --load checkpoints/gpt --prompt "To be" --num-tokens 64',
        "megatron-npu generate --load checkpoints/gpt --num-samples 4 --top-p 0.9 --seed 1",
    ),
    "megatron-npu serve": ("megatron-npu serve --load checkpoints/gpt --port 8000",),
    "megatron-npu convert": (
        "megatron-npu convert --from hf --to megatron gpt2/ checkpoints/gpt2",
        "megatron-npu convert --from megatron --to hf checkpoints/gpt2 gpt2-again/",
    ),
    "megatron-npu lambada": (
        "megatron-npu lambada --load checkpoints/gpt --valid-data lambada_test.jsonl --strict-lambada",
    ),
    "megatron-npu evaluate": (
        "megatron-npu evaluate --model megatron_npu --model_args load=checkpoints/gpt --tasks lambada_openai",
    ),
    "megatron-npu checkpoint": (
        "megatron-npu checkpoint list checkpoints/gpt",
        "megatron-npu checkpoint verify checkpoints/gpt",
        "megatron-npu checkpoint prune checkpoints/gpt --keep 3",
        "megatron-npu checkpoint gather node1/gpt node2/gpt --into checkpoints/gpt",
    ),
    "megatron-npu bench": ("megatron-npu bench --suite 3d --devices 4 --json 3d.json --markdown 3d.md",),
    "megatron-npu sim": (
        "megatron-npu sim -- python train.py",
        "megatron-npu sim --devices 2 -- megatron-npu doctor",
    ),
    "megatron-npu doctor": (
        "megatron-npu doctor",
        "megatron-npu doctor --quick --json",
        "megatron-npu doctor --megatron Megatron-LM --known-bugs",
    ),
    "megatron-npu patches": (
        "megatron-npu patches list VocabParallelEmbedding",
        "megatron-npu patches check --megatron Megatron-LM",
    ),
    "megatron-npu patches list": (
        "megatron-npu patches list",
        "megatron-npu patches list --static --megatron Megatron-LM",
    ),
    "megatron-npu patches check": ("megatron-npu patches check --megatron Megatron-LM",),
    "megatron-npu patches pin": ("megatron-npu patches pin --megatron Megatron-LM",),
    "megatron-npu ledger": (
        "megatron-npu ledger",
        "megatron-npu ledger VocabParallelEmbedding",
        "megatron-npu ledger --static --megatron Megatron-LM",
    ),
    "megatron-npu check": ("megatron-npu check --megatron Megatron-LM",),
    "megatron-npu pin": ("megatron-npu pin --megatron Megatron-LM",),
}


def end_of_help(prog: str, epilog: str | None) -> str:
    """Return the last part of the ``--help`` of a command: examples and exit codes.

    Exit codes are omitted if ``epilog`` already lists them.
    """
    examples = EXAMPLES.get(prog, ())
    parts = []
    if examples:
        parts.append("\n".join(["examples:", *(f"  {line}" for line in examples)]))
        if "exit code" not in (epilog or ""):
            parts.append(EXIT_CODES)
    return "".join(f"\n{part}\n" for part in parts)
