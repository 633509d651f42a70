"""Checkpoints as others see them: a hash of the weights, plain safetensors files, and the commands."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from cs336_systems.checkpoint.__main__ import main
from cs336_systems.checkpoint.disk import RefusedError
from cs336_systems.checkpoint.folder import export_plain, open_checkpoint, open_plain, save, weights_hash
from cs336_systems.checkpoint.tensors import RANDOM, VALUE, Box
from cs336_systems.errors import UserError
from cs336_systems.host.console import run_command
from tests.support.checkpoint_cases import FILE, bits, flip, pieces_of, save_step, tensors


def test_the_hash_of_weights_knows_every_bit_name_shape_and_dtype(tmp_path, group):
    zeros = torch.zeros(2, 3)
    base = {("w", VALUE): zeros, ("w", "exp_avg"): zeros, (f"{RANDOM}x", VALUE): torch.zeros(3)}
    same = [{("w", VALUE): zeros}, base | {("w", "exp_avg"): torch.ones(2, 3)}, base]
    others = [
        {("w", VALUE): zeros.index_fill(0, torch.tensor([1]), -0.0)},
        {("v", VALUE): zeros},
        {("w", VALUE): torch.zeros(3, 2)},
        {("w", VALUE): zeros.int()},
        {("w", VALUE): zeros, ("v", VALUE): torch.zeros(0)},
    ]
    hashes = [
        weights_hash(open_checkpoint(save(tmp_path, number, pieces_of(whole, 0, 1), {}, {}, group)))
        for number, whole in enumerate([*same, *others])
    ]
    assert len({*hashes[:3]}) == 1
    assert len({*hashes}) == 6


def test_export_and_import_of_a_plain_file(tmp_path, group, monkeypatch):
    checkpoint = open_checkpoint(save_step(tmp_path / "checkpoints", 1, group))
    file = tmp_path / "model.safetensors"
    assert export_plain(checkpoint, file) == 5
    assert file.stat().st_mode & 0o777 == (checkpoint.folder / "manifest.json").stat().st_mode & 0o777
    wanted = {name: each for (name, kind), each in tensors(1).items() if kind == VALUE}
    theirs, ours, before = load_file(file), open_plain(file), file.read_bytes()
    assert theirs.keys() == wanted.keys() == ours.tensors.keys()
    for name, tensor in wanted.items():
        assert theirs[name].dtype == tensor.dtype
        assert bits(theirs[name]) == bits(tensor) == bits(ours.read(name, VALUE, Box.whole(tensor.shape)))
    assert weights_hash(ours) == weights_hash(checkpoint)

    def no_rename(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.rename", no_rename)
    for path, said in (
        (file, f"{file} exists already; name another file"),
        (tmp_path / "nowhere" / "x", f"cannot write {tmp_path}/nowhere/x: No such file or directory"),
        (tmp_path / "y", f"cannot write {tmp_path}/y: .*Input/output error"),
    ):
        with pytest.raises(UserError, match=said):
            export_plain(checkpoint, path)
    assert file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "model.safetensors"]


def head(value: object, data: int = 8) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


HALF = {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}


def one(**changes: object) -> bytes:
    return head({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "its head would have 0 bytes of 0"),
        (b"\x80\x02}q\x00.", "its head would have .* bytes of 6"),
        (head(b"[" * 5000), "recursion|Expecting value"),  # by release of Python
        (one(dtype="F8"), "dtype 'F8'"),
        (one(shape=[-2]), "-2 is no count"),
        (one(shape=[1 << 40, 2]), f"a tensor of {1 << 41} elements of F32 at 0 to 8 of 8 bytes"),
        (one(data_offsets=[8, 0]), "a tensor of 2 elements of F32 at 8 to 0 of 8 bytes"),
        (one(shape=""), "'' is no list of counts"),
        (one(shape=[1] * 17), "a tensor of 17 axes"),
        (head({"t": HALF | {"shape": [2], "data_offsets": [0, 8]}, "u": HALF}), "ends at 8, and the next begins at 4"),
        (head({"__metadata__": {"pieces": {}}}), "its metadata are not strings"),
    ],
)
def test_a_plain_file_that_is_none_is_refused(data, said, tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(data)
    with pytest.raises(RefusedError, match=f"^x.safetensors is no safetensors file: .*({said})"):
        open_plain(file)


def test_a_missing_plain_file_and_a_shape_that_overflows_are_refused(tmp_path):
    file = tmp_path / "x.safetensors"
    with pytest.raises(UserError, match=f"^cannot read {file}: No such file"):
        open_plain(file)
    file.write_bytes(one(shape=[1 << 40, 1 << 40, 0], data_offsets=[0, 0]))
    with pytest.raises(RefusedError, match=r"^t \(value\) has shape .*, which no tensor has"):
        open_plain(file)


def test_show(parent, tmp_path, group, capsys):
    newest, state = parent / "step-00000002", {"recipe": {"layers": [1] * 90}, "\x1b[1m": None, "[red]": "é"}
    for path in (tmp_path, parent, newest):
        assert run_command(main, ["show", str(path)]) == 0
        lines = [line.strip("│ ").split("│") for line in capsys.readouterr().out.splitlines() if "│" in line]
        shown = {what.strip(): value.strip() for what, value in lines}
        assert shown.pop("files").startswith("1 of 1.")
        assert shown == {
            "checkpoint": "step-00000002",
            "step": "2",
            "parameters": "37 in 5 tensors",
            "of the optimizer": "exp_avg",
            "tensors": "7 in all, of BF16, BOOL, F32, F64, U8",
            "SHA-256 of the weights": weights_hash(open_checkpoint(newest)),
            "state: step": "2",
        }
    assert run_command(main, ["show", str(save(tmp_path, 3, [], {}, state, group))]) == 0
    shown = capsys.readouterr().out
    for words in ('{"layers": [1, 1', ", 1 ...", "\\x1b[1m", "[red]", '"é"', "0 in 0 tensors"):
        assert words in shown
    assert "\x1b" not in shown


def test_verify(parent, capsys):
    assert run_command(main, ["verify", str(parent)]) == 0
    assert capsys.readouterr().out == "step-00000001: whole\nstep-00000002: whole\n"
    flip(parent / "step-00000001" / FILE, -1)
    assert run_command(main, ["verify", str(parent)]) == 2
    out, error = capsys.readouterr()
    first, second = out.splitlines()
    assert first.startswith(f"step-00000001: refused: step-00000001/{FILE} is damaged, or of another checkpoint")
    assert second == "step-00000002: whole"
    assert error == f"error: 1 of 2 checkpoints in {parent} cannot be used\n"
    assert run_command(main, ["verify", str(parent / "step-00000002")]) == 0
    (parent / "step-00000002" / "manifest.json").unlink()
    assert run_command(main, ["verify", str(parent / "step-00000002")]) == 2
    assert "manifest.json is missing" in capsys.readouterr().out


def test_export(parent, tmp_path, capsys):
    file = tmp_path / "model.safetensors"
    assert run_command(main, ["export", str(parent), str(file)]) == 0
    assert capsys.readouterr().out.startswith(f"{file}: 5 parameters of step-00000002, ")
    assert torch.equal(load_file(file)["a.weight"], tensors(2)["a.weight", VALUE])
    for path, name in {str(file): file, "": ".", "/": "/"}.items():  # the last two have no name
        assert run_command(main, ["export", str(parent), path]) == 2
        assert capsys.readouterr().err == f"error: {name} exists already; name another file\n"
    shutil.move(parent / "step-00000001", tmp_path / "away")
    assert run_command(main, ["export", str(tmp_path / "away"), str(tmp_path / "first")]) == 0
    assert torch.equal(load_file(tmp_path / "first")["a.weight"], tensors(1)["a.weight", VALUE])


@pytest.mark.parametrize("command", ["show", "verify", "export"])
def test_a_path_without_checkpoints_is_one_line(command, parent, tmp_path, capsys):
    more = [str(tmp_path / "out")] if command == "export" else []
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        assert run_command(main, [command, str(path), *more]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path} is no checkpoint, and there is none in it: ")
        assert error.count("\n") == 1
    flip(parent / "step-00000002" / FILE, -1)
    assert run_command(main, [command, str(parent), *more]) == 2
    assert capsys.readouterr().err.count("\n") == 1
