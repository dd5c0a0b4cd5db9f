"""Pre-train a GPT from scratch with DistributedDataParallel, in plain PyTorch for CUDA.

    python ddp_train.py                                          # one process for each GPU
    megatron-npu run --redirect ddp_train.py                     # one for each NPU
    megatron-npu run --redirect --cpu-devices 2 ddp_train.py     # two on a CPU

docs/tutorials/ddp-from-scratch.md walks through it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from gpt import GPTModel, calc_loss_batch, calc_loss_loader, generate_text
from text_data import LLMDataset, tokenizer_for


def parse() -> argparse.Namespace:
    """Return the flags; the defaults are GPT-2's smallest model. --max-steps: of each epoch; 0: all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, default in {
        "train-data": "train_data",
        "val-data": "val_data",
        "vocabulary": "gpt2",
        "vocabulary-size": 50257,
        "context-len": 1024,
        "embedding-dim": 768,
        "num-layers": 12,
        "num-heads": 12,
        "dropout": 0.1,
        "batch-size": 2,
        "num-epochs": 10,
        "max-steps": 0,
        "learning-rate": 6e-4,
        "initial-lr": 3e-5,
        "min-lr": 1e-6,
        "warmup-steps": 10,
        "weight-decay": 0.1,
        "max-norm": 1.0,
        "eval-freq": 5,
        "eval-iter": 1,
        "start-context": "萧炎,斗之力,三段",
        "checkpoint-dir": "checkpoint",
        "nnodes": 1,
        "node-rank": 0,
        "master-addr": "127.0.0.1",
        "master-port": 16801,
    }.items():
        parser.add_argument(f"--{flag}", type=type(default), default=default)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    return parser.parse_args()


def setup(args: argparse.Namespace, local_rank: int, local_size: int) -> int:
    """Join the other processes and take this one's device; return the rank among all processes."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = args.master_addr, str(args.master_port)
    rank = args.node_rank * local_size + local_rank
    init_process_group(backend="nccl", rank=rank, world_size=args.nnodes * local_size)
    torch.cuda.set_device(local_rank)
    return rank


def loader_of(args: argparse.Namespace, path: str, sampler: bool) -> DataLoader:
    """Return the batches of a folder; with a sampler this rank's part of them, in an order of each epoch."""
    end_of_text = args.vocabulary_size - 1
    data = LLMDataset(path, args.vocabulary, end_of_text, args.context_len, args.context_len)
    own = DistributedSampler(data, seed=123) if sampler else None
    return DataLoader(data, args.batch_size, sampler=own, drop_last=sampler, pin_memory=True)


def learning_rate(args: argparse.Namespace, step: int, last: int) -> float:
    """Return the rate of a step: linear up to the highest, then a cosine down."""
    if step < args.warmup_steps:
        return args.initial_lr + step * (args.learning_rate - args.initial_lr) / args.warmup_steps
    progress = (step - args.warmup_steps) / max(1, last - args.warmup_steps)
    return args.min_lr + (args.learning_rate - args.min_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def train(local_rank: int, args: argparse.Namespace, model: GPTModel, local_size: int) -> None:
    """Train in one of the processes that ``mp.spawn`` starts."""
    rank = setup(args, local_rank, local_size)
    torch.manual_seed(123 + rank)  # dropout of its own
    train_loader, val_loader = loader_of(args, args.train_data, True), loader_of(args, args.val_data, False)
    model.to(local_rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    first = load(args, model, optimizer) if args.resume else 0
    parallel = DistributedDataParallel(model, device_ids=[local_rank])
    steps = min(len(train_loader), args.max_steps or len(train_loader))
    for epoch in range(first, args.num_epochs):
        train_loader.sampler.set_epoch(epoch)
        for batch, (inputs, targets) in enumerate(itertools.islice(train_loader, steps)):
            step = epoch * steps + batch
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, step, args.num_epochs * steps)
            loss = calc_loss_batch(inputs, targets, parallel, local_rank)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parallel.parameters(), args.max_norm)
            optimizer.step()
            print(
                f"[GPU{rank}] Epoch {epoch + 1} (Batch {batch:06d}): Train loss {loss.item():.5f}", flush=True
            )
            if rank == 0 and step % args.eval_freq == 0:
                evaluate(args, model, local_rank, step, train_loader, val_loader)
        if rank == 0:
            save(args, model, optimizer, epoch)
    destroy_process_group()


def evaluate(
    args: argparse.Namespace,
    model: GPTModel,
    device: int,
    step: int,
    train_loader: DataLoader,
    val_loader: DataLoader,
) -> None:
    """Print losses and a sample. The model itself is asked, not DDP's: no other rank has to take part."""
    losses = [
        calc_loss_loader(loader, model, device, args.eval_iter) for loader in (train_loader, val_loader)
    ]
    print(f"Step {step:06d}: Train loss {losses[0]:.3f}, Val loss {losses[1]:.3f}")
    text = generate_text(
        model, args.start_context, 50, tokenizer_for(args.vocabulary), args.context_len, compact_format=True
    )
    print(f"Generated Sample Text: {text}", flush=True)


def save(args: argparse.Namespace, model: GPTModel, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """Write the weights and the optimizer after an epoch, under a temporary name first."""
    folder = Path(args.checkpoint_dir)
    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, folder / "writing")
    os.replace(folder / "writing", folder / f"epoch_{epoch:06d}.pth")


def load(args: argparse.Namespace, model: GPTModel, optimizer: torch.optim.Optimizer) -> int:
    """Read the newest checkpoint, if there is one; return the epoch to begin with."""
    files = sorted(Path(args.checkpoint_dir).glob("epoch_*.pth"))
    if not files:
        return 0
    state = torch.load(files[-1], map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1


def main() -> None:
    """Build the model once and hand it to a process for each device of this machine."""
    args = parse()
    torch.manual_seed(123)
    model = GPTModel(
        embedding_dim=args.embedding_dim,
        num_layers=args.num_layers,
        num_heads=args.num_heads,
        context_len=args.context_len,
        vocabulary_size=args.vocabulary_size,
        dropout=args.dropout,
        qkv_bias=False,
    )
    count = torch.cuda.device_count()
    print(f"PyTorch {torch.__version__}, CUDA available: {torch.cuda.is_available()}, devices: {count}")
    mp.spawn(train, args=(args, model, count), nprocs=count)


if __name__ == "__main__":
    main()
