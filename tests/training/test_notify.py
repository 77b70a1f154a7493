"""aura notify against real servers on loopback: what they get, what is kept meanwhile, what is never shown."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from apprise.plugins.discord import NotifyDiscord
from apprise.plugins.slack import NotifySlack
from apprise.plugins.telegram import NotifyTelegram
from aura.cluster import register
from aura.cluster.register import Book, Record, Vote
from aura.commands import notify
from aura.corpus.corpus import Corpus
from aura.errors import ConfigError
from aura.run.status import Status
from aura.watch import nodes
from aura.watch.events import WARNING, Event
from aura.watch.lead import lead_of
from aura.watch.nodes import MISSES, Nodes, answers
from aura.watch.queue import Queue
from aura.watch.runs import ACTIVE, Seen, begun_of, is_alive, news, statuses
from aura.watch.sender import Memory, Sender
from aura.watch.services import read_services, without_secrets
from conftest import Aura
from services import mail_server, wait_until, web_server
from trainers import TINY, Trainer, at_step

SECRET = "abcdefghijklmnop0123"  # noqa: S105 - made up
QUIET = 3.0  # seconds; in less of them a busy machine may not have written fifty events down
EVENT = Event(
    "node.lost", WARNING, "node3 no longer answers.", "Is it on?", host="node3", run="r", ts=time.time()
)


def config(folder: Path, content: Any) -> Path:
    path = folder / "webhooks.json"
    path.write_text(json.dumps(content))
    path.chmod(0o600)
    return path


def own(port: int) -> dict[str, str]:
    return {"webhook_url": f"http://127.0.0.1:{port}/hook/{SECRET}?token={SECRET}", "webhook_type": "json"}


def sender(folder: Path, content: Any, said: list[str], **options: float) -> Sender:
    """To whom webhooks.json with this content names."""
    services = read_services(config(folder, content))
    return Sender(Queue(folder), services, Memory(folder), said.append, **options)


def follow(folder: Path) -> subprocess.Popen[str]:
    """aura notify as a process, on folder/runs."""
    (folder / "runs").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "aura", "notify", "--webhook-config", str(folder / "webhooks.json"),
         "--runs", str(folder / "runs"), "--state", str(folder), "--node", "node1"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_every_service_gets_it_in_its_own_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The services' names lead to a server here; of what they would say nothing is known."""
    with web_server() as web, mail_server() as mail:
        here = f"http://127.0.0.1:{web.port}"
        monkeypatch.setattr(NotifyDiscord, "notify_url", f"{here}/discord")
        monkeypatch.setattr(NotifySlack, "webhook_url", f"{here}/slack")
        monkeypatch.setattr(NotifyTelegram, "notify_url", f"{here}/telegram/")
        listed = [
            {"webhook_url": f"https://discord.com/api/webhooks/123456/{SECRET}", "webhook_type": "discord"},
            {"webhook_url": "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"},
            f"tgram://123456789:{SECRET}/12315544/",
            {"webhook_url": f"{here}/topic", "webhook_type": "ntfy"},
            own(web.port),
            f"mailto://127.0.0.1:{mail.port}?from=aura@example.org&to=you@example.org",
        ]
        services = read_services(config(tmp_path, {"services": listed, "cluster": "home"}))
        assert [service.send(EVENT, services.cluster) for service in services.services] == [""] * 6
        discord, slack, telegram, ntfy, json_ = web.bodies
    assert (
        "node3 no longer answers." in discord["content"] and "home · node3 · node.lost" in discord["content"]
    )
    assert "node3 no longer answers." in json.dumps(slack["attachments"])
    assert "node3 no longer answers." in telegram["text"] and telegram["chat_id"] == 12315544
    assert (ntfy["topic"], ntfy["message"]) == ("topic", "node3 no longer answers.\nIs it on?")
    assert json_ == {
        "schema": 1, "event": "node.lost", "severity": "warning", "cluster": "home", "host": "node3", "rank": None,
        "run": "r", "attempt": "", "step": None, "message": "node3 no longer answers.\nIs it on?",
        "remedy": "Is it on?", "facts": {}, "ts": EVENT.ts, "dedup_key": "node.lost:node3:r",
    }  # fmt: skip
    assert web.paths[-1] == f"/hook/{SECRET}?token={SECRET}"
    assert "To: you@example.org" in mail.bodies[0] and "node3 no longer answers." in mail.bodies[0]


