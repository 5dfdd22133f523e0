"""Parameters and FLOPs of a model, term by term, and MFU. Integers in, exact integers out.

The MFU rule, stated here and nowhere else:

    MFU = (model FLOPs per token x tokens per second) / (devices x peak FLOP/s of the dtype)

* Model FLOPs are the matrix multiplications the definition of the model needs: forward, and twice
  that for backward. Recomputed work is not counted, so recompute lowers MFU by what it costs.
  Norms, rotary embedding, softmax and the optimizer are not counted.
* One multiply-add is 2 FLOPs. Embeddings, of tokens and of positions, are look-ups and count 0;
  biases are additions and count 0.
* The head counts the true vocabulary; padding columns are our choice, not the model's work.
* Attention over a sequence of S tokens is counted both ways, and both figures are kept: `full` lets
  every token see all S (most published tables), `causal` what the mask leaves: half of that, or
  less under a sliding window, which is what a kernel that skips masked blocks has to do. Where one
  number is shown it is `causal`: it cannot exceed 100 %.
* Masks between documents do not lower the count: the sequence length stays S.
* Tokens are input tokens of the step, masked or not; the peak is the dense one of hardware.py, and
  an unknown device has no MFU.

Knows no torch and no times.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass, replace
from math import prod

from megalite.config import ModelConfig
from megalite.layout.sharding import Role
from megalite.run.parameters import layer_parameters, stage_parameters, whole_model

BACKWARD_FORWARDS = 2  # a backward multiplies twice: for the input's and the weight's gradient


@dataclass(frozen=True)
class Flops:
    """FLOPs per token, by term. `attention_*` are the two products with the scores.

    `qkv`, `attention_out`, `mlp` (gate included, where there is one) and `head` are the products
    with weights.
    """

    embedding: int
    qkv: int
    attention_full: int
    attention_causal: int
    attention_out: int
    mlp: int
    head: int

    @property
    def matmul_weights(self) -> int:
        """All terms but the scores: 2 FLOPs for each weight that multiplies."""
        return self.embedding + self.qkv + self.attention_out + self.mlp + self.head

    @property
    def total_full(self) -> int:
        """The sum of all terms, with every token attending to the whole sequence."""
        return self.matmul_weights + self.attention_full

    @property
    def total_causal(self) -> int:
        """The sum of all terms, with the scores that causal mask and sliding window leave."""
        return self.matmul_weights + self.attention_causal


@dataclass(frozen=True)
class Mfu:
    """Model FLOPs utilisation as a fraction, in both conventions of attention."""

    full: float
    causal: float


def parameter_counts(model: ModelConfig, padded: bool = False) -> Counter[Role]:
    """Elements of the weights of each role in the whole model, a tied one once.

    `padded` counts the vocabulary rows that are stored. Counted from the model's own list
    (`parameters.py`): the ends, and one layer for all.
    """
    ends = stage_parameters(model, replace(whole_model(model), layers=range(0)))
    layer = list(layer_parameters(model, 0))
    counts: Counter[Role] = Counter()
    for spec, times in [*((s, 1) for s in ends), *((s, model.num_layers) for s in layer)]:
        rows, *columns = spec.shape
        if spec.num_true_rows is not None and not padded:
            rows = spec.num_true_rows
        counts[spec.role] += times * rows * prod(columns)
    return counts


def forward_flops(model: ModelConfig, seq_length: int) -> Flops:
    """Forward FLOPs per token of the whole model at a sequence length in tokens.

    A weight matrix costs 2 FLOPs per element and token. Scores: each token multiplies its query
    with S keys and its weights with S values, 2 x 2 x heads x head size x S per layer (Narayanan
    et al. 2021, appendix, with q heads; grouping kv heads saves none of it). The causal half is
    exactly half of that, without the diagonal's share of 1/S. With a window of W < S tokens the
    first W of them see half of W on average and the others W: W - W^2 / 2S keys instead of S / 2.
    Each layer counts with its own window.
    """
    counts = parameter_counts(model)
    scores = 4 * model.num_heads * model.head_size * seq_length  # of a layer
    windows = [min(kind.window or seq_length, seq_length) for kind in model.kinds]
    seen = sum(window * (2 * seq_length - window) for window in windows)
    return Flops(
        embedding=0,
        qkv=2 * counts["qkv"],
        attention_full=scores * model.num_layers,
        attention_causal=scores * seen // (2 * seq_length**2),
        attention_out=2 * counts["attention_out"],
        mlp=2 * counts["mlp"],
        head=2 * model.vocab_size * model.hidden_size,
    )


def training_flops(model: ModelConfig, seq_length: int) -> Flops:
    """Forward and backward FLOPs per token: three times the forward ones, recompute not counted."""
    factor = 1 + BACKWARD_FORWARDS
    return Flops(*(factor * term for term in astuple(forward_flops(model, seq_length))))


def flops_text(model: ModelConfig, seq_length: int) -> str:
    """The training FLOPs of a token in one line: both totals, then each term."""
    flops = training_flops(model, seq_length)
    mega = {name: f"{getattr(flops, name) / 1e6:,.2f}" for name in Flops.__dataclass_fields__}
    return (
        f"training MFLOPs per token: {flops.total_full / 1e6:,.2f} with full attention, "
        f"{flops.total_causal / 1e6:,.2f} with what the mask leaves (qkv {mega['qkv']}, scores "
        f"{mega['attention_full']} full or {mega['attention_causal']} masked, attention output "
        f"{mega['attention_out']}, feed-forward {mega['mlp']}, head {mega['head']})"
    )


def mfu(
    tokens_per_s: float,
    model: ModelConfig,
    seq_length: int,
    peak_tflops: float | None,
    num_devices: int = 1,
) -> Mfu | None:
    """Utilisation at `tokens_per_s` over all `num_devices`; None if the peak is not known."""
    if peak_tflops is None:
        return None
    flops = training_flops(model, seq_length)
    peak = peak_tflops * 1e12 * num_devices
    return Mfu(flops.total_full * tokens_per_s / peak, flops.total_causal * tokens_per_s / peak)
