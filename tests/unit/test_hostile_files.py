"""Hostile bytes in every file that is a pickle: refused in one line, and nothing that they name is run.

Files that are whole are changed at random: bytes, lengths, and pieces of ``CORPUS``, which are pickles that
name functions in each way that a pickle can. ``mark`` is the function that none of them may reach.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import resource
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_npu.base.errors import UsageError
from megatron_npu.safe_files import safe_load, safe_numpy, safe_pickle, torch_readers
from tests.support import plain_readers
from tests.support.payload import Calls

reached: list[object] = []


def mark(*given: object) -> None:
    """What a payload calls."""
    reached.append(given)


HERE = mark.__module__
# Each names the function in another way, of another protocol.
CORPUS = [
    *(pickle.dumps(Calls(mark, "ran"), protocol) for protocol in range(6)),
    pickle.dumps([{"a": Calls(mark, "ran")}, torch.float32], 4),
    f"c{HERE}\nmark\n)R.".encode(),
    f"(S'x'\ni{HERE}\nmark\n.".encode(),
    b"cos\nsystem\n(S'true'\ntR.",
    b"cbuiltins\neval\n(S'1'\ntR.",
    b"ctorch.distributed.checkpoint.metadata\nMetadata.__init__.__globals__\n.",
    b"\x80\x04\x8c\x05torch\x8c\x15hub.load_state_dict_f\x93.",
    b"cpathlib\nPosixPath\n(S'/'\ntR(dS'exists'\ncos\nsystem\nsb.",
    b"",
    b"\x80",
    b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
]


def metadata() -> bytes:
    from torch.distributed.checkpoint import metadata as kinds

    size = torch.Size([2, 3])
    piece = kinds.ChunkStorageMetadata(torch.Size([0, 0]), size)
    tensor = kinds.TensorStorageMetadata(kinds.TensorProperties(torch.float32), size, [piece])
    values = {"weight": tensor, "rng": kinds.BytesStorageMetadata()}
    return pickle.dumps(kinds.Metadata(values, storage_meta=kinds.StorageMeta(Path("x"))))


def saved(content: object, *, zipped: bool = True) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=zipped)
    return stream.getvalue()


def index() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.arange(6))
    return stream.getvalue()


RANK = {"args": Namespace(num_layers=2, seed=np.int64(3)), "iteration": 3, "model": {"w": torch.ones(2)}}
Reader = Callable[[Path], object]


def read_metadata(file: Path) -> object:
    return torch_readers._load_metadata(io.BytesIO(file.read_bytes()))


def read_value(file: Path) -> object:
    return torch_readers._load_value(io.BytesIO(file.read_bytes()))


def read_rank(file: Path) -> object:
    return safe_load.read(file, safe_load.OF_STOCK_SCRIPTS)


def read_embeddings(file: Path) -> object:
    with file.open("rb") as stream:
        return safe_pickle.load(stream)


READERS: dict[str, tuple[Reader, bytes]] = {
    "metadata": (read_metadata, metadata()),
    "value": (read_value, saved([np.arange(3, dtype=np.uint32), {"a": torch.ones(2)}])),
    "rank": (read_rank, saved(RANK)),
    "rank-of-old": (read_rank, saved(RANK, zipped=False)),
    "index": (safe_numpy.load, index()),
    "embeddings": (read_embeddings, pickle.dumps({"embed_data": {np.int64(3): np.ones(4, np.float16)}}, 4)),
}


RAISES = ("metadata", "value")  # checkpoint_failures and the adaptors make a line of what torch raises there


def of_two_disks(archive: bytes) -> bytes:
    """Return an archive that says it is one of two, as a changed byte may."""
    place = archive.rindex(b"PK\x06\x07") + 16  # in the locator of its directory
    return archive[:place] + (2).to_bytes(4, "little") + archive[place + 4 :]


# what fuzz.py has found: files at which a reader raised what is no refusal
FOUND: list[tuple[str, bytes]] = [("rank", of_two_disks(saved(RANK)))]


def repacked(whole: bytes, pickled: bytes) -> bytes:
    """Return a file of torch with another pickle in it; what is no archive gets the pickle in its place."""
    if not zipfile.is_zipfile(io.BytesIO(whole)):
        return pickled
    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as before, zipfile.ZipFile(result, "w") as after:
        for name in before.namelist():
            after.writestr(name, pickled if name.endswith("data.pkl") else before.read(name))
    return result.getvalue()


def read(name: str, file: Path, content: bytes) -> None:
    """Read what may be hostile: it is data, or refused, and nothing is reached."""
    reached.clear()
    file.write_bytes(content)
    reader, _ = READERS[name]
    broken = (Exception,) if name in RAISES else ()
    with contextlib.suppress(UsageError, *broken):
        reader(file)
    assert not reached


pytestmark = pytest.mark.filterwarnings("ignore:Detected pickle protocol")


@pytest.mark.parametrize("name", READERS)
def test_what_is_whole_is_read(name, tmp_path):
    reader, whole = READERS[name]
    (tmp_path / "file").write_bytes(whole)
    assert reader(tmp_path / "file") is not None


# a list of faults; half of them is one, too; what cannot be read is left out of both others
MILD = ("checksums", "merges", "metrics", "summary")
BRACKETS = b'{"a":' * 50_000
STRANGE = [b"[" * 100_000, BRACKETS, b"9" * 5000, b"null", b"[[]]", b'{"text": 5, "event": "train"}']


def test_a_run_of_too_many_or_no_tokens_a_second_has_no_end_that_is_known(tmp_path):
    """Found by fuzz.py: numbers that no float holds."""
    row = {"event": "start", "iteration": 0, "global_batch_size": 4, "seq_length": 8, "train_iters": 10**300}
    slow = {"event": "train", "iteration": 1, "losses": [2.0], "tokens_per_second": 0.0}
    for start in (row, row | {"global_batch_size": 10**30}, row | {"train_iters": 9}):
        lines = [json.dumps(line) for line in (start, slow)]
        (tmp_path / "file").write_text("\n".join([*lines, ""]))
        assert plain_readers.read_metrics(tmp_path / "file")["seconds_left"] is None


@pytest.mark.parametrize("line", [*STRANGE, b'{"event": "train", "iteration": "x", "losses": ["y"]}'])
@pytest.mark.parametrize("name", ["metrics", "passages", "summary", "description-of-train"])
def test_lines_of_a_stranger_are_left_out_or_refused(name, line, tmp_path):
    reader, whole = plain_readers.whole()[name]
    (tmp_path / "file").write_bytes(whole.rstrip(b"\n") + b"\n" + line + b"\n")
    if name in MILD:
        assert reader(tmp_path / "file") is not None
    else:
        with pytest.raises(UsageError):
            reader(tmp_path / "file")
    (tmp_path / "file").write_bytes(line)
    with contextlib.suppress(UsageError):
        reader(tmp_path / "file")


def test_what_is_no_pickle_is_read_and_refused(tmp_path):
    """The readers that fuzz.py has besides take what is whole, and refuse half of it or say what is wrong."""
    pytest.importorskip("safetensors")
    for name, (reader, whole) in plain_readers.whole().items():
        file = tmp_path / name
        file.write_bytes(whole)
        assert reader(file) is not None
        if name not in MILD:
            file.write_bytes(whole[: len(whole) // 2])
            with pytest.raises(UsageError):
                reader(file)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("number", range(len(CORPUS)))
def test_the_corpus_reaches_nothing(name, number, tmp_path):
    read(name, tmp_path / "file", repacked(READERS[name][1], CORPUS[number]))


@pytest.mark.parametrize(("name", "content"), FOUND)
def test_what_fuzzing_has_found_is_refused(name, content, tmp_path):
    read(name, tmp_path / "file", content)


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60)
@given(data=st.data())
def test_changed_bytes_reach_nothing(name, data, tmp_path):
    whole = bytearray(READERS[name][1])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(whole)))
        piece = data.draw(st.sampled_from(CORPUS) | st.binary(max_size=8))
        whole[place : place + data.draw(st.sampled_from([0, 1, len(piece), 1 << 20]))] = piece
    read(name, tmp_path / "file", bytes(whole))


@pytest.fixture
def few_gigabytes():
    """Let this process take 2 GiB more than it has, so that what takes all ends with an error."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + 2**31
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"Nr" + (2**31).to_bytes(4, "little") + b".",
            "must contain torch's Metadata, but it contains a NoneType",
        ),
        (b"Np2147483648\n.", "must contain torch's Metadata, but it contains a NoneType"),
        (b"\x96" + (2**40).to_bytes(8, "little") + b".", "invalid: 150"),
    ],
)
def test_a_few_bytes_take_no_gigabytes(content, said, few_gigabytes):
    """C's unpickler makes a table for all values up to the number: 34 GB; and believes a length."""
    with pytest.raises(ValueError, match=said):
        torch_readers._load_metadata(io.BytesIO(content))


METADATA = "torch.distributed.checkpoint.metadata"
FORMAT = f"c{METADATA}\n_MEM_FORMAT_ENCODING\n(I0\ntR"


@pytest.mark.parametrize("changed", ["cpathlib\nPosixPath\n", f"c{METADATA}\nMetadata\n", FORMAT])
@pytest.mark.parametrize("state", ["(N(dS'_str'\nS'/elsewhere'\nst", "(dS'_str'\nS'/elsewhere'\ns"])
def test_what_others_use_is_not_changed(changed, state):
    """With a state for a class a file could make every path of the process mean another one."""
    with pytest.raises((UsageError, ValueError)) as refused:
        torch_readers._load_metadata(io.BytesIO(f"{changed}{state}b0".encode() + metadata()))
    assert "sets attributes of" in str(refused.value)
    assert str(Path("/here")) == "/here"


@given(content=st.binary(max_size=200))
@example(content=CORPUS[0])
@example(content=CORPUS[4])
def test_names_in_a_pickle_are_found_without_running_it(content):
    reached.clear()
    names = safe_load.names_in_pickle(io.BytesIO(content))
    assert not reached
    if content in CORPUS[:6]:
        assert names == {f"{HERE}.mark"}
