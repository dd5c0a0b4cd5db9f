"""Cross-checks: what follows from the flags, and every combination that cannot be."""

from __future__ import annotations

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.flags import arguments, muon_flags, validation
from megatron_npu.pretrain.flags.checks import machine


@pytest.fixture
def check(flags, monkeypatch):
    """Return a function: flags to add, number of processes -> the checked flags."""

    def checked(*changes: str, processes: int = 1):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        return validation.check(arguments.parse(flags(*changes)))

    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    return checked


def test_what_follows_from_the_flags(check):
    args = check("--pipeline-model-parallel-size", "2", processes=4)
    assert (args.kv_channels, args.ffn_hidden_size, args.num_query_groups) == (8, 128, 4)
    assert (args.data_parallel_size, args.num_microbatches) == (2, 2)
    assert (args.tokenizer_vocab_size, args.padded_vocab_size) == (256, 256)
    assert args.use_cpu_initialization


def test_vocabulary_is_padded_to_a_multiple_for_each_tensor_rank(check):
    args = check("--tensor-model-parallel-size", "4", processes=4)
    assert args.padded_vocab_size == 512


def test_swiglu_takes_whole_64s_of_8_thirds(check):
    assert check("--swiglu", "--hidden-size", "768").ffn_hidden_size == 2048


