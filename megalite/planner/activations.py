"""What one microbatch of a stage holds on a rank, in bytes, counted tensor by tensor.

Shapes: T tokens of the microbatch; t = T / tp under sequence parallelism, else T; D model; n, k and
f = query heads, key/value heads and feed-forward width of this rank; H head dim.
A layer keeps, in elements (Korthikanti et al., arXiv 2205.05198, counted for these layers):

    4 t D     what the two norms take and give       T (n + 2k) H   turned queries and keys, values
    T n H     attention's output                     T f or 2 T f   what the activation takes
    T f       what that gives

and statistics of norms and softmax in float32. "selective" keeps the heads as the projection gave
them, and leaves out softmax statistics and what the activation gives; "full" keeps t D, the layer's
input. Attention is counted as a kernel that never stores scores; on the CPU, windows and dropped
attention weights take more.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config import RunConfig
from megalite.planner.states import BYTES, sum_bytes
from megalite.run.parameters import ModelStage

_BLOCK_ELEMENTS = 1 << 19  # that plain torch works on at a time
_ROW_BYTES = 9  # of a token: its int64 row of the embedding, and whether that is here


@dataclass(frozen=True)
class KeptBytes:
    """Bytes of one microbatch of a stage.

    activations: from its forward to its input gradient. checkpoint: in their place from its forward
    to its recomputation, if the schedule has one. deferred: from its input gradient to its weight
    gradient, where the two are split. working: what a backward takes at most beside these.
    messages: what arrives and leaves meanwhile, of any microbatch.
    """

    activations: int
    checkpoint: int
    deferred: int
    working: int
    messages: int


@dataclass(frozen=True)
class _Sizes:
    """Elements of the tensors of a rank, by name."""

    hidden: int  # of the rank's tokens, [t, D]
    gathered: int  # of all tokens, [T, D]
    packed: int
    normed_heads: int  # queries and keys
    context: int
    before: int  # what the activation takes
    after: int
    logits: int
    tokens: int
    own_tokens: int  # t
    heads: int


def held_by(config: RunConfig, stage: ModelStage) -> KeptBytes:
    """Of a stage of a resolved config."""
    size, element = _sizes(config), BYTES[config.train.dtype]
    kept = "none" if config.train.recompute == "stage" else config.train.recompute
    layers = len(stage.layers)
    deferred = layers * element * _deferred_elements(size)
    if stage.first:
        deferred += element * size.gathered + _ROW_BYTES * size.tokens
    if stage.last and not config.train.loss_chunk_tokens:
        deferred += element * (size.logits + size.gathered)
    return KeptBytes(
        activations=layers * _layer_bytes(config, size, kept) + _end_bytes(config, size, stage),
        checkpoint=0 if stage.first else element * size.hidden,
        deferred=deferred,
        working=max(
            _layer_working_bytes(config, size) if layers else 0,
            _head_working_bytes(config, size) if stage.last else 0,
            _embedding_working_bytes(config, size) if stage.first else 0,
        ),
        messages=_message_bytes(config, size, stage),
    )


def _sizes(config: RunConfig) -> _Sizes:
    model, tp = config.model, config.parallel.tp
    tokens = config.train.micro_batch * config.data.seq_length
    own = tokens // tp if config.parallel.sequence_parallel else tokens
    heads, groups = model.num_heads // tp, model.kv_heads // tp
    ffn, head = model.ffn_hidden_size // tp, model.head_size
    return _Sizes(
        hidden=own * model.hidden_size,
        gathered=tokens * model.hidden_size,
        packed=tokens * (heads + 2 * groups) * head,
        normed_heads=tokens * (heads + groups),
        context=tokens * heads * head,
        before=tokens * ffn * (2 if model.gated else 1),
        after=tokens * ffn,
        logits=tokens * model.padded_vocab_size // tp,
        tokens=tokens,
        own_tokens=own,
        heads=heads,
    )


def _statistics(config: RunConfig, size: _Sizes) -> int:
    """Bytes of a norm's statistics: one number a token, two under LayerNorm."""
    numbers = 2 if config.model.norm == "layernorm" else 1
    return numbers * size.own_tokens * sum_bytes(config.train.dtype)


def _layer_bytes(config: RunConfig, size: _Sizes, recompute: str) -> int:
    """What a layer keeps of a microbatch."""
    element, wide = BYTES[config.train.dtype], sum_bytes(config.train.dtype)
    if recompute == "full":
        return element * size.hidden
    elements = 4 * size.hidden + size.packed + size.context + size.before
    statistics = 2 * _statistics(config, size)
    if recompute == "none":
        elements += size.after
        statistics += size.heads * size.tokens * wide
        if config.model.qk_norm:  # what it takes, packed, and a number a query and key head
            elements += size.packed
            statistics += size.normed_heads * wide
    masks = 2 * size.hidden if _keeps_masks(config, config.model.residual_dropout) else 0
    return element * elements + statistics + masks


