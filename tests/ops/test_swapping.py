"""ops.swap: the same numbers before, with, and after it, for models of Transformers and a user's own.

On the simulated Ascend the same tests say which kernels were launched.
"""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_npu import devices, ops
from megatron_npu.ops import dispatch, norm
from megatron_npu.ops.cross_entropy import cross_entropy as ours
from megatron_npu.ops.linear_cross_entropy import blocks
from megatron_npu.ops.products.linear import faster_than_torch
from megatron_npu.ops.swapping import heads, linears, losses

DEVICE = devices.current().name
torchs = cross_entropy
VOCABULARY = 300  # more than the fewest classes of the loss
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED = {"num_key_value_heads": 2}
LENGTHS = (12, 8, 5)  # of the rows of a batch, which is padded at the right


def text_batch() -> dict[str, torch.Tensor]:
    """Return ids, mask and labels ``[3, 12]``."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, VOCABULARY, (3, 12), generator=generator)
    mask = (torch.arange(12) < torch.tensor(LENGTHS)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def image_batch() -> dict[str, torch.Tensor]:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 2])}


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def bart() -> nn.Module:
    sides = {
        f"{side}_{what}": value
        for side in ("encoder", "decoder")
        for what, value in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))
    }
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=32, dropout=0.0, max_position_embeddings=64, **sides
    )
    return transformers.BartForConditionalGeneration(config)


def gpt2() -> nn.Module:
    dropouts = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, **dropouts)
    return transformers.GPT2LMHeadModel(config)


def vit() -> nn.Module:
    sizes = {**SIZES, **ENCODER, "image_size": 16, "patch_size": 4, "num_labels": 3}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))


def of(family: str, head: str, **options) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    return getattr(transformers, f"{family}For{head}")(config)


# name: (model, batch, what has to be in the ledger)
PARTS = {"norm", "loss", "attention"}
if DEVICE == "cpu" and any(map(faster_than_torch, (torch.float32, torch.bfloat16))):
    PARTS.add("linear")  # torch's own stay on a processor that has nothing faster, such as Intel's with AMX
MODELS = {
    "bert": (lambda: of("Bert", "MaskedLM", **ENCODER), text_batch, PARTS | {"activation"}),
    "roberta": (
        lambda: of("Roberta", "MaskedLM", **ENCODER, max_position_embeddings=70),
        text_batch,
        PARTS,
    ),
    "albert": (lambda: of("Albert", "MaskedLM", **ENCODER, embedding_size=16), text_batch, PARTS),
    "gpt2": (gpt2, text_batch, PARTS | {"activation"}),
    "llama": (lambda: of("Llama", "CausalLM", **GROUPED), text_batch, PARTS | {"rotary", "gated MLP"}),
    # a window of 8 leaves every token of the batch a key: rows without any are not numbers upstream
    "mistral": (
        lambda: of("Mistral", "CausalLM", **GROUPED, sliding_window=8),
        text_batch,
        PARTS | {"rotary", "gated MLP"},
    ),
    "qwen2": (lambda: of("Qwen2", "CausalLM", **GROUPED), text_batch, PARTS | {"rotary", "gated MLP"}),
    "gemma": (lambda: of("Gemma", "CausalLM", **GROUPED, head_dim=8), text_batch, PARTS | {"rotary"}),
    "t5": (t5, text_batch, (PARTS | {"gated MLP"}) - {"attention"}),
    "bart": (bart, text_batch, PARTS),
    "vit": (vit, image_batch, (PARTS | {"activation"}) - {"loss"}),
}


def to_device(batch: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        name: value.to(DEVICE, dtype if value.is_floating_point() else None) for name, value in batch.items()
    }


def losses_and_gradients(model: nn.Module, batch: dict[str, torch.Tensor]):
    """Return loss, logits where there is no padding, and all gradients, in fp64 on the host."""
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    logits = output.logits.detach().cpu().double()
    if "attention_mask" in batch:
        logits = logits[batch["attention_mask"].cpu().bool()]
    gradients = {n: p.grad.cpu().double() for n, p in model.named_parameters() if p.grad is not None}
    return output.loss.item(), logits, gradients


def assert_same(ours, right, share: float) -> None:
    """Compare with the largest value of each; a gradient that is zero but for rounding, with all others'."""
    assert ours[0] == pytest.approx(right[0], rel=share)
    assert (ours[1] - right[1]).abs().max() <= share * right[1].abs().max()
    largest = max(gradient.abs().max() for gradient in right[2].values())
    assert ours[2].keys() == right[2].keys()
    for name, gradient in right[2].items():
        scale = max(gradient.abs().max(), 1e-2 * largest)
        assert (ours[2][name] - gradient).abs().max() <= share * scale, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_numbers_with_and_after_it(name, dtype):
    make, batch_of, expected_parts = MODELS[name]
    torch.manual_seed(1)
    model = make().to(DEVICE, dtype).train()
    batch = to_device(batch_of(), dtype)
    right = losses_and_gradients(model, batch)
    implementation = model.config._attn_implementation
    swapped = ops.swap(model)
    assert ops.swap(model) is swapped
    ours = losses_and_gradients(model, batch)
    # 8 %: Transformers rounds T5's GELU to bf16 in each of its nine steps
    assert_same(ours, right, 2e-5 if dtype is torch.float32 else 8e-2)
    assert {entry.what for entry in swapped.ledger if entry.by} >= expected_parts
    assert all(bool(entry.by) != bool(entry.why_not) for entry in swapped.ledger)
    swapped.undo()
    assert model.config._attn_implementation == implementation
    assert not any(
        {"forward", "_swapped_parts", "_loss_function"} & vars(module).keys() for module in model.modules()
    )
    again = losses_and_gradients(model, batch)
    assert again[0] == right[0]
    assert all(torch.equal(again[2][key], value) for key, value in right[2].items())


