"""The recorder sees what it is there for: use of what is in flight, and what kernels write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.kernels.triton import attention, norm
from tests.gpu.kit.recorder import Operators, Recorder, range_of
from tests.gpu.kit.writes import written_parameters


def in_flight(reads: list[torch.Tensor], writes: list[torch.Tensor]) -> Recorder:
    recorder = Recorder(0)
    recorder.launch("all_gather", "0,1 #0", "8", reads, writes)
    recorder.trace.faults.clear()  # these tensors are on the CPU
    return recorder


def test_the_result_of_an_operation_is_not_read_before_the_wait() -> None:
    buffer = torch.zeros(8)
    recorder = in_flight([buffer[:4]], [buffer])
    recorder.touch("add", [buffer[6:]], [])
    assert len(recorder.trace.faults) == 1
    assert "add uses the result of all_gather #0" in recorder.trace.faults[0]
    recorder.in_flight[0].wait()
    recorder.touch("add", [buffer[6:]], [])
    assert len(recorder.trace.faults) == 1


def test_the_input_of_an_operation_is_not_written_before_the_wait() -> None:
    source, result = torch.zeros(8), torch.zeros(16)
    recorder = in_flight([source], [result])
    recorder.touch("mul", [source], [torch.zeros(8)])
    assert recorder.trace.faults == []
    recorder.touch("zero_", [], [source.view(2, 4)[1]])
    assert len(recorder.trace.faults) == 1
    assert "zero_ overwrites the input of all_gather #0" in recorder.trace.faults[0]


def test_the_rest_of_a_buffer_may_be_used() -> None:
    grads = torch.zeros(12)
    recorder = in_flight([grads[:4]], [grads[:4]])
    recorder.touch("addmm", [grads[4:]], [grads[4:8]])
    assert recorder.trace.faults == []


def test_work_on_another_stream_is_in_flight_until_it_is_joined() -> None:
    recorder, batch, stream = Recorder(0), torch.zeros(4), object()
    recorder.streams.append(stream)
    recorder.launched("copy", "async", [], [batch])
    recorder.streams.pop()
    recorder.touch("embedding", [batch], [])
    assert len(recorder.trace.faults) == 1
    recorder.join(stream)
    recorder.touch("embedding", [batch], [])
    assert len(recorder.trace.faults) == 1


def test_a_range_ends_with_the_last_element() -> None:
    x = torch.zeros(4, 6)
    column = range_of(x[:, 2])
    assert (column.first, column.last) == (8, 4 * (3 * 6 + 3))
    assert not range_of(x[:1]).overlaps(range_of(x[1:]))
    assert range_of(x[:0]).last == range_of(x[:0]).first


def test_operators_on_the_cpu_are_not_recorded() -> None:
    recorder = Recorder(0)
    with Operators(recorder):
        assert float(torch.ones(3).sum()) == 0.0  # no value reaches the host
    assert recorder.trace.events == []


@pytest.mark.parametrize(
    ("kernel", "written"),
    [
        (norm._norm_forward_kernel, {"y_ptr", "s_ptr", "mean_ptr", "rstd_ptr"}),
        (norm._column_sum_kernel, {"out_ptr"}),
        (attention._forward_kernel, {"o_ptr", "lse_ptr"}),
        (attention._delta_kernel, {"stats_ptr"}),
    ],
)
def test_pointers_that_a_kernel_writes_through(kernel: Any, written: set[str]) -> None:
    found = written_parameters(kernel.jit.fn)
    assert {name for name in found if name.endswith("_ptr")} == written
