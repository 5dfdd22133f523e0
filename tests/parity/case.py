"""One combination of layout and options, its config, and the data it trains on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from megalite.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)
from megalite.model.dropout import DropoutAt
from megalite.train.batch import TokenBatch

STEPS = 3
SEQ_LENGTH = 16
# What a family changes in the tiny model beside its own defaults.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"max_positions": SEQ_LENGTH + 3},
    "qwen3": {"head_dim": 10},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "llama3": {"family": "llama", "rope_scaling": "llama3", "rope_original_max_position": 40},
}
# Traits of published models, several in one model, each at a few layouts (test_traits.py).
TRAITS: dict[str, dict[str, Any]] = {
    "gated gelu": {"family": "llama", "activation": "geglu", "mlp_bias": True},
    "squared relu": {"family": "llama", "activation": "relu2", "attention_out_bias": True},
    "after": {
        "family": "llama",
        "norm_place": "after",
        "qk_norm": True,
        "qk_norm_over": "projection",
    },
    "layers": {
        "family": "llama",
        "layers": ["window", "full_nope", "full"],
        "sliding_window": 5,
        "rope_local_theta": 30.0,
        "norm_place": "both",
    },
    "parallel": {"family": "gpt2", "max_positions": SEQ_LENGTH, "parallel_residual": True},
    "multipliers": {
        "family": "llama",
        "embedding_multiplier": None,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 3.0,
        "norm_zero_centered": True,
        "qk_norm": True,
        "rope_scaling": "yarn",
        "rope_original_max_position": 64,
    },
}
DROPOUT = ("embedding_dropout", "attention_dropout", "residual_dropout")


@dataclass(frozen=True)
class Case:
    """A layout and its options. `m` is the number of microbatches per replica."""

    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    schedule: str = "1f1b"
    dp: int = 1
    zero: Literal[0, 1] = 0
    recompute: Literal["none", "selective", "full", "stage"] = "none"
    family: str = "llama"
    dropout: bool = False
    tied: bool = False
    kv_heads: int = 4
    vocab: int = 97
    mask: Literal["full", "ragged", "documents"] = "full"
    clip: float | None = 0.05  # far below any norm here: always clips
    m: int = 3
    micro_batch: int = 1
    chunk_tokens: int = 0
    overlap: bool = True

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def global_batch(self) -> int:
        return self.dp * self.m * self.micro_batch

    @property
    def num_layers(self) -> int:
        """Enough for every stage to have one, and never a multiple that hides a lost layer."""
        return max(5, self.pp * self.vpp + 1)

    def __str__(self) -> str:
        plain = asdict(Case())
        return " ".join(f"{k}={v}" for k, v in asdict(self).items() if v != plain[k]) or "serial"

    def reference(self) -> Case:
        """The same model and data in one process, without any option that must not matter."""
        return Case(
            family=self.family,
            dropout=self.dropout,
            tied=self.tied,
            kv_heads=self.kv_heads,
            vocab=self.vocab,
            mask=self.mask,
            clip=self.clip,
            m=self.dp * self.m,
            micro_batch=self.micro_batch,
        )


def model_of(case: Case, num_layers: int) -> ModelConfig:
    """The tiny model of a case's family."""
    settings = {
        "family": case.family,
        "num_layers": num_layers,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": case.kv_heads,
        "ffn_hidden_size": 48,
        "vocab_size": case.vocab,
        "vocab_pad_multiple": 4,
        "tie_embeddings": case.tied,
        **dict.fromkeys(DROPOUT, 0.2 if case.dropout else 0.0),
        **{**FAMILIES, **TRAITS}[case.family],
    }
    return ModelConfig.model_validate(settings)


def config_of(case: Case, num_layers: int) -> RunConfig:
    """Resolved config of a case."""
    return RunConfig(
        model=model_of(case, num_layers),
        parallel=ParallelConfig(
            tp=case.tp,
            pp=case.pp,
            vpp=case.vpp,
            dp=case.dp,
            sequence_parallel=case.sp,
            overlap_tp=case.overlap,
        ),
        pipeline=PipelineConfig(schedule=case.schedule),
        optimizer=OptimizerConfig(
            lr=1e-2,
            lr_schedule="constant",
            clip_grad=case.clip,
            zero=case.zero,
            bucket_mb=0.02,
            overlap_grad_reduce=case.overlap,
            overlap_param_gather=case.overlap,
        ),
        data=DataConfig(seq_length=SEQ_LENGTH),
        train=TrainConfig(
            steps=STEPS,
            global_batch=case.global_batch,
            micro_batch=case.micro_batch,
            dtype="float64",
            recompute=case.recompute,
            loss_chunk_tokens=case.chunk_tokens,
        ),
    )


def global_samples(case: Case, step: int) -> list[TokenBatch]:
    """The step's samples one by one, in global order; weights already sum to 1 over the batch."""
    generator = torch.Generator().manual_seed(1000 + step)
    samples = []
    for index in range(case.global_batch):
        tokens = torch.randint(0, case.vocab, (SEQ_LENGTH + 1,), generator=generator)
        edges = torch.tensor([0, case.vocab - 1, case.vocab // 2, case.vocab // 4])
        tokens[: len(edges)] = edges  # the edges of vocabulary shards are always met
        valid = torch.ones(SEQ_LENGTH, dtype=torch.float64)
        cuts: list[int] = []
        if case.mask == "ragged":
            keep = int(torch.randint(1, SEQ_LENGTH, (1,), generator=generator))
            # Each third sample, and so a microbatch or a whole rank, has no valid token at all.
            valid[keep if index % 3 or case.global_batch == 1 else 0 :] = 0.0
        if case.mask == "documents":
            cut = torch.randperm(SEQ_LENGTH - 1, generator=generator)[:2] + 1
            cuts = sorted(cut.tolist())
            valid[[c - 1 for c in cuts]] = 0.0
        bounds = [0, *cuts, SEQ_LENGTH]
        samples.append(TokenBatch(tokens[:-1], tokens[1:], valid, bounds))
    total = sum(float(sample.weight_T.sum()) for sample in samples)
    return [
        TokenBatch(s.token_T, s.label_T, s.weight_T / max(total, 1.0), s.cu_seqlens)
        for s in samples
    ]


def rank_batches(case: Case, step: int, dp_rank: int) -> list[TokenBatch]:
    """A replica's microbatches of a step."""
    samples, count, size = global_samples(case, step), case.m * case.micro_batch, case.micro_batch
    starts = range(dp_rank * count, (dp_rank + 1) * count, size)
    return [
        join(samples[start : start + size], DropoutAt(1234, step, start * SEQ_LENGTH))
        for start in starts
    ]


def join(samples: list[TokenBatch], dropout: DropoutAt) -> TokenBatch:
    """Samples side by side in one microbatch."""
    bounds = [0]
    for index, sample in enumerate(samples):
        bounds += [index * SEQ_LENGTH + b for b in sample.cu_seqlens[1:]]
    return TokenBatch(
        torch.cat([s.token_T for s in samples]),
        torch.cat([s.label_T for s in samples]),
        torch.cat([s.weight_T for s in samples]),
        bounds,
        dropout,
    )
