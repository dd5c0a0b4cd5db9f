"""Graphs of blocks and batches of few lengths: the same losses, one graph for all layers and lengths."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data.padding import bucketed, buckets
from megatron_npu.finetune.model import caches, compiled_blocks
from megatron_npu.finetune.model.prepare import AdamOptions, accelerated, prepare
from megatron_npu.options.switch_rules import Place, refuse
from megatron_npu.options.switches import Switches
from tests.support import finetune_models as models
from tests.support import train_script

VOCABULARY = 300


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes, **dropout))


def batches() -> list[dict[str, torch.Tensor]]:
    """Return batches of six lengths, each with padding in its second row."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for length in (9, 12, 17, 21, 26, 31):
        ids = torch.randint(5, VOCABULARY, (2, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, length - 3 :] = 0
        made.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return made


def losses(switches: Switches, collate) -> tuple[list[float], list[str], list[int]]:
    """Train twice over the batches; return losses, the ledger, and the graphs that each time compiled."""
    prepared = prepare(
        bert().train(),
        None,
        None,
        switches,
        device=torch.device("cpu"),
        adam=AdamOptions(lr=1e-3),
        clip_grad=1.0,
    )
    counts, found = [compiled_blocks.count_graphs()], []
    for _ in range(2):
        for batch in batches():
            with prepared.accumulating(last=True), prepared.forward_context():
                loss = prepared.model(**collate([batch])).loss
            prepared.backward(loss)
            prepared.step()
            found.append(loss.item())
        counts.append(compiled_blocks.count_graphs())
    return found, prepared.ledger, [after - before for before, after in itertools.pairwise(counts)]


def test_one_graph_serves_all_layers_and_lengths(tmp_path, monkeypatch):
    """Fused operations and graphs together give the losses of plain training."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "graphs"))
    plain, _, none = losses(Switches(), lambda samples: samples[0])
    assert none == [0, 0]
    switches = Switches(fused_ops=True, graph_optimization=True, dynamic_shape=True)
    collate = bucketed(lambda samples: samples[0], buckets(40))
    compiled, ledger, (first, second) = losses(switches, collate)
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert second == 0
    assert first == 1
    assert len(collate.seen) == 3
    assert any("3 blocks, which share one graph, for all batch lengths" in line for line in ledger)
    assert any((tmp_path / "graphs").iterdir())


def test_lengths_that_nobody_pads_share_the_second_graph(without_kernels):
    """As the document's own line has them, which does not ask for dynamic shapes."""
    _, ledger, (first, second) = losses(Switches(graph_optimization=True), lambda samples: samples[0])
    assert (first, second) == (2, 0)
    assert any("once for the first batch length and once for all others" in line for line in ledger)


@pytest.fixture
def without_kernels(monkeypatch):
    """Capture graphs as ever, but run them as they are, which takes no compiler: they are to be counted."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda call, dynamic, options: compile_(call, dynamic=dynamic, backend="eager")
    )
    torch.compiler.reset()
    yield
    torch.compiler.reset()


COUNTED = [
    ("gpt2", {}, 1),  # its cache of keys and values would take one for each layer
    ("gpt2", {"mixed_precision": "bf16", "checkpoint_activations": True}, 1),
    ("bert", {"mixed_precision": "bf16", "dynamic_shape": True, "checkpoint_activations": True}, 1),
    ("bert tokens", {"dynamic_shape": True, "mixed_precision": "bf16"}, 1),
    ("albert", {}, 1),
    ("gpt2", {"lora_rank": 4}, 2),  # what goes into the first layer needs no gradient
]


@pytest.mark.parametrize("fused_ops", [False, True])
@pytest.mark.parametrize(("kind", "words", "graphs"), COUNTED, ids=str)
def test_all_layers_and_steps_have_one_graph(without_kernels, monkeypatch, kind, words, graphs, fused_ops):
    monkeypatch.setattr(models, "LAYERS", 4)
    before = compiled_blocks.count_graphs()
    switches = Switches(graph_optimization=True, fused_ops=fused_ops, **words)
    losses = train_script.run(kind, switches, 3, torch.device("cpu"))
    assert compiled_blocks.count_graphs() - before == graphs
    assert losses == pytest.approx(
        train_script.plain(kind, 3, switches.lora_rank), rel=1e-2 if switches.mixed_precision else 1e-5
    )


def test_modules_of_torch_itself_are_compiled(without_kernels):
    """Dynamo skips torch's own files: what ``nn.Module.compile`` makes of them would have no graph."""
    whole = nn.Sequential(nn.Linear(24, 24), nn.GELU())
    layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)
    for model, batch in (
        (whole, torch.randn(4, 24)),
        (nn.TransformerEncoder(layer, 3), torch.randn(2, 5, 24)),
    ):
        expected = model(batch).detach()
        before = compiled_blocks.count_graphs()
        compiled, _ = accelerated(model.train(), Switches(graph_optimization=True))
        found = compiled(batch.requires_grad_())
        found.square().mean().backward()
        assert 1 <= compiled_blocks.count_graphs() - before <= 2, type(
            model
        )  # the first layer's, and the others'
        torch.testing.assert_close(found.detach(), expected)


