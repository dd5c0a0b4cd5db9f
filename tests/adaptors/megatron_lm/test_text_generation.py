"""The stock text-generation server: asked over HTTP, it says what a forward pass without a cache says."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_npu.data.preprocessing import indexed_dataset
from tests.conftest import LONGEST, on_a_leash, wait_until
from tests.support import stock_lm, tiny, warm
from tests.support.simulated import unavailable

PORT = 5000  # upstream gives no way to choose another
URL = f"http://127.0.0.1:{PORT}/api"
PROMPTS = ["abc def ghi jkl abc", "jkl a"]
NEW = 12  # tokens after the longest prompt
SCRIPT = Path("tools", "run_text_generation_server.py")


@pytest.fixture(scope="module")
def spelled(checkout, tmp_path_factory) -> tuple[Path, list[str]]:
    """A model that has learned one sentence by heart, at TP 1; its folder and flags."""
    folder = tmp_path_factory.mktemp("spelled")
    stock_lm.write_vocabulary(folder)
    text = b"abc def ghi jkl "
    names = json.loads((folder / "vocab.json").read_text())
    ids = np.array([names["\u0120" if letter == 32 else chr(letter)] for letter in text], np.uint16)
    with indexed_dataset.Writer(str(folder / "text"), np.dtype(np.uint16)) as writer:
        for start in range(60):
            tokens = np.roll(np.tile(ids, 5), -start)
            writer.add(tokens.tobytes(), np.array([len(tokens)], np.int32), np.array([1], np.int64))
        writer.finish()
        indexed_dataset.publish([writer])
    training = "--train-iters 120 --lr 3e-3 --lr-decay-iters 120 --eval-iters 0"
    flags = [*stock_lm.flags(folder), *f"{training} {stock_lm.TOOL_MULTIPLE}".split()]
    saving = ["--save", str(folder / "saved"), "--save-interval", "120"]
    stock_lm.succeeded(stock_lm.run(checkout / "pretrain_gpt.py", [*flags, *saving]))
    return folder, flags


@pytest.fixture(scope="module")
def expected(checkout, spelled) -> list[str]:
    """The texts without a cache; the model knows the sentence."""
    folder, flags = spelled
    length = len(PROMPTS[0]) + NEW  # the server gives every prompt so many tokens; here a letter is a token
    asked = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    command = [*flags, "--load", str(folder / "saved"), *asked, "--tokens-in-all", str(length)]
    output = stock_lm.succeeded(
        stock_lm.run(Path(__file__).parent / "greedy.py", command, MEGATRON_LM_PATH=str(checkout))
    )
    texts = json.loads(output.splitlines()[-1])
    assert texts[0] == "abc def ghi jkl abc def ghi jkl"
    return texts


@contextlib.contextmanager
def server(checkout: Path, flags: list[str], device: str, processes: int, log: Path) -> Iterator[None]:
    """Hold a server that answers; end it and its processes afterwards."""
    command = tiny.command("run", str(checkout / SCRIPT), *flags, processes=processes)
    # a device that is named and not there would be an error
    env = stock_lm.environment(MEGATRON_NPU_DEVICE=device, PYTHONUNBUFFERED="1")
    ready = warm.simulated if device == "npu" else warm.ready
    command, env = ready(command, env, warm.STOCK, checkout)
    simulated = tiny.command("sim", "--") if device == "npu" else []
    with log.open("w") as stream:
        process = subprocess.Popen([*simulated, *command], env=env, stdout=stream, stderr=subprocess.STDOUT)
    with on_a_leash(process):
        try:
            wait_for_port(process, log)
            yield
        finally:
            process.terminate()  # the launcher ends its ranks, which are children of a warm parent
            process.wait(LONGEST)
            wait_until(lambda: not listening())


def wait_for_port(process: subprocess.Popen, log: Path) -> None:
    """Wait until somebody listens."""
    wait_until(listening, process, lambda: log.read_text()[-3000:])


def listening() -> bool:
    """Return whether somebody listens on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", PORT)) == 0


def ask(**request: object) -> dict:
    """Return what the server answers."""
    data = json.dumps(request).encode()
    put = urllib.request.Request(URL, data, {"Content-Type": "application/json"}, method="PUT")
    with urllib.request.urlopen(put, timeout=LONGEST) as answer:
        return json.load(answer)


@pytest.mark.parametrize(("device", "tensor"), [("cpu", 1), ("cpu", 2), ("npu", 1)])
def test_server(checkout, spelled, expected, tmp_path, device, tensor):
    pytest.importorskip("flask_restful", reason="upstream's server needs flask and flask-restful")
    if device == "npu" and unavailable():
        pytest.skip(unavailable())
    if listening():
        pytest.skip(f"port {PORT}, upstream's only one, is taken")
    folder, flags = spelled
    saved, layout = folder / "saved", ""
    if tensor > 1:
        saved, layout = folder / "saved-tp2", "--tensor-model-parallel-size 2"
        stock_lm.change_layout(checkout, folder / "saved", saved, tensor, 1)
    flags = [*flags, "--load", str(saved), *layout.split()]
    with server(checkout, flags, device, tensor, tmp_path / "log"):
        assert ask(prompts=PROMPTS, tokens_to_generate=NEW, top_k=1)["text"] == expected
        beams = ask(prompts=PROMPTS[:1], tokens_to_generate=NEW, beam_width=2, stop_token=0)["text"]
        assert beams[0] == expected[0]
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(prompts=[], tokens_to_generate=NEW)
