"""The memory of one microbatch of a stage on a rank, in bytes, counted tensor by tensor.

Shapes: T tokens of the microbatch; t = T / tp under sequence parallelism, else T; D model; n, k and
f = query heads, key/value heads and feed-forward width of this rank; H head dim.
A layer keeps, in elements (Korthikanti et al., arXiv 2205.05198, counted for these layers):

    4 t D            inputs and outputs of the two norms (6 t D of four, 3 t D of parallel blocks)
    T (n + 2k) H     rotated queries and keys, and values
    T n H            output of attention
    T f or 2 T f     input of the activation (2 T f where it is gated)
    T f              output of the activation

and statistics of norms and softmax in float32. "selective" keeps the heads before rotation, and
leaves out softmax statistics and the activation's output; "full" keeps t D, the layer's input.
Attention is counted as a kernel that never stores scores; on the CPU, windows and dropped attention
weights take more.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config import RunConfig
from megalite.planner.states import BYTES, sum_bytes
from megalite.run.parameters import ModelStage

_BLOCK_ELEMENTS = 1 << 19  # of the activation's input, that plain torch works on at a time
_ROW_BYTES = 8  # of a token's lookup in the embedding: its row of this rank's part, int64


@dataclass(frozen=True)
class MicrobatchBytes:
    """Bytes of one microbatch of a stage.

    activations: kept from its forward to its input gradient. checkpoint: kept instead of them from
    its forward to its recomputation, if the schedule has one. deferred: kept from its input
    gradient to its weight gradient, where the two are split. working: the most that a backward
    allocates beside these. messages: tensors received and sent meanwhile, of any microbatch.
    """

    activations: int
    checkpoint: int
    deferred: int
    working: int
    messages: int


@dataclass(frozen=True)
class _Sizes:
    """Numbers of elements of a rank's tensors, and of its tokens and heads."""

    hidden: int  # [t, D]
    gathered_hidden: int  # [T, D]
    qkv: int  # [T, (n + 2k) H], queries, keys and values, packed or apart
    head_norms: int  # [T, n + k], a statistic for each query and key head
    attention_output: int  # [T, n H]
    activation_input: int  # [T, f], or [T, 2 f] where it is gated
    activation_output: int  # [T, f]
    logits: int  # [T, V / tp]
    tokens: int  # T
    own_tokens: int  # t
    heads: int  # n


def microbatch_bytes(config: RunConfig, stage: ModelStage) -> MicrobatchBytes:
    """The bytes of one microbatch of a stage; the config must be resolved."""
    size, element = _sizes(config), BYTES[config.train.dtype]
    recompute = "none" if config.train.recompute == "stage" else config.train.recompute
    layers = len(stage.layers)

    # A weight gradient needs the product's input and its output's gradient, until it is computed.
    deferred = layers * element * _deferred_elements(config, size)
    if stage.first:
        deferred += element * size.gathered_hidden + _ROW_BYTES * size.tokens
    if stage.last and not config.train.loss_chunk_tokens:
        deferred += element * (size.logits + size.gathered_hidden)

    return MicrobatchBytes(
        activations=layers * _layer_bytes(config, size, recompute)
        + _end_bytes(config, size, stage),
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
        gathered_hidden=tokens * model.hidden_size,
        qkv=tokens * (heads + 2 * groups) * head,
        head_norms=tokens * (heads + groups),
        attention_output=tokens * heads * head,
        activation_input=tokens * ffn * (2 if model.gated else 1),
        activation_output=tokens * ffn,
        logits=tokens * model.padded_vocab_size // tp,
        tokens=tokens,
        own_tokens=own,
        heads=heads,
    )


def _statistics(config: RunConfig, size: _Sizes) -> int:
    """Bytes of a norm's statistics: one number a token, two under LayerNorm."""
    numbers = 2 if config.model.norm == "layernorm" else 1
    return numbers * size.own_tokens * sum_bytes(config.train.dtype)


def _norms(config: RunConfig) -> tuple[int, int]:
    """(tensors [t, D], norms) that a layer keeps around its two blocks, whose inputs are kept, too.

    A norm keeps its input; two parallel blocks share that of their first norms.
    """
    kept, norms = {"before": (4, 2), "after": (4, 2), "both": (6, 4)}[config.model.norm_place]
    return kept - config.model.parallel_residual, norms


def _layer_bytes(config: RunConfig, size: _Sizes, recompute: str) -> int:
    """Bytes that a layer keeps of a microbatch for its backward."""
    element, wide = BYTES[config.train.dtype], sum_bytes(config.train.dtype)
    if recompute == "full":
        return element * size.hidden
    kept, norms = _norms(config)
    elements = kept * size.hidden + size.qkv + size.attention_output + size.activation_input
    statistics = norms * _statistics(config, size)
    if recompute == "none":
        elements += size.activation_output
        statistics += size.heads * size.tokens * wide
        if config.model.qk_norm:  # the packed heads before the norm, beside those after it
            elements += size.qkv
            whole = config.model.qk_norm_over == "projection"
            statistics += (2 * size.tokens if whole else size.head_norms) * wide
    masks = 2 * size.hidden if _keeps_masks(config, config.model.residual_dropout) else 0
    return element * elements + statistics + masks


