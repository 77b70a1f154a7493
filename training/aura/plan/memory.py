"""How much memory one rank of a training needs, by what it is for. Standard library only.

The formulas follow aura/model and aura/optim/adamw.py operation by operation, and test_plan_memory.py holds
them against the tensors that are really alive. A unit is one element per token and channel: micro-batch x sequence x
d_model. Assumed: attention of the flash kind (no matrix of all pairs of positions). What torch.compile makes of a block
and of the loss (LanguageModel.compile_blocks) keeps less, which is counted with compile=true on a GPU, as `make
null-card` has measured it; with auto a rank may have to go without.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aura.config import MICRO_BATCH, TrainConfig
from aura.plan.shapes import shape_of

GIB = 2**30
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
CODE_BITS, CODE_BLOCK = {"int8": 8, "int4": 4}, 128  # on the wire; a block has one byte more
PIECE = 1 << 22  # elements that the optimizer updates at once where it is not torch's fused kernel
STACK = 1 << 23  # elements of Muon's matrices that are updated at once on a GPU
BLOCK = 256  # int8 moments: elements that share one fp32 scale
# What the driver, CUDA and its libraries keep for one process. Between 0.3 and 0.8 GiB by card and driver.
CONTEXT = 600 * 2**20
PROCESS = 2 * GIB  # of main memory, that Python, torch and CUDA take; assumed


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the moment of the step that needs most; they add up to `total`."""

    parameters: int
    gradients: int
    moments: int  # and the owner's own weights, where it has some; with rounds also what all have agreed on
    weight_copies: int  # 2-byte copies that autocast makes of fp32 weights
    activations: int  # kept from the forward for the backward pass
    logits: int  # of one chunk, with their gradient
    workspace: int  # gradients on their way, and a block that is computed again
    delay: int  # what an exchange beside the next step's computing needs, and predicted weights
    context: int  # assumed; 0 on a CPU
    moment: str  # when that is; see memory_of

    @property
    def tensors(self) -> int:
        """What torch has allocated at the most: torch.cuda.max_memory_allocated()."""
        return self.total - self.context

    @property
    def total(self) -> int:
        return sum(value for value in vars(self).values() if isinstance(value, int))


def parameter_bytes(config: TrainConfig) -> int:
    return shape_of(config).stored * BYTES[config.parameter_format]


def wire_bytes(config: TrainConfig) -> int:
    """All gradients, or all weights, in the number format in which ranks send them."""
    if config.wire in CODE_BITS:
        return math.ceil(shape_of(config).stored / CODE_BLOCK) * (
            CODE_BLOCK * CODE_BITS[config.wire] // 8 + 1
        )
    return shape_of(config).stored * min(BYTES[config.parameter_format], BYTES[config.wire])


def link_bytes(config: TrainConfig, ranks: int, nodes: int) -> int:
    """That a node's link sends in a step, and receives, on the node where it is most; ranks are spread over the nodes
    as evenly as they go. With rounds: on the average, of those that send little and the one that ends a round.

    With N ranks on M nodes, L of them on this one, it sends (N - L) / N of the gradients, added up inside the node, and
    L / N of the weights to each of the M - 1 others (strategy/by_node.py): together N + L (M - 2) of N parts.
    """
    if nodes == 1:
        return 0
    most = math.ceil(ranks / nodes)
    return (ranks + most * (nodes - 2)) * wire_bytes(config) // (ranks * steps_apart(config))


def has_rounds(config: TrainConfig, ranks: int) -> bool:
    return config.strategy == "rounds" and ranks > 1


def steps_apart(config: TrainConfig) -> int:
    """From one exchange of weights to the next."""
    return config.local_steps if config.strategy == "rounds" else 1


def is_delayed(config: TrainConfig, ranks: int) -> bool:
    """Who is alone waits for nobody."""
    return config.delay > 0 and ranks > 1