def test_fp64_shows_that_only_rounding_differs():
    if DEVICE == "npu":
        return  # it has no fp64
    for name in ("bert", "bart"):
        torch.manual_seed(1)
        model = MODELS[name][0]().double()
        batch = to_device(text_batch(), torch.float64)
        right = losses_and_gradients(model, batch)
        ops.swap(model)
        assert_same(losses_and_gradients(model, batch), right, 1e-12)


def test_a_cache_gives_the_tokens_of_the_whole_text():
    """One token at a time, after a prompt, with grouped heads and a window shorter than the text."""
    torch.manual_seed(2)
    model = of("Mistral", "CausalLM", **GROUPED, sliding_window=4).to(DEVICE).eval()
    ids = text_batch()["input_ids"][:2].to(DEVICE)
    with torch.no_grad():
        right = model(input_ids=ids).logits
        ops.swap(model)
        first = model(input_ids=ids[:, :6], use_cache=True)
        parts, cache = [first.logits], first.past_key_values
        for position in range(6, ids.size(1)):
            step = model(input_ids=ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            parts.append(step.logits)
    torch.testing.assert_close(torch.cat(parts, 1), right, rtol=0, atol=2e-5)


def test_dropout_drops_weights_and_values():
    """Others each time, the same from the same state; the mean over many is what nothing dropped gives."""
    torch.manual_seed(3)
    model = of("Bert", "MaskedLM", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2).to(DEVICE)
    batch = to_device(text_batch(), torch.float32)
    ops.swap(model)

    def logits(seed: int) -> torch.Tensor:
        devices.current().manual_seed(seed)
        with torch.no_grad():
            return model.train()(**batch).logits[0]

    assert torch.equal(logits(1), logits(1))
    assert not torch.equal(logits(1), logits(2))
    with torch.no_grad():
        whole = model.eval()(**batch).logits[0]
    mean = torch.stack([logits(seed) for seed in range(30)]).mean(0)
    assert (mean - whole).abs().mean() < 0.5 * (logits(1) - whole).abs().mean()


class Own(nn.Module):
    """A user's encoder, with torch's layers, a causal layer that calls SDPA, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.causal = Causal()
        self.norm = nn.RMSNorm(32)
        self.head = nn.Linear(32, VOCABULARY)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        logits = self.head(self.norm(self.causal(hidden)))
        loss = self.loss(logits.flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.MaskedLMOutput(loss=loss, logits=logits)


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


def test_a_users_own_model():
    torch.manual_seed(4)
    model = Own().to(DEVICE)
    batch = to_device(text_batch(), torch.float32)
    right = losses_and_gradients(model, batch)
    swapped = ops.swap(model)
    assert_same(losses_and_gradients(model, batch), right, 2e-5)
    by = {entry.where: entry.by for entry in swapped.ledger}
    assert by["encoder.layers.1.self_attn"] == by["causal"] == "attention"
    assert by["norm"] == "rms_norm"
    assert by["encoder.layers.0.norm1"] == "layer_norm"
    assert by["loss"].startswith("cross_entropy")
    model.eval()
    with torch.no_grad():  # torch's own path for inference looks at the layers from outside
        ours = model(**batch).loss.item()
    assert ours == pytest.approx(right[0], rel=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_under_autocast_is_fp32_as_torchs(reduction):
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(6, VOCABULARY, generator=generator).to(DEVICE, torch.bfloat16)
    target = torch.tensor([1, 2, -100, 3, 4, 299], device=DEVICE)
    theirs, ours = (nn.CrossEntropyLoss(reduction=reduction) for _ in range(2))
    ops.swap(ours)
    with torch.autocast(DEVICE, torch.bfloat16):
        right, loss = theirs(logits, target), ours(logits, target)
    assert loss.dtype is right.dtype is torch.float32
    # torch_npu rounds within torch's own loss, as if there were no autocast
    torch.testing.assert_close(loss, theirs(logits.float(), target), rtol=1e-5, atol=1e-5)
    assert ours(logits, target).dtype is theirs(logits, target).dtype is torch.bfloat16


class Outer(nn.Module):
    """A loss by its bare name, around a module with one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss()

    def forward(self, logits, target):
        return cross_entropy(logits, target), self.inner(logits, target), F.cross_entropy(logits, target)


def test_functions_are_torchs_again_behind_a_forward(monkeypatch):
    model, given = Outer(), (torch.randn(4, VOCABULARY).to(DEVICE), torch.tensor([1, 2, 3, 4], device=DEVICE))
    right, calls = model(*given), []
    monkeypatch.setattr(losses, "cross_entropy", lambda *args: calls.append(1) or ours(*args))
    ops.swap(model)
    torch.testing.assert_close(model(*given), right)
    assert len(calls) >= 3
    with pytest.raises(AttributeError):
        model(None, None)
    assert cross_entropy is F.cross_entropy is torchs


def test_threads_whose_forwards_overlap_do_not_touch_each_others_functions(monkeypatch):
    """The first to begin ends first: what the second found and would put back is the replacement."""
    inside, outside = threading.Barrier(2, timeout=60), threading.Event()
    callers: list[str] = []
    monkeypatch.setattr(losses, "cross_entropy", lambda *args: callers.append(_thread()) or ours(*args))

    class Meeting(nn.Module):
        def forward(self, x, y):
            loss = F.cross_entropy(x, y)
            inside.wait()
            if _thread() == "second":
                assert outside.wait(60)
            return loss

    given = torch.randn(4, VOCABULARY).to(DEVICE), torch.tensor([1, 2, 3, 4], device=DEVICE)
    names = ("first", "second")
    models = [Meeting() for _ in names]
    for model in models:
        ops.swap(model)
    threads = [threading.Thread(target=models[i], args=given, name=name) for i, name in enumerate(names)]
    for thread in threads:
        thread.start()
    threads[0].join(60)
    F.cross_entropy(*given)  # of a thread that has no such forward
    outside.set()
    threads[1].join(60)
    assert sorted(callers) == ["first", "second"]
    assert cross_entropy is F.cross_entropy is torchs


def _thread() -> str:
    return threading.current_thread().name


class LargestTensor(TorchDispatchMode):
    """Notes the most numbers that a result of torch has (masks are none), and whose operations are called."""

    values = 0

    def __init__(self) -> None:
        super().__init__()
        self.namespaces: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.namespaces.add(function.namespace)
        if isinstance(result, torch.Tensor) and result.is_floating_point():
            self.values = max(self.values, result.numel())
        return result


HEADS = {  # name: (model, its output layer, one of how many tokens does not count)
    "no bias": (("Llama", "CausalLM"), GROUPED, "lm_head", 7),
    "bias": (("Bert", "MaskedLM"), ENCODER, "cls.predictions.decoder", 2),
}


def _renames(forward):
    @functools.wraps(forward)
    def call(*args, **kwargs):
        return forward(*args, **kwargs)

    return call


def _asks_the_class(forward):
    @functools.wraps(forward)
    def call(module, *args, **kwargs):
        return type(module).forward.__wrapped__(module, *args, **kwargs)

    return call


@pytest.mark.parametrize(("wrap", "replaced"), [(_renames, True), (_asks_the_class, False)])
def test_rotary_embeddings_of_wrapped_layers(wrap, replaced, monkeypatch):
    """Transformers 5.24 wraps its layers; who calls what it wraps in a way of its own is left alone."""
    model = MODELS["llama"][0]().to(DEVICE)
    kind = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(kind, "forward", wrap(kind.forward))
    batch = to_device(text_batch(), torch.float32)
    right = losses_and_gradients(model, batch)
    ledger = ops.swap(model).ledger
    assert_same(losses_and_gradients(model, batch), right, 2e-5)
    (found,) = {bool(entry.by) for entry in ledger if entry.what == "rotary"}
    assert found == replaced


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("head", [*HEADS] if DEVICE == "cpu" else ["no bias"])
def test_training_makes_no_logits_unless_they_are_asked_for(head, autocast, monkeypatch):
    """Losses of some steps as without; what a step makes at most; its logits before it is over, and after."""
    family, options, layer, share = HEADS[head]
    tokens, words = 144, 1 << 14  # more logits than a block of the operation on a cpu
    monkeypatch.setattr(blocks, "_LOGITS", blocks._LOGITS_ON_CPU)
    torch.manual_seed(4)
    model = of(*family, **options, vocab_size=words, hidden_size=8).to(DEVICE)
    twin = copy.deepcopy(model)
    ids = torch.randint(5, words, (4, tokens // 4), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    labels = ids.masked_fill(ids % share == 0, -100)
    swapped = ops.swap(model)
    curves, largest = [], []
    for each in (model, twin):
        optimizer, losses_ = torch.optim.SGD(each.parameters(), lr=0.5), []
        for _ in range(3):
            with LargestTensor() as mode, torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                output = each(input_ids=ids, labels=labels)
                output.loss.backward()
            losses_.append(output.loss.item())
            largest.append(mode.values)
            assert DEVICE == "cpu" or "mkldnn" not in mode.namespaces  # operations of the host
            optimizer.step()
            optimizer.zero_grad()
        curves.append(losses_)
    assert curves[0] == pytest.approx(curves[1], rel=2e-3 if autocast else 1e-6)
    assert curves[1][0] - curves[1][-1] > 0.05
    assert max(largest[:3]) < tokens * words <= min(largest[3:])
    assert f"output layer {layer}: linear_cross_entropy, fused with the loss" in swapped.lines()
    if autocast:
        return  # the weights of the two are apart by now
    output = model(input_ids=ids, labels=labels)
    assert output.logits.shape == (4, tokens // 4, words)
    (output.logits.square().mean() + output.loss).backward()
    right = twin(input_ids=ids, labels=labels)
    (right.logits.square().mean() + right.loss).backward()
    gradients = [each.get_output_embeddings().weight.grad for each in (model, twin)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-7)
    reason = f"output layer {layer} stays: a training step reads or changes its logits"
    assert reason in swapped.lines()
    output = model(input_ids=ids, labels=labels)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    with pytest.raises(RuntimeError, match=r"Read the logits before optimizer\.step"):
        output.logits.argmax(-1)
    with torch.no_grad():
        assert type(model(input_ids=ids).logits) is torch.Tensor
    model.get_output_embeddings().register_forward_hook(lambda *_: None)
    assert type(model(input_ids=ids).logits) is torch.Tensor


def test_logits_that_are_changed_count_as_they_are():
    """In place, through a view: the loss is of what is there now."""
    layer = nn.Linear(8, 300).to(DEVICE)
    logits = heads.Unmade(layer, torch.randn(2, 3, 8, device=DEVICE), layer.weight, layer.bias)
    rows, target = logits.view(-1, 300), torch.arange(6, device=DEVICE)
    assert type(rows) is heads.Unmade
    unchanged = rows.losses(target, -100)
    torch.testing.assert_close(unchanged, F.cross_entropy(layer(rows._hidden), target, reduction="none"))
    logits.zero_()
    assert rows.losses(target, -100) is None
    assert not rows.any()


def test_labels_that_are_no_words_are_told_as_by_torch():
    if DEVICE != "cpu":
        return  # a device says so later, or not at all
    model = of("Llama", "CausalLM", **GROUPED)
    ops.swap(model)
    ids = text_batch()["input_ids"]
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=ids, labels=ids + VOCABULARY)
    with pytest.raises((ValueError, RuntimeError)):
        model(input_ids=ids, labels=ids[:, :4])


def test_what_stays_is_named_with_the_reason():
    class LookAlikeNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x):
            return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)

    parts = {
        "no_bias": nn.LayerNorm(8, bias=False),
        "look_alike": LookAlikeNorm(),
        "extra_key": nn.MultiheadAttention(8, 2, add_bias_kv=True),
        "quick": transformers.activations.QuickGELUActivation(),
        "smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
        "taken": nn.LayerNorm(8),
    }
    model = nn.ModuleDict(parts)
    model["taken"].forward = lambda x: x
    ledger = {entry.where: entry for entry in ops.swap(model).ledger}
    for name, reason in (
        ("no_bias", "no bias"),
        ("look_alike", "something other than RMS norm"),
        ("extra_key", "adds keys"),
        ("quick", "neither form of GELU"),
        ("smoothing", "label smoothing"),
        ("taken", "replaced already"),
    ):
        assert reason in ledger[name].why_not
        assert not ledger[name].by
    assert any(line.startswith("norm no_bias stays: ") for line in ops.swap(model).lines())


def test_a_loss_over_few_classes_stays():
    def loss_of(head: str, **options) -> tuple[str, str]:
        ledger = ops.swap(of("Bert", head, **ENCODER, **options)).ledger
        return next((entry.by, entry.why_not) for entry in ledger if entry.what == "loss")

    assert loss_of("SequenceClassification", num_labels=2) == (
        "",
        "2 classes: below 256, torch's own loss is as fast",
    )
    assert loss_of("TokenClassification", num_labels=300)[0].startswith("cross_entropy")
    assert loss_of("QuestionAnswering")[0].startswith("cross_entropy")  # over the places of a text


def test_attention_weights_are_still_to_be_had(monkeypatch):
    """The operation has none: torch's own layer runs, and the ledger says so."""
    monkeypatch.setattr(dispatch, "fallbacks", {})
    layer = nn.MultiheadAttention(32, 4, batch_first=True).to(DEVICE)
    x = torch.randn(2, 5, 32, device=DEVICE)
    right = layer(x, x, x)
    swapped = ops.swap(layer)
    ours = layer(x, x, x)
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b)
    assert [entry.why_not for entry in swapped.ledger if entry.what == "attention"] == [
        "the attention weights are requested (need_weights)"
    ]


