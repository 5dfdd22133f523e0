"""A step's microbatches on their way to the device, and the masks that they share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.data.batches import MicroBatch
from megalite.kernels.upload import upload
from megalite.model.dropout import DropoutAt
from megalite.train.batch import Upload

CPU = torch.device("cpu")
TOKENS = 12


def micro_batches(count: int) -> list[MicroBatch]:
    """Random tokens, every third of no weight, each microbatch cut elsewhere."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for index in range(count):
        drawn = torch.randint(0, 97, (TOKENS + 1,), generator=generator)
        weight = (torch.arange(TOKENS) % 3 > 0).float()
        cuts = torch.tensor([0, 1 + index, TOKENS], dtype=torch.int32)
        found.append(MicroBatch(drawn[:-1], drawn[1:], weight, cuts, np.arange(1)))
    return found


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32),
     (torch.float64, torch.float64)],
    ids=str,
)  # fmt: skip
def test_a_step_arrives_in_the_types_in_which_it_is_used(dtype, weight_dtype) -> None:
    scale, loaded = 1 / 23, micro_batches(3)
    batches = Upload(CPU, dtype).token_batches(loaded, scale, DropoutAt(1, 2, 100))
    for index, (batch, source) in enumerate(zip(batches, loaded, strict=True)):
        assert torch.equal(batch.token_T, source.tokens)
        assert torch.equal(batch.label_T, source.labels)
        assert batch.weight_T.dtype == weight_dtype
        # rounded once, from the product in float64
        want = (source.loss_weight.double() * scale).to(weight_dtype)
        assert torch.equal(batch.weight_T, want)
        assert batch.cu_seqlens == source.cu_seqlens.tolist()
        assert batch.dropout == DropoutAt(1, 2, 100 + index * TOKENS)
        assert batch.masks is batches[0].masks
    assert Upload(CPU, dtype).token_batches(loaded, scale)[0].masks is not batches[0].masks


class Streams:
    """A stand-in for CUDA: a log of what is done, and on which stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        self.current = "compute"
        log, streams = self.log, self

        class Stream:
            def __init__(self, name: Any = "copy") -> None:
                self.name = name if isinstance(name, str) else "copy"

            def wait_stream(self, other: Stream) -> None:
                log.append(("wait", self.name, other.name))

        @contextmanager
        def stream(chosen: Stream) -> Iterator[None]:
            before, streams.current = streams.current, chosen.name
            yield
            streams.current = before

        def pin_memory(host: Tensor) -> Tensor:
            log.append(("pin", tuple(host.shape)))
            return host

        def to(host: Tensor, device: Any, non_blocking: bool = False) -> Tensor:
            if not isinstance(device, torch.device):  # another type, on the host
                return original(host, device)
            assert non_blocking
            assert device.type == "cuda"
            log.append(("copy", streams.current, tuple(host.shape), host.dtype))
            return host.clone()

        def record_stream(there: Tensor, user: Stream) -> None:
            log.append(("used on", user.name, tuple(there.shape)))

        original = Tensor.to
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(streams.current))
        monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
        monkeypatch.setattr(Tensor, "to", to)
        monkeypatch.setattr(Tensor, "record_stream", record_stream)


def test_two_copies_a_step_from_pinned_memory_beside_the_computation(monkeypatch) -> None:
    loaded = micro_batches(5)
    want = Upload(CPU, torch.bfloat16).token_batches(loaded, 0.25)
    streams = Streams(monkeypatch)
    found = Upload(torch.device("cuda", 0), torch.bfloat16).token_batches(loaded, 0.25)
    ids, weights = (10, TOKENS), (5, TOKENS)
    assert streams.log == [
        ("pin", ids), ("copy", "copy", ids, torch.int64),
        ("wait", "compute", "copy"), ("used on", "compute", ids),
        ("pin", weights), ("copy", "copy", weights, torch.float32),
        ("wait", "compute", "copy"), ("used on", "compute", weights),
    ]  # fmt: skip
    for got, batch in zip(found, want, strict=True):
        for name in ("token_T", "label_T", "weight_T"):
            assert torch.equal(getattr(got, name), getattr(batch, name))
        assert got.cu_seqlens == batch.cu_seqlens


def test_numbers_of_the_host_are_pinned_for_a_gpu_alone(monkeypatch) -> None:
    numbers = torch.tensor([1.0, 2.0])
    assert upload(numbers, CPU) is numbers
    streams = Streams(monkeypatch)
    assert torch.equal(upload(numbers, torch.device("cuda")), numbers)
    assert streams.log == [("pin", (2,)), ("copy", "compute", (2,), torch.float32)]
