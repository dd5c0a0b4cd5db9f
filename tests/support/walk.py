"""Execute the commands of a page as in a user's shell, with samples in place of network downloads.

A clone is a copy of a tree that is there, a download a small file, an installation nothing. Everything else
is what the page says.
"""

from __future__ import annotations

import bz2
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tests.support import bytecode, stock_lm
from tests.support.tiny import ROOT

KNOWN = [
    "b a a c a",
    "c a d a",
    "a a a",
    "x y a z a",
    "a b c d e a",
    "m a a a n a",
    "t a u a v a",
    "f g h i j k a",
]
LINES = [*KNOWN, "a b a q", "a a a r", "c a z", "a k a s t"]


# -- the text of a page --------------------------------------------------------------------------------------


def blocks_of_page(text: str) -> list[str]:
    """Return the bash blocks of a page, in order."""
    return re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)


def commands_of_page(text: str) -> list[str]:
    """Return the command lines in the bash blocks of a page, in order; continued lines are joined."""
    lines = "".join(blocks_of_page(text)).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def bare(command: str) -> str:
    """Return a command without its comment, and with single blanks between its words."""
    return " ".join(command.partition(" #")[0].split())


Run = Callable[..., subprocess.CompletedProcess[str]]


class Walk:
    """A user's shell in an empty folder, into which commands are typed.

    What they export lasts, and so does the folder that they change into.

    Args:
        commands: what is typed, in order; each may have several lines, of which the first that fails ends it.
        trees: the Megatron-LM that ``git clone`` gets, by the version in its command line; "" is any other.
        folder: an empty folder.
        run: runs a command given as its words, with changes to the environment given by name.
        settings: of the environment.
        before: called with each command and the folder before it is typed: does what the page tells in words.
    """

    def __init__(
        self,
        commands: list[str],
        trees: Mapping[str, Path],
        folder: Path,
        run: Run,
        settings: Mapping[str, str],
        before: Callable[[str, Path], None] = lambda command, home: None,
    ) -> None:
        self.commands, self._run, self._before = commands, run, before
        self._results: list[subprocess.CompletedProcess[str]] = []
        self.home, self._state = folder / "home", folder / "state"
        self.home.mkdir()
        write_sentence_model(folder / "nltk")
        write_downloads(folder / "downloads")
        write_programs(folder / "bin", trees, folder)
        self._settings = {
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "NLTK_DATA": str(folder / "nltk"),
            "MEGATRON_LM_PATH": "",
            **bytecode.elsewhere(),
            **settings,
        }

    def output(self, number: int) -> str:
        """Run the commands up to this one, check that it succeeded, and return its output."""
        while len(self._results) <= number:
            if all(result.returncode == 0 for result in self._results):
                self._results.append(self._type(self.commands[len(self._results)]))
            else:
                self._results.append(self._results[-1])
        return stock_lm.succeeded(self._results[number])

    def outputs(self, *words: str) -> list[str]:
        """Return the output of each command that contains all of ``words``."""
        numbers = [number for number, line in enumerate(self.commands) if all(word in line for word in words)]
        return [self.output(number) for number in numbers]

    def _type(self, command: str) -> subprocess.CompletedProcess[str]:
        self._before(command, self.home)
        begin = f". '{self._state}'" if self._state.exists() else f"cd '{self.home}'"
        # which interpreter a command has is ``run``'s choice for each
        lasting = "export -p | grep -vE '^declare -x PYTHON(_EXEC)?='"
        end = f"{{ {lasting}; echo \"cd '$PWD'\"; }} > '{self._state}'"
        return self._run("bash", "-c", f"set -e\n{begin}\n{command}\n{end}", **self._settings)