def test_a_copy_has_operations_of_its_own():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).to(DEVICE)
    ops.swap(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
    x = torch.randn(3, 8, device=DEVICE)
    assert twin[0](x).abs().max() == 0
    assert model[0](x).abs().max() > 0


@pytest.mark.skipif(DEVICE != "npu", reason="there is nothing to launch without an NPU")
def test_the_kernels_of_an_npu_are_launched():
    from megatron_npu.sim import counting

    torch.manual_seed(5)
    model = MODELS["llama"][0]().to(DEVICE, torch.bfloat16)
    batch = to_device(text_batch(), torch.bfloat16)

    def launched():
        with counting() as counts:
            losses_and_gradients(model, batch)
        return counts

    before = launched()
    ops.swap(model)
    after = launched()
    for kernel in ("npu_fusion_attention", "npu_rms_norm", "npu_swiglu", "npu_rotary_mul"):
        assert any(kernel in name for name in after.launches), kernel
        # torch_npu's SDPA is the fused attention, too; the rest is torch's small kernels there
        assert kernel == "npu_fusion_attention" or not any(kernel in name for name in before.launches), kernel
    assert after.total_launches < before.total_launches


def test_it_steps_aside_where_operations_are_bound_to_another_device(monkeypatch):
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.1))
    ops.swap(model)
    other = devices.CudaDevice() if DEVICE != "cuda" else devices.CpuDevice()
    monkeypatch.setattr(devices, "current", lambda: other)
    for room, name in ((norm, "_layer_norm"), (linears, "linear"), (linears, "dropout")):
        monkeypatch.setattr(room, name, None)
    assert model(torch.randn(3, 8)).shape == (3, 8)