@pytest.mark.parametrize("trouble", [500, 429, None], ids=["refused", "too-many", "cut"])
def test_what_is_refused_is_tried_again_and_holds_nobody_up(tmp_path: Path, trouble: int | None) -> None:
    said: list[str] = []
    with web_server() as sick, web_server() as well:
        sick.answer = trouble
        post = sender(tmp_path, [own(sick.port), own(well.port)], said, first_wait=0.2)
        for number in range(3):
            post.queue.add(replace(EVENT, run=f"r{number}"))
        began = time.monotonic()
        wait_until(lambda: post.round() or sick.asked >= 3, 30, lambda: str(said))
        assert len(well.bodies) == 3 and sick.bodies == []
        # After 0, 0.2, 0.6 s.
        assert sick.asked == 3 and time.monotonic() - began >= 0.6
        sick.answer = 200
        wait_until(lambda: (post.round() or len(sick.bodies)) == 3, 10, lambda: str(said))
        assert [body["run"] for body in sick.bodies] == ["r0", "r1", "r2"]
        assert len(well.bodies) == 3 and post.is_idle()
    waits = [line for line in said if "tried again" in line]
    assert len(waits) == 3 and SECRET not in "".join(said), said


@pytest.mark.parametrize("comes_and_goes", [False, True])
def test_a_message_that_a_service_refuses_holds_up_no_other_one(tmp_path: Path, comes_and_goes: bool) -> None:
    """It is given up once it has been tried often enough, and not while the service takes none, nor over a line that
    comes and goes."""
    said: list[str] = []
    with web_server() as web:
        web.answer, web.refuses = 500, '"run": "r0"'
        post = sender(tmp_path, own(web.port), said, first_wait=0.05)
        for number in range(4):
            post.queue.add(replace(EVENT, run=f"r{number}"))
        wait_until(lambda: (post.round() or web.asked) >= 5, 30, lambda: str(said))
        assert not web.bodies and "given up" not in "".join(said)
        web.answer = 200
        wait_until(lambda: post.round() or web.bodies, 30, lambda: str(said))
        if comes_and_goes:
            web.refuses = ""  # before the next visit
        wait_until(lambda: post.round() or post.is_idle(), 30, lambda: str(said))
    given_up = [line for line in said if "given up" in line]
    assert sorted(body["run"] for body in web.bodies) == ["r0", "r1", "r2", "r3"][not comes_and_goes :]
    assert len(given_up) == (not comes_and_goes) and SECRET not in "".join(said)
    assert all("node.lost: node3 no longer answers." in line for line in given_up)


def test_the_same_is_said_once_and_then_counted(tmp_path: Path) -> None:
    said: list[str] = []
    with web_server() as web:
        post = sender(tmp_path, own(web.port), said, quiet=QUIET)
        for _ in range(50):
            post.queue.add(EVENT)
        post.queue.add(replace(EVENT, host="node4"))
        post.round()
        assert [body["host"] for body in web.bodies] == ["node3", "node4"]
        # Who is started again meanwhile still knows.
        post = sender(tmp_path, own(web.port), said, quiet=QUIET)
        post.queue.add(EVENT)
        wait_until(lambda: (post.round() or len(web.bodies)) == 3, 60, lambda: str(web.bodies))
        assert web.bodies[2]["message"].startswith("50 times more") and post.is_idle()
        time.sleep(QUIET + 0.1)
        post.round()
        assert len(web.bodies) == 3


def test_a_clock_that_was_wrong_once_silences_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    with web_server() as web:
        for offset in (4 * 365 * 86400, 0):
            monkeypatch.setattr(time, "time", lambda offset=offset: now + offset)
            post = sender(tmp_path, own(web.port), [])
            post.queue.add(replace(EVENT, ts=now + offset))
            post.round()
        assert [body["ts"] - now for body in web.bodies] == [4 * 365 * 86400, 0]
        # It was 2020 until a time server answered, and there was no internet until then.
        web.answer = 500
        post.queue.add(replace(EVENT, host="node4", ts=1577836800.0))
        post.round()
        web.answer = 200
        sender(tmp_path, own(web.port), []).round()
        assert web.bodies[2]["host"] == "node4"


