"""Which tensors of a rehearsal have values, and which have shapes alone."""

import torch
from torch import nn

from meshwright import predict
from meshwright.prediction.values import SMALL
from meshwright.private import FakeTensor

ROWS = 8
PLAN = {"mesh": "dp_shard=2", "rows": "split"}  # no trial runs the model with values


class Notes:
    """A list that a rehearsal does not put back, as it stands in a slot."""

    __slots__ = ("items",)

    def __init__(self):
        self.items = []


class Noted(nn.Module):
    """Notes what its forward makes, in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        h = self.head(x)
        made = self.make(x, h)
        self.notes.items.append(made)
        return h.mean()


def noted(make, batch=None):
    """What ``make`` of a batch and what follows from parameters made in the last step, and the prediction's notes."""
    notes = Notes()

    class Model(Noted):
        pass

    Model.make, Model.notes = staticmethod(make), notes
    prediction = predict(Model, (torch.ones(ROWS, 4) if batch is None else batch,), PLAN, loss=itself)
    return notes.items[-1], prediction.notes


def itself(loss):
    return loss


def test_what_is_made_of_nothing_has_values_if_it_is_small():
    elements = SMALL // 8
    small, _ = noted(lambda x, h: (torch.arange(elements), torch.zeros(2, elements // 2), torch.full((), 3.0)))
    assert not any(isinstance(t, FakeTensor) for t in small)
    large, _ = noted(lambda x, h: (torch.arange(elements + 1), torch.zeros(3, elements), torch.linspace(0, 1, SMALL)))
    assert all(isinstance(t, FakeTensor) for t in large)


def test_what_is_written_with_what_has_no_values_has_none():
    def make(x, h):
        seen, other = torch.zeros(3), torch.zeros(3)
        seen[0] = h.sum()
        other.copy_(seen)
        fresh = torch.zeros(3)
        return [bool(fresh.sum() > 0), bool(seen[0] > 0), bool(other.sum() > 0)]

    known, notes = noted(make)
    assert known == [False, True, True]
    assert len([note for note in notes if "assumed" in note]) == 1, "of one line"


def test_a_mask_of_the_batch_selects_what_it_does():
    batch = torch.arange(ROWS * 4.0).view(ROWS, 4)
    (by_index, by_function), notes = noted(
        lambda x, h: (h[x[:, 0] % 8 == 0], h.masked_select(x[:, :1] % 8 == 0)), batch
    )
    assert by_index.shape == (ROWS // 2 // 2, 4) and by_function.shape == (ROWS // 2 // 2 * 4,)
    assert not [note for note in notes if "assumed" in note]


def test_a_mask_that_follows_from_parameters_selects_all():
    (by_index, by_function), notes = noted(lambda x, h: (h[h > 0], h.masked_select(h > 0)))
    assert by_index.shape == by_function.shape == (ROWS // 2 * 4,)
    assert [note for note in notes if "assumed" in note]
