"""A folder of checkpoints: what is complete, what is damaged, and what a kill at any moment leaves. No tensors."""

from __future__ import annotations

import json
import os
import pickle
import shutil

import pytest
import torch

import meshwright as mw
from meshwright.checkpoint import folder, load
from meshwright.checkpoint.folder import Manifest, begin, complete, described, newest, publish, read_manifest, verify
from meshwright.checkpoint.storage import read_metadata
from meshwright.errors import CheckpointError
from saving import Tied, rows


def saved(root, step, text=b"0123456789", keep=None):
    aside = begin(root, step)
    (aside / "data").write_bytes(text)
    file = described(aside / "data", [("a", 2, 3), ("b", 5, 4)])
    return publish(aside, Manifest(step, {"mesh": {"tp": 1}}, {"data": file}), keep)


def test_a_manifest_says_what_was_written(tmp_path):
    path = saved(tmp_path, 7)
    manifest = read_manifest(path)
    assert path.name == "step-00000007" and manifest.step == 7
    pieces = manifest.files["data"].pieces
    assert [(p.name, p.offset, p.length) for p in pieces] == [("", 0, 2), ("a", 2, 3), ("b", 5, 4), ("", 9, 1)]
    verify(path)


def test_only_what_was_published_is_there(tmp_path):
    assert newest(tmp_path) is None and complete(tmp_path / "nowhere") == []
    saved(tmp_path, 5)
    aside = begin(tmp_path, 10)
    (aside / "data").write_bytes(b"half")
    assert [p.name for p in complete(tmp_path)] == ["step-00000005"]
    saved(tmp_path, 10)
    assert [p.name for p in complete(tmp_path)] == ["step-00000005", "step-00000010"]
    assert (tmp_path / "latest").read_text() == "step-00000010\n"
    assert not list(tmp_path.glob(".saving-*"))


def steps(root):
    return [read_manifest(p).step for p in complete(root)]


def test_the_newest_is_the_one_that_was_saved_last_also_after_going_back(tmp_path):
    for step, kept in ((100, [100]), (50, [100, 50]), (60, [50, 60]), (70, [60, 70]), (70, [60, 70]), (80, [70, 80])):
        saved(tmp_path, step, keep=2)
        assert steps(tmp_path) == kept
    saved(tmp_path, 20, keep=2)
    assert steps(tmp_path) == [80, 20] and newest(tmp_path).name == "step-00000020.back2"
    assert folder.find(tmp_path) == newest(tmp_path)


@pytest.mark.parametrize("content", [None, b"step-00000100\n", b"\xff", b"step-77777777\n"])
def test_no_other_file_and_no_clock_takes_part_in_what_is_newest(tmp_path, content):
    for step in (100, 50, 60):
        saved(tmp_path, step)
    (tmp_path / "latest").unlink()
    if content is not None:
        (tmp_path / "latest").write_bytes(content)
    for path in reversed(complete(tmp_path)):  # the clock went back between any two
        os.utime(path)
    assert steps(tmp_path) == [100, 50, 60]
    saved(tmp_path, 70, keep=3)
    assert steps(tmp_path) == [50, 60, 70] and (tmp_path / "latest").read_text() == "step-00000070.back1\n"


def test_folders_of_earlier_versions_keep_their_order(tmp_path):
    for name in ("step-00000003.2", "step-00000003", "step-00000020", "step-00000005.1"):
        (tmp_path / name).mkdir()
    kept = ["step-00000003", "step-00000003.2", "step-00000005.1", "step-00000020"]
    assert [p.name for p in complete(tmp_path)] == kept
    assert saved(tmp_path, 4).name == "step-00000004.back1"
    assert saved(tmp_path, 21).name == "step-00000021.back1"


def test_before_a_checkpoint_is_what_a_run_may_have_come_from(tmp_path):
    for step in (10, 20, 30, 15, 25):
        saved(tmp_path, step)
    came_from = [read_manifest(p).step for p in folder.before(newest(tmp_path))]
    assert came_from == [15, 20, 10], "30 was given up by going back"


