"""lm-eval on checkpoints that nobody has converted: its numbers are those of Transformers on the export."""

from __future__ import annotations

import contextlib
import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.evaluation import lambada
from tests.conftest import LONGEST, checkout
from tests.end_to_end.test_serve import started
from tests.support import processes, tiny
from tests.support.simulated import run_simulated, unavailable
from tests.support.tokenizers_made import byte_level, write_gpt2_files, write_json

pytest.importorskip("megatron.core")
pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval")
PASSAGES = [
    "To be, or not to be, that is the question",
    "the end of the  user's question",
    "12 34 567 is the\nend",
    "the question that is not to be the end of the question",
    "to be the user",
]
ANSWERS = [" a", " b", " c", " d"]  # of one token each
PAIRS = [
    *[(" ".join(text.split(" ")[:-1]), " " + text.split(" ")[-1]) for text in PASSAGES],
    *[("the question that is not", answer) for answer in ANSWERS],
    *[("the question ", ending) for ending in ("is not to be", "of the user is 567", "that")],
    ("", "To be, or not to be"),
    ("the question of the end " * 20, "is not to be"),  # longer than the model's positions
]


@pytest.fixture(scope="module")
def folders(dataset, tmp_path_factory) -> dict[str, Path]:
    """A checkpoint of the driver, its tokenizer and its export."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "tokenizer").mkdir()
    write_gpt2_files(folder / "tokenizer", byte_level(special=()))
    flags = [*tiny.flags_for(dataset), "--train-iters", "10", "--eval-iters", "0"]
    flags += ["--seq-length", "64", "--max-position-embeddings", "64", "--hidden-size", "64"]
    flags += ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(folder / "tokenizer/vocab.json")]
    flags += ["--merge-file", str(folder / "tokenizer/merges.txt"), "--init-method-std", "0.3"]
    place = flags.index("--vocab-size")
    del flags[place : place + 2]
    done = tiny.run("pretrain", *flags, "--save", str(folder / "checkpoint"))
    assert done.returncode == 0, done.stderr
    line = ["convert", "--from", "megatron", "--to", "hf", "--proof", "tensors"]
    assert tiny.run(*line, str(folder / "checkpoint"), str(folder / "export")).returncode == 0
    return {name: folder / name for name in ("checkpoint", "tokenizer", "export")}


@pytest.fixture(scope="module")
def theirs(folders):
    """Transformers' model, as lm-eval asks it."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folders["export"]), dtype="float32", device="cpu", batch_size=3)


@pytest.fixture
def loaded(monkeypatch) -> Iterator:
    """Return a function: the arguments of our model -> the model."""
    from megatron_npu.evaluation.lm_eval_model import MegatronNpu

    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    with contextlib.ExitStack() as stack:
        yield lambda **arguments: stack.enter_context(contextlib.closing(MegatronNpu(**arguments)))


@pytest.fixture
def ours(folders, loaded):
    return loaded(load=folders["checkpoint"], batch_size=3, max_gen_toks=16, device="cuda:0")


def requests(kind: str, arguments: list[tuple]) -> list:
    from lm_eval.api.instance import Instance

    rows = enumerate(arguments)
    return [Instance(request_type=kind, doc={}, arguments=some, idx=number) for number, some in rows]


def write_llama(folder: Path) -> None:
    """Write a random Llama, with a tokenizer that begins every text with <s>, and a chat template."""
    transformers = pytest.importorskip("transformers")
    tokenizer = byte_level(special=("<s>", "</s>"))
    first, last = (tokenizer.token_to_id(token) for token in ("<s>", "</s>"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **{"vocab_size": last + 1, "max_position_embeddings": 64, "initializer_range": 0.3, **sizes},
        **{"bos_token_id": first, "eos_token_id": last},
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special})


