"""Checkpoints: saved under one layout, loaded under any other. A checkpoint is complete or does not exist.

    folder.py          a folder of checkpoints: manifest, checksums, publishing by one rename, the newest; no torch
    lock.py            lets one run at a time save in a folder; no torch
    rank_agreement.py  an exception of one rank is an error on all ranks
    pieces.py          a rank's slices of a tensor as DCP chunks; DCP planners for them
    storage.py         DCP's files, with a checksum for each chunk; reads DCP's metadata safely
    contents.py        the parts of a job, or of a plain module, and of its optimizers to save
    staging.py         copies of tensors for an asynchronous save
    save.py            collective: every rank writes its own pieces ─► publish
    load.py            collective: verify ─► every rank reads its own slices
    jobs.py            saving and loading, for a job and for a plain module

    pretrained.py   loads a Hugging Face folder into a job; conversion.py maps names; lazy_tensor.py reads slices
    export.py       writes a checkpoint as a Hugging Face folder; tensorfiles.py writes safetensors, tensor by tensor
    inspection.py   lists the contents of a checkpoint

``torch.distributed.checkpoint`` (DCP) does the planning, writing and reading. A checkpoint is a plain DCP checkpoint:
``dcp.load`` reads it under the names that ``get_state_dict`` gives.
"""

from meshwright.errors import CheckpointError

__all__ = ["CheckpointError"]
