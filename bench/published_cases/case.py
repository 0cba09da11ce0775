"""``Case``: one row of a published table, in one set of words and in SI units, whatever the table's columns are.

What a row leaves open is filled in by the reader of its table and named in ``Case.assumed``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 2**30


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a transformer.

    Attributes:
        kind: ``gpt`` and ``mpt`` (learned positions, LayerNorm, GELU, biases), ``llama`` (rotary positions, RMSNorm, SwiGLU, no
            biases), ``vit`` (as ``gpt``, over patches of images, not causal).
        vocab: tokens of the vocabulary; classes of a ``vit``.
        sequence: tokens of a row; patches of an image.
        kv_heads: heads of key and value; fewer than ``heads`` where several queries share them.
        intermediate: the width of the MLP.
        tied: whether the head shares the embedding's weight.
        gated: whether the MLP has three matrices (SwiGLU).
        attention: ``plain`` keeps the scores of all pairs of tokens for the backward, ``flash`` does not.
        dropout: its probability; 0: none. With ``flash`` attention, that of attention's weights is left out.
    """

    kind: Literal["gpt", "llama", "mpt", "vit"]
    layers: int
    hidden: int
    heads: int
    vocab: int
    sequence: int
    kv_heads: int
    intermediate: int
    tied: bool = False
    gated: bool = False
    attention: Literal["flash", "plain"] = "flash"
    dropout: float = 0.0


@dataclass(frozen=True)
class Layout:
    """How a step is spread over devices.

    Attributes:
        tp, pp, dp_shard, dp_replicate: the sizes of the axes. ``dp_shard`` are the ranks that divide what ``zero`` says.
        microbatches: forwards and backwards of a rank in a step (gradient accumulation, or of a pipeline).
        microbatch_rows: rows of one of them, on one data rank.
        schedule: of a pipeline; ``none`` without one.
        stages_per_rank: more than 1 where the schedule is interleaved.
        recompute: what the backward computes again: nothing; some operations of each block; whole blocks.
        recomputed_blocks: how many blocks, where ``recompute`` is ``full``; they are spread evenly.
        reshard_after_forward: whether gathered parameters are freed between forward and backward.
        zero: what ``dp_shard`` divides: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.
    """

    microbatches: int
    microbatch_rows: int
    tp: int = 1
    pp: int = 1
    dp_shard: int = 1
    dp_replicate: int = 1
    schedule: Literal["none", "1f1b", "interleaved"] = "none"
    stages_per_rank: int = 1
    recompute: Literal["none", "selective", "full"] = "none"
    recomputed_blocks: int = 0
    sequence_parallel: bool = False
    reshard_after_forward: bool = True
    zero: Literal[0, 1, 2, 3] = 0

    @property
    def data_ranks(self) -> int:
        return self.dp_shard * self.dp_replicate

    @property
    def devices(self) -> int:
        return self.tp * self.pp * self.data_ranks

    @property
    def global_batch(self) -> int:
        """Rows of a step, over all data ranks."""
        return self.data_ranks * self.microbatches * self.microbatch_rows


@dataclass(frozen=True)
class Precision:
    """The types of what a run holds and computes.

    Attributes:
        parameters: as the model holds them at rest.
        compute: of the forward and backward.
        reduce: of the sum of gradients over data ranks.
        master: whether the optimizer holds a float32 copy of the parameters.
        optimizer: of each of Adam's two moments.
    """

    parameters: str
    compute: str
    reduce: str
    master: bool = False
    optimizer: str = "float32"


@dataclass(frozen=True)
class Machine:
    """What a row was measured on.

    Attributes:
        profile: the name of a hardware profile.
        capacity: bytes of memory of a device.
        node: devices of a node.
        network: the kind of the links between nodes; ``none`` for a run within one node.
        network_gbps: what a node sends to other nodes, in 10⁹ bits a second.
        slower: (kind of call, how many times as long it takes in the row's software as in that of the profile).
    """

    profile: str
    capacity: int
    node: int = 8
    network: str = "none"
    network_gbps: float = 0.0
    slower: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Measured:
    """What a row says.

    Attributes:
        seconds: of a step; None: not measured.
        how: from which columns.
        low, high: its range, where the row gives one.
        active: bytes of live tensors at the peak, of the device that was watched; None: not measured.
        reserved: bytes that the allocator, or the process, held. A counter that is not stated counts as this.
        counter: of ``reserved``, in the row's words.
        out_of_memory: the run ended so.
    """

    seconds: float | None = None
    how: str = ""
    low: float | None = None
    high: float | None = None
    active: int | None = None
    reserved: int | None = None
    counter: str = ""
    out_of_memory: bool = False


@dataclass(frozen=True)
class Case:
    """One row that can be predicted.

    Attributes:
        table: the file's name without ``.csv``.
        row: tells it from the table's other rows, for a person.
        runtime: the program that was measured: FSDP1, FSDP2, Megatron-LM, ...
        compiled: whether with ``torch.compile``.
        assumed: what the row and its source leave open, and what was taken instead.
    """

    table: str
    row: str
    model: ModelShape
    layout: Layout
    precision: Precision
    machine: Machine
    runtime: str
    measured: Measured
    compiled: bool = False
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """A row that no case was made of."""

    table: str
    row: str
    reason: str


@dataclass(frozen=True)
class Predicted:
    """What a predictor says of a case.

    Attributes:
        seconds: of a step.
        low, high: its interval; None: the predictor gives none.
        active: bytes of live tensors at the peak of the fullest rank; None: the predictor does not say.
        reserved: what the allocator holds then; None: the predictor does not say.
    """

    seconds: float
    low: float | None = None
    high: float | None = None
    active: int | None = None
    reserved: int | None = None
