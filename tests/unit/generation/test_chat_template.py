"""Chat templates: the text that Transformers makes of them, and nothing that reaches out of the sandbox."""

from __future__ import annotations

import json
import resource
import time

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_npu.base.errors import UsageError
from megatron_npu.generation import chat_template
from megatron_npu.pretrain.flags.plan_parts import TokenizerFlags
from tests.support.tokenizers_made import byte_level

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  To be? "},
    {"role": "assistant", "content": "Not to be."},
    {"role": "user", "content": "Why \u00e9?"},
]
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}\n    {{- '<|im_start|>' + message['role'] + '\\n' + "
        "message['content'] + '<|im_end|>\\n' }}\n{% endfor %}\n{% if add_generation_prompt %}\n"
        "    {{- '<|im_start|>assistant\\n' }}\n{% endif %}"
    ),
    "with a first token": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
        "{{ '<<SYS>>' + messages[0].content }}{% else %}{% set rest = messages %}{% endif %}"
        "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if message.role == 'user' %}"
        "[INST] {{ message.content | trim }} [/INST]{% else %}{{ message.content }}{{ eos_token }}{% endif %}"
        "{% endfor %}"
    ),
    "with json and a break": (
        "{% for message in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{{ message | tojson }}"
        "{% endfor %}{% if tools is none %}no tools{% endif %}"
    ),
}


def folder_with(folder, template=None, **config) -> TokenizerFlags:
    byte_level(special=("<|endoftext|>", "<s>")).save(str(folder / "tokenizer.json"))
    values = {"eos_token": "<|endoftext|>", "bos_token": "<s>", **config}
    if template is not None:
        values["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return TokenizerFlags("HuggingFaceTokenizer", str(folder))


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_text_is_that_of_transformers(tmp_path, template):
    transformers = pytest.importorskip("transformers")
    found = chat_template.of(folder_with(tmp_path, template, tokenizer_class="PreTrainedTokenizerFast"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for messages in (MESSAGES, MESSAGES[1:2], MESSAGES[:3]):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert found.render(messages) == expected
    if "content" in template:
        expected = theirs.apply_chat_template(MESSAGES[:3], tokenize=False, continue_final_message=True)
        assert found.render(MESSAGES[:3], begin_answer=False) == expected


def test_where_a_template_may_be(tmp_path):
    args = folder_with(tmp_path)
    assert chat_template.of(args) is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "a"}))
    assert chat_template.of(args).source == "a"
    several = [{"name": "tool_use", "template": "b"}, {"name": "default", "template": "c"}]
    assert chat_template.of(folder_with(tmp_path, several)).source == "c"
    (tmp_path / "chat_template.jinja").write_text("d")
    assert chat_template.of(args).source == "d"
    assert chat_template.of(TokenizerFlags("GPT2BPETokenizer")) is None


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.nothing.there }}", "nothing"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.__class__.__mro__[-1].__subclasses__() }}", "unsafe"),
        ("{{ raise_exception.__globals__['json'] }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/hostname' %}", "loader"),
        ("{{ range(10 ** 9) | list }}", "range"),
    ],
)
def test_what_a_template_cannot_do_is_told(tmp_path, template, told):
    with pytest.raises(UsageError) as caught:
        chat_template.of(folder_with(tmp_path, template)).render(MESSAGES)
    assert told in str(caught.value).lower()


def test_what_is_no_template_is_told(tmp_path):
    with pytest.raises(UsageError, match="a valid Jinja template"):
        chat_template.of(folder_with(tmp_path, "{% for %}"))


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro again() %}{% for a in range(99999) %}{{ again() }}{% endfor %}{% endmacro %}{{ again() }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ ('a' * 99999999) * 999 }}",
        "{{ [1] * 9999999999 }}",
        "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
        "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    ],
    ids=["loops", "calls", "power", "text", "list", "brackets", "blocks"],
)
def test_a_template_without_end_is_told(tmp_path, monkeypatch, template):
    """The server would answer nobody any more."""
    monkeypatch.setattr(chat_template, "_SECONDS", 0.2)
    begun = time.monotonic()
    with pytest.raises(UsageError, match="chat template"):
        chat_template.ChatTemplate(template, {}).render(MESSAGES)
    assert time.monotonic() - begun < 20