def write_programs(folder: Path, trees: Mapping[str, Path], home: Path) -> None:
    """Write what stands for the programs that need a network, and for our own, started by ``$PYTHON``."""
    folder.mkdir()
    git, project = shutil.which("git"), home / "project"
    lay_out_project(project)
    choices = "\n".join(f"*{version}*) tree={tree} ;;" for version, tree in trees.items())
    own = "commit.gpgsign=false -c user.name=tests -c user.email=tests@localhost"
    scripts = {
        "git": f"""[ "$1" = clone ] || exec {git} "$@"
            case "$*" in {choices}
            esac
            for name in "$@"; do :; done
            case "$name" in megatron_npu) exec cp -r {project} megatron_npu ;; *:*) name=Megatron-LM ;; esac
            cp -r "$tree" "$name" && cd "$name"
            [ -d .git ] || {{ {git} init -q . && {git} add -A . && {git} -c {own} commit -qm stock; }}""",
        "pip": 'echo "pip $*"',
        "pip3": 'echo "pip3 $*"',
        "wget": f"""to=
            if [ "$1" = -O ]; then to=$2; shift 2; fi
            exec cp "{home}/downloads/${{1##*/}}" "${{to:-.}}\"""",
        "python": f"""case "$*" in *fetch.fetch*) exec cp -r "{home}/downloads" data ;; esac
            exec "$PYTHON" "$@\"""",
        "python3": f"""[ "$2" != venv ] || {{ mkdir -p .venv/bin && exec touch .venv/bin/activate; }}
            exec {sys.executable} "$@\"""",
        "torchrun": 'exec "$PYTHON" -m torch.distributed.run "$@"',
        "megatron-npu": 'exec "$PYTHON" -m megatron_npu "$@"',
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o700)


def lay_out_project(project: Path) -> None:
    """Lay this project out in a folder as a clone would be, with GPT-2's vocabulary put there by the user."""
    project.mkdir()
    for name in ("megatron_npu", "patches", "scripts", "demo"):
        (project / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "tests_gpt", project / "tests_gpt", ignore=shutil.ignore_patterns("checkpoint*"))
    (project / "test_gpt").symlink_to("tests_gpt")
    (project / "tests").mkdir()
    for script in (ROOT / "tests").glob("*.sh"):
        shutil.copy(script, project / "tests")
    write_gpt_vocabulary(project)


# -- samples ------------------------------------------------------------------------------------------------


def write_gpt_vocabulary(folder: Path) -> None:
    """Write a vocabulary in which " a" is one token, under the names of GPT-2's."""
    tokens, merges = stock_lm.write_vocabulary(folder, merges=["\u0120 a"])
    tokens.rename(folder / "gpt2-vocab.json")
    merges.rename(folder / "gpt2-merges.txt")


def write_lambada(file: Path) -> None:
    """Write the passages."""
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))


def write_sentence_model(folder: Path) -> None:
    """Write a model of nltk's sentence splitter for English that knows one abbreviation."""
    english = folder / "tokenizers" / "punkt_tab" / "english"
    english.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (english / name).write_text("mr\n" if name == "abbrev_types.txt" else "")


def write_downloads(folder: Path) -> None:
    """Write a small Wikipedia, the vocabularies of its letters, and passages, as pages download them."""
    folder.mkdir()
    generator = np.random.RandomState(0)
    articles = [article(generator) for _ in range(200)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in articles))
    pages = "".join(map(page, range(200), articles))
    dump = f'<mediawiki xml:lang="en">\n{SITE}{pages}</mediawiki>\n'
    (folder / "enwiki-latest-pages-articles.xml.bz2").write_bytes(bz2.compress(dump.encode()))
    letters = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *letters]
    (folder / "bert-large-uncased-vocab.txt").write_text("\n".join(words) + "\n")
    write_gpt_vocabulary(folder)
    write_lambada(folder / "lambada_test.jsonl")


SITE = """<siteinfo>
<base>https://en.wikipedia.org/wiki/Main_Page</base>
<namespaces>
<namespace key="10" case="first-letter">Template</namespace>
</namespaces>
</siteinfo>
"""


def article(generator: np.random.RandomState) -> str:
    """Return ten sentences; nine in ten of their words are "a"."""
    letters = [chr(ord("a") + letter) for letter in generator.randint(26, size=20)]
    words = np.where(generator.rand(10, 20) < 0.9, "a", letters)
    return " ".join(f"A {' '.join(sentence)}." for sentence in words)


def page(number: int, text: str) -> str:
    """Return an article as a dump has it."""
    return (
        f"<page>\n<title>Article {number}</title>\n<ns>0</ns>\n<id>{number + 1}</id>\n<revision>\n"
        f"<id>{number + 1}</id>\n<text xml:space=\"preserve\">'''{text[0]}'''{text[1:]} [[Category:Letters]]"
        "</text>\n</revision>\n</page>\n"
    )