def master_bytes(config: TrainConfig, ranks: int) -> int:
    """Of all owners: the weights in fp32 that each has beside everybody's, see strategy/formats.py."""
    has_some = config.wire in CODE_BITS or config.delay > 0
    has_some |= config.strategy == "rounds" and config.parameter_format == "bf16"
    return 4 * shape_of(config).stored if ranks > 1 and has_some else 0


def change_bytes(config: TrainConfig, ranks: int) -> int:
    """By how much the last step has changed the weights, in bf16: what predicts them (strategy/delayed.py)."""
    predicts = is_delayed(config, ranks) and config.predicted_weights and config.strategy != "rounds"
    return 2 * shape_of(config).stored if predicts else 0


def moment_bytes(config: TrainConfig) -> int:
    """Both moments of AdamW, and what belongs to them; one of Muon for the matrices of the blocks."""
    shape = shape_of(config)
    matrices = [len(matrix) for matrix in shape.matrices] * shape.layers
    tensors = [*shape.outside, *shape.vectors * shape.layers]
    momentum = 0
    if config.optimizer == "muon":
        momentum = 4 * sum(matrices)
    else:
        tensors += matrices
    steps = 4 * len(tensors)
    if config.moment_format == "int8":
        return sum(2 * count + 2 * 4 * math.ceil(count / BLOCK) for count in tensors) + steps
    return 2 * BYTES[config.moment_format] * sum(tensors) + steps + momentum


def owned_bytes(config: TrainConfig, ranks: int) -> int:
    """What of an optimizer's state the owners divide among them; with rounds that is the outer one."""
    of_optimizer = 4 * shape_of(config).stored if has_rounds(config, ranks) else moment_bytes(config)
    return of_optimizer + master_bytes(config, ranks)


def local_bytes(config: TrainConfig, ranks: int) -> int:
    """With rounds: the state of an optimizer that each rank has for itself, and does not send."""
    return moment_bytes(config) if has_rounds(config, ranks) else 0


def state_bytes(config: TrainConfig, ranks: int) -> int:
    """What is in a checkpoint beside the parameters. With a delay also the weights of late micro-batches."""
    has_late = is_delayed(config, ranks) and config.strategy != "rounds"
    late = parameter_bytes(config) if has_late else 0
    return owned_bytes(config, ranks) + local_bytes(config, ranks) + change_bytes(config, ranks) + late


def checkpoint_bytes(config: TrainConfig, ranks: int) -> int:
    """Parameters and state in their formats; names and progress are a few kilobytes more."""
    return parameter_bytes(config) + state_bytes(config, ranks)


def save_bytes(config: TrainConfig, ranks: int) -> int:
    """Of a node that writes a checkpoint: a copy of it, and of its rank's part of what the owners send each other. In
    main memory where that has room, in files beside the checkpoint otherwise (checkpoint/store.py)."""
    own = math.ceil(owned_bytes(config, ranks) / ranks) if ranks > 1 else 0
    return checkpoint_bytes(config, ranks) + own


def host_bytes(config: TrainConfig, ranks: int, nodes: int, on_gpu: bool, of_a_rank: int) -> int:
    """Of main memory that the fullest node needs, without copies for a checkpoint. of_a_rank: what a rank computes
    with, which is there where it has no GPU."""
    own = PROCESS + exchange_bytes(config, ranks, nodes) + (0 if on_gpu else of_a_rank)
    return math.ceil(ranks / nodes) * own


def exchange_bytes(config: TrainConfig, ranks: int, nodes: int) -> int:
    """Of main memory of a rank: what a leg of the exchange sends and brings, and with a delay the weights that the late
    micro-batches of a checkpoint see."""
    sent = 2 * wire_bytes(config) if nodes > 1 else 0
    late = parameter_bytes(config) if is_delayed(config, ranks) and config.strategy != "rounds" else 0
    return sent + late