class InFp32(nn.Linear):
    """A linear layer that autocast leaves alone."""

    def forward(self, input):
        with torch.autocast("cpu", enabled=False):
            return super().forward(input)


def test_the_backward_pass_of_graphs_is_not_under_autocast():
    """As without them; torch's default rounds in it what the forward pass has not rounded."""
    torch.compiler.reset()
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Sequential(InFp32(24, 40), InFp32(40, 24)) for _ in range(2))
        model, _ = accelerated(nn.Sequential(*layers), Switches(graph_optimization=graphs))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(20, 24)).square().mean()
        loss.backward()
        found.append(layers[0][0].weight.grad)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)


def test_graphs_drop_what_is_dropped_outside_of_them(without_kernels):
    """Our dropout stays in a graph, and draws as without one: the losses of both are the same."""
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = models.gpt2().train()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.2
        model, _ = accelerated(model, Switches(graph_optimization=graphs, fused_ops=True))
        ids = torch.randint(models.VOCABULARY, (2, models.LENGTH), generator=torch.Generator().manual_seed(1))
        torch.manual_seed(2)
        found.append([model(input_ids=ids, labels=ids).loss.item() for _ in range(2)])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0][0] != found[0][1]


class Dropping(nn.Module):
    """A block of few operations: each takes a call of the compiler."""

    def __init__(self):
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(24, 24), nn.Dropout(0.2), nn.Linear(24, 24)

    def forward(self, hidden):
        return self.second(self.dropout(self.first(hidden)))


def test_without_operations_torch_draws_as_outside_of_graphs():
    """Compiled, on a CPU, with activations that are computed again: the losses of plain training."""
    torch.compiler.reset()
    found = []
    for words in ({}, {"graph_optimization": True, "checkpoint_activations": True}):
        torch.manual_seed(0)
        model, _ = accelerated(nn.Sequential(Dropping(), Dropping()).train(), Switches(**words))
        batch = torch.randn(20, 24, generator=torch.Generator().manual_seed(1)).requires_grad_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = compiled_blocks.count_graphs()
        torch.manual_seed(2)
        losses = []
        for _ in range(3):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
        assert compiled_blocks.count_graphs() - before == len(words) // 2
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[0][2] < found[0][0]


