"""The page of a run: what it is told, where it is served, and what a browser makes of it."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from megatron_npu.base.arg_parser import Unfit
from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.pretrain.report.dashboard import command, snapshot
from megatron_npu.serving import command as serving
from megatron_npu.web import address
from megatron_npu.web.address import Address
from tests.conftest import LONGEST, ROOT, on_a_leash, wait_until
from tests.support import browser

PAGE = ROOT / "megatron_npu" / "pretrain" / "report" / "dashboard" / "page"
START = {
    "event": "start",
    "iteration": 0,
    "world_size": 2,
    "device": "cpu",
    "train_iters": 40,
    "global_batch_size": 4,
    "seq_length": 32,
}


def train_row(iteration, losses, **changes):
    values = {
        "event": "train",
        "iteration": iteration,
        "losses": losses,
        "loss": losses[-1],
        "learning_rate": 1e-3,
        "tokens_per_second": 128.0,
        "peak_memory_bytes": 3 << 30,
        "grad_norm": 1.5,
        "utilization": 0.75,
    }
    return values | changes


def append(path, *rows):
    with open(path, "a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "my-run" / "metrics.jsonl"
    path.parent.mkdir()
    append(path, START, train_row(2, [5.0, 4.0]))
    return path


def state_of(run):
    return json.loads(run.snapshot(at_once=True)[1])


def test_the_state_of_a_run(metrics):
    run = snapshot.Run(metrics, "my-run")
    state = state_of(run)
    assert (state["name"], state["iteration"], state["train_iters"]) == ("my-run", 2, 40)
    assert state["curves"]["loss"] == {"x": [1, 2], "y": [5.0, 4.0]}
    assert state["seconds_left"] == 38 * 4 * 32 / 128
    assert state["ended_by"] is None
    texts = [{"event": "sample", "iteration": n, "prompt": "a", "text": f"b{n}"} for n in range(30)]
    append(metrics, {"event": "validation", "iteration": 2, "loss": 4.5, "training_loss": 4.25}, *texts)
    append(metrics, {"event": "end", "iteration": 2, "ended_by": "signal"})
    state = state_of(run)
    assert (state["latest"]["validation"], state["curves"]["evaluated"]["y"]) == (4.5, [4.25])
    assert (state["ended_by"], state["seconds_left"]) == ("signal", None)
    assert [sample["text"] for sample in state["samples"]] == [f"b{n}" for n in range(29, 9, -1)]
    append(metrics, START | {"iteration": 1})  # it goes on from there
    state = state_of(run)
    assert (state["iteration"], state["ended_by"], state["curves"]["loss"]["x"]) == (1, None, [1])


@pytest.mark.parametrize(
    "change",
    [
        *(
            {name: value}
            for name in ("epoch", "tflops_per_device")
            for value in ("x", math.nan, [1], 10**400)
        ),
        {"loss": "low"},
        {"consumed_samples": True},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_value_that_is_none_is_left_out_alone(metrics, change):
    append(metrics, train_row(4, [3.0, 2.0], **change))
    text = snapshot.Run(metrics, "my-run").snapshot(at_once=True)[1]
    state = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert state["latest"][next(iter(change))] is None
    assert (state["iteration"], state["curves"]["loss"]["y"][-1]) == (4, 2.0)


@pytest.mark.parametrize("change", [{"device": 3}, {"world_size": "x"}, {"train_iters": []}], ids=str)
def test_what_a_run_began_with_is_looked_at(metrics, change):
    append(metrics, START | change, train_row(4, [3.0, 2.0]))
    state = state_of(snapshot.Run(metrics, "my-run"))
    assert state[next(iter(change))] in (None, START[next(iter(change))])
    assert state["iteration"] == 4


def test_a_state_has_a_number_of_its_own_and_is_not_made_twice(metrics, monkeypatch):
    made = []
    monkeypatch.setattr(snapshot, "_state", lambda history: made.append(1) or {})
    run = snapshot.Run(metrics, "x")
    assert run.snapshot(at_once=True)[0] == run.snapshot(at_once=True)[0] == 1
    append(metrics, train_row(3, [3.0]))
    assert run.snapshot(at_once=True)[0] == 2
    assert len(made) == 2


def test_a_long_curve_becomes_means_and_extremes():
    points = {number: float(number % 10) for number in range(1, 10_001)}
    curve = snapshot.thinned(points, most=100)
    assert len(curve["x"]) == len(curve["y"]) == 100
    assert curve["x"][-1] == 10_000
    assert set(curve["y"]) == {4.5}
    assert (set(curve["low"]), set(curve["high"])) == ({0.0}, {9.0})
    assert snapshot.thinned({3: 1.0, 1: 2.0}) == {"x": [1, 3], "y": [2.0, 1.0]}
    assert snapshot.thinned({}) == {"x": [], "y": []}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8000", Address("127.0.0.1", 8000)),
        ("0.0.0.0:0", Address("0.0.0.0", 0)),
        ("[::1]:80", Address("::1", 80)),
        ("localhost:1", Address("localhost", 1)),
    ],
)
def test_addresses(text, expected):
    assert address.address(text) == expected
    assert expected.is_loopback == (expected.host != "0.0.0.0")


@pytest.mark.parametrize("text", ["", "x", "host:", "65536", "-1", "host:port"])
def test_what_is_no_address(text):
    with pytest.raises(Unfit, match="a port from 0 to 65535"):
        address.address(text)


def test_an_address_has_one_form_and_its_former_spellings_are_hidden():
    dashboard, serve = command.parser(), serving.parser()
    asked = dashboard.parse_args(["runs", "--port", "[::1]:80"])
    assert asked.port == dashboard.parse_args(["runs", "--at", "[::1]:80"]).port == Address("::1", 80)
    assert dashboard.parse_args(["runs"]).port == Address("127.0.0.1", 0)
    apart = serve.parse_args(["--load", "gpt", "--host", "0.0.0.0", "--port", "80"])
    together = serve.parse_args(["--load", "gpt", "--port", "0.0.0.0:80"])
    assert serving.listening_at(apart.port, apart.host) == together.port
    assert str(serve.parse_args(["--load", "gpt"]).port) == "127.0.0.1:8000"
    for parser, hidden in ((dashboard, "--at"), (serve, "--host")):
        assert "--port [HOST:]PORT" in parser.format_help()
        assert hidden not in parser.format_help()
        with pytest.raises(UsageError, match="matches no flag"):
            parser.help_about(hidden)


def test_an_address_that_is_taken_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"--dashboard 127.0.0.1:{port}: Address already in use"):
            address.listening(f"--dashboard 127.0.0.1:{port}", Address("127.0.0.1", port))
    with pytest.raises(UsageError, match=r"--port 192: .*or the host 127\.0"):
        address.listening("--port 192", Address("192.0.2.1", 0))  # RFC 5737: of no machine


def test_the_command_needs_a_run(tmp_path, capsys):
    assert cli.main(["dashboard", str(tmp_path)]) == 2
    assert "metrics.jsonl does not exist" in capsys.readouterr().err


def test_a_run_that_cannot_be_read_is_refused(metrics, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    assert command.find(str(metrics)) == metrics
    monkeypatch.setattr(command.files, "regular", refuse)  # root may read anything
    with pytest.raises(UsageError, match="cannot be read \\(Permission denied\\)"):
        command.find(str(metrics))


def test_a_run_is_called_what_its_folder_is(metrics):
    assert command.name_of(command.find(str(metrics.parent))) == "my-run"
    assert command.name_of(metrics.with_name("curves.json")) == "curves"


def test_the_packages_that_serve_it_are_asked_for(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install starlette uvicorn"):
        address.require_packages("--dashboard")


def test_the_page_takes_nothing_from_elsewhere():
    for path in PAGE.iterdir():
        text = path.read_text()
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= {"http://www.w3.org/2000/svg"}, path
    page = (PAGE / "index.html").read_text()
    assert not re.search(r"\son\w+=|style=|<script>|<style", page)  # the policy would forbid it


@contextmanager
def served(metrics):
    """Serve a run from a thread; give its port."""
    server = pytest.importorskip("megatron_npu.pretrain.report.dashboard.server")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        running = server.Server(snapshot.Run(metrics, "my-run"), Address("127.0.0.1", 0))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield sock.getsockname()[1]
        finally:
            running.should_exit = True
            thread.join(LONGEST)
    assert not thread.is_alive()


def ask(port, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def test_the_server_answers_with_page_and_state_and_nothing_else(metrics):
    with served(metrics) as port:
        page = ask(port, "/")
        assert b"dashboard.js" in page.read()
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert ask(port, "/dashboard.js").headers["Content-Type"].startswith("text/javascript")
        assert json.load(ask(port, "/state"))["curves"]["loss"]["y"] == [5.0, 4.0]
        assert ask(port, "/state", "POST").status == 405
        assert ask(port, "/../metrics.jsonl").status == 404
        assert ask(port, "/", Host="evil.example").status == 421  # whose name may point here
        assert ask(port, "/", Host="localhost:1").status == 200  # through a tunnel, say


def test_a_client_that_goes_away_leaves_the_server_to_others(metrics):
    with served(metrics) as port:
        gone = ask(port, "/events")
        assert gone.readline().startswith(b"data: {")
        gone.close()
        events = ask(port, "/events")
        assert told(events)["iteration"] == 2
        append(metrics, train_row(3, [3.5]))
        assert told(events)["iteration"] == 3


def told(events):
    """Return the next state of a stream, which now and then says that there is nothing new."""
    data = next(line for line in events if line.startswith(b"data: "))
    return json.loads(data.removeprefix(b"data: "))


_HOLDER = """
import os
import sys
from pathlib import Path
from megatron_npu.web.address import Address
from megatron_npu.pretrain.report.dashboard.process import shown
with shown(Path(sys.argv[1]), Address("127.0.0.1", 0)) as url:
    if os.fork() == 0:  # as a process that reads data
        sys.stdin.read()
        os._exit(0)
    print(url, flush=True)
    sys.stdin.read()