def memory_of(config: TrainConfig, micro_batch: int, on_gpu: bool, ranks: int = 1) -> Memory:
    """Of one of so many ranks, with that micro-batch [sequences]."""
    share = math.ceil(shape_of(config).stored / ranks) if ranks > 1 else 0  # elements that this rank owns
    sizes = Sizes(config, micro_batch, on_gpu)
    moments = _moments(config, sizes, on_gpu, share)
    name = max(moments, key=lambda name: sum(moments[name]))
    weight_copies, activations, logits, workspace = moments[name]
    return Memory(
        parameters=parameter_bytes(config),
        # An owner adds up the gradients of all ranks in fp32.
        gradients=parameter_bytes(config) + 4 * share,
        moments=math.ceil(owned_bytes(config, ranks) / ranks)
        + local_bytes(config, ranks)
        # With a delay also what a rank had when the last round ended
        + parameter_bytes(config) * has_rounds(config, ranks) * (2 if config.delay else 1),
        weight_copies=weight_copies,
        activations=activations,
        logits=logits,
        workspace=workspace,
        delay=_of_delay(config, sizes, on_gpu, share) + change_bytes(config, ranks) if share else 0,
        context=CONTEXT if on_gpu else 0,
        moment=name,
    )


class Sizes:
    """What the pieces of one forward pass need [bytes]."""

    def __init__(self, config: TrainConfig, micro_batch: int, on_gpu: bool) -> None:
        fused = on_gpu and config.compile == "true"  # by kernels that torch.compile has written
        d, tokens = config.d_model, micro_batch * config.seq_len
        self.parameter = BYTES[config.parameter_format]
        self.autocast = config.precision != "fp32" and self.parameter == 4
        self.narrow = 2 if self.autocast else self.parameter  # of what matrix products read and write
        self.shape = shape = shape_of(config)
        self.unit, self.embedding = tokens * d, shape.outside[0]  # elements
        self.several_chunks = 0 < config.loss_chunk < tokens
        self.chunk = config.loss_chunk if self.several_chunks else tokens  # tokens
        self.matrix = max(map(len, shape.matrices))  # elements
        self.widest = shape.widest * tokens
        in_norms = 4 if shape.norms_in_fp32 and not on_gpu else self.parameter
        times = 1 if on_gpu else shape.norms_on_cpu
        self.statistics = shape.statistics * tokens * in_norms
        self.input_of_norm = times * shape.in_norm * tokens * in_norms
        of_heads = times * shape.in_head_norms + shape.head_statistics
        # A block keeps the inputs and statistics of its two norms, what matrix products, attention and activation
        # function read, and an fp32 number per token and head.
        self.block = 2 * (self.input_of_norm + self.statistics) + 4 * tokens * config.heads
        again = fused * (shape.computed_again + self.autocast * shape.cast_again)
        self.block += (self.narrow * (shape.kept - again) + in_norms * of_heads) * tokens
        # Logits and their softmax in fp32, or those that come out of a product and the gradient that goes into one
        self.softmax = 2 * self.narrow if fused else 8  # bytes of each logit
        self.kept_of_block = self.parameter * self.unit if config.gradient_checkpointing else self.block
        # After the blocks: the input of the last norm, and the gradient of what the output matrix has read.
        self.end = self.input_of_norm + self.statistics + self.narrow * self.unit
        norms = (shape.calls - 1) * (self.input_of_norm + self.statistics)  # behind the calls before the last
        self.kept = shape.blocks * self.kept_of_block + norms + self.end
        # The copies of the matrices and biases of a block
        self.copy_of_block = 2 * (shape.in_matrices + shape.biases) if self.autocast else 0
        self.copy_of_embedding = 2 * self.embedding if self.autocast else 0