@pytest.mark.parametrize("fused_ops", [False, True])
def test_dropout_within_attention_divides_the_graphs_and_the_ledger_says_so(without_kernels, fused_ops):
    torch.manual_seed(0)
    model = models.gpt2().train()
    model.config.attn_pdrop = 0.1
    for block in model.transformer.h:
        block.attn.attn_dropout.p = 0.1
    model, ledger = accelerated(model, Switches(graph_optimization=True, fused_ops=fused_ops))
    before = compiled_blocks.count_graphs()
    ids = torch.randint(models.VOCABULARY, (2, models.LENGTH))
    model(input_ids=ids, labels=ids).loss.backward()
    assert (compiled_blocks.count_graphs() - before > 1) == fused_ops
    assert (
        any(
            "graphs: attention is not compiled, because its dropout masks are generated tile by tile" in line
            for line in ledger
        )
        == fused_ops
    )


def test_a_cache_comes_where_it_is_asked_for():
    prepared = train_script.prepared("gpt2", Switches(), 1, torch.device("cpu"))
    ids = torch.tensor([[1, 2, 3]])
    model = prepared.model.eval()
    assert model(input_ids=ids).past_key_values is None
    first = model(input_ids=ids[:, :2], use_cache=True)
    then = model(input_ids=ids[:, 2:], past_key_values=first.past_key_values)
    torch.testing.assert_close(then.logits[:, -1], model(input_ids=ids).logits[:, -1])
    assert then.past_key_values is not None
    assert model.config.use_cache


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_that_a_call_brings_is_used(name):
    assert caches._without_cache(1, nn.Module(), (), {name: object()})[1].keys() == {name}
    assert caches._without_cache(1, nn.Module(), (), {name: None})[1]["use_cache"] is False


def test_a_batch_is_padded_to_its_bucket_and_counts_as_before():
    collate = bucketed(lambda samples: samples[0], [16, 32], pad_token_id=7)
    batch = batches()[1]
    padded = collate([dict(batch)])
    assert {value.shape for value in padded.values()} == {(2, 16)}
    assert padded["input_ids"][:, 12:].unique().tolist() == [7]
    assert padded["attention_mask"][:, 12:].sum() == 0
    assert padded["labels"][:, 12:].unique().tolist() == [-100]
    model = bert().eval()
    with torch.no_grad():
        assert model(**padded).loss.item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)
    left = bucketed(lambda samples: samples[0], [16], left=True)([dict(batch)])
    assert torch.equal(left["input_ids"][:, 4:], batch["input_ids"])


def test_what_is_filled_in_is_masked_where_no_mask_was():
    padded = bucketed(lambda samples: {"input_ids": torch.ones(2, 5, dtype=torch.long)}, [8])([])
    assert padded["attention_mask"].tolist() == 2 * [[1] * 5 + [0] * 3]


def test_what_has_no_bucket_stays_as_it_is():
    long = {"input_ids": torch.ones(1, 40, dtype=torch.long)}
    assert bucketed(lambda samples: long, [8, 16])([]) is long
    image = {"pixel_values": torch.ones(1, 3, 4, 4)}
    assert bucketed(lambda samples: image, [8])([]) is image


@pytest.mark.parametrize("longest", [1, 15, 16, 100, 4096])
def test_buckets_are_few_and_waste_little(longest):
    lengths = buckets(longest)
    assert lengths[-1] == longest
    assert lengths == sorted(set(lengths))
    assert len(lengths) <= 25
    assert all(b <= 1.5 * a + 8 for a, b in itertools.pairwise(lengths))


def test_bad_lengths_are_refused():
    with pytest.raises(UsageError, match="at least 1"):
        buckets(0)
    with pytest.raises(UsageError, match="positive numbers of tokens"):
        bucketed(list, [])


def test_no_compiler_is_one_line_before_anything_is_loaded(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UsageError, match="requires a C"):
        refuse(Switches(graph_optimization=True), Place("user", "cpu"))


def test_an_npu_has_no_inductor():
    with pytest.raises(UsageError, match="inductor"):
        refuse(Switches(graph_optimization=True), Place("transformers", "npu"))


def test_a_cache_that_cannot_be_written_to_is_one_line(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(file / "below"))
    with pytest.raises(UsageError, match="TORCHINDUCTOR_CACHE_DIR"):
        compiled_blocks.compile_blocks(bert(), dynamic=False)
