"""Functions that torch itself does not run on meta: planning has their shapes, and stages run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.planning.meta_functions import MetaFunctions
from meshwright.planning.shadow import Shadow
from meshwright.workers.pool import LocalWorkers

N, HOP, FRAMES = 16, 4, 9
CALLS: dict[str, dict[str, Any]] = {
    "centred": {},
    "of a length": {"length": 30},
    "not centred": {"center": False, "window": torch.ones(N)},
    "a short window": {"win_length": 12, "window": torch.hamming_window(12)},
    "both sides": {"onesided": False, "return_complex": True},
}


@pytest.mark.parametrize("rows", [(), (3,)], ids=["a signal", "rows"])
@pytest.mark.parametrize("call", CALLS)
def test_the_inverse_of_a_spectrum_has_its_shape_and_dtype(call: str, rows: tuple[int, ...]) -> None:
    arguments = {"n_fft": N, "hop_length": HOP, "window": torch.hamming_window(N), **CALLS[call]}
    bins = N if call == "both sides" else N // 2 + 1
    spectrum = torch.randn(*rows, bins, FRAMES, dtype=torch.complex64)
    expected = torch.istft(spectrum, **arguments)
    with Shadow(), MetaFunctions():
        on_meta = spectrum.to("meta").requires_grad_()
        of_function, of_method = torch.istft(on_meta, **arguments), on_meta.istft(**arguments)
    for found in (of_function, of_method):
        assert (found.shape, found.dtype, found.is_meta) == (expected.shape, expected.dtype, True)
        assert found.grad_fn is not None


class Masks(nn.Module):
    """Multiplies a spectrum by a mask, as models do that separate sources."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(N // 2 + 1, 12), nn.Linear(12, N // 2 + 1)
        self.register_buffer("window", torch.hann_window(N))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.stft(x, N, HOP, window=self.window, return_complex=True)
        mask = self.down(self.up(spectrum.abs().transpose(1, 2)).tanh()).sigmoid().transpose(1, 2)
        return (torch.istft(spectrum * mask, N, HOP, window=self.window, length=x.shape[-1]) - x).square().mean()


@pytest.mark.parametrize("plan", ["pp=2", "pp=3", "pp=2,tp=2"])
def test_a_pipeline_inverts_a_spectrum(plan: str, workers: LocalWorkers) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    report = mw.check(Masks, (x,), plan, workers=workers, dtype=torch.float64)
    assert report, report
