"""Checkpoints: saved under one layout, loaded under any other; only complete ones exist.

    folder.py    a folder of checkpoints: manifest, checksums, publishing by one rename, which is newest; no torch
    lock.py      one run at a time in a folder; no torch
    talk.py      how ranks agree: an exception of any is an error of all
    pieces.py    a tensor's slices on this rank as chunks; DCP's planners over them
    storage.py   DCP's files, with a checksum a chunk; its metadata read without trusting it
    contents.py  what a job, or a plain module, and its optimizers have to save
    save.py      collective: every owner writes its own pieces ─► publish
    load.py      collective: verify ─► every rank reads its own slices
    jobs.py      both, for a job and for a plain module

    pretrained.py   a Hugging Face folder into a job; conversion.py which tensor is which; unread.py read in slices
    export.py       a checkpoint as such a folder; tensorfiles.py its files, written tensor by tensor
    inspection.py   what is in a checkpoint

``torch.distributed.checkpoint`` (DCP) does the planning, writing and reading. A checkpoint is one of its own: plain
``dcp.load`` reads it under the names that ``get_state_dict`` gives.
"""

from meshwright.errors import CheckpointError

__all__ = ["CheckpointError"]