def test_given_flags_are_left_as_they_are(flags, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    args = arguments.parse(flags())
    before = dict(vars(args))
    validation.check(args)
    assert vars(args) == before


ROPE = "--position-embedding-type rope"
YARN = "--position-embedding-type yarn --rotary-scaling-factor 4"


@pytest.mark.parametrize(
    ("changes", "processes", "named"),
    [
        ("--seq-length 33", 1, "--max-position-embeddings 32"),
        ("--num-attention-heads 5", 1, "--num-attention-heads"),
        ("--bf16 --fp16", 1, "--bf16 and --fp16"),
        (
            "--use-rope-scaling",
            1,
            "--use-rope-scaling requires .*but got --position-embedding-type learned_absolute",
        ),
        (f"{ROPE} --rope-scaling-type dynamic", 1, "--rope-scaling-type requires --use-rope-scaling"),
        (f"{ROPE} --yarn-beta-fast 8", 1, "--yarn-beta-fast requires --position-embedding-type yarn"),
        (f"{ROPE} --mscale 2", 1, "--mscale requires --multi-latent-attention"),
        (f"{ROPE} --rotary-seq-len-interpolation-factor 0", 1, "a positive number"),
        (f"{ROPE} --use-rope-scaling --rotary-seq-len-interpolation-factor 2", 1, "mutually exclusive"),
        (f"{ROPE} --use-rope-scaling --rope-scaling-low-freq-factor 4", 1, "less than --rope-scaling-high"),
        (
            f"{YARN} --rotary-percent 0.5",
            1,
            "--rotary-percent 0.5 cannot be used with --position-embedding-type yarn",
        ),
        (f"{YARN} --yarn-beta-slow 64", 1, "at least --yarn-beta-slow"),
        (
            f"{YARN} --use-rope-scaling",
            1,
            "--use-rope-scaling requires .*but got --position-embedding-type yarn",
        ),
        ("--window-attn-skip-freq 2", 1, "--window-attn-skip-freq requires --pre-tockens"),
        ("--pre-tockens 4 --window-attn-skip-freq [1]", 1, r"list 2 layers \(--num-layers\), but it lists 1"),
        (
            "--null-tokenizer-eod-id 256",
            1,
            "--null-tokenizer-eod-id must be at most --vocab-size 255, but got 256",
        ),
        ("--reuse-fp32-param", 1, "--reuse-fp32-param requires bf16 parameters"),
        ("--use-precision-aware-optimizer", 1, "--use-precision-aware-optimizer requires"),
        ("--exp-avg-dtype bf16", 1, "--exp-avg-dtype bf16 requires --use-precision-aware-optimizer"),
        (
            "--bf16 --reuse-fp32-param --use-distributed-optimizer --main-grads-dtype bf16 "
            "--accumulate-allreduce-grads-in-fp32",
            1,
            "--main-grads-dtype bf16 requires .*--bf16 without --accumulate-allreduce-grads-in-fp32",
        ),
        (
            "--bf16 --reuse-fp32-param --zero-3-memory-optimization",
            2,
            "--reuse-fp32-param require Adam .* but got FSDP",
        ),
        ("--bf16 --reuse-fp32-param --cpu-offload", 1, "--cpu-offload"),
        ("--tp-comm-overlap", 1, "--tp-comm-overlap requires an Ascend NPU, but the device is cpu"),
        (
            "--fine-grained-activation-offloading",
            1,
            "--fine-grained-activation-offloading requires .* on the cpu device",
        ),
        ("--offload-modules core_attn", 1, "--offload-modules requires --fine-grained-activation-offloading"),
        (
            "--cp-comm-type a2a+p2p --context-parallel-size 4",
            4,
            "a2a.p2p and --hierarchical-context-parallel-sizes must be passed together",
        ),
        (
            "--cp-comm-type a2a+p2p --context-parallel-size 4 --hierarchical-context-parallel-sizes 2 3",
            4,
            "--hierarchical-context-parallel-sizes must be .* 4, but got 2 3",
        ),
        (
            "--global-batch-size 3 --micro-batch-size 2",
            1,
            "--global-batch-size must be a multiple of .*, but got 3",
        ),
        (
            "--global-batch-size 4 --micro-batch-size 1",
            3,
            "--global-batch-size must be a multiple of .*, but got 4",
        ),
        (
            "--tensor-model-parallel-size 2",
            1,
            "number of processes must be a multiple of .*, but got 1. Start a multiple of 2 processes, "
            "such as `torchrun --nproc-per",
        ),
        ("--tensor-model-parallel-size 3", 3, "--num-attention-heads must be a multiple of .*, but got 4"),
        ("--pipeline-model-parallel-size 4", 4, "--num-layers must be a multiple of .*, but got 2"),
        (
            "--tensor-model-parallel-size 4 --ffn-hidden-size 130",
            4,
            "--ffn-hidden-size must be a multiple of .*, but got 130",
        ),
        ("--group-query-attention --num-query-groups 3", 1, "--num-query-groups"),
        (
            "--tensor-model-parallel-size 2 --group-query-attention",
            2,
            "--num-query-groups must be a multiple of .*, but got 1",
        ),
        (
            "--context-parallel-size 2 --seq-length 30",
            2,
            "--seq-length must be a multiple of 2 x --context-parallel-size = 4, but got 30.",
        ),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 31",
            2,
            r"must be a multiple of --tensor-model-parallel-size \(with --sequence-parallel\) = 2, ",
        ),
        ("--num-virtual-stages-per-pipeline-rank 2", 1, "a --pipeline-model-parallel-size of at least 2"),
        ("--overlap-param-gather", 1, "--use-distributed-optimizer"),
        (
            "--fsdp-memory-optimization --check-weight-hash-across-dp-replicas-interval 1",
            2,
            "cannot be used with FSDP .torch., .*no replicas to compare",
        ),
        ("--min-lr 1", 1, "--min-lr must be .*, but got 1"),
        ("--lr-warmup-iters 6", 1, "--lr-warmup-iters must be .*, but got 6"),
        ("--lr-warmup-iters 1 --lr-warmup-fraction 0.1", 1, "--lr-warmup-fraction"),
        ("--train-samples 24", 1, "exactly one of .*, but got --train-iters 6 and --train-samples 24"),
        ("--epochs 2", 1, "exactly one of .*, but got --train-iters 6 and --epochs 2"),
        ("--lr-decay-samples 24", 1, "--lr-decay-samples cannot be used without --train-samples"),
        ("--lr-warmup-samples 4", 1, "--lr-warmup-samples cannot be used without --train-samples"),
        ("--valid-data-path x", 1, "--data-path and --valid-data-path are mutually exclusive"),
        ("--data-path --valid-data-path x", 1, "requires --train-data-path"),
        ("--data-path --train-data-path 1 x y", 1, "--split '90,10,0' cannot be used with --train-data-path"),
        ("--ckpt-step 3", 1, "--load DIR"),
        ("--lr-decay-style WSD", 1, "--lr-wsd-decay-iters"),
        ("--start-weight-decay 0.1", 1, "--weight-decay-incr-style"),
        ("--recompute-granularity full", 1, "--recompute-method"),
        ("--recompute-method block", 1, "--recompute-granularity full"),
        ("--split 0,1,0", 1, "no document for training"),
        ("--split 1,0,0", 1, "no document for validation"),
        ("--split nine,1", 1, "--split"),
        ("--split=nan,1,0", 1, "finite numbers, .*, none of them negative .*, but got 'nan,1,0'"),
        ("--split=inf,1,0", 1, "finite numbers, .*, none of them negative .*, but got 'inf,1,0'"),
        ("--split=-1,1,0", 1, "finite numbers, .*, none of them negative .*, but got '-1,1,0'"),
        ("--split=0,0,0", 1, "at least one of them positive, but got '0,0,0'"),
        ("--mock-data", 1, "--mock-data and --data-path"),
        ("--save-interval 2", 1, "--save DIR"),
        ("--pre-tockens 4 --attention-backend unfused", 1, "--pre-tockens"),
        ("--vocab-size 100", 1, "token id 255"),
        ("--tokenizer-type GPT2BPETokenizer", 1, "--vocab-file"),
        ("--plot", 1, "--plot"),
    ],
)
def test_what_cannot_be_is_refused(check, changes, processes, named):
    with pytest.raises(UsageError, match=named) as caught:
        check(*changes.split(), processes=processes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("version", "words", "named"),
    [
        ("0.15.3", "--optimizer muon", "megatron-core 0.15.3"),
        (
            "0.16.1",
            "--optimizer muon --muon-coefficient-type simple",
            "quintic with megatron-core 0.16.1, .* but got simple",
        ),
        ("0.17.1", "--optimizer muon --fp16", "muon cannot be used with fp16"),
        ("0.19.2", "--optimizer muon --use-distributed-optimizer", "a distributed optimizer"),
        ("0.19.2", "--optimizer muon --overlap-grad-reduce", "--overlap-grad-reduce"),
        ("0.19.2", "--optimizer muon --muon-momentum 1", "--muon-momentum must be .*, but got 1"),
        ("0.19.2", "--muon-nesterov", "--muon-nesterov requires --optimizer muon"),
        ("0.19.2", "--muon-no-split-qkv", "--muon-no-split-qkv requires"),
    ],
)
def test_what_muon_does_not_do_is_refused(check, monkeypatch, version, words, named):
    monkeypatch.setattr(machine, "require_megatron_core", lambda: version)
    monkeypatch.setattr(muon_flags, "installed", lambda: True)
    with pytest.raises(UsageError, match=named):
        check(*words.split())