def test_the_queue_survives_a_kill_and_nothing_shows_the_address(tmp_path: Path) -> None:
    with web_server() as web:
        web.answer = 500
        config(tmp_path, own(web.port))
        for number in range(3):
            Queue(tmp_path).add(replace(EVENT, run=f"r{number}"))
        process = follow(tmp_path)
        assert process.stdout
        wait_until(lambda: web.asked > 0, 120, lambda: "nothing was sent")
        assert SECRET not in Path(f"/proc/{process.pid}/cmdline").read_text()
        assert SECRET not in Path(f"/proc/{process.pid}/environ").read_text()
        said = ""
        while "not delivered" not in said:
            said += process.stdout.readline()
        process.kill()
        said += process.communicate()[0]
        assert "not delivered" in said and "500" in said and SECRET not in said
        kept = "".join(path.read_text() for path in tmp_path.rglob("*.json") if path.name != "webhooks.json")
        assert SECRET not in kept
        web.answer = 200
        again = follow(tmp_path)
        web.wait_for(3, 120)
        again.send_signal(signal.SIGTERM)
        assert again.wait(120) == 0
        assert [body["run"] for body in web.bodies] == ["r0", "r1", "r2"]
        assert list((tmp_path / "queue").iterdir()) == []


def test_a_run_by_hand_tells_how_it_goes(corpus: Corpus, tmp_path: Path) -> None:
    """The flag and the file of guide 003. The run, which takes less than a second, goes on once it was looked at."""
    looked = tmp_path / "mine/.notify/state.json"
    waits = at_step(9, lambda: wait_until(looked.exists, 120, lambda: "nobody looks"))
    with web_server() as web:
        path = config(tmp_path, own(web.port))
        words = [
            "--preset",
            "gpt2-nano",
            "--corpus",
            str(corpus.path),
            *TINY.split(),
            "--webhook_config",
            str(path),
        ]
        trainer = Trainer(tmp_path, {}, words, waits, run="mine")
        assert trainer.end(180) == 0, trainer.text
        wait_until(lambda: "run.finished" in web.events, 120, lambda: str(web.events))
        (last,) = (body for body in web.bodies if body["event"] == "run.finished")
    assert (last["run"], last["rank"], last["step"], last["severity"]) == ("mine", 0, 20, "info")
    assert last["facts"]["loss"] == trainer.done["validation_loss"]


def test_a_test_says_who_took_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with web_server() as web, web_server() as heart:
        url = f"http://127.0.0.1:{heart.port}/{SECRET}"
        path = config(tmp_path, {"services": [own(web.port)], "heartbeat_url": url})
        words = ["--test", "--webhook-config", str(path), "--node", "node1"]
        assert notify.main(words) == 0
        assert capsys.readouterr().out == "JSON 1: delivered.\nThe heartbeat arrives.\n"
        assert web.events == ["test"] and heart.paths == [f"/{SECRET}"]
        web.answer = heart.answer = 500
        path.chmod(0o644)
        assert notify.main(words) == 75
    said = capsys.readouterr().out
    assert "chmod 600" in said and "JSON 1: not delivered" in said and "HTTP 500" in said
    assert SECRET not in said


