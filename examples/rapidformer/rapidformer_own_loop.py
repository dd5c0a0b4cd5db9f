# The document's loop without a template, after its two steps (data parallelism, the fused optimizer), as it is
# printed there but for what is marked with "here:".
import os  # here: for the test

import torch
from datasets import load_dataset, load_metric
from torch.utils.data import DataLoader
from transformers import (
    AdamW,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    get_linear_schedule_with_warmup,
    BertForSequenceClassification,

)
from rapidformer import RapidformerEngine
engine = RapidformerEngine()
finetuner = Finetuner(engine=engine)

tokenizer = AutoTokenizer.from_pretrained(args.pretrained_model_name_or_path)  # here: the model's name
datasets = load_dataset(args.dataset_path, args.dataset_name)  # here: the data's names, three times
metric = load_metric(args.dataset_path, args.dataset_name)

def tokenize_function(examples):
    # max_length=None => use the model max length (it's actually the default)
    outputs = tokenizer(examples["sentence1"], examples["sentence2"], truncation=True, max_length=None)
    return outputs

tokenized_datasets = datasets.map(
    tokenize_function,
    batched=True,
    remove_columns=["idx", "sentence1", "sentence2"],
)

train_dataloader = finetuner.build_data_loader(tokenized_datasets["train"])
eval_dataloader = finetuner.build_data_loader(tokenized_datasets["validation"])

model = AutoModelForSequenceClassification.from_pretrained(args.pretrained_model_name_or_path, return_dict=True)  # here: its name

lr_scheduler = partial(
        get_linear_schedule_with_warmup,
        num_warmup_steps=args.lr_warmup_iters,
        num_training_steps=args.train_iters
    )

model, optimizer, lr_scheduler = engine.compose(model_obj=model, lr_scheduler_fn=lr_scheduler)

device = torch.device("cuda", args.local_rank)

for epoch in range(args.epochs):
    model.train()
    for step, batch in enumerate(train_dataloader):
        batch.to(device)
        outputs = model(**batch)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        os.write(1, "step {} rank {}: {!r}\n".format(step, args.rank, loss.item()).encode())  # here: for the test
        
    model.eval()
    for step, batch in enumerate(eval_dataloader):
        batch.to(device)
        with torch.no_grad():
            outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            metric.add_batch(
                    predictions=engine.gather(predictions),
                    references=engine.gather(batch["labels"]))

    eval_metric = metric.compute()  # here: one blank less before this line and the next
    print("epoch {}: {}".format(epoch, eval_metric))
