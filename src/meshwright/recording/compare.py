"""``compare_recordings``: compares loss, gradients and updates of many ranks with those of one process, and names causes.

names ─ weights ─ for each step, up to the first that differs:   rows ─ settings ─ loss ─ gradients ─ updates
                                                                            │
                                                 patterns, grouped by what they usually mean (``causes``)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from meshwright.recording.causes import CAUSES
from meshwright.recording.diagnosis import Facts, grouped
from meshwright.recording.folder import RecordingFolder
from meshwright.recording.inputs import split_rows, wrong_loss, wrong_names, wrong_rows, wrong_settings
from meshwright.recording.pairs import Pair, Renames, StepFacts
from meshwright.recording.values import KindComparison, judge_gradients, judge_updates, judge_weights, note_lines
from meshwright.recording.verdict import ExplainedDifferences, Kind, TensorDifference, Verdict

Folder = str | os.PathLike[str]


def compare_recordings(
    one: Folder, many: Folder, *, renames: Renames = (), tolerance: float | None = None, again: Folder | None = None
) -> Verdict:
    """Compares a run of many processes with a run of one process. Both were recorded by ``mw.record``.

    Args:
        one: folder of the recording of one process.
        many: folder of the recording of many processes.
        renames: (regular expression, replacement) pairs, applied in turn to the names of ``many``.
        tolerance: largest difference, relative to the largest element of a tensor. Default: by the tensors' types.
        again: folder of a second recording of one process, with another order of rows. Its differences to ``one`` are taken
            for rounding.

    Raises:
        CheckpointError: one of the folders has no complete recording.
    """
    recording_of_one, recording_of_many = RecordingFolder.open(Path(one)), RecordingFolder.open(Path(many))
    noise = RecordingFolder.open(Path(again)) if again is not None else None
    pair = Pair.of(recording_of_one, recording_of_many, noise, renames)
    causes = _Causes(pair)
    causes.add("names", list(wrong_names(pair)), len(pair.one.parameters), Facts(pair.spans))
    weights = judge_weights(pair)
    causes.add_judged(weights, Facts(pair.spans))
    other_weights = any(wrong.pattern.kind != "rounding" for wrong in weights.wrong.values())
    judged, step = [weights], 0
    for step in range(1, pair.steps + 1):
        judged += _step(pair, step, tolerance, causes, other_weights)
        if causes.wrong_in_step:
            break
    return Verdict(str(one), str(many), step, causes.counts, tuple(causes.causes), (*note_lines(judged), *_notes(pair)))


def _step(pair: Pair, step: int, tolerance: float | None, causes: _Causes, other_weights: bool) -> list[KindComparison]:
    """Compares one step, and adds the causes of its differences."""
    one, many = (StepFacts.of(recorded.steps[step - 1]) for recorded in (pair.one, pair.many))
    rows = [*wrong_rows(one, many), *split_rows(pair, many)]
    facts = Facts(
        pair.spans,
        forwards=max(many.losses, one.losses) / max(1, min(many.losses, one.losses)),
        counts=many.counts if many.uneven else (),
        other_rows=bool(rows),
        other_weights=other_weights,
    )
    if (one.rows and many.rows) or (sum(one.counts) and sum(many.counts)):
        causes.add("rows", rows, 1, facts)
    causes.add("settings", list(wrong_settings(one, many)), len(next(iter(one.settings.values()), ())), facts)
    if one.loss is not None and many.loss is not None:
        causes.add("loss", list(wrong_loss(one, many, tolerance)), 1, facts)
    gradients = judge_gradients(pair, step, tolerance)
    causes.add_judged(gradients, facts)
    updates = judge_updates(pair, step, gradients, tolerance)
    causes.add_judged(updates, facts)
    return [gradients, updates]


class _Causes:
    """Collects the causes of all differences.

    Attributes:
        counts: kind → (number of compared values, number of right ones).
        wrong_in_step: whether a step has a difference; then later steps are not compared.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.causes: list[ExplainedDifferences] = []
        self.counts: dict[Kind, tuple[int, int]] = {}
        self.wrong_in_step = False

    def add_judged(self, judged: KindComparison, facts: Facts) -> None:
        self.add(judged.kind, list(judged.wrong.values()), judged.total, facts)

    def add(self, kind: Kind, wrong: Sequence[TensorDifference], total: int, facts: Facts) -> None:
        """Adds the differences of one kind. ``total``: number of compared values."""
        compared, right = self.counts.get(kind, (0, 0))
        if total:
            self.counts[kind] = (compared + total, right + max(0, total - len(wrong)))
        follows = self._follows(kind)
        for group in grouped(kind, wrong, total, facts):
            cause = CAUSES[group.key]
            self.causes.append(
                ExplainedDifferences(kind, group.key, group.says, cause.look, tuple(group.wrong), total, follows)
            )
        self.wrong_in_step |= bool(wrong) and kind not in ("names", "weights")

    def _follows(self, kind: Kind) -> bool:
        """Whether an earlier cause may be the reason for differences of this kind."""
        earlier = {cause.kind for cause in self.causes}
        sources: dict[Kind, set[Kind]] = {
            "loss": {"weights", "rows"}, "gradients": {"weights", "rows"}, "updates": {"weights", "settings"},
        }  # fmt: skip
        return bool(earlier & sources.get(kind, set()))


def _notes(pair: Pair) -> list[str]:
    """Notes of both recordings, and on what could not be compared."""
    notes = []
    for recorded in (pair.one, pair.many):
        for number, step in enumerate(recorded.steps, 1):
            notes += [f"{recorded.path.name}, step {number}: {note}" for note in StepFacts.of(step).notes]
    for file, names in pair.many.manifest["uneven"].items():
        notes += [f"{name} ({file}): ranks {ranks} have none; zeros were used" for name, ranks in names.items()]
    for file, names in pair.many.manifest["strange"].items():
        notes += [
            f"{name} ({file}): ranks {ranks} hold other values than the first rank with the same part"
            for name, ranks in names.items()
        ]
    if any(StepFacts.of(step).loss is None for recorded in (pair.one, pair.many) for step in recorded.steps):
        notes.append("no loss was compared: rec.loss(loss, rows=...) before optimizer.step() records it")
    if len(pair.one.steps) != len(pair.many.steps):
        notes.append(
            f"{len(pair.one.steps)} and {len(pair.many.steps)} steps were recorded: the first {pair.steps} are compared"
        )
    return notes
