"""Norm, rotation, gate and argmax: every backend against the formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from chatserve_kernels.cpu.backend import NativeBackend
from chatserve_kernels.cpu.build import supported_isas
from chatserve_kernels.interface import Backend
from chatserve_kernels.reference import ReferenceBackend
from chatserve_kernels.torch_backend import TorchBackend

from tests.kernels.native import library

BACKENDS = [ReferenceBackend(), TorchBackend()]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def backend_name(backend: Backend) -> str:
    return backend.name


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", BACKENDS, ids=backend_name)
def test_rms_norm(backend: Backend, dtype: torch.dtype) -> None:
    """x / rms(x) * weight, whatever the leading dimensions."""
    x, weight = torch.randn(3, 5, 16).to(dtype), torch.randn(16).to(dtype)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()
    out = backend.rms_norm(x, weight, 1e-3)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", BACKENDS, ids=backend_name)
def test_rotation_turns_each_pair_by_its_angle(backend: Backend, dtype: torch.dtype) -> None:
    """Components (i, i + D/2) turn as one complex number; a strided view is rotated in place, its base not beyond."""
    base = torch.randn(4, 5, 8).to(dtype)
    original = base.clone()
    angle = torch.rand(4, 1, 4) * 2 * math.pi
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(dtype)
    backend.rotate(base[:, :3], cos, sin)
    wide = original[:, :3].double()
    turned = torch.complex(wide[..., :4], wide[..., 4:]) * torch.exp(1j * angle.double())
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(base[:, :3].double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(base[:, 3:], original[:, 3:])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", BACKENDS, ids=backend_name)
def test_silu_mul(backend: Backend, dtype: torch.dtype) -> None:
    """gate * sigmoid(gate) * up, and the input is left as it was."""
    gate_up = (torch.randn(7, 12) * 4).to(dtype)
    original = gate_up.clone()
    gate, up = gate_up.double().chunk(2, -1)
    out = backend.silu_mul(gate_up)
    torch.testing.assert_close(out.double(), gate * gate.sigmoid() * up, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(gate_up, original)


@pytest.mark.parametrize("backend", [*BACKENDS, *supported_isas()], ids=str)
def test_argmax(backend: Backend | str) -> None:
    """The first of equals wins; a NaN does before any number, minus infinity only among its like."""
    if isinstance(backend, str):
        backend = NativeBackend(library(backend))
    for columns in (1, 15, 256, 257, 1000):
        x = torch.randn(33, columns).round(decimals=1)
        x[0] = -torch.inf
        x[1, columns // 2 :] = torch.inf
        x[2, columns // 3 :: 7] = torch.nan
        x[3] = torch.tensor(-0.0)
        x[4, -1] = 1e38
        assert torch.equal(backend.argmax(x), torch.from_numpy(x.numpy().argmax(-1)).int())
    assert len(backend.argmax(torch.empty(0, 5))) == 0