def _keeps_masks(config: RunConfig, probability: float) -> bool:
    """True if dropout keeps its masks, a byte an element: plain torch does, Triton redraws them."""
    return probability > 0 and config.kernels.backend == "reference"


def _end_bytes(config: RunConfig, size: _Sizes, stage: ModelStage) -> int:
    """Bytes that embedding, final norm, head and loss keep of a microbatch for their backwards."""
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


def _deferred_elements(config: RunConfig, size: _Sizes) -> int:
    """Elements of the inputs of a layer's four products, and of their outputs' gradients.

    Blocks side by side have the same gradient of their outputs, unless each is changed on its way.
    """
    model = config.model
    changed = model.residual_multiplier != 1 or model.residual_dropout > 0
    same = model.parallel_residual and not changed and not config.parallel.sequence_parallel
    inputs = 2 * size.gathered_hidden + size.attention_output + size.activation_output
    output_grads = size.qkv + 2 * size.gathered_hidden + size.activation_input
    return inputs + output_grads - (size.gathered_hidden if same else 0)


def _layer_working_bytes(config: RunConfig, size: _Sizes) -> int:
    """The most bytes that a layer's backward allocates: in the feed-forward block or in attention.

    Attention's backward has more tensors, but it runs when those that the block kept are free.
    """
    recompute, element = config.train.recompute, BYTES[config.train.dtype]

    # Feed-forward block: gradients of its output, and of the activation's output or its own input.
    # The gradient of the activation's input is written over that input.
    room = _reference_room(config, size) if config.kernels.backend == "reference" else 0
    elements = size.hidden + max(size.activation_output + room // element, size.gathered_hidden)
    if config.model.residual_dropout:
        elements += size.hidden  # the output's gradient after dropout's backward
    if config.model.residual_multiplier != 1:
        elements += size.hidden  # the output's gradient times the multiplier
    if config.parallel.sequence_parallel:
        elements += size.gathered_hidden  # the output's gradient of all tokens
    if recompute == "selective":
        elements += size.activation_output  # computed again
    # The mask of the block's dropout is free by then.
    mask = size.hidden if _keeps_masks(config, config.model.residual_dropout) else 0

    # Attention: gradients of its output and of the heads, which are rotated again if "selective".
    free = 2 * size.hidden + size.activation_input
    heads = size.qkv + size.attention_output
    attention = size.hidden + heads + size.attention_output - free
    if recompute == "selective":
        attention += heads
    else:
        attention -= size.activation_output

    working = max(element * elements - mask, element * attention)
    if recompute == "full":  # the layer's forward again, of which the input was kept
        working += _layer_bytes(config, size, "none") - element * size.hidden
    return working


def _reference_room(config: RunConfig, size: _Sizes) -> int:
    """Bytes that plain torch allocates for a block of the activation's input."""
    ffn, wide = size.activation_output // size.tokens, sum_bytes(config.train.dtype)
    widened = wide > BYTES[config.train.dtype]
    if config.model.activation == "relu2":
        return 0  # all of it in place
    if config.model.activation in ("geglu", "geglu_tanh"):
        columns, across = 7 * ffn, 2 * ffn
    elif config.model.gated:
        whole = min(2 * ffn, -(-ffn // 32) * 32)
        columns, across = whole + (3 * ffn if widened else 0), 2 * ffn
    else:
        columns, across = 5 * ffn if widened else 3 * ffn, ffn
    rows = min(size.tokens, max(1, _BLOCK_ELEMENTS // across))
    return rows * columns * wide


def _head_working_bytes(config: RunConfig, size: _Sizes) -> int:
    """Bytes of the gradient of the head's input.

    Where logits are computed in chunks, also a chunk of logits and of that gradient, and five
    numbers of 8 bytes for each of its tokens (label, upstream gradient and the like).
    """
    chunk = min(size.tokens, config.train.loss_chunk_tokens)
    parts = 2 if config.parallel.sequence_parallel else 1
    elements = (
        parts * size.gathered_hidden + (size.logits + size.gathered_hidden) * chunk // size.tokens
    )
    if config.model.logits_scaling != 1:
        elements += size.hidden  # the gradient of the norm's output
    return BYTES[config.train.dtype] * elements + 5 * 8 * chunk


def _embedding_working_bytes(config: RunConfig, size: _Sizes) -> int:
    """Bytes of the output's gradient, and of all tokens' where sequence parallelism gathers it."""
    gathered = size.gathered_hidden if config.parallel.sequence_parallel else 0
    multiplied = size.hidden if config.model.embedding_factor != 1 else 0
    return BYTES[config.train.dtype] * (size.hidden + gathered + multiplied)


def _message_bytes(config: RunConfig, size: _Sizes, stage: ModelStage) -> int:
    """Bytes of the messages in flight: one received and one sent, for each neighbour."""
    neighbours = (not stage.first) + (not stage.last)
    return 2 * neighbours * BYTES[config.train.dtype] * size.hidden
