"""The closed form of a GPT's memory, against figures 1 and 7 of Korthikanti et al., arXiv 2205.05198.

Figure 1 is held to every digit. Figure 7 is a chart: its published values are whole pixels of a chart in which 100 % is 562.5
pixels high, so each is known to within a pixel, 0.18 percentage points.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from meshwright.prediction.analytic import (
    Layer,
    first_stage_activations,
    layer_activations,
    layer_activations_full,
    layer_activations_over_sequence,
    layer_activations_over_tensor,
    layer_activations_selective,
    model_state,
)

GIB = 2**30
PIXELS = 562.5  # of 100 % in figure 7


@dataclass(frozen=True)
class Published:
    """One model of both figures.

    Attributes:
        state, activations, reduced: of figure 1, in GiB: model states; activations with tensor parallelism alone; with sequence
            parallelism and selective recomputation.
        sequence, selective, both, full: of figure 7, activations in percent of those with tensor parallelism alone.
    """

    name: str
    layer: Layer
    layers: int
    stages: int
    stages_per_rank: int
    state: float
    activations: float
    reduced: float
    sequence: float
    selective: float
    both: float
    full: float


TENSOR_RANKS = 8
MODELS = (
    Published("22B", Layer(6144, 64, 2048, 4), 48, 1, 1, 45.5625, 59.25, 9.5625, 66.84, 49.42, 16.18, 7.64),
    Published("175B", Layer(12288, 96, 2048, 1), 96, 8, 3, 45.5625, 66.84375, 12.3515625, 62.04, 56.53, 18.49, 8.71),
    Published(
        "530B", Layer(20480, 128, 2048, 1), 105, 35, 3, 31.640625, 114.0234375, 23.076171875, 58.31, 62.04, 20.27, 9.42
    ),
    Published("1T", Layer(25600, 160, 2048, 1), 128, 64, 1, 32.958984375, 131.25, 26.5625, 58.31, 62.04, 20.27, 9.42),
)
each_model = pytest.mark.parametrize("model", MODELS, ids=lambda m: m.name)


@each_model
def test_model_states_of_figure_1(model: Published) -> None:
    state = model_state(model.layers, model.layer.hidden, tensor_ranks=TENSOR_RANKS, stages=model.stages)
    assert state / GIB == model.state


@each_model
def test_activations_of_figure_1(model: Published) -> None:
    baseline = layer_activations_over_tensor(model.layer, TENSOR_RANKS)
    reduced = layer_activations_selective(model.layer, TENSOR_RANKS, sequence_parallel=True)
    for layer_bytes, published in ((baseline, model.activations), (reduced, model.reduced)):
        total = first_stage_activations(
            layer_bytes, model.layers, stages=model.stages, stages_per_rank=model.stages_per_rank
        )
        assert total / GIB == published


@each_model
def test_shares_of_figure_7_to_within_a_pixel(model: Published) -> None:
    layer, baseline = model.layer, layer_activations_over_tensor(model.layer, TENSOR_RANKS)
    shares = (
        (layer_activations_over_sequence(layer, TENSOR_RANKS), model.sequence),
        (layer_activations_selective(layer, TENSOR_RANKS, sequence_parallel=False), model.selective),
        (layer_activations_selective(layer, TENSOR_RANKS, sequence_parallel=True), model.both),
        (layer_activations_full(layer), model.full),
    )
    for layer_bytes, published in shares:
        pixels = round(published / 100 * PIXELS)
        assert published == round(100 * pixels / PIXELS, 2)  # it was read off the chart
        assert abs(float(layer_bytes / baseline) * PIXELS - pixels) < 1


def test_one_device_keeps_what_equations_2_and_4_give_for_one_rank() -> None:
    layer = Layer(hidden=1024, heads=16, sequence=512, rows=3)
    alone = layer_activations(layer)
    assert alone == 512 * 3 * 1024 * (34 + 5 * 16 * 512 / 1024)
    assert alone == layer_activations_over_tensor(layer, 1) == layer_activations_over_sequence(layer, 1)


def test_a_pipeline_does_not_change_what_its_first_rank_keeps_unless_it_is_interleaved() -> None:
    layer = layer_activations(Layer(1024, 16, 512, 1))
    assert first_stage_activations(layer, 24, stages=8) == first_stage_activations(layer, 24)
    assert first_stage_activations(layer, 24, stages=2, stages_per_rank=2) == first_stage_activations(layer, 24) * 1.25
