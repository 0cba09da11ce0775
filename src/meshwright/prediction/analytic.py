"""The memory of a GPT in closed form: one function for each equation of Korthikanti et al. A check of the predictor.

Source: "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198. The paper's names: s sequence
length, b rows of a microbatch, h hidden size, a attention heads, L layers, t tensor-parallel ranks, p pipeline ranks, m
stages on each rank (interleaving).

    equation                                          function
    (1)  sbh (34 + 5as/h)                             layer_activations
    (2)  sbh (10 + 24/t + 5as/(ht))                   layer_activations_over_tensor
    (4)  sbh/t (34 + 5as/h)                           layer_activations_over_sequence
    Table 2, selective recomputation                  layer_activations_selective
    Table 2, full recomputation: 2sbh                 layer_activations_full
    (5)  L times the layer, (6), and section 4.2.3    first_stage_activations
    Figure 1, parameters and optimizer state          model_state

The paper assumes: activations of 2 bytes and dropout masks of 1 byte; attention without a fused kernel; an MLP of width 4h
with GELU; dropout after the softmax of attention, after attention and after the MLP. It leaves out embeddings, the last
norm and the output layer. Results are exact fractions of bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Layer:
    """The sizes of one transformer layer and of its input.

    Attributes:
        hidden: h, the width.
        heads: a, attention heads.
        sequence: s, tokens of a row.
        rows: b, rows of a microbatch.
    """

    hidden: int
    heads: int
    sequence: int
    rows: int

    @property
    def sbh(self) -> int:
        """Elements of the layer's input."""
        return self.sequence * self.rows * self.hidden

    @property
    def core(self) -> int:
        """Bytes that the core of attention stores, 5as²b: softmax (2), mask of its dropout (1), output of its dropout (2)."""
        return 5 * self.heads * self.sequence**2 * self.rows


def layer_activations(layer: Layer) -> Fraction:
    """Bytes that one layer stores for its backward on one device: sbh (34 + 5as/h). Equation (1)."""
    return Fraction(34 * layer.sbh + layer.core)


def layer_activations_over_tensor(layer: Layer, ranks: int) -> Fraction:
    """Bytes that one layer stores on each of t tensor-parallel ranks: sbh (10 + 24/t + 5as/(ht)). Equation (2).

    The 10 bytes are replicated: the inputs of both norms (4), of attention and of the MLP (4), and two dropout masks (2).
    """
    return 10 * layer.sbh + Fraction(24 * layer.sbh + layer.core, ranks)


def layer_activations_over_sequence(layer: Layer, ranks: int) -> Fraction:
    """Bytes that one layer stores on each rank with tensor and sequence parallelism: sbh/t (34 + 5as/h). Equation (4)."""
    return layer_activations(layer) / ranks


def layer_activations_selective(layer: Layer, ranks: int, *, sequence_parallel: bool) -> Fraction:
    """Bytes that one layer stores on each rank if its backward recomputes the core of attention. Table 2.

    With sequence parallelism sbh · 34/t, else sbh (10 + 24/t): equations (4) and (2) without 5as/h.
    """
    activations = layer_activations_over_sequence if sequence_parallel else layer_activations_over_tensor
    return activations(layer, ranks) - Fraction(layer.core, ranks)


def layer_activations_full(layer: Layer) -> Fraction:
    """Bytes that one layer stores on each rank if its backward recomputes all of the layer: its input, 2sbh. Table 2."""
    return Fraction(2 * layer.sbh)


def first_stage_activations(
    layer_bytes: Fraction, layers: int, *, stages: int = 1, stages_per_rank: int = 1
) -> Fraction:
    """Bytes of activations on the first rank of a 1F1B pipeline. Equations (5) and (6), section 4.2.3.

    The first of p ranks has L/p layers, and p microbatches in flight: L · layer_bytes, for any p. With m stages on each rank
    (interleaved 1F1B), 1 + (p − 1)/(pm) times as much. A step must have at least p microbatches.

    Args:
        layer_bytes: bytes that one layer stores for one microbatch.
        layers: L, the layers of the full model.
        stages: p, the ranks of the pipeline.
        stages_per_rank: m; 1: not interleaved.
    """
    interleaving = 1 + Fraction(stages - 1, stages * stages_per_rank) if stages_per_rank > 1 else Fraction(1)
    return layers * layer_bytes * interleaving


def model_state(layers: int, hidden: int, *, tensor_ranks: int, stages: int, bytes_each: int = 18) -> Fraction:
    """Bytes of parameters, gradients and optimizer states on each rank, as in figure 1. A rank has 12Lh²/(tp) parameters.

    The matrices of one layer have 12h² elements: 4h² in attention and 8h² in the MLP. Biases, norms and embeddings are not
        counted.

    Args:
        bytes_each: bytes for each parameter. 18 are a half-precision parameter (2), a float32 gradient (4), and a float32
            parameter with the two moments of Adam (12): the README of Megatron-LM, "Distributed Optimizer", without it.
    """
    return Fraction(12 * layers * hidden**2 * bytes_each, tensor_ranks * stages)
