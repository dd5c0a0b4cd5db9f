# The program of a document on DDP, in our own words: the same calls in the same order, and the
# mistakes that docs/tutorials/ddp-from-scratch.md corrects. Tests read this file as text (ddp_document.py);
# nothing imports it, and it does not run as it is.
# ruff: noqa: F821
import math
import os

import tiktoken
import torch
import torch.multiprocessing as mp
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def join(rank, world_size, master_addr, master_port):
    os.environ["MASTER_ADDR"] = master_addr
    os.environ["MASTER_PORT"] = master_port
    init_process_group(backend="nccl", rank=rank, world_size=world_size)
    torch.cuda.set_device(rank)


def files_of(folder, number):
    return [os.path.join(folder, f"{kind}_{number:06d}.pth") for kind in ("model", "optimizer")]


def train_rank(
    rank, world_size, master_addr, master_port, model, train_loader, val_loader, tokenizer, settings
):
    join(rank, world_size, master_addr, master_port)
    model.to(rank)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings["learning_rate"], weight_decay=settings["weight_decay"]
    )
    if rank == 0:
        os.makedirs(settings["checkpoint_dir"], exist_ok=True)
    number = settings["checkpoint"]
    if number is not None:
        model_file, optimizer_file = files_of(settings["checkpoint_dir"], number)
        model.load_state_dict(torch.load(model_file))
        optimizer.load_state_dict(torch.load(optimizer_file))
    else:
        number = -1
    model = DDP(model, device_ids=[rank])
    step = -1
    highest = optimizer.param_groups[0]["lr"]
    last = len(train_loader) * settings["num_epochs"]
    first, lowest, warmup = settings["initial_lr"], settings["min_lr"], settings["warmup_steps"]
    for epoch in range(settings["num_epochs"]):
        for batch, (inputs, targets) in enumerate(train_loader):
            model.train()
            optimizer.zero_grad()
            step += 1
            if step < warmup:
                lr = first + step * (highest - first) / warmup
            else:
                progress = (step - warmup) / (last - warmup)
                lr = lowest + (highest - lowest) * 0.5 * (1 + math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = lr
            loss = calc_loss_batch(inputs, targets, model, rank)
            loss.backward()
            if step > warmup:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=settings["max_norm"])
            optimizer.step()
            print(f"[GPU{rank}] Epoch {epoch + 1} (Batch {batch:06d}): Train loss {loss.item():.3f}")
            if step % settings["eval_freq"] == 0:
                look(model, train_loader, val_loader, tokenizer, settings, epoch, step, rank)
            if rank == 0 and step % settings["save_freq"] == 0:
                number = save(model, optimizer, settings["checkpoint_dir"], number)
        look(model, train_loader, val_loader, tokenizer, settings, epoch, step, rank)
        if rank == 0:
            number = save(model, optimizer, settings["checkpoint_dir"], number)
        print(f"[GPU{rank}] Epoch {epoch + 1} finished, checkpoint: {number:06d}")
    destroy_process_group()


def look(model, train_loader, val_loader, tokenizer, settings, epoch, step, device):
    train_loss = calc_loss_loader(train_loader, model, device, settings["eval_iter"])
    val_loss = calc_loss_loader(val_loader, model, device, settings["eval_iter"])
    print(f"Epoch {epoch + 1} (Step {step:06d}): Train loss {train_loss:.3f}, Val loss {val_loss:.3f}")
    text = generate_text(
        model,
        settings["start_context"],
        max_new_tokens=50,
        tokenizer=tokenizer,
        context_size=model.pos_emb.weight.shape[0],
        top_k=1,
        compact_format=True,
    )
    print(f"Generated Sample Text: {text}")


def save(model, optimizer, folder, number):
    model_file, optimizer_file = files_of(folder, number + 1)
    torch.save(model.state_dict(), model_file)
    torch.save(optimizer.state_dict(), optimizer_file)
    return number + 1


if __name__ == "__main__":
    print("PyTorch version:", torch.__version__)
    print("CUDA available:", torch.cuda.is_available())
    print("Number of GPUs available:", torch.cuda.device_count())
    torch.manual_seed(123)
    world_size = 4
    master_addr = "192.168.0.1"
    master_port = "16801"
    train_data_path = "train_data"
    val_data_path = "val_data"
    vocabulary = "gpt2"
    special_token_id = 50256
    context_len = 1024
    stride = 1024
    batch_size = 2
    train_dataset = LLMDataset(train_data_path, vocabulary, special_token_id, context_len, stride)
    val_dataset = LLMDataset(val_data_path, vocabulary, special_token_id, context_len, stride)
    train_loader = DataLoader(
        dataset=train_dataset,
        batch_size=batch_size,
        shuffle=False,
        drop_last=True,
        pin_memory=True,
        sampler=DistributedSampler(train_dataset),
    )
    val_loader = DataLoader(dataset=val_dataset, batch_size=batch_size, shuffle=False, drop_last=False)
    embedding_dim = 768
    num_layers = 12
    num_heads = 12
    vocabulary_size = 50257
    dropout = 0.1
    gpt2_small = GPTModel(
        embedding_dim=embedding_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        context_len=context_len,
        vocabulary_size=vocabulary_size,
        dropout=dropout,
        qkv_bias=False,
    )
    learning_rate = 0.0006
    num_epochs = 10
    eval_freq = 5
    save_freq = 5
    warmup_steps = 10
    checkpoint = None
    settings = {
        "learning_rate": learning_rate,
        "weight_decay": 0.1,
        "num_epochs": num_epochs,
        "eval_freq": eval_freq,
        "eval_iter": 1,
        "start_context": "萧炎,斗之力,三段",
        "save_freq": save_freq,
        "checkpoint_dir": "checkpoint",
        "warmup_steps": warmup_steps,
        "initial_lr": 3e-05,
        "min_lr": 1e-6,
        "max_norm": 1.0,
        "checkpoint": checkpoint,
    }
    tokenizer = tiktoken.encoding_for_model(vocabulary)
    mp.spawn(
        train_rank,
        args=(
            world_size,
            master_addr,
            master_port,
            gpt2_small,
            train_loader,
            val_loader,
            tokenizer,
            settings,
        ),
        nprocs=torch.cuda.device_count(),
    )