"""


def test_the_server_is_gone_when_the_run_is_killed(metrics):
    pytest.importorskip("uvicorn")
    run = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(metrics)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with on_a_leash(run):
        port = int(run.stdout.readline().rstrip("/\n").rpartition(":")[2])
        assert json.load(ask(port, "/state"))["iteration"] == 2
        events = ask(port, "/events")
        assert events.readline().startswith(b"data: ")
        run.send_signal(signal.SIGKILL)
        run.wait(LONGEST)
    events.read()  # until the server closes the connection
    wait_until(lambda: not listens(port))
    run.stdin.close()  # which ends what the run had forked
    run.stdout.close()


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_browser_shows_the_run_and_follows_it(metrics, tmp_path):
    """A real one: curves, samples as text whatever they hold, a phone's width, the dark scheme."""
    browser.program()
    hostile = "<img src=x onerror=document.title='taken'> & more"
    append(metrics, {"event": "sample", "iteration": 2, "prompt": "To be", "text": hostile})
    with served(metrics) as port, browser.page(tmp_path) as page:
        page.open(f"http://127.0.0.1:{port}/")
        page.wait("document.title === 'my-run'")
        assert page.value("document.getElementById('state').textContent") == "running"
        assert "3.00 GiB" in page.value("document.body.innerText")
        assert "device busy\n75%" in page.value("document.getElementById('facts').innerText")
        assert page.value("document.querySelector('#samples pre').textContent") == f"To be{hostile}"
        assert page.value("document.querySelectorAll('#samples img').length") == 0
        before = page.value("document.querySelector('figure polyline').getAttribute('points')")
        append(metrics, train_row(4, [3.5, 3.0]), {"event": "validation", "iteration": 4, "loss": 3.25})
        page.wait("document.getElementById('place').textContent.startsWith('iteration 4 of 40')")
        after = page.value("document.querySelector('figure polyline').getAttribute('points')")
        assert (len(before.split()), len(after.split())) == (2, 4)
        assert page.value("document.querySelectorAll('figure[hidden]').length") == 0
        page.value("range.value = '0.5'; range.dispatchEvent(new Event('change'))")
        half = page.value("document.querySelector('figure polyline').getAttribute('points')")
        assert len(half.split()) == 3  # iterations 2 to 4
        assert "3.2500" in page.value("document.getElementById('facts').innerText")
        light = page.value("getComputedStyle(document.body).backgroundColor")
        append(metrics, {"event": "end", "iteration": 4, "ended_by": "DivergedError"})
        page.wait("document.getElementById('state').textContent === 'failed: DivergedError'")
        page.open(f"http://127.0.0.1:{port}/", width=360, dark=True)
        page.wait("document.querySelectorAll('polyline').length > 1")
        assert page.value("document.documentElement.scrollWidth") <= 360
        assert page.value("getComputedStyle(document.body).backgroundColor") != light
        assert page.errors == []


def test_a_browser_names_the_slow_rank_and_its_machine_at_the_top(metrics, tmp_path):
    """It was named below all curves only, six screens down on a phone."""
    browser.program()
    ranks = {
        "event": "ranks",
        "iteration": 2,
        "hosts": ["node1", "node1", "node2", "node2"],
        "stages": [0] * 4,
    }
    row = train_row(3, [3.5])
    append(metrics, ranks, row | {"forward_ms_of_ranks": [10.0, 11.0, 12.0, 31.0]})
    with served(metrics) as port, browser.page(tmp_path) as page:
        page.open(f"http://127.0.0.1:{port}/", width=360)
        page.wait("document.title === 'my-run'")
        page.wait("!document.getElementById('slow').hidden")
        assert page.value("document.getElementById('slow').textContent") == "slow: rank 3 on node2 (31 ms)"
        assert page.value("document.getElementById('slow').getBoundingClientRect().bottom") < 300
        append(metrics, train_row(4, [3.5]) | {"forward_ms_of_ranks": [10.0, 11.0, 12.0, 13.0]})
        page.wait("document.getElementById('slow').hidden")
        assert page.errors == []
