"""What a recorded forward keeps: shapes, and no rows of the batch that it was recorded with."""

import gc

import torch
from torch import nn

from meshwright.calls.stub import stub, without_values
from meshwright.graph import ROOT
from meshwright.planning.capture import capture

ROWS = 13  # no other tensor here has so many


class Masked(nn.Module):
    """Each block is given a mask that is made of the batch, and hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, batch):
        ids = batch["ids"]
        h, mask = self.table(ids), (ids > 3)[..., None].float()
        for block in self.blocks:
            h, mask = block(h, mask)
        return h.square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, h, mask):
        return h + self.linear(h * mask), mask


def recorded():
    with torch.device("meta"):
        model = Masked()
    return capture(model, lambda model: model({"ids": torch.arange(ROWS * 4).remainder(16).view(ROWS, 4)}))


def rows_that_live():
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and not x.is_meta and x.dim() and len(x) == ROWS]
    return sorted(x.dtype.is_floating_point for x in tensors)


def test_no_row_of_a_batch_outlives_its_recording():
    graph = recorded()
    assert rows_that_live() == [False, True]  # the batch, and the mask
    without_values(graph)
    assert rows_that_live() == [True]  # a block hands on the mask: what stands for that is found by it


def test_what_stands_for_a_call_is_what_it_was():
    graph = recorded()
    without_values(graph)
    (path,) = (path for path in graph.calls if path[-1][0] == "blocks.1")
    h, mask = torch.zeros(ROWS, 4, 8), torch.ones(ROWS, 4, 1)
    numbers = []

    def standing(number, like):
        numbers.append(number)
        assert (tuple(like.shape), like.requires_grad, like.grad_fn) == ((ROWS, 4, 8), True, None)
        return h

    result, handed_on = stub(graph.calls[path], (h, mask), {}, standing, lambda t, number: None)
    assert result is h and handed_on is mask
    assert numbers == [graph.calls[path].outputs[0]]
    assert graph.calls[ROOT].arguments == ((None,), {})
