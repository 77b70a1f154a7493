"""aura notify against real servers on loopback: what they get, what is kept meanwhile, what is never shown."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from apprise.plugins.discord import NotifyDiscord
from apprise.plugins.slack import NotifySlack
from apprise.plugins.telegram import NotifyTelegram
from aura.commands import notify
from aura.corpus.corpus import Corpus
from aura.errors import ConfigError
from aura.run.status import Status
from aura.watch.events import CRITICAL, WARNING, Event
from aura.watch.findings import NAME, add_finding, read_findings
from aura.watch.runs import ACTIVE, Seen, begun_of, is_alive, news, report_leaderless, statuses
from aura.watch.sender import MOST, WITHIN, Sender
from aura.watch.services import read_services, without_secrets
from conftest import Aura
from services import mail_server, wait_until, web_server
from trainers import TINY, Trainer, at_step

SECRET = "abcdefghijklmnop0123"  # noqa: S105 - made up
EVENT = Event(
    "rank.left", WARNING, "node3 no longer answers.", "Is it on?", host="node3", run="r", ts=time.time()
)


def config(folder: Path, content: Any) -> Path:
    path = folder / "webhooks.json"
    path.write_text(json.dumps(content))
    path.chmod(0o600)
    return path


def own(port: int) -> dict[str, str]:
    return {"webhook_url": f"http://127.0.0.1:{port}/hook/{SECRET}?token={SECRET}", "webhook_type": "json"}


def sender(folder: Path, content: Any, said: list[str], **options: Sequence[float]) -> Sender:
    """To whom webhooks.json with this content names."""
    return Sender(read_services(config(folder, content)), said.append, **options)


def follow(folder: Path) -> subprocess.Popen[str]:
    """aura notify as a process, on folder/runs and what was found of cards in folder."""
    (folder / "runs").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "aura", "notify", "--webhook-config", str(folder / "webhooks.json"), "--faults",
         str(folder), "--runs", str(folder / "runs"), "--state", str(folder), "--node", "node1"],
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
        "node3 no longer answers." in discord["content"] and "home · node3 · rank.left" in discord["content"]
    )
    assert "node3 no longer answers." in json.dumps(slack["attachments"])
    assert "node3 no longer answers." in telegram["text"] and telegram["chat_id"] == 12315544
    assert (ntfy["topic"], ntfy["message"]) == ("topic", "node3 no longer answers.\nIs it on?")
    assert json_ == {
        "schema": 1, "event": "rank.left", "severity": "warning", "cluster": "home", "host": "node3", "rank": None,
        "run": "r", "attempt": "", "step": None, "message": "node3 no longer answers.\nIs it on?",
        "remedy": "Is it on?", "facts": {}, "ts": EVENT.ts, "dedup_key": "rank.left:node3:r",
    }  # fmt: skip
    assert web.paths[-1] == f"/hook/{SECRET}?token={SECRET}"
    assert "To: you@example.org" in mail.bodies[0] and "node3 no longer answers." in mail.bodies[0]


@pytest.mark.parametrize("trouble", [500, 429, None], ids=["refused", "too-many", "cut"])
def test_what_is_refused_is_tried_three_times_and_holds_nobody_up(
    tmp_path: Path, trouble: int | None
) -> None:
    said: list[str] = []
    with web_server() as unhealthy, web_server() as well:
        unhealthy.answer = trouble
        post = sender(tmp_path, [own(unhealthy.port), own(well.port)], said, pauses=(0.2, 0.4))
        for number in range(2):
            post.tell(replace(EVENT, run=f"r{number}"))
        began = time.monotonic()
        post.round()
        assert [body["run"] for body in well.bodies] == ["r0", "r1"] and unhealthy.asked == 1
        wait_until(lambda: post.round() or unhealthy.asked >= 3, 30, lambda: str(said))
        assert time.monotonic() - began >= 0.6
        unhealthy.answer = 200
        wait_until(lambda: post.round() or post.is_idle(), 10, lambda: str(said))
        assert len(well.bodies) == 2
    given_up = [line for line in said if "given up after 3 tries" in line]
    assert len(given_up) == (0 if unhealthy.bodies[0]["run"] == "r0" else 1), said
    assert unhealthy.bodies[-1]["run"] == "r1"
    assert len([line for line in said if "tried again" in line]) >= 2 and SECRET not in "".join(said), said


def test_of_a_flood_the_last_word_about_each_run_is_sent_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with web_server() as web:
        post = sender(tmp_path, own(web.port), [])
        for number in range(MOST + 30):
            post.tell(replace(EVENT, run=f"r{number % 2}", step=number))
            post.round()
        assert [body["step"] for body in web.bodies] == list(range(MOST)) and not post.is_idle()
        now += WITHIN + 1
        post.round()
    assert [body["step"] for body in web.bodies[MOST:]] == [MOST + 28, MOST + 29] and post.is_idle()


def test_a_finding_is_told_once_and_nothing_shows_the_address(tmp_path: Path) -> None:
    fault = Event("gpu.fault", CRITICAL, "GPU 0 is lost.", host="node1")
    with web_server() as web:
        web.answer = 500
        config(tmp_path, own(web.port))
        add_finding(tmp_path, fault)
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
        assert "gpu.fault: GPU 0 is lost." in said and "500" in said and SECRET not in said
        assert SECRET not in (tmp_path / "state.json").read_text()
        web.answer = 200
        add_finding(tmp_path, replace(fault, message="GPU 1 is lost."))
        again = follow(tmp_path)
        web.wait_for(1, 120)
        again.send_signal(signal.SIGTERM)
        assert again.wait(120) == 0
        assert [body["message"] for body in web.bodies] == ["GPU 1 is lost."]
    # After a start of the machine the file is a new one.
    (tmp_path / NAME).write_text("no finding\n")
    add_finding(tmp_path, fault)
    assert [event.message for _, event in read_findings(tmp_path, "gone")] == ["GPU 0 is lost."]


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


def test_a_full_disk_is_a_sentence(small_disk: Path, tmp_path: Path, aura_says: Aura) -> None:
    with suppress(OSError):
        (small_disk / "filler").write_bytes(b"0" * 65536)
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
    "it is short of ranks, and every start of it ends": (
        [LEARNS, BROKE, JOINS, {**BROKE, "pid": 2}, says("joining", 3), {**BROKE, "pid": 3}, JOINS],
        "started first_step interrupted",
    ),
    "a rank was lost, the others go on without it, and it is back": (
        [
            LEARNS,
            BROKE,
            JOINS,
            TRAINS | {"away": [2]},
            TRAINS | {"away": [2]},
            LEAVES | {"pid": 2},
            says("joining", 3),
            says("training", 3, loss=2.0, away=[]),
        ],
        "started first_step interrupted rank.left rank.back",
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


def test_where_nobody_leads_any_more_one_sentence_says_that_the_run_is_broken() -> None:
    """The PC that leads is off, and the others may not go on without it."""
    seen, told = Seen("running", "training", 1, learned=True), []
    follower = {"rank": 3, "leads": False}
    for number in range(100):
        status = (BROKE | follower) if number % 2 else says("joining", 2 + number, **follower)
        seen, _ = news("r", seen, status, status["state"] == "joining", 50.0, now=100.0 + 60 * number)
        seen, events = report_leaderless("r", seen, status, now=100.0 + 60 * number)
        told += events
    assert [event.kind for event in told] == ["run.interrupted"]
    assert "rank 2 on node2 has not answered" in told[0].message


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
    assert [event.kind.removeprefix("run.") for event in told] == expected.split()
    if "interrupted" in expected and any(BROKE in (status, status.get("before")) for status in statuses):
        assert "rank 2 on node2 has not answered" in told[2].message
        assert told[2].step == 7


def test_of_a_run_tells_who_leads_it_and_who_takes_the_lead_goes_on(tmp_path: Path) -> None:
    """Rank 0's node goes and comes back. Each node has a notifier of its own, here called for one look."""
    with web_server() as web:
        path, messages = config(tmp_path, own(web.port)), list[str]()

        def node(number: int, state: str, pid: int, **values: Any) -> list[str]:
            """What it tells, once its rank has written this."""
            rank = tmp_path / f"{number}/runs/r/rank-{number}"
            rank.mkdir(parents=True, exist_ok=True)
            begun = begun_of(pid) if state in ACTIVE else ""
            said = says(state, pid, rank=number, begun=begun, updated=time.time(), **values)
            (rank / "status.json").write_text(json.dumps(said))
            words = ["--webhook-config", str(path), "--once", "--node", f"node{number}"]
            words += ["--runs", str(rank.parents[1]), "--state", str(tmp_path / str(number))]
            assert notify.main([*words, "--faults", str(tmp_path)]) == 0
            bodies, web.bodies[:] = web.bodies[:], []
            messages.extend(body["message"] for body in bodies)
            return [f"{body['event']} {body['rank']}" for body in bodies]

        mine, older = os.getpid(), os.getppid()
        leads, follows = {"leads": True, "loss": 2.5}, {"leads": False, "loss": 2.5}
        assert node(0, "training", older, **leads) == ["run.started 0", "run.first_step 0"]
        assert node(1, "training", older, **follows) == []
        # It is gone.
        assert node(1, "failed", older, **follows, exit_code=75, message="rank 0 has not answered") == []
        assert node(1, "joining", mine) == []
        assert node(1, "training", mine, **leads, away=[0]) == ["rank.left 1"]
        assert "without rank(s) 0" in messages[-1]
        # It is refused before it meets the others, who know nothing of it.
        refused = {"exit_code": 64, "message": "torch cannot use the card"}
        assert node(2, "joining", older) == []
        assert node(2, "failed", older, **refused) == ["run.failed 2"]
        assert messages[-1].startswith("node2 does not take part in run r: torch cannot use the card")
        assert node(2, "joining", older) == []
        assert node(2, "failed", older, attempt="20261121-1", **refused) == []
        # It is back, and they meet again.
        back = {"exit_code": 75, "message": "rank 0 is back", **leads}
        assert node(1, "stopped", mine, **back) == []
        assert node(1, "training", older, **follows) == []
        assert node(0, "training", mine, **leads) == ["run.interrupted 0", "run.resumed 0"]
        assert node(1, "done", older, **follows) == []
        assert node(0, "done", mine, **leads, validation_loss=2.2) == ["run.finished 0"]


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
