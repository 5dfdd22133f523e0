"""The choice of a backend on GPUs that are not here."""

from __future__ import annotations

import pytest
import torch

from megalite.kernels import select
from megalite.kernels.errors import BackendError


def test_triton_is_taken_from_the_capability_on_that_its_kernels_compile_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, name in (((7, 5), "reference"), ((8, 0), "triton"), ((9, 0), "triton")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert select("auto", "cuda").name == name
        if name == "reference":
            with pytest.raises(BackendError, match=r"capability is \(7, 5\), its kernels need 8.0"):
                select("triton", "cuda")