def test_a_converted_model_whose_texts_begin_with_a_token_of_their_own(tmp_path, loaded):
    from lm_eval.models.huggingface import HFLM

    write_llama(tmp_path / "llama")
    line = ["convert", "--from", "hf", "--to", "megatron", "--proof", "tensors"]
    assert cli.main([*line, str(tmp_path / "llama"), str(tmp_path / "converted")]) == 0
    model = HFLM(pretrained=str(tmp_path / "llama"), dtype="float32", device="cpu", batch_size=3)
    both = loaded(load=tmp_path / "converted", batch_size=3), model
    messages = [{"role": "user", "content": "To be"}]
    assert both[0].apply_chat_template(messages) == model.apply_chat_template(messages) == "<s>[user] To be"
    assert both[0].chat_template(True) == model.chat_template(True)
    texts = [*PASSAGES, both[0].apply_chat_template(messages), "", "<s> the end"]
    for text in texts:
        assert both[0].tok_encode(text) == model.tok_encode(text)
    assert both[0].prefix_token_id == model.prefix_token_id != both[0].eot_token_id == model.eot_token_id
    require_equal(*both)


def require_equal(ours, theirs) -> None:
    """Compare the answers to all three kinds of requests."""
    pairs = requests("loglikelihood", PAIRS)
    found, expected = ours.loglikelihood(pairs), theirs.loglikelihood(pairs)
    assert [value for value, _ in found] == pytest.approx(
        [value for value, _ in expected], rel=1e-6, abs=1e-4
    )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    again = dict(zip(PAIRS, ours.loglikelihood(pairs[::-1])[::-1], strict=True))
    assert [*again.values()] == ours.loglikelihood(pairs), "whatever their order"
    for pair in PAIRS[5:9]:  # read once for the four answers
        assert again[pair][0] == ours.loglikelihood(requests("loglikelihood", [pair]))[0][0]
    texts = requests("loglikelihood_rolling", [(text,) for text in ("a", " ".join(PASSAGES * 3), "")])
    found, expected = (model.loglikelihood_rolling(texts[:2]) for model in (ours, theirs))
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-4)
    wishes = [{"until": ["e"], "max_gen_toks": 20}, {"until": [], "max_gen_toks": 9, "do_sample": False}]
    drawn = requests("generate_until", [(text, wish) for text in PASSAGES for wish in wishes])
    assert ours.generate_until(drawn) == theirs.generate_until(drawn)


def test_all_three_kinds_of_requests_are_answered_as_by_transformers(ours, theirs):
    require_equal(ours, theirs)


def test_lambada_with_lm_evals_cut_has_its_numbers(folders, theirs, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    (tmp_path / "passages").write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    rows = lambada.found(str(folders["checkpoint"]), str(tmp_path / "passages"), cut="lm-eval")
    expected = theirs.loglikelihood(requests("loglikelihood", PAIRS[: len(PASSAGES)]))
    assert [row.logprob for row in rows] == pytest.approx([value for value, _ in expected], abs=1e-4)
    assert [row.correct for row in rows] == [greedy for _, greedy in expected]


@pytest.mark.parametrize("tokenized", [True, False])
def test_the_server_answers_local_completions(folders, theirs, tokenized, server):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    pytest.importorskip("tenacity")
    client = LocalCompletionsAPI(
        **{"model": "checkpoint", "base_url": f"http://127.0.0.1:{server.port}/v1/completions"},
        **{"tokenizer": str(folders["export"]), "tokenizer_backend": "huggingface", "batch_size": 4},
        **{"max_length": 64, "tokenized_requests": tokenized, "max_retries": 1},
    )
    pairs = requests("loglikelihood", [pair for pair in PAIRS if pair[0] and len(pair[0]) < 100])
    found, expected = client.loglikelihood(pairs), theirs.loglikelihood(pairs)
    assert [value for value, _ in found] == pytest.approx(
        [value for value, _ in expected], rel=1e-6, abs=1e-4
    )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    drawn = requests("generate_until", [(text, {"until": ["e"], "max_gen_toks": 20}) for text in PASSAGES])
    assert client.generate_until(drawn) == theirs.generate_until(drawn)


@pytest.fixture(scope="module")
def server(folders):
    running = started(str(folders["checkpoint"]))
    yield running
    running.process.send_signal(signal.SIGTERM)
    _, err = running.process.communicate(timeout=LONGEST)
    assert "Traceback" not in err


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A folder with a task shaped as lambada_openai, of passages on this machine."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "passages.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    write_json(
        folder / "local.yaml",  # JSON is YAML
        {
            "task": "local",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "passages.jsonl")}},
            "output_type": "loglikelihood",
            "test_split": "test",
            "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
            "doc_to_target": "{{' '+text.split(' ')[-1]}}",
            "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
        },
    )
    return folder


