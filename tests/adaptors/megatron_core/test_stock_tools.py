"""Megatron-LM's other scripts at core_v0.12.1 and core_v0.16.1, unedited: LAMBADA, generation, BERT, T5."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_npu.data.preprocessing import command as preprocess
from megatron_npu.evaluation import lambada
from megatron_npu.generation import generate
from tests.conftest import LONGEST, checkout, on_a_leash, wait_until
from tests.support import private, processes, tiny, warm
from tests.support.ports import free_port
from tests.support.simulated import unavailable
from tests.support.stock_core import learns_from_sentences, losses, pretrain, run_script

MODEL = [
    *"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32".split(),
    *"--max-position-embeddings 32 --micro-batch-size 4 --attention-dropout 0 --hidden-dropout 0".split(),
    *f"--tokenizer-type NullTokenizer --vocab-size {tiny.SIZE}".split(),
]
PROMPTS = ["10 12 14 16", "100 103 106 109", "7 8 9 10 11"]
NEW_TOKENS = 6
# `python SCRIPT` where the package may only be on the path, so that no entry point arms the hook
PROGRAM = """
import runpy, sys
import megatron_npu
sys.argv = sys.argv[1:]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Trained(NamedTuple):
    """A checkpoint that pretrain_gpt.py of a tree has saved, of a model that has learned to count on."""

    tree: Path
    load: Path


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train the smallest model that knows more than one answer, by the script of the tag asked for."""
    version = request.param
    tree = checkout("megatron_core", version)
    if version == "0.12.1":
        pytest.importorskip("einops", reason="upstream's local attention of 0.12 needs einops")
    folder = tmp_path_factory.mktemp("trained")
    data = tiny.write_dataset(folder / "numbers", documents=200)
    training = "--train-iters 60 --global-batch-size 16 --lr 1e-2 --split 100,0,0 --eval-iters 0".split()
    save = ["--save", str(folder / "checkpoint"), "--save-interval", "60"]
    done = pretrain(tree, folder, *MODEL, *training, *save, data=data)
    assert losses(done)[-1] < 4
    return Trained(tree, folder / "checkpoint")


def needs_simulator(device: str) -> None:
    if device == "npu" and unavailable():
        pytest.skip(unavailable())


def greedy(load: Path, prompt: str) -> str:
    """Return what a loop over whole forward passes, without a cache, says."""
    return generate.generate(str(load), prompt, num_tokens=NEW_TOKENS, temperature=0)


# -- generation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", ["0.12.1", "0.16.1"], indirect=True)
def test_the_server_answers_with_the_likeliest_tokens(trained: Trained, tmp_path: Path) -> None:
    answers = _ask_server(trained, tmp_path, PROMPTS[0])
    assert answers["text"] == [greedy(trained.load, PROMPTS[0])]
    assert "".join(answers["segments"][0]) == answers["text"][0]


def _ask_server(trained: Trained, folder: Path, prompt: str) -> dict:
    """Start the stock server, ask it once, and end it."""
    port = str(free_port())
    script = str(trained.tree / "tools" / "run_text_generation_server.py")
    command = tiny.command("run", script, *MODEL, "--load", str(trained.load), "--port", port)
    environment = tiny.environment() | {"MEGATRON_LM_PATH": str(trained.tree)}
    body = {"prompts": [prompt], "tokens_to_generate": NEW_TOKENS, "top_k": 1}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api",
        data=json.dumps(body).encode(),
        method="PUT",
        headers={"Content-Type": "application/json"},
    )
    command, environment = warm.ready(command, environment, warm.STOCK, trained.tree)
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    with on_a_leash(server):
        wait_until(lambda: _listens(port), server, lambda: (folder / "log").read_text()[-4000:])
        with urllib.request.urlopen(request, timeout=LONGEST) as answer:
            return json.load(answer)


def _listens(port: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", int(port))) == 0


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("trained", ["0.16.1"], indirect=True)
def test_static_inference_gives_the_likeliest_tokens(trained: Trained, tmp_path: Path, device: str) -> None:
    """Prompts of several lengths in one batch, with the cache of the engine."""
    needs_simulator(device)
    options = f"--num-tokens-to-generate {NEW_TOKENS} --top_k 1 --incoming-requests-per-step 1".split()
    options += ["--legacy-tokenizer"]  # 0.16's other NullTokenizer has no bos_id, which the engine asks for
    done = run_script(
        trained.tree,
        tmp_path,
        "examples/inference/gpt/gpt_static_inference.py",
        *[*MODEL, "--load", str(trained.load), *options, "--output-path", "output.json"],
        *["--prompts", *PROMPTS],
        device=device,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    output = json.loads((tmp_path / "output.json").read_text()).values()
    texts = {row["input_prompt"]: row["generated_text"] for row in output}
    for prompt in PROMPTS:
        assert f"{prompt} {texts[prompt].strip()}" == greedy(trained.load, prompt)


@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_the_examples_find_what_lies_at_the_root_of_their_tree(tmp_path: Path, name: str) -> None:
    """No variable names the tree: the script lies in it."""
    script = checkout("megatron_core", "0.16.1") / f"examples/inference/gpt/gpt_{name}_inference.py"
    command = tiny.command("run", str(script), "--help")
    done = warm.run(command, env=tiny.environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "--num-tokens-to-generate" in done.stdout


def test_the_converter_is_refused_where_its_script_starts(tmp_path: Path) -> None:
    """Under the entry point of torch alone, without a command of ours."""
    tree = checkout("megatron_core", "0.16.1")
    flags = f"--model-type GPT --loader core --saver core --load-dir no --save-dir no --megatron-path {tree}"
    command = [sys.executable, "-c", PROGRAM, str(tree / "tools/checkpoint/convert.py"), *flags.split()]
    done = processes.run(command, env=tiny.environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert (
        "convert.py requires TransformerEngine, which its saver always imports"
        in done.stderr.splitlines()[-1]
    )


# -- evaluation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize("trained", ["0.12.1"], indirect=True)
def test_lambada_counts_what_we_count(trained: Trained, tmp_path: Path, device: str) -> None:
    """0.13 and later have no such task. Half of the passages count on, half end in another number."""
    needs_simulator(device)
    passages = [f"{n} {n + 2} {n + 4} {n + 6} {n + 8 + odd * 50}" for n in range(20, 60, 5) for odd in (0, 1)]
    file = tmp_path / "passages.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    right, total = lambada.accuracy(str(trained.load), str(file), strict=False)
    assert 0 < right <= len(passages) / 2 < total
    task = ["--task", "LAMBADA", "--valid-data", str(file), "--load", str(trained.load), "--num-workers", "0"]
    load = ["--no-load-optim", "--no-load-rng"]
    done = run_script(trained.tree, tmp_path, "tasks/main.py", *MODEL, *task, *load, device=device)
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.search(r"number correct: (\S+) \| total examples: (\S+)", done.stdout)
    assert (float(found[1]), float(found[2])) == (right, total)


@pytest.mark.parametrize("trained", ["0.12.1"], indirect=True)
def test_lambada_counts_each_once_and_reads_the_end(trained: Trained, tmp_path: Path) -> None:
    """Four times a passage that is known, and one that is too long, on two copies of the model."""
    file = tmp_path / "passages.jsonl"
    counted = [" ".join(str(n + 2 * step) for step in range(5)) for n in range(20, 60, 5)]

    def ours(*texts: str) -> tuple[int, int]:
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return lambada.accuracy(str(trained.load), str(file), strict=False)

    known = next(text for text in counted if ours(text) == (1, 1))
    expected = ours(*[known] * 4, " ".join(["7"] * 100))
    assert expected in ((4, 5), (5, 5))
    task = ["--task", "LAMBADA", "--valid-data", str(file), "--load", str(trained.load), "--num-workers", "0"]
    load = ["--no-load-optim", "--no-load-rng"]
    done = run_script(trained.tree, tmp_path, "tasks/main.py", *MODEL, *task, *load, processes=2)
    assert done.returncode == 0, done.stderr[-4000:]
    assert " > 1 passages are longer than " in done.stdout
    found = re.search(r"number correct: (\S+) \| total examples: (\S+)", done.stdout)
    assert (float(found[1]), float(found[2])) == expected


# -- data, and the other models ---------------------------------------------------------------------


def test_preprocess_data_writes_our_bytes(tmp_path: Path, gpt2_vocab) -> None:
    tree = checkout("megatron_core", "0.16.1")
    texts = ["One, two.\n\nThree?", "Übermut tut selten gut \N{SNOWMAN}", " "]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    vocabulary = ["--vocab-file", str(gpt2_vocab.vocab_file), "--merge-file", str(gpt2_vocab.merge_file)]
    flags = ["--tokenizer-type", "GPT2BPETokenizer", *vocabulary, "--append-eod", "--workers", "1"]
    flags = ["--input", str(tmp_path / "in.jsonl"), *flags]
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    assert preprocess.main([*flags, "--output-prefix", ours]) in (0, None)
    # without it 0.16 looks for the tokenizer on the network, whatever files are given
    legacy = ["--output-prefix", theirs, "--legacy-tokenizer"]
    done = warm.run(  # without any command of ours, whose umask is 027
        [sys.executable, "-c", PROGRAM, str(tree / "tools/preprocess_data.py"), *flags, *legacy],
        cwd=tmp_path,
        env=tiny.environment() | {"PYTHONPATH": f"{tree}:{tiny.ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        umask=0o022,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    private.assert_all(tmp_path.glob("theirs*"), "*.bin", "*.idx")
    for end in ("_text_document.bin", "_text_document.idx"):
        assert Path(ours + end).read_bytes() == Path(theirs + end).read_bytes()


@pytest.mark.parametrize(
    ("version", "script", "tokenizer"),
    [
        ("0.12.1", "pretrain_bert.py", ["--tokenizer-type", "BertWordPieceLowerCase"]),
        ("0.16.1", "pretrain_t5.py", ["--tokenizer-type", "BertWordPieceCase", "--legacy-tokenizer"]),
    ],
)
def test_bert_and_t5_learn(version: str, script: str, tokenizer: list[str], tmp_path: Path) -> None:
    """With the default --transformer-impl, which is transformer_engine."""
    tree = checkout("megatron_core", version)
    if version == "0.12.1":
        pytest.importorskip("einops", reason="upstream's local attention of 0.12 needs einops")
    learns_from_sentences(tree, tmp_path, script, *tokenizer)
