"""A small example of transformers' Trainer, without a download: a GPT-2 learns to count."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

LENGTH, TOKENS = 16, 64


class Counting(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        tokens = (torch.arange(LENGTH) + index) % TOKENS
        return {"input_ids": tokens, "labels": tokens}


def main():
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(arguments.seed)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    told = {
        "rank": dist.get_rank(), "world_size": dist.get_world_size(), "backend": dist.get_backend(),
        "first_loss": losses[0], "last_loss": losses[-1],
        "compiled": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "checksum": float(sum(parameter.double().abs().sum() for parameter in model.parameters())),
    }  # fmt: skip
    Path(f"result-{told['rank']}.json").write_text(json.dumps(told))
    print("learnt to count", flush=True)


main()