def evaluated(
    task: Path, output: Path, *before: str, processes_: int = 1, simulated: bool = False, **env: str
) -> dict[str, float]:
    """Return the figures that lm-eval writes; ``before`` is the command with the model and its arguments."""
    line = [*before, "--tasks", "local", "--include_path", str(task), "--batch_size", "2"]
    line += ["--output_path", str(output)]
    own: dict[str, Any] = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", **env}
    own["HF_DATASETS_CACHE"] = str(output)
    if simulated:
        done = run_simulated(*tiny.command(*line), timeout=LONGEST, **own)
    else:
        done = processes.run(
            tiny.command(*line, processes=processes_),
            env={**tiny.environment(), **own},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-2000:] + (done.stderr or "")[-4000:]
    (file,) = output.glob("*/results_*.json")
    figures = json.loads(file.read_text())["results"]["local"]
    return {name: figures[f"{name},none"] for name in ("acc", "perplexity")}


@pytest.fixture(scope="module")
def expected(theirs) -> dict[str, float]:
    found = theirs.loglikelihood(requests("loglikelihood", PAIRS[: len(PASSAGES)]))
    mean = sum(value for value, _ in found) / len(found)
    return {"acc": sum(greedy for _, greedy in found) / len(found), "perplexity": math.exp(-mean)}


@pytest.mark.parametrize(
    ("count", "more"),
    [(1, ""), (2, ""), (2, ",tensor_model_parallel_size=2"), (2, ",pipeline_model_parallel_size=2")],
)
def test_the_command_in_one_process_and_two(folders, task, expected, tmp_path, count, more):
    line = ["evaluate", "--model", "megatron_npu", "--model_args", f"load={folders['checkpoint']}{more}"]
    assert evaluated(task, tmp_path, *line, processes_=count) == pytest.approx(expected, rel=1e-5)


def test_our_model_on_a_simulated_npu(folders, task, expected, tmp_path):
    if unavailable():
        pytest.skip(unavailable())
    line = ["evaluate", "--model", "megatron_npu", "--model_args", f"load={folders['checkpoint']}"]
    assert evaluated(task, tmp_path, *line, simulated=True) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("simulated", [False, True], ids=["cpu", "npu"])
def test_lm_evals_own_model_of_megatron_lm_runs_unedited(folders, task, expected, tmp_path, simulated):
    """With a checkpoint of the driver, whose arguments it takes; it computes in bf16 alone."""
    if simulated and unavailable():
        pytest.skip(unavailable())
    tree = checkout("megatron_core", "0.16.1")
    script = Path(lm_eval.__file__).with_name("__main__.py")
    tokenizer = folders["tokenizer"]
    model_args = f"load={folders['checkpoint']},tokenizer_type=GPT2BPETokenizer,seq_length=64"
    model_args += f",vocab_file={tokenizer}/vocab.json,merge_file={tokenizer}/merges.txt"
    line = ["run", str(script), "--model", "megatron_lm", "--model_args", model_args]
    found = evaluated(task, tmp_path, *line, simulated=simulated, MEGATRON_PATH=str(tree))
    mean, wanted = math.log(found["perplexity"]), math.log(expected["perplexity"])
    print(f"mean log-likelihood {-mean:.4f} in bf16, {-wanted:.4f} in fp32")
    assert mean == pytest.approx(wanted, rel=0.02)  # 8 bits of logits near 20
    assert found["acc"] == expected["acc"]


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ({"shape": 1}, "unknown key shape in --model_args"),
        (
            {"max_length": 65},
            "max_length in --model_args must be at most 64, the number of positions of the model, but got",
        ),
        ({"device": "mps"}, "--device must be cpu"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(folders, loaded, argument, told):
    with pytest.raises(UsageError) as caught:
        loaded(load=folders["checkpoint"], **argument)
    assert told in str(caught.value)


def test_the_command_tells_a_wrong_checkpoint_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    monkeypatch.setattr("sys.argv", [])
    line = ["evaluate", "--model", "megatron_npu", "--model_args", f"load={tmp_path}", "--tasks", "piqa"]
    assert cli.main(line) == 2
    assert "no checkpoint" in capsys.readouterr().err.splitlines()[-1]