def test_muon_needs_its_package(check, monkeypatch):
    monkeypatch.setattr(machine, "require_megatron_core", lambda: "0.17.1")
    monkeypatch.setattr(muon_flags, "installed", lambda: True)
    assert check("--optimizer", "muon", "--bf16").muon_split_qkv
    monkeypatch.setattr(muon_flags, "installed", lambda: False)
    with pytest.raises(UsageError, match=r"pip install .* emerging_optimizers"):
        check("--optimizer", "muon")


def test_interleaving_of_two_stages_needs_overlapped_sends(check):
    changes = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
    args = check(*changes.split(), processes=2)
    assert args.virtual_pipeline_model_parallel_size == 2
    with pytest.raises(UsageError, match="--no-overlap-p2p-communication"):
        check(*changes.split(), "--no-overlap-p2p-communication", processes=2)
    with pytest.raises(UsageError, match="micro batches"):
        check(*changes.split(), "--micro-batch-size", "4", processes=2)


def test_training_needs_data_and_a_learning_rate(flags):
    argv = flags()[: flags().index("--data-path")]
    with pytest.raises(UsageError, match="--data-path"):
        validation.check(arguments.parse(argv))
    argv = flags()
    at = argv.index("--lr")
    with pytest.raises(UsageError, match="--lr"):
        validation.check(arguments.parse(argv[:at] + argv[at + 2 :]))


