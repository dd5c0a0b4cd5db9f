"""A server of a checkpoint whose tokenizer, and chat template, are a stranger's."""

from __future__ import annotations

import functools
import json
import resource
import shutil
import signal
from collections.abc import Iterator

from tests.campaign.accounts import servers, trials
from tests.campaign.accounts.rooms import Room
from tests.campaign.accounts.samples import Samples
from tests.campaign.accounts.trials import DONE, Later, Try, Verdict
from tests.support import ports

_PLACE = "chat templates of another account"
_HUGE = "1000000000"
_GROWING = (
    "{{% set n = namespace(s={start}) %}}{{% for i in range(40) %}}{{% set n.s = {step} %}}{{% endfor %}}"
    "{{{{ n.s|length }}}}"
)
_CASES: dict[str, str] = {
    "plain": "1 2",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a wide filter": f"{{{{ 'a'|center({_HUGE}) }}}}",
    "a wide method": f"{{{{ 'a'.ljust({_HUGE}) }}}}",
    "a wide format": f"{{{{ '%{_HUGE}d'|format(1) }}}}",
    "a wide format of a method": f"{{{{ '{{:>{_HUGE}}}'.format(1) }}}}",
    "a wide operator": f"{{{{ '%{_HUGE}d' % 1 }}}}",
    "a wide indent": f"{{{{ 'a\\nb'|indent({_HUGE}) }}}}",
    "a wide tojson": f"{{{{ [1]|tojson(indent={_HUGE}) }}}}",
    "a wide batch": "{{ [1]|batch(300000000, 'x')|list|length }}",
    "zeros": f"{{{{ '1'.zfill({_HUGE}) }}}}",
    "tabs": f"{{{{ '\\t'.expandtabs({_HUGE}) }}}}",
    "a replacement of itself": "{% set s = ' '.ljust(30000) %}{{ s.replace(' ', s) }}",
    "a filter that replaces": "{% set s = ' '.ljust(30000) %}{{ s|replace(' ', s) }}",
    "a text that joins itself": "{% set s = ' '.ljust(30000) %}{{ s.join(s) }}",
    "a filter that joins": "{% set s = ' '.ljust(30000) %}{{ s|list|join(s) }}",
    "doubling": _GROWING.format(start="'1 '", step="n.s ~ n.s"),
    "adding": _GROWING.format(start="'1 '", step="n.s + n.s"),
    "a list that doubles": _GROWING.format(start="[1]", step="n.s + n.s"),
    "blocks that double": (
        "{% set n = namespace(s='1 ') %}{% for i in range(40) %}{% set t %}{{ n.s }}{{ n.s }}{% endset %}"
        "{% set n.s = t %}{% endfor %}{{ n.s|length }}"
    ),
    "a list of long texts": (
        "{% set n = namespace(s=[]) %}{% for i in range(5000) %}"
        "{% set n.s = n.s + ['a'.ljust(9000000) ~ i] %}{% endfor %}{{ n.s|length }}"
    ),
    "globals": "{{ cycler.__init__.__globals__ }}",
    "a class": "{{ messages|attr('__class__') }}",
    "classes of a map": "{{ [messages]|map(attribute='__class__')|list }}",
    "a format that looks": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "a format of a map": "{{ '{x.__init__.__globals__}'.format_map({'x': cycler}) }}",
    "a format by a filter": "{{ ('{0.__class__}'|attr('format'))(messages) }}",
    "an include": "{% include '/etc/passwd' %}",
    "an import": "{% import '/etc/passwd' as x %}{{ x }}",
    "words": "{{ lipsum(n=1000000) }}",
    "a macro of itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a number": "{{ (10**4000000)|string }}",
    "a power of powers": "{{ 9**9**9**9 }}",
    "a date": "{{ strftime_now('%9999999Y' * 1000) }}",
    "a link": "{{ ('www.' ~ 'a.' * 50000)|urlize }}",
    "tags": "{{ ('<' * 100000)|striptags }}",
    "control characters": "{{ raise_exception('\x1b[2J\x1b]0;x') }}",
    "a surrogate": "{{ '\\ud800' }}",
    "zero bytes": "{{ '\\x00' * 1000 }}",
    "a long text": "{{ '1 ' * 8000000 }}",
    "nothing": "",
    "division by zero": "{{ 1 // 0 }}",
    "exit": "{{ raise_exception.__globals__ }}",
    "changes of messages": "{{ messages.append(1) }}{{ messages.clear() }}",
    "debug": "{% debug %}",
}


def tries(room: Room) -> Iterator[Later | Verdict]:
    """Yield chats, each of which takes another way through the template."""
    samples = Samples(room)
    folder = room.place("chat")
    words = {str(number): number for number in range(300)}
    tokens = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    ways = [(name, text) for name, text in _CASES.items() if not _is_invalid(text)]
    template = "".join(
        f"{{% {'if' if not number else 'elif'} messages[-1].content == {name!r} %}}{text}"
        for number, (name, text) in enumerate(ways)
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "255", "chat_template": f"{template}{{% endif %}}"})
    )
    room.give(folder)
    path = room.temporary / "chatty"
    flags = [word for word in samples.pretrain() if word not in ("--vocab-size", "255")]
    flags += [
        "--tokenizer-type",
        "HuggingFaceTokenizer",
        "--tokenizer-model",
        str(folder),
        "--save",
        str(path),
    ]
    shutil.rmtree(path, ignore_errors=True)
    found = trials.made(room, Try("setup", "a checkpoint", flags, DONE, limit=400))
    if found.verdict != "done":
        raise RuntimeError(f"no checkpoint: {found}")
    port = ports.free_port()
    command = ["serve", "--load", str(path), "--port", str(port)]
    with servers.Server(room, command, port, "/health", _limited) as server:
        for name, _ in ways:
            asked = {"messages": [{"role": "user", "content": name}], "max_tokens": 2}
            sent = servers.post(asked, "/v1/chat/completions")
            yield Later(name, functools.partial(server.tried, _PLACE, servers.Request(name, sent)))
        yield server.ended(_PLACE, "SIGTERM", signal.SIGTERM)


def _limited() -> None:
    """Let what expands without end meet a limit before the machine does."""
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))


def _is_invalid(text: str) -> bool:
    """Return whether Jinja rejects a text, which would spoil the whole template."""
    from jinja2 import Environment, TemplateError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except TemplateError:
        return True
    return False