def test_the_heart_beats_while_nobody_else_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    with web_server() as heart:
        url = f"http://127.0.0.1:{heart.port}/{SECRET}"
        post = sender(tmp_path, {"heartbeat_url": url, "heartbeat_seconds": 1}, said)
        post.services.heartbeat_seconds = 0.1
        for answer in (200, None, None, 200):
            heart.answer = answer
            post.round()
            time.sleep(0.12)
    assert heart.asked == 4
    assert len(said) == 2 and "does not arrive" in said[0] and "again" in said[1]
    assert SECRET not in "".join(said)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"webhook_url": f"https://example.org/{SECRET}", "webhook_type": "discord"}, r"entry 1 .*discord"),
        ({"webhook_url": f"https://example.org/{SECRET}"}, "webhook_type json"),
        ({"webhook_url": SECRET, "webhook_type": "discrod"}, "Did you mean 'discord'"),
        ({"webhook_type": "discord"}, "no address"),
        ({"webhook_ulr": SECRET}, "Did you mean 'webhook_url'"),
        ({"services": {}}, "no JSON of the form"),
        ([], "names nobody"),
        ({"heartbeat_url": f"ftp://{SECRET}"}, "heartbeat_url must begin"),
        ({"heartbeat_url": "http://x/", "heartbeat_seconds": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_meant_is_said_without_the_address(
    tmp_path: Path, content: Any, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        read_services(config(tmp_path, content))
    assert SECRET not in str(caught.value)


def test_a_file_that_is_no_json_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "webhooks.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_services(path)
    path.write_text(f'{{"webhook_url": "https://x/{SECRET}"')
    with pytest.raises(ConfigError, match="no JSON") as caught:
        read_services(path)
    assert SECRET not in str(caught.value) and caught.value.__context__ is not None


def test_a_reason_that_holds_the_address_loses_it_and_a_topic_in_the_place_of_a_host() -> None:
    address = f"https://me:pass-word@example.org/hook/{SECRET}?key=another-secret"
    said = without_secrets(f"{address} refused /hook/{SECRET}: key another-secret of me, pass-word", address)
    assert "example.org" in said and not any(part in said for part in (SECRET, "another-secret", "pass-word"))
    said = without_secrets(f"Failed to send ntfy notification to topic '{SECRET}'.", f"ntfy://{SECRET}")
    assert SECRET not in said
    assert "localhost" in without_secrets("localhost is silent", "http://localhost/hook")
    assert "doorbell" in without_secrets("doorbell is silent", "json://doorbell:8080/hook")


def test_a_server_may_take_its_time_to_answer(tmp_path: Path) -> None:
    with web_server() as received:
        received.slow = 4.5
        (service,) = read_services(config(tmp_path, own(received.port))).services
        assert service.send(EVENT, "home") == ""


def test_the_first_node_that_lives_tells_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes.time, "clock_gettime", lambda clock: nodes.BOOTING)
    there = {"a": True, "b": True, "c": True, "d": True}
    names = {name: name for name in there}
    by_node = {me: Nodes(me, names, {}, is_there=there.__getitem__) for me in names}

    def told(looks: int) -> list[str]:
        return [
            f"{me}: {event.kind} {event.host}"
            for _ in range(looks)
            for me in names
            if there[me]
            for event in by_node[me].look()
        ]

    assert told(3) == []
    there["c"] = False
    assert told(MISSES - 1) == []
    assert told(5) == ["a: node.lost c"]
    there["a"] = False
    assert told(5) == ["b: node.lost a"]
    there["c"] = True
    assert told(1) == ["b: node.back c"]
    there["a"] = True  # which does not know what it was told of meanwhile
    assert told(1) == ["a: node.back c", "b: node.back a"]


def test_who_hears_nobody_does_not_call_all_others_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A switch that restarts, its own cable; and after a power cut the others boot."""
    boot = nodes.BOOTING
    monkeypatch.setattr(nodes.time, "clock_gettime", lambda clock: boot)
    there = dict.fromkeys("bc", False)
    me = Nodes("a", {name: name for name in "abc"}, {}, is_there=there.__getitem__)
    assert [me.look() for _ in range(nodes.ALONE - 1)] == [[]] * (nodes.ALONE - 1)
    there["b"] = True
    assert [[event.host for event in me.look()] for _ in range(MISSES)] == [[], [], ["c"]]
    there["b"] = there["c"] = False
    assert [event.host for _ in range(nodes.ALONE + MISSES) for event in me.look()] == ["b"]
    boot, me = nodes.BOOTING - 1, Nodes("a", {"a": "a", "b": "b"}, {}, is_there=there.__getitem__)
    assert [me.look() for _ in range(MISSES)] == [[]] * MISSES


def test_who_refuses_a_connection_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that lets it wait does not: here a listener that takes nobody, with its queue full."""
    monkeypatch.setattr(nodes, "TIMEOUT", 0.2)
    with web_server() as web:
        assert answers("127.0.0.1", web.port)
    assert answers("127.0.0.1", web.port)
    with socket.socket() as frozen, contextlib.ExitStack() as stack:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen(0)
        port = frozen.getsockname()[1]
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        assert not answers("127.0.0.1", port)


def test_a_full_disk_of_the_queue_is_a_sentence(small_disk: Path, tmp_path: Path, aura_says: Aura) -> None:
    (small_disk / "filler").write_bytes(b"0" * 60000)
    words = ["--webhook-config", str(config(tmp_path, own(1)))]
    words += ["--runs", str(small_disk), "--state", str(small_disk)]
    assert "No space left" in aura_says("notify", *words, code=75)


def says(state: str, pid: int = 1, **values: Any) -> dict[str, Any]:
    """status.json of a rank 0."""
    known = {"rank": 0, "world_size": 5, "node": "node1", "step": 7, "max_steps": 9, "updated": 100.0}
    return {**known, "loss": None, "state": state, "pid": pid, **values}


LEARNS = says("training", loss=2.5)
BROKE = says("failed", exit_code=75, message="rank 2 on node2 has not answered for 8 s.")
REFUSED = says("failed", exit_code=64, message="x")
LEAVES = says("stopped", exit_code=75)  # to begin anew with who is back
JOINS, TRAINS = says("joining", 2), says("training", 2, loss=2.0)
STORIES: dict[str, tuple[list[dict[str, Any]], str]] = {
    "good": (
        [says("joining"), says("training"), LEARNS, says("saving", loss=2.5), LEARNS, says("done", loss=2.5)],
        "started first_step finished",
    ),
    "a rank was lost": ([LEARNS, BROKE, BROKE, JOINS, TRAINS], "started first_step interrupted resumed"),
    "rank 0 was killed, and is there again before anybody looked": (
        [LEARNS, JOINS, TRAINS],
        "started first_step interrupted resumed",
    ),
    "it broke off, and began anew before anybody looked": (
        [LEARNS, says("joining", 2, step=0, before=BROKE), TRAINS | {"before": BROKE}],
        "started first_step interrupted resumed",
    ),
    "it began anew with one that was back": (
        [LEARNS, JOINS | {"before": LEAVES}, TRAINS],
        "started first_step",
    ),
    "one is back, and somebody looks before it begins anew": (
        [LEARNS, LEAVES, JOINS, TRAINS],
        "started first_step",
    ),
    "rank 0 was killed, and nobody starts it": (
        [LEARNS, *[{**LEARNS, "gone": True}] * 60],
        "started first_step interrupted failed",
    ),
    "it broke off, and nobody starts it": (
        [LEARNS, *[BROKE] * 60],
        "started first_step interrupted failed",
    ),
    "a wrong setting": ([says("joining"), REFUSED], "started failed"),
    "a sick GPU": ([LEARNS, REFUSED | {"exit_code": 69}], "started first_step failed"),
    "stopped, and launched again": (
        [LEARNS, says("stopped"), says("stopped"), JOINS],
        "started first_step stopped started",
    ),
    "failed between two looks": ([REFUSED], "failed"),
    "over before anybody looked": ([REFUSED | {"updated": 1.0}, says("done", updated=1.0)], ""),
}


@pytest.mark.parametrize("story", STORIES)
def test_what_has_become_of_a_run(story: str) -> None:
    """Looked at every five seconds."""
    statuses, expected = STORIES[story]
    seen, told = Seen(), []
    for number, status in enumerate(statuses):
        status = dict(status)
        seen, events = news(
            "r", seen, status, not status.pop("gone", False), began=50.0, now=100.0 + 5 * number
        )
        told += events
    assert [event.kind for event in told] == [f"run.{kind}" for kind in expected.split()]
    if "interrupted" in expected and any(BROKE in (status, status.get("before")) for status in statuses):
        assert "rank 2 on node2 has not answered" in told[2].message
        assert told[2].step == 7


def test_of_a_run_tells_who_leads_it_and_who_takes_the_lead_goes_on(tmp_path: Path) -> None:
    """Rank 0's node goes and comes back. Each node has a notifier of its own, here called for one look."""
    path, messages = config(tmp_path, own(1)), list[str]()

    def node(number: int, record: Record, state: str, pid: int, **values: Any) -> list[str]:
        """What it tells, once its rank has written this."""
        rank = tmp_path / f"{number}/runs/r/rank-{number}"
        Book(rank / register.FILE, "20261121-1", Vote(record)).write(Vote(record))
        begun = begun_of(pid) if state in ACTIVE else ""
        said = says(state, pid, rank=number, begun=begun, updated=time.time(), **values)
        (rank / "status.json").write_text(json.dumps(said))
        words = ["--webhook-config", str(path), "--once", "--node", f"node{number}"]
        words += ["--runs", str(rank.parents[1]), "--state", str(tmp_path / str(number))]
        assert notify.main(words) == 0
        entries = [*Queue(tmp_path / str(number)).entries()]
        for entry in entries:
            entry.path.unlink()
        messages.extend(entry.event.message for entry in entries)
        return [f"{entry.event.kind} {entry.event.rank}" for entry in entries]

    all_, rest, back = Record(1, (0, 1, 2)), Record(2, (1, 2)), Record(3, (0, 1, 2))
    mine, older = os.getpid(), os.getppid()
    assert node(0, all_, "training", older, loss=2.5) == ["run.started 0", "run.first_step 0"]
    assert node(1, all_, "training", older, loss=2.5) == []
    # It is gone.
    assert node(1, all_, "failed", older, exit_code=75, message="rank 0 has not answered") == []
    assert node(1, rest, "joining", mine) == []
    assert node(1, rest, "training", mine, loss=2.4) == ["run.resumed 1"]
    # It is refused before it meets the others, who know nothing of it.
    refused = {"exit_code": 64, "message": "torch cannot use the card"}
    assert node(2, all_, "joining", older) == []
    assert node(2, all_, "failed", older, **refused) == ["run.failed 2"]
    assert messages[-1] == "node2 does not take part in run r: torch cannot use the card"
    assert node(2, all_, "joining", older) == []
    assert node(2, all_, "failed", older, attempt="20261121-1", **refused) == []
    # It is back, and they meet again.
    assert node(1, rest, "failed", mine, exit_code=75, message="rank 0 is back") == ["run.interrupted 1"]
    assert node(1, back, "training", older, loss=2.3) == []
    assert node(0, back, "training", mine, loss=2.3) == ["run.interrupted 0", "run.resumed 0"]
    assert node(1, back, "done", older) == []
    assert node(0, back, "done", mine, validation_loss=2.2) == ["run.finished 0"]


def test_a_vote_that_says_nothing_leaves_the_lead_to_rank_0(tmp_path: Path) -> None:
    votes = [tmp_path / f"rank-{rank}" / register.FILE for rank in range(3)]
    for vote in votes:
        vote.parent.mkdir()
    votes[0].write_text('{"launch": "20261121')
    votes[1].write_text("[]")
    assert lead_of(tmp_path).rank == 0
    votes[2].write_text('{"launch": "20261121-1"}')
    assert (lead_of(tmp_path).launch, lead_of(tmp_path).rank) == ("20261121-1", 0)


def test_a_clock_that_is_set_back_makes_no_rank_a_dead_one(tmp_path: Path) -> None:
    Status(tmp_path / "runs/r/rank-0/status.json").set(state="training")
    ((directory, status),) = statuses(tmp_path / "runs")
    assert directory == tmp_path / "runs/r/rank-0"
    assert is_alive(status | {"updated": status["updated"] - 7200})
    # Another process has its number now, or the machine was started since.
    assert not is_alive(status | {"pid": 1})
    assert not is_alive(status | {"begun": "another-boot " + status["begun"].split()[1]})


def test_who_broke_off_before_the_machine_was_started_gets_its_time_again() -> None:
    seen, _ = news("r", Seen("running", "training", 1), BROKE, True, 50.0, now=90000.0)
    seen, events = news("r", seen, BROKE, True, 50.0, now=30.0)
    assert (seen.phase, seen.since, events) == ("broken", 30.0, [])
    seen, events = news("r", seen, BROKE, True, 50.0, now=300.0)
    assert [event.kind for event in events] == ["run.failed"]
