"""Training in this process, alone and on its CPU: for benchmarks that ask what is learnt and not how fast."""

from __future__ import annotations

import torch
from aura.cluster.ranks import Ranks
from aura.config import TrainConfig
from aura.corpus.corpus import Corpus
from aura.corpus.windows import Order, Windows, inputs_and_targets
from aura.model.forward import validation_loss
from aura.model.language_model import LanguageModel
from aura.optim.schedule import learning_rate
from aura.strategy.alone import Alone
from aura.strategy.interface import Told


def trained(model: LanguageModel, config: TrainConfig, corpus: Corpus) -> float:
    """The validation loss at the end [nats per token]; batch_size windows a step."""
    train, validation = (Windows(corpus, split, config.seq_len) for split in ("train", "validation"))
    order, tokens = Order(len(train), config.seed), config.batch_size * config.seq_len
    strategy = Alone(model, config)
    for step in range(config.steps):
        batch = train.batch(order.at(step * config.batch_size, config.batch_size))
        strategy.begin_step()
        model.begin_step(step, config.steps)
        with strategy.last_backward():
            loss = model.loss_sum(*inputs_and_targets(batch))
            loss.backward()  # type: ignore[no-untyped-call]
        outcome = strategy.apply(Told(loss.detach(), tokens), learning_rate(config, step))()
        assert not outcome.left_out
    device = torch.device("cpu")
    return validation_loss(model, validation, config, Ranks(0, ["node"], device), device).whole