def _moments(config: TrainConfig, s: Sizes, on_gpu: bool, share: int) -> dict[str, tuple[int, int, int, int]]:
    """The moments of a step that may need most: (weight copies, kept activations, logits, workspace). share: elements
    that the rank owns where there are several owners."""
    shape = s.shape
    all_copies = shape.blocks * s.copy_of_block
    copies = s.copy_of_block if config.gradient_checkpointing else all_copies
    logits = s.chunk * s.embedding // config.d_model
    of_blocks = 0 if config.gradient_checkpointing else all_copies
    of_loss = (of_blocks + s.copy_of_embedding, s.kept)
    # The last block: gradients of the residual stream (twice where it is cast), of the widest output, of one matrix;
    # the block's activations where none were kept
    of_block = (
        (s.block - s.kept_of_block)
        + s.narrow * s.widest
        + (s.parameter + (s.narrow if s.autocast else 0)) * s.unit
        + s.matrix * (s.narrow + (s.parameter if s.autocast else 0))
    )
    # The gradient of the output matrix: in fp32 where it is added up over chunks, else as the product makes it
    sum_of_chunks = 4 * s.embedding if s.several_chunks else 0
    product = 0 if sum_of_chunks and s.narrow == 4 else s.narrow * s.embedding
    gradient = sum_of_chunks or product
    moments = {
        "softmax": (*of_loss, s.softmax * logits, s.narrow * s.unit + sum_of_chunks),
        # The gradient of the logits makes that of the output matrix
        "loss": (*of_loss, s.narrow * logits, s.narrow * s.unit + sum_of_chunks + product),
        # That one, and a copy of it in the format of the parameters
        "output matrix": (
            of_blocks,
            s.kept,
            0,
            gradient
            + (s.parameter * s.embedding if gradient != s.parameter * s.embedding else 0)
            + (s.parameter if s.autocast else 0) * s.unit,
        ),
        # Beside the block, the half of the embedding's gradient that waits for its other half
        "block": (
            copies,
            s.kept - s.end + s.statistics,
            0,
            s.parameter * shape.tied * s.embedding + of_block,
        ),
        # Both halves of the embedding's gradient. (To round its sum at random takes less than the update will.)
        "embedding": (0, 0, 0, s.parameter * ((1 + shape.tied) * s.embedding + s.unit)),
        "optimizer": (0, 0, 0, max(0, _of_update(config, s, on_gpu, share))),
    }
    if shape.stacks > 1:
        # Gradients of what is called several times wait for the call that was the first: all stacks' are on their way,
        # and all but the last call of each still kept.
        left = shape.calls - shape.stacks
        moments["stacks"] = (
            max(s.copy_of_block, of_blocks * left // shape.calls),
            (s.kept - s.end) * left // shape.calls,
            0,
            s.parameter * shape.layers * shape.in_matrices + of_block,
        )
    return moments


def _of_update(config: TrainConfig, s: Sizes, on_gpu: bool, share: int) -> int:
    """Where there are several owners, all gradients have left, and what an owner sends is a copy of its weights. With
    rounds each rank updates with all of them; what an owner has to do at the end of a round takes no more."""
    if config.strategy == "rounds":
        return _temporary(config, s, on_gpu)
    return _temporary(config, s, on_gpu) + (s.parameter * share - parameter_bytes(config) if share else 0)


def _of_delay(config: TrainConfig, s: Sizes, on_gpu: bool, share: int) -> int:
    """At any moment of the next step: all that one leg sends waits for the wire (with gloo in main memory), or
    all that has come for `apply_update`, while the owner updates. It has its elements before and after that, the
    latter in fp32."""
    if not config.delay:
        return 0
    return wire_bytes(config) + _temporary(config, s, on_gpu) + (s.parameter + 4) * share


def _temporary(config: TrainConfig, s: Sizes, on_gpu: bool) -> int:
    """Temporary bytes of the optimizer, which updates a piece at once; measured, as the test does."""
    piece = min(PIECE, max(s.embedding, s.matrix))
    if config.optimizer == "muon" and on_gpu:  # gradients in fp32 and bf16, or three times as much in bf16
        return 6 * _stack_of_matrices(s)
    if config.optimizer == "muon":  # of a matrix: itself, the polynomial of its rows, and what comes of both
        squares = ((m, min(m.rows // m.parts, m.columns) ** 2) for m in s.shape.matrices)
        return 4 * max(2 * len(m) + m.parts * square for m, square in squares)
    # The random numbers of the rounding are 64-bit integers.
    if config.parameter_format == "bf16":
        return 40 * piece
    return piece * {"fp32": 0, "bf16": 24, "int8": 36}[config.moment_format]


def _stack_of_matrices(s: Sizes) -> int:
    """Elements of the largest stack of matrices that Muon updates at once, at the most: of several owners each may have
    fewer."""
    of_shapes: dict[tuple[int, int], int] = {}
    for matrix in s.shape.matrices:
        shape = matrix.rows // matrix.parts, matrix.columns
        of_shapes[shape] = of_shapes.get(shape, 0) + s.shape.layers * matrix.parts
    together = (min(count, STACK // (r * c)) * r * c for (r, c), count in of_shapes.items())
    return max(s.matrix, *together)


def settings_that_fit(
    config: TrainConfig,
    available: float | Sequence[float],
    on_gpu: bool,
    keep: Collection[str] = (),
    ranks: int = 1,
) -> dict[str, Any] | None:
    """Changes with which every rank needs at most `available` bytes, one number for all `ranks` or one for each; None
    when none of them is enough.

    The least harmful first: what costs nothing, then time, then precision. The tokens per step stay the same, and the
    settings in `keep` too.
    """
    batch, accumulation = config.batch_size, config.gradient_accumulation_steps
    ways: list[dict[str, Any]] = [{}, {"loss_chunk": min(256, config.loss_chunk or 256)}]
    if config.micro_batch not in MICRO_BATCH:
        ways.insert(1, {"micro_batch": "batch_size"})
    ways.append({"gradient_checkpointing": True})
    if config.delay:
        ways.append({"delay": 0.0})
    if not config.rank_batch_sizes and config.global_batch_tokens:
        ways += [{"batch_size": part} for part in range(batch - 1, 0, -1)]
    elif not config.rank_batch_sizes:
        ways += [
            {"batch_size": part, "gradient_accumulation_steps": accumulation * batch // part}
            for part in range(batch - 1, 0, -1)
            if batch % part == 0
        ]
    # Muon has no small formats.
    ways += [
        {"optimizer": "adamw", "moment_format": "int8"},
        {"precision": "bf16", "parameter_format": "bf16"},
    ]
    changes: dict[str, Any] = {}
    for way in ways:
        if not set(keep).isdisjoint(way):
            continue
        changes |= {name: value for name, value in way.items() if getattr(config, name) != value}
        if fits(replace(config, **changes), available, on_gpu, ranks):
            return changes
    return None


def fits(config: TrainConfig, available: float | Sequence[float], on_gpu: bool, ranks: int) -> bool:
    """available: bytes, one number for all `ranks` or one for each."""
    if not isinstance(available, Sequence):
        return memory_of(config, largest_micro_batch(config), on_gpu, ranks).total <= available
    sizes = config.batch_sizes(len(available))
    pairs = zip(sizes, available, strict=True)
    return all(memory_of(config, size, on_gpu, len(sizes)).total <= room for size, room in pairs)


def largest_micro_batch(config: TrainConfig) -> int:
    """Of any rank [sequences]."""
    whole = config.global_batch_tokens // config.seq_len  # step
    if config.micro_batch not in MICRO_BATCH:
        largest = max(map(int, config.micro_batch.split(",")))
        return min(largest, whole or config.batch_size * config.gradient_accumulation_steps)
    if config.rank_batch_sizes:
        return max(config.batch_sizes(config.rank_batch_sizes.count(",") + 1))
    return min(config.batch_size, whole or config.batch_size)
