"""`aura probe` over real sockets: the nodes are addresses of the loopback interface, 127.0.0.2 and up."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from itertools import combinations
from pathlib import Path

import pytest
from aura.check.probe import limits
from aura.check.probe.caller import connect, open_port, try_all, try_port
from aura.check.probe.coordinator import rounds
from aura.check.probe.host import Host, listening
from aura.check.probe.node import _find_unit
from aura.check.probe.run import run
from aura.check.probe.wire import Json, Line, Settings
from aura.commands import probe
from ports import free_port

TRAINING = Path(__file__).parents[2] / "training"


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would otherwise be waited for in vain. Loopback answers in microseconds."""
    monkeypatch.setattr(limits, "STRAGGLER_GRACE", 0.5)
    monkeypatch.setattr(limits, "CONNECT_TIMEOUT", 1.0)


def make_settings(number: int, patience: float = 2.0) -> list[Settings]:
    """Settings of so many nodes, node0 the coordinator, with short measurements."""
    peers = {f"node{i}": f"127.0.0.{i + 2}" for i in range(number)}
    rendezvous, ephemeral = free_port(), free_port()
    return [Settings(name, peers, rendezvous, ephemeral, patience, expected_mbit=1) for name in peers]


def run_together(nodes: list[Settings], limit: float = 20) -> dict[str, Json]:
    """Each node in a thread of its own; {name: document}. A node that hangs fails the test."""
    documents: dict[str, Json] = {node.node: {} for node in nodes}
    threads = [threading.Thread(target=run, args=(node, documents[node.node]), daemon=True) for node in nodes]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
        assert not thread.is_alive(), f"still running after {limit} s"
    return documents


def test_five_healthy_nodes_as_commands() -> None:
    """As on the nodes: five processes, nothing but the standard library, one line of JSON each."""
    rendezvous, ephemeral = free_port(), free_port()
    peers = ",".join(f"node{i}=127.0.0.{i + 2}" for i in range(5))
    options = [f"--peers={peers}", f"--rendezvous-port={rendezvous}", f"--ephemeral-port={ephemeral}"]
    options += ["--expected-mbit=1"]
    processes = {}
    for name in (f"node{i}" for i in range(5)):
        command = [sys.executable, "-S", "-m", "aura", "probe", f"--node={name}", *options]
        processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TRAINING)
        time.sleep(0.1)  # nodes never start at the same moment
    documents = {name: json.loads(one.communicate(timeout=30)[0]) for name, one in processes.items()}
    for name, document in documents.items():
        others = [other for other in documents if other != name]
        assert document["complete"] and document["all_peers_answer"] and not document["lost"]
        assert document["busy_ports"] == {}
        assert sorted(document["tcp"]) == others
        ports = document["tcp"].values()
        assert all(port["rendezvous"]["ok"] and port["ephemeral"]["ok"] for port in ports)
        assert sorted(document["bandwidth"]) == others
        assert all(rate["ok"] and rate["mbit_per_second"] > 0 for rate in document["bandwidth"].values())
        assert document["about"]["hostname"] == socket.gethostname()
        assert document["about"]["versions"]["python"]
        if name != "node0":
            assert abs(document["clock"]["offset_seconds"]) < 0.05
    assert "clock" not in documents["node0"]


def test_a_missing_node_does_not_stop_the_others() -> None:
    *present, missing = make_settings(4, patience=1.0)
    documents = run_together(present, limit=12)
    for name, document in documents.items():
        assert document["complete"] and not document["all_peers_answer"]
        assert document["tcp"][missing.node]["rendezvous"]["error"] == "refused"
        assert sorted(document["bandwidth"]) == [node.node for node in present if node.node != name]
    assert documents["node0"]["lost"] == {missing.node: "did not come to the measurement"}


def test_without_the_coordinator_the_pairs_are_still_tried() -> None:
    _, *present = make_settings(3, patience=0.5)
    documents = run_together(present, limit=8)
    assert documents["node1"]["tcp"]["node2"]["ephemeral"]["ok"]
    assert documents["node2"]["left_out"] == "node0 does not answer"
    assert not documents["node2"]["clock"]["ok"]


def test_one_port_that_nobody_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """node1's rendezvous port is closed; its other port still serves the clock and the measurements.

    node1 itself reaches everybody at once, and waits for a coordinator that is still trying to reach node1.
    """
    monkeypatch.setattr(limits, "SILENCE_LIMIT", 0.6)
    nodes = make_settings(3, patience=1.0)
    opened = Host.open
    closed = threading.Event()

    def open_one(host: Host) -> None:
        if host.settings.node != "node1":
            assert closed.wait(10)  # or they might reach the port in the moment before it is closed
            opened(host)
            return
        opened(host)
        listener = host._sockets.pop(0)
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        closed.set()

    monkeypatch.setattr(Host, "open", open_one)
    documents = run_together(nodes)
    for name in ("node0", "node2"):
        ports = documents[name]["tcp"]["node1"]
        assert ports["rendezvous"] == {"ok": False, "error": "refused", "detail": "refused"}
        assert ports["ephemeral"]["ok"]
        assert documents[name]["bandwidth"]["node1"]["ok"]
    assert documents["node1"]["all_peers_answer"] and not documents["node0"]["all_peers_answer"]
    assert not any(document["lost"] or "left_out" in document for document in documents.values())