def test_links_and_files_of_a_checkpoint_s_name_do_no_harm(tmp_path):
    root, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    first = saved(root, 1)
    first.rename(elsewhere)
    first.symlink_to(elsewhere)
    (root / "step-00000002").write_text("a file")
    (root / "step-00000002.1").symlink_to(tmp_path / "nowhere")
    assert newest(root) == first
    verify(first)
    assert saved(root, 2, keep=1).name == "step-00000002.2"
    assert complete(root) == [root / "step-00000002.2"]
    assert (elsewhere / "data").exists() and not list(root.glob(".old-*")), "the link is gone, its content stays"


def test_a_checkpoint_that_is_there_is_no_failure(tmp_path, monkeypatch):
    saved(tmp_path, 1)

    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(folder, "remove", refused)
    with pytest.warns(UserWarning, match=r"step-00000002 is saved; but: .*Permission denied"):
        saved(tmp_path, 2, keep=1)
    assert steps(tmp_path) == [1, 2]


def test_a_step_that_is_saved_again_takes_the_place_of_the_first(tmp_path):
    saved(tmp_path, 3)
    again = saved(tmp_path, 3, b"9876543210")
    assert complete(tmp_path) == [again]
    assert (again / "data").read_bytes() == b"9876543210"


@pytest.mark.parametrize("when", ["rename", "replace", "rmtree", "fsync"])
def test_whatever_is_broken_off_leaves_a_whole_one(tmp_path, monkeypatch, when):
    """Each call that changes what is on the disk fails in turn, as where the process is killed before it."""
    module = {"rmtree": folder.shutil}.get(when, folder.os)
    for nth in range(8):
        root = tmp_path / str(nth)
        saved(root, 1)
        calls, real = iter(range(99)), getattr(module, when)

        def killed(*args, nth=nth, calls=calls, real=real, **kwargs):
            if next(calls) == nth:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(module, when, killed)
            try:
                saved(root, 2, keep=1)
            except KeyboardInterrupt:
                assert next(calls) == nth + 1
        assert complete(root)
        for path in complete(root):
            verify(path)
        saved(root, 3, keep=1)
        assert [p.name for p in root.iterdir() if p.name != "latest"] == ["step-00000003"]


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = tmp_path_factory.mktemp("damage")
    torch.manual_seed(0)
    module = Tied()
    optimizer = torch.optim.AdamW(module.parameters())
    module(**rows())["loss"].backward()
    optimizer.step()
    for step in (1, 2):
        mw.save_checkpoint(root, module, optimizer, step=step)
    return root / "step-00000002"


def damaged(path, content):
    module = Tied()
    before = {n: p.clone() for n, p in module.state_dict().items()}
    kept = path.read_bytes()
    try:
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(CheckpointError) as raised:
            mw.load_checkpoint(path.parent, module, torch.optim.AdamW(module.parameters()))
    finally:
        path.write_bytes(kept)
    assert all(torch.equal(p, before[n]) for n, p in module.state_dict().items()), "something was loaded"
    (finding,) = raised.value.findings
    assert finding.where == str(path)
    assert finding.fix == f"load {path.parent.with_name('step-00000001')} instead"
    return finding.given


