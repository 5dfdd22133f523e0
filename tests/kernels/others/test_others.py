"""Kernels of other packages: what is found, what is refused, and what the adapters compute."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor

from megalite.distributed.mesh import Mesh
from megalite.kernels.adamw_operations import AdamWRun, AdamWSettings
from megalite.kernels.dispatch import with_adapters
from megalite.kernels.errors import BackendError
from megalite.kernels.operations import Kernels
from megalite.kernels.others import probe
from megalite.kernels.others.apex import ApexAdamW, ApexNorm, apex_adamw, apex_norm
from megalite.kernels.others.attention import attention_adapter, packed_attention, packed_mask
from megalite.kernels.plain.attention import attention
from megalite.kernels.plain.dropout import AttentionDropout
from megalite.kernels.plain.norms import rms_norm, rms_norm_grad
from megalite.layout.topology import Topology
from tests.kernels.others import kit as stand_ins
from tests.optim.kit.synthetic import make, train
from tests.tolerances import FLOAT32

CPU = torch.device("cpu")
Install = Callable[..., None]
Adapter = tuple[Callable[..., Any], Callable[..., Tensor]]


@pytest.fixture(name="install")
def fake_installations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts modules, given as {path: source}, where `import` finds them, for one test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)

    def install(files: dict[str, str]) -> None:
        for name, source in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")

    yield install
    for name in set(sys.modules) - known:
        if name.partition(".")[0] in ("apex", "amp_C", "fused_layer_norm_cuda", "flash_attn"):
            del sys.modules[name]


NVIDIA = {
    "apex/__init__.py": "",
    "apex/optimizers/__init__.py": "from tests.kernels.others.kit import FusedAdam",
    "apex/normalization/__init__.py": "from tests.kernels.others.kit import FusedRMSNorm",
}
EXTENSIONS = {
    "amp_C.py": "",
    "fused_layer_norm_cuda.py": (
        "from tests.kernels.others.kit import rms_backward_affine, rms_forward_affine"
    ),
}
PYPI = {
    "apex/__init__.py": "raise SystemExit('a stranger was imported')",
    "apex/lib/libapex.py": "",
    "apex-0.9.10.dist-info/METADATA": (
        "Metadata-Version: 1.1\nName: apex\nVersion: 0.9.10\nSummary: Pyramid toolkit\n"
    ),
}


# --- apex ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "apex is not installed; install NVIDIA's from source"),
        (PYPI, r"installed apex \(0\.9\.10: Pyramid toolkit\) is not NVIDIA's.*uninstall it"),
        (NVIDIA, r"without its CUDA extensions \(no module amp_C\)"),
        (
            {**NVIDIA, **EXTENSIONS, "apex/optimizers/__init__.py": "import nothing_of_the_kind"},
            "apex.optimizers of the installed apex cannot be imported.*nothing_of_the_kind",
        ),
        (
            {**NVIDIA, **EXTENSIONS, "apex/optimizers/__init__.py": "raise OSError('libcudart')"},
            "apex.optimizers of the installed apex cannot be imported.*libcudart",
        ),
        (
            {**NVIDIA, **EXTENSIONS, "apex/optimizers/__init__.py": ""},
            "apex.optimizers has no FusedAdam",
        ),
    ],
    ids=["none", "pypi", "no extensions", "broken", "no library", "no optimizer"],
)
def test_apex_that_cannot_be_used_is_refused(
    install: Install, files: dict[str, str], message: str
) -> None:
    install(files)
    with pytest.raises(BackendError, match=f"optimizer.adam=apex: .*{message}") as refused:
        apex_adamw(torch.device("cuda"))
    assert "pip install apex" in str(refused.value)


def test_apex_that_is_there_is_found_and_needs_a_cuda_device(install: Install) -> None:
    install(NVIDIA | EXTENSIONS)
    with pytest.raises(BackendError, match="needs a CUDA device, this one is cpu"):
        apex_adamw(CPU)
    with pytest.raises(BackendError, match="needs a CUDA device, this one is cpu"):
        apex_norm(Kernels(), CPU)
    cuda = torch.device("cuda")
    assert isinstance(apex_adamw(cuda)([], AdamWSettings(0.9, 0.95, 1e-8)), ApexAdamW)
    assert isinstance(apex_norm(Kernels(), cuda), ApexNorm)


@pytest.mark.parametrize("fused_adam", [stand_ins.FusedAdam, stand_ins.MovingFusedAdam])
def test_apex_update_goes_on_from_our_state_and_leaves_it_behind(fused_adam: type[Any]) -> None:
    """Steps 3 and 4 on state of two steps of ours: moments and number of updates travel along."""
    mesh = Mesh(Topology())
    settings: dict[str, Any] = {"groups": [{"match": "layers.1.*", "lr_scale": 0.5}], "zero": 0}
    ours = make(mesh, torch.float32, **settings)
    apex = Kernels(adamw_plan=partial(ApexAdamW, fused_adam=fused_adam))
    theirs = make(mesh, torch.float32, ops=apex, **settings)
    train(*ours, mesh, 2)
    for to, of in zip(theirs[1].named_state(), ours[1].named_state(), strict=True):
        to.tensor.copy_(of.tensor)
    theirs[1].load_scalars(ours[1].scalars())
    theirs[1].after_load()
    train(*ours, mesh, 2, first_step=2)
    train(*theirs, mesh, 2, first_step=2)
    for got, want in zip(theirs[1].named_state(), ours[1].named_state(), strict=True):
        assert (got.tensor - want.tensor).abs().max() <= FLOAT32 * want.tensor.abs().max()


def test_apex_refuses_what_it_cannot_update() -> None:
    weight, m = torch.ones(8), torch.zeros(8)
    settings = AdamWSettings(0.9, 0.95, 1e-8)
    narrow = AdamWRun(weight, weight.clone(), m.bfloat16(), m.bfloat16())
    with pytest.raises(BackendError, match=r"torch\.bfloat16; set optimizer\.moment_dtype=float32"):
        ApexAdamW([narrow], settings, stand_ins.FusedAdam)
    run = AdamWRun(weight, weight.clone(), m, m.clone())
    forgetful = ApexAdamW([run], settings, stand_ins.ForgetfulFusedAdam)
    with pytest.raises(BackendError, match="counts 4 updates after update 5"):
        forgetful.update(0.1, 5, 1.0)
    ApexAdamW([], settings, stand_ins.FusedAdam).update(0.1, 1, 1.0)


def test_apex_rms_norm_has_the_shapes_of_ours() -> None:
    x, residual, dy, ds = (draw(5, 12, seed=seed).bfloat16() for seed in range(4))
    weight = draw(12, seed=4).bfloat16()
    norm = ApexNorm(Kernels(), stand_ins)
    y, s, _, rstd = norm.norm(x.t().contiguous().t(), weight, None, 1e-5, residual)
    want, want_rstd = rms_norm(x + residual, weight, 1e-5)
    assert torch.equal(s, x + residual)
    assert torch.equal(y, want)
    assert torch.equal(rstd, want_rstd)
    dx, dweight, _ = norm.norm_grad(dy, s, weight, None, rstd, ds)
    want_dx, want_dweight = rms_norm_grad(dy, s, weight, rstd)
    assert torch.equal(dx, want_dx + ds)
    assert dweight.dtype == torch.float32
    assert torch.equal(dweight, want_dweight.bfloat16().float().unsqueeze(0))


@pytest.mark.parametrize(("centred", "offset"), [(True, 0.0), (False, 1.0)])
def test_what_apex_has_not_stays_with_the_own_kernels(centred: bool, offset: float) -> None:
    x, weight, bias = draw(5, 12), draw(12, seed=4), draw(12, seed=5) if centred else None
    apex, own = ApexNorm(Kernels(), None), Kernels()
    y, s, mean, rstd = apex.norm(x, weight, bias, 1e-5, offset=offset)
    assert torch.equal(y, own.norm(x, weight, bias, 1e-5, offset=offset)[0])
    found, want = (ops.norm_grad(x, s, weight, mean, rstd, offset=offset) for ops in (apex, own))
    for a, b in zip(found, want, strict=True):
        assert (a is None) == (b is None) == (not centred and a is None)
        assert a is None or b is None or torch.equal(a, b)


# --- attention -----------------------------------------------------------------------------------


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads(kv_heads: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = [(12, 4, 16), (12, kv_heads, 16), (12, kv_heads, 16)]
    return [draw(*s, seed=i).to(dtype).requires_grad_() for i, s in enumerate(shapes)]


def attend(adapter: Adapter, inputs: list[Tensor], cu: list[int], window: int | None) -> Tensor:
    """What a pair of mask and attention gives for documents."""
    make_mask, attention_of = adapter
    return attention_of(*inputs, make_mask(cu, window, CPU))


def same(
    adapter: Adapter, inputs: list[Tensor], cu: list[int], window: int | None, bar: float
) -> None:
    """The adapter's output and gradients are the reference's."""
    q, k, v = inputs
    out, want = attend(adapter, inputs, cu, window), attention(q, k, v, cu, window)
    upstream = draw(*want.shape, seed=9).to(want.dtype)
    found = [out, *torch.autograd.grad(out, inputs, upstream)]
    wanted = [want, *torch.autograd.grad(want, inputs, upstream)]
    for got, expected in zip(found, wanted, strict=True):
        assert (got - expected).abs().max() <= bar * expected.abs().max()


@pytest.mark.parametrize("cu", [[0, 12], [0, 4, 8, 12], [0, 5, 6, 12]], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_sdpa_flash_goes_document_by_document(cu: list[int], kv_heads: int) -> None:
    same(attention_adapter("sdpa_flash", CPU), heads(kv_heads), cu, None, FLOAT32)


def test_sdpa_flash_refuses_what_it_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = attention_adapter("sdpa_flash", CPU)
    inputs = heads(4)
    same(adapter, inputs, [0, 6, 12], 6, FLOAT32)  # no document is longer than the window
    with pytest.raises(BackendError, match="no sliding window; got one of 5 tokens in a document"):
        attend(adapter, inputs, [0, 6, 12], 5)
    make_mask, attention_of = adapter
    mask, drop = make_mask([0, 12], None, CPU), AttentionDropout(0.5, (1, 2), 0, 0)
    with pytest.raises(BackendError, match="drops no attention weights"):
        attention_of(*inputs, mask, drop)

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("No available kernel. Aborting execution.")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)
    with pytest.raises(
        BackendError, match=r"does not take torch\.float32, 4 query heads and 4 key"
    ):
        attend(adapter, inputs, [0, 12], None)


@pytest.mark.parametrize(
    ("cu", "window"), [([0, 12], None), ([0, 5, 6, 12], None), ([0, 7, 12], 3)]
)
def test_packed_attention_has_documents_and_windows(
    monkeypatch: pytest.MonkeyPatch, cu: list[int], window: int | None
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_ins.varlen_attn)
    adapter = packed_mask, partial(packed_attention, "fa3")
    same(adapter, heads(2, torch.bfloat16), cu, window, 0.0)
    with pytest.raises(BackendError, match=r"takes bfloat16 and float16, not torch\.float32"):
        attend(adapter, heads(2), cu, window)


def test_names_and_devices_of_attention_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        BackendError, match="'fa2'; allowed: auto, sdpa_flash, sdpa_cudnn, fa3, fa4"
    ):
        attention_adapter("fa2", CPU)
    for name in ("sdpa_cudnn", "fa3", "fa4"):
        with pytest.raises(BackendError, match=f"{name} needs a CUDA device, this one is cpu"):
            attention_adapter(name, CPU)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    with pytest.raises(BackendError, match="has no cuDNN here; install a CUDA build"):
        attention_adapter("sdpa_cudnn", torch.device("cuda"))


def test_attention_of_another_package_takes_head_dims_of_its_own() -> None:
    from megalite.kernels.triton.operations import TRITON

    with pytest.raises(BackendError, match=r"head dim of 40; it takes 16.*attention=sdpa_flash or"):
        TRITON.check_model(40, 64)
    ops = with_adapters(TRITON, CPU, "sdpa_flash", "auto", "auto")
    ops.check_model(40, 64)
    with pytest.raises(BackendError, match=r"up to 16384 columns, model\.hidden_size is 20000"):
        ops.check_model(40, 20000)


MODULES = {"fa3": "flash_attn_interface.py", "fa4": "flash_attn/cute/interface.py"}


@pytest.mark.parametrize("name", MODULES)
def test_flash_attention_is_looked_for_and_taken_in(
    install: Install, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch.nn.attention, "list_flash_attention_impls", lambda: ["FA3", "FA4"])
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_ins.varlen_attn)
    cuda = torch.device("cuda")
    with pytest.raises(BackendError, match=r"no module flash_attn.*; install FlashAttention"):
        attention_adapter(name, cuda)
    install({"flash_attn/__init__.py": "raise SystemExit('imported')", MODULES[name]: ""})
    probe.require_flash(name)
    capability = [8, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    with pytest.raises(BackendError, match=r"capability 9\.x.*this one has 8\.x"):
        attention_adapter(name, cuda)
    capability[0] = 9
    active: list[str] = []
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", active.append)
    assert attention_adapter(name, cuda)[0] is packed_mask
    assert active == [name.upper()]

    def fail(impl: str) -> None:
        raise RuntimeError(f"{impl} exposes no kernels")

    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", fail)
    with pytest.raises(BackendError, match=f"{name.upper()} exposes no kernels.; install"):
        attention_adapter(name, cuda)


def test_a_torch_without_the_registry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.attention, "list_flash_attention_impls", raising=False)
    with pytest.raises(BackendError, match=r"cannot take FA3 into its attention; use torch 2\.13"):
        probe.require_flash("fa3")