def test_a_port_in_use_names_the_process_that_has_it() -> None:
    nodes = make_settings(2, patience=8.0)
    with socket.create_server((nodes[0].address, nodes[0].rendezvous_port)):
        started = time.monotonic()
        documents = run_together(nodes)
        assert time.monotonic() - started < 7, "an answer that is final must not be waited out"
    busy = documents["node0"]["busy_ports"]["rendezvous"]
    assert busy["reason"] == "in use"
    assert busy["holder"]["pid"] == os.getpid()
    assert documents["node1"]["tcp"]["node0"]["rendezvous"]["error"] == "silent"
    assert documents["node1"]["clock"]["ok"], "the other port is used instead"
    assert not documents["node0"]["all_peers_answer"]


def test_a_clock_that_is_ahead() -> None:
    nodes = make_settings(3)
    late = Settings(**{**nodes[2].__dict__, "now": lambda: time.time() + 3})
    documents = run_together([*nodes[:2], late])
    assert documents["node1"]["clock"]["offset_seconds"] == pytest.approx(0, abs=0.05)
    assert documents["node2"]["clock"]["offset_seconds"] == pytest.approx(3, abs=0.05)


def test_the_wrong_host_answers() -> None:
    """node0 believes that node2's address is node1's: the greeting tells."""
    nodes = make_settings(3)
    peers = {"node0": nodes[0].address, "node1": nodes[2].address}
    mistaken = Settings(**{**nodes[0].__dict__, "peers": peers})
    with listening(nodes[2]):
        result = try_port(mistaken, "node1", nodes[0].ephemeral_port, time.monotonic() + 5)
    assert result == {"ok": False, "error": "wrong node", "detail": "node2"}


def test_a_node_without_its_address() -> None:
    peers = {"node0": "192.0.2.1", "node1": "127.0.0.3"}
    document: Json = {}
    run(Settings("node0", peers, free_port(), free_port(), patience=0.5), document)
    assert document["busy_ports"]["rendezvous"] == {"reason": "no address", "holder": None}
    assert document["tcp"]["node1"]["rendezvous"]["error"] == "no address"


def test_a_node_that_leaves_in_the_middle() -> None:
    """node2 comes to the measurement, then its power is cut: the others end, soon, with all their pairs."""
    nodes = make_settings(3)
    gone = threading.Event()

    def leave() -> None:
        with listening(nodes[2]):
            reach = try_all(nodes[2])
            port = open_port(nodes[2], reach["node0"])
            assert port
            control = connect(nodes[2], "node0", port, "control")
            while control.receive(10).get("do") != "send":
                pass
            control.close()
        gone.set()

    threading.Thread(target=leave, daemon=True).start()
    started = time.monotonic()
    documents = run_together(nodes[:2])
    assert gone.is_set()
    assert time.monotonic() - started < 12
    assert "left during the measurement" in documents["node0"]["lost"]["node2"]
    assert documents["node0"]["bandwidth"]["node1"]["ok"] and documents["node1"]["bandwidth"]["node0"]["ok"]


def test_a_coordinator_that_leaves_in_the_middle() -> None:
    nodes = make_settings(2)
    with listening(nodes[0]) as coordinator:

        def leave() -> None:
            while "node1" not in coordinator.controls:
                time.sleep(0.02)
            coordinator.controls["node1"].close()

        threading.Thread(target=leave, daemon=True).start()
        document = run_together(nodes[1:], limit=8)["node1"]
    assert document["complete"]
    assert document["left_out"].startswith("the coordinator went away in the middle")


def test_a_coordinator_that_freezes() -> None:
    nodes = make_settings(2, patience=0.5)
    with listening(nodes[0]):
        document = run_together(nodes[1:], limit=6)["node1"]
    assert document["left_out"] == "the coordinator went away in the middle (timed out)"


def test_the_time_limit_prints_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    rendezvous, ephemeral = free_port(), free_port()
    arguments = ["--node=node0", "--peers=node0=127.0.0.2,node1=127.0.0.3", "--time-limit=0.3"]
    arguments += [f"--rendezvous-port={rendezvous}", f"--ephemeral-port={ephemeral}", "--patience=2"]
    assert probe.main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["node"] == "node0" and not document["complete"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--node=node9", "--peers=node0=127.0.0.2"], "node9 is not among"),
        (["--node=node0", "--peers=node0=127.0.0.2,node1=127.0.0.2"], "or comes twice"),
        (["--peers=node0=127.0.0.2"], "--node"),
    ],
)
def test_wrong_usage(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="64"):
        probe.main([*arguments, "--ephemeral-port=50000"])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("number", range(1, 9))
def test_rounds_pair_everybody_once(number: int) -> None:
    names = [f"node{i}" for i in range(number)]
    found = rounds(names)
    for pairs in found:
        busy = [name for pair in pairs for name in pair]
        assert len(busy) == len({*busy}), "a node in two pairs of the same round shares its link between them"
    assert sorted(tuple(sorted(pair)) for pairs in found for pair in pairs) == [*combinations(names, 2)]
    assert len(found) == (number if number % 2 else number - 1)


def test_the_unit_that_a_process_belongs_to() -> None:
    version2 = "0::/system.slice/system-aura\\x2dtrain.slice/aura-train@0.service\n"
    assert _find_unit(version2) == "aura-train@0.service"
    version1 = "12:pids:/system.slice/ssh.service\n1:name=systemd:/system.slice/ssh.service\n"
    assert _find_unit(version1) == "ssh.service"
    assert _find_unit("0::/user.slice/user-1000.slice/session-3.scope\n") is None


def test_what_is_not_our_language_is_an_error() -> None:
    for said in (b"SSH-2.0-OpenSSH_9\r\n", b"[1, 2]\n", b"x" * 70000):
        with socket.create_server(("127.0.0.2", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        with ours, theirs:
            theirs.settimeout(1)
            threading.Thread(target=theirs.sendall, args=(said,), daemon=True).start()
            with pytest.raises(OSError, match="the answer is not"):
                Line(ours).receive(1)