def test_every_file_that_is_gone_or_short_or_changed_is_named(checkpoint):
    names = sorted(p.name for p in checkpoint.iterdir())
    assert names == [".metadata", "__0_0.distcp", "manifest.json", "run.pt"]
    for name in names:
        path, content = checkpoint / name, (checkpoint / name).read_bytes()
        assert damaged(path, None).startswith("missing")
        damaged(path, b"")
        for at in range(0, len(content), max(1, len(content) // 24)):
            damaged(path, content[:at])
            damaged(path, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        damaged(path, content[:-1] + bytes([content[-1] ^ 128]))
        damaged(path, content + b"\n")


def test_the_tensor_that_was_in_the_changed_place_is_named(checkpoint):
    name, file = next((n, f) for n, f in read_manifest(checkpoint).files.items() if n.endswith(".distcp"))
    content = (checkpoint / name).read_bytes()
    for piece in file.pieces[::5]:
        middle = piece.offset + piece.length // 2
        given = damaged(checkpoint / name, content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
        assert given == f"changed; damaged: {piece.name}"
    last = file.pieces[-1].name
    assert damaged(checkpoint / name, content[:-1]) == f"{len(content) - 1:,} bytes; lost: {last}"


def test_a_folder_without_a_checkpoint_says_so(tmp_path):
    begin(tmp_path, 4)
    with pytest.raises(CheckpointError, match="one was begun and never completed"):
        mw.load_checkpoint(tmp_path, Tied())
    with pytest.raises(CheckpointError, match="no such directory"):
        mw.load_checkpoint(tmp_path / "nowhere", Tied())


class Runs:
    def __reduce__(self):
        return (print, ("run by a checkpoint",))


def test_metadata_names_nothing_but_dcp_s_own_types(tmp_path, capsys):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(pickle.UnpicklingError, match=r"builtins.print has no place"):
        read_metadata(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(torch.Size([1])))
    with pytest.raises(pickle.UnpicklingError, match="holds a Size"):
        read_metadata(tmp_path)
    assert capsys.readouterr().out == ""


def test_a_manifest_s_text_is_what_was_written_to_the_byte(checkpoint):
    text = (checkpoint / "manifest.json").read_text()
    assert Manifest.parse(text).dump() == text
    with pytest.raises(ValueError, match="checksum"):
        Manifest.parse(text.replace('"step": 2', '"step": 3'))
    with pytest.raises(ValueError, match="checksum"):
        Manifest.parse(json.dumps(json.loads(text)))


# --- what does not fit ------------------------------------------------------------------------------------------------


class Wider(Tied):
    def __init__(self):
        super().__init__()
        self.blocks[0].mlp.up = torch.nn.Linear(12, 22)
        self.extra = torch.nn.Linear(2, 2)
        del self.blocks[1].scale
        self.blocks[1].scale = 1.0


def test_another_model_s_checkpoint_is_refused_with_every_difference(checkpoint):
    module = Wider()
    with pytest.raises(CheckpointError) as raised:
        mw.load_checkpoint(checkpoint, module)
    assert {f.where for f in raised.value.findings} == {
        "blocks.0.mlp.up.weight", "blocks.0.mlp.up.bias", "extra.weight", "extra.bias", "blocks.1.scale",
    }  # fmt: skip
    assert "(21, 12)" in str(raised.value) and "(22, 12)" in str(raised.value)


def test_what_a_load_would_refuse_is_refused_when_it_is_saved(tmp_path):
    with pytest.raises(CheckpointError, match=r"where: +extra"):
        mw.save_checkpoint(tmp_path, Tied(), step=1, extra={"x": Runs()})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [-1, 1.0, "1", None])
def test_a_step_is_a_number_from_zero(step, tmp_path):
    with pytest.raises(CheckpointError, match=r"where: +step"):
        mw.save_checkpoint(tmp_path, Tied(), step=step, keep=1)
    assert mw.save_checkpoint(tmp_path, Tied(), step=torch.tensor(3).numpy()[()]).name == "step-00000003"


def test_a_checkpoint_that_is_deleted_while_it_is_loaded_is_an_error(tmp_path, monkeypatch):
    for name in ("read_manifest", "check"):
        path, real = mw.save_checkpoint(tmp_path, Tied(), step=1), getattr(load, name)

        def deleted(at, *arguments, real=real, **settings):
            found = real(at, *arguments, **settings)
            shutil.rmtree(at)
            return found

        with monkeypatch.context() as patched, pytest.raises(CheckpointError, match=str(path)):
            patched.setattr(load, name, deleted)
            mw.load_checkpoint(tmp_path, Tied())


def test_a_folder_that_cannot_be_written_to_is_an_error_of_a_person(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        mw.save_checkpoint(tmp_path / "file", Tied(), step=1)
