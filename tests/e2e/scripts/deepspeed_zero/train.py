"""DeepSpeed with ZeRO 1: the optimizer's states are shared out among the ranks, and the parameters are the same."""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int)
arguments = parser.parse_args()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
engine, optimizer, _, _ = deepspeed.initialize(
    args=arguments, model=model, model_parameters=model.parameters()
)
rank = dist.get_rank()
data = torch.Generator().manual_seed(rank)
losses = []
for _ in range(40):
    inputs = torch.randn(8, 16, generator=data)
    loss = (engine(inputs.to(engine.device)) - inputs.sum(1, keepdim=True).to(engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
own = sum(part.numel() for part in optimizer.single_partition_of_fp32_groups)
Path(f"result-{rank}.json").write_text(json.dumps({
    "rank": rank, "local_rank": arguments.local_rank, "world_size": dist.get_world_size(),
    "backend": dist.get_backend(), "stage": engine.zero_optimization_stage(), "own_part": own,
    "parameters": sum(one.numel() for one in model.parameters()),
    "first_loss": losses[0], "last_loss": losses[-1],
    "checksum": float(sum(one.detach().double().abs().sum() for one in model.parameters())),
}))  # fmt: skip
dist.destroy_process_group()
