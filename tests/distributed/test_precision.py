"""Number formats: where sums are kept, and TF32 refused where there is none."""

from __future__ import annotations

import pytest
import torch

from megalite.distributed.precision import DTYPES, main_grad_dtype, set_tf32
from megalite.errors import ConfigError


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_sums_are_never_kept_in_sixteen_bits(name: str) -> None:
    wanted = torch.float64 if name == "float64" else torch.float32
    assert main_grad_dtype(DTYPES[name]) == wanted


def test_tf32_is_refused_on_a_device_without_it() -> None:
    set_tf32(False, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"train\.tf32=true has no effect on cpu"):
        set_tf32(True, torch.device("cpu"))