_GROWING = "{% set n = namespace(s=START) %}{% for i in range(60) %}{% set n.s = STEP %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a'|center(1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a'.ljust(width=1000000000) }}",
        "{{ ['a']|map('center', 1000000000)|list }}",
        "{{ '1'.zfill(1000000000) }}",
        "{{ '\\t'.expandtabs(1000000000) }}",
        "{{ 'a\\nb'|indent(1000000000) }}",
        "{{ [1]|tojson(indent=1000000000) }}",
        "{{ [1]|batch(1000000000, 'x')|list }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{w}}'.format(1, w=1000000000) }}",
        "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
        "{% set s = ' '.ljust(90000) %}{{ s.replace(' ', s) }}",
        "{% set s = ' '.ljust(90000) %}{{ s|replace(' ', s) }}",
        "{% set s = ' '.ljust(90000) %}{{ s.join(s) }}",
        "{% set s = ' '.ljust(90000) %}{{ s|list|join(s) }}",
        "{% set s = ' '.ljust(90000) %}{{ s|map('upper')|join(s) }}",
        "{{ 'aaaaaaaaaaaaaaaaaaaa'.ljust(900000, 'a').translate({97: 'b'.ljust(900000)}) }}",
        _GROWING.replace("START", "'1'").replace("STEP", "n.s ~ n.s"),
        _GROWING.replace("START", "'1'").replace("STEP", "n.s + n.s"),
        _GROWING.replace("START", "[1]").replace("STEP", "n.s + n.s"),
        _GROWING.replace("START", "[1]").replace("STEP", "[n.s, n.s]") + "{{ n.s }}",
        _GROWING.replace("START", "['a']").replace("STEP", "n.s + [('a'.ljust(50000000) ~ i)]"),
        _GROWING.replace("START", "['a'.ljust(50000000)]").replace("STEP", "n.s + [n.s[0][i:]]"),
        "{% set n = namespace(s='11') %}{% for i in range(60) %}{% set t %}{{ n.s }}{{ n.s }}{% endset %}"
        "{% set n.s = t %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a'.ljust(10000) }}{% endfor %}",
    ],
)
def test_a_template_that_uses_up_memory_is_told(template, monkeypatch):
    if "s=[1]" in template:  # nothing but the time ends a list of lists
        monkeypatch.setattr(chat_template, "_SECONDS", 1.5)
    found = chat_template.ChatTemplate(template, {})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UsageError, match=r"values that are too large|did not finish"):
        found.render(MESSAGES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_what_templates_do_with_texts_is_as_without_limits():
    """Each is compared with Jinja's own sandbox."""
    template = (
        "{% set n = namespace(s='') %}{% for m in messages %}{% set n.s = n.s ~ m.role ~ ': ' + m.content %}"
        "{% endfor %}{{ n.s[2:] }}{{ n.s[:-1][::2] }}{{ messages|map(attribute='content')|join('\\n')|trim }}"
        "{{ messages|tojson(indent=2) }}{{ '%s and %05d'|format('a', 1700000000) }}{{ '%s' % 1700000000 }}"
        "{{ '{} {:>4}'.format('x', 3) }}{{ n.s.replace('e', 'xy').upper().split(' ')|length }}{{ 1 + 2 * 3 }}"
        "{{ n.s|indent(4) }}{{ ', '.join(['a', 'b']) }}{{ [1, 2][1:] }}{{ 2 ** 10 }}{{ 7 % 4 }}"
        "{% for m in messages|reverse %}{{ loop.index ~ m.role }}{% endfor %}{{ messages[-1]['role'] }}"
        "{% macro twice(t) %}{{ t }}{{ t }}{% endmacro %}{{ twice('ä' * 3) }}{{ 'a'|center(9) }}"
    )
    own = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    own.filters["tojson"] = chat_template._as_json
    expected = own.from_string(template).render(messages=MESSAGES)
    assert chat_template.ChatTemplate(template, {}).render(MESSAGES) == expected
    long = [{"role": "user", "content": "word " * 200_000}]
    assert len(chat_template.ChatTemplate(template, {}).render(long)) > 4_000_000