@pytest.fixture
def check_length(flags, check):
    """Return a function: flags that say how long a run trains -> the checked flags."""
    argv = flags()
    at = argv.index("--train-iters")
    rest = [*argv[:at], *argv[at + 2 :]]
    return lambda *changes: validation.check(arguments.parse([*rest, *changes]))


def test_samples_and_epochs_are_whole_global_batches(check_length):
    by_samples = check_length("--train-samples", "26")
    assert (by_samples.train_iters, by_samples.lr_decay_samples) == (6, 26)
    by_epochs = check_length("--epochs", "3")
    assert by_epochs.train_iters == 3 * by_epochs.epoch_samples // 4
    assert by_epochs.lr_decay_iters == by_epochs.train_iters


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ("", "exactly one of --train-iters, --train-samples, --epochs must be passed, but got none of them"),
        ("--train-samples 3", "--train-samples 3 .*less than one global batch of 4"),
        ("--epochs 1 --global-batch-size 100000", "--epochs 1 amounts to [0-9]+ samples of 32 tokens"),
        ("--epochs 1 --mock-data --data-path", "a dataset of known size"),
        (
            "--train-samples 24 --lr-decay-iters 3",
            "--lr-decay-iters cannot be used with --train-samples.*--lr-decay-samples",
        ),
        (
            "--train-samples 24 --lr-warmup-samples 24",
            "--lr-warmup-samples .*24 samples of the decay, but got 24",
        ),
    ],
)
def test_a_length_that_cannot_be_is_refused(check_length, changes, named):
    with pytest.raises(UsageError, match=named) as caught:
        check_length(*changes.split())
    assert "\n" not in str(caught.value)


def test_a_tokenizer_is_found_in_a_converted_checkpoint_that_has_been_moved(check, tmp_path):
    """Its flags.txt names where the folder was written."""
    words = pytest.importorskip("tokenizers.models").WordLevel({str(word): word for word in range(256)}, "0")
    before, now = tmp_path / "before" / "hf", tmp_path / "now" / "hf"
    now.mkdir(parents=True)
    pytest.importorskip("tokenizers").Tokenizer(words).save(str(now / "tokenizer.json"))
    (now / "tokenizer_config.json").write_text('{"eos_token": "255"}')
    named = ["--vocab-size", "256", "--tokenizer-type", "HuggingFaceTokenizer"]
    named += ["--tokenizer-model", str(before)]
    with pytest.raises(UsageError, match="before"):
        check(*named)
    args = check(*named, "--load", str(now.parent), "--save", str(now.parent))
    assert args.tokenizer_model == str(now)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--hidden-dropout", "1"),
        ("--attention-dropout", "-0.5"),
        ("--adam-beta2", "1.5"),
        ("--clip-grad", "-1"),
        ("--weight-decay", "-1"),
        ("--rotary-base", "0"),
        ("--norm-epsilon", "0"),
        ("--initial-loss-scale", "0"),
        ("--rotary-percent", "1.5"),
        ("--seed", "-5"),
        ("--seed", str(2**32)),
    ],
)
def test_numbers_out_of_range(check, flag, value):
    with pytest.raises(
        UsageError, match=rf"^{flag} must be an? .*(number|integer).*, but got {value}[.0]*\."
    ):
        check(flag, value)


@pytest.mark.parametrize("changes", ["--kv-channels 3", "--rotary-percent 0.1"])
def test_positions_need_channels_that_are_rotated(check, changes):
    """The first ended in a ValueError; the second trained a model without positions."""
    with pytest.raises(UsageError, match="at least one pair of channels"):
        check("--position-embedding-type", "rope", *changes.split())
    check("--position-embedding-type", "rope", "--rotary-percent", "0.25")