def _keeps_masks(config: RunConfig, probability: float) -> bool:
    """Plain torch keeps masks of dropout, a byte each; Triton draws them again."""
    return probability > 0 and config.kernels.backend == "reference"


def _end_bytes(config: RunConfig, size: _Sizes, stage: ModelStage) -> int:
    """What embedding, final norm, head and loss keep of a microbatch."""
    element, wide = BYTES[config.train.dtype], sum_bytes(config.train.dtype)
    total = 0
    if stage.first:
        total += _ROW_BYTES * size.tokens
        total += 8 * size.own_tokens if config.model.positions == "learned" else 0
        total += size.hidden if _keeps_masks(config, config.model.embedding_dropout) else 0
    if stage.last:
        total += 2 * element * size.hidden + _statistics(config, size)
        total += wide * size.tokens  # log-sum-exp
        total += wide * size.tokens if wide < 8 else 0  # the weights of the loss, which are float64
        if not config.train.loss_chunk_tokens:
            total += element * size.logits
    return total


def _deferred_elements(size: _Sizes) -> int:
    """Of a layer's four products: what each took, and the gradient of what it gave."""
    taken = 2 * size.gathered + size.context + size.after
    given = size.packed + 2 * size.gathered + size.before
    return taken + given


def _layer_working_bytes(config: RunConfig, size: _Sizes) -> int:
    """While a feed-forward block goes back: gradients of its output, activation and input.

    Or while attention does, which has more of them but comes when what that block kept is free.
    """
    recompute, element = config.train.recompute, BYTES[config.train.dtype]
    # The gradient of what the activation took is written over that itself.
    room = _reference_room(config, size) if config.kernels.backend == "reference" else 0
    elements = size.hidden + max(size.after + room // element, size.gathered)
    if config.model.residual_dropout:
        elements += size.hidden  # the output's gradient as dropout lets it through
    if config.parallel.sequence_parallel:
        elements += size.gathered  # the output's gradient of all tokens
    if recompute == "selective":
        elements += size.after
    # The mask of the block's dropout is free by then.
    mask = size.hidden if _keeps_masks(config, config.model.residual_dropout) else 0
    free = 2 * size.hidden + size.before + (size.after if recompute != "selective" else 0)
    heads = size.packed + size.context  # once more where turned heads are made again
    attention = size.hidden + heads * (2 if recompute == "selective" else 1) + size.context - free
    again = _layer_bytes(config, size, "none") - element * size.hidden
    working = max(element * elements - mask, element * attention)
    return working + (again if recompute == "full" else 0)


def _reference_room(config: RunConfig, size: _Sizes) -> int:
    """Bytes in which plain torch works on a block of the activation's input."""
    ffn, wide = size.after // size.tokens, sum_bytes(config.train.dtype)
    widened = wide > BYTES[config.train.dtype]
    if config.model.gated:
        whole = min(2 * ffn, -(-ffn // 32) * 32)
        columns, across = whole + (3 * ffn if widened else 0), 2 * ffn
    else:
        columns, across = 5 * ffn if widened else 3 * ffn, ffn
    rows = min(size.tokens, max(1, _BLOCK_ELEMENTS // across))
    return rows * columns * wide


def _head_working_bytes(config: RunConfig, size: _Sizes) -> int:
    """The gradient of what the head takes, and a chunk of both where logits come in chunks.

    Of a chunk's tokens also five numbers: labels, what their gradients are multiplied by, the like.
    """
    chunk = min(size.tokens, config.train.loss_chunk_tokens)
    parts = 2 if config.parallel.sequence_parallel else 1
    elements = parts * size.gathered + (size.logits + size.gathered) * chunk // size.tokens
    return BYTES[config.train.dtype] * elements + 5 * 8 * chunk


def _embedding_working_bytes(config: RunConfig, size: _Sizes) -> int:
    """The gradient of its rows, of all tokens too where they were gathered."""
    gathered = size.gathered if config.parallel.sequence_parallel else 0
    return BYTES[config.train.dtype] * (size.hidden + gathered)


def _message_bytes(config: RunConfig, size: _Sizes, stage: ModelStage) -> int:
    """Boundary tensors on their way: one that arrives and one that leaves, for each neighbour."""
    neighbours = (not stage.first) + (not stage.last)
    return 2 * neighbours * BYTES[config.train.dtype] * size.hidden
