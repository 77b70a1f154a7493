"""Who brings a message to a person: Discord, Slack, Telegram, e-mail, ntfy, a webhook of one's own; apprise speaks to
them. Their addresses are secrets: no error, no line and no name here holds one.

webhooks.json, in the form of guide 003, or with several of them:

    {"webhook_url": "https://discord.com/api/webhooks/…", "webhook_type": "discord"}
    {"services": [{…}, "tgram://…"], "heartbeat_url": "https://…", "heartbeat_seconds": 60, "cluster": "home"}
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import apprise
import requests
from apprise.plugins.custom_json import NotifyJSON

from aura.errors import ConfigError, did_you_mean
from aura.texts.console import text
from aura.watch.events import CRITICAL, LONGEST, WARNING, Event, payload

TIMEOUT = 30.0  # seconds for one message to one service
HEARTBEAT_TIMEOUT = 10.0
SLOW = 20.0  # seconds that a server may take to answer
# `webhook_type`, and what apprise calls the service. raw is what guide 003 calls a webhook of one's own.
TYPES = {"discord": "Discord", "slack": "Slack", "telegram": "Telegram", "ntfy": "ntfy", "email": "E-Mail"}
OWN = ("json", "raw")
ADDRESS = ("webhook_url", "callback_url")  # the second is that of raw
OF_A_SERVICE = (*ADDRESS, "webhook_type")
OF_THE_FILE = ("services", "heartbeat_url", "heartbeat_seconds", "cluster")
LEVELS = {WARNING: apprise.NotifyType.WARNING, CRITICAL: apprise.NotifyType.FAILURE}

# What it logs may hold addresses. What a person has to know comes with the answer.
for name in ("apprise", "urllib3", "requests"):
    logging.getLogger(name).addHandler(logging.NullHandler())
    logging.getLogger(name).propagate = False


@dataclass
class Service:
    """`name` is for people and logs, `key` for the queue; neither says where it is."""

    name: str
    key: str
    address: str = field(repr=False)
    apprise: apprise.Apprise = field(repr=False)

    def send(self, event: Event, cluster: str) -> str:
        """Why it was not delivered; empty when it was."""
        for plugin in self.apprise:
            if isinstance(plugin, NotifyJSON):  # its own five keys give way to ours
                its = dict.fromkeys(("version", "title", "type", "attachments"), "")
                plugin.payload_extras = its | payload(event, cluster)
        answer = self.apprise.notify(
            body="\n".join(filter(None, (event.message[:LONGEST], event.remedy))),
            title=" · ".join(filter(None, (cluster, event.host, event.kind))),
            notify_type=LEVELS.get(event.severity, apprise.NotifyType.INFO),
            body_format=apprise.NotifyFormat.TEXT,
            timeout=TIMEOUT,
        )
        if answer:
            return ""
        said = " ".join(entry.message for entry in answer.logs())
        return without_secrets(said, self.address) or text("service_says_nothing")


@dataclass
class Services:
    services: list[Service]
    cluster: str = ""
    heartbeat_url: str = field(default="", repr=False)
    heartbeat_seconds: float = 60.0

    def heartbeat(self) -> str:
        """Say that this node lives; why that was not possible, or empty."""
        try:
            answer = requests.get(self.heartbeat_url, timeout=HEARTBEAT_TIMEOUT)
        except requests.RequestException as error:
            return type(error).__name__  # its own text has the address
        return "" if answer.ok else f"HTTP {answer.status_code}"


def read_services(path: Path) -> Services:
    """Raises ConfigError, which says what is wrong in the file and never shows an address."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("webhooks_unreadable", path=path, reason=error.strerror) from None
    except ValueError:  # its own text shows a part of the file
        raise ConfigError("webhooks_no_json", path=path) from None
    if isinstance(content, list):
        content = {"services": content}
    if not isinstance(content, dict):
        raise ConfigError("webhooks_no_json", path=path)
    _check_keys(content, (*OF_THE_FILE, *OF_A_SERVICE), path)
    listed = content.get("services", [])
    if not isinstance(listed, list):
        raise ConfigError("webhooks_no_json", path=path)
    if any(key in content for key in OF_A_SERVICE):
        listed = [*listed, {key: content[key] for key in OF_A_SERVICE if key in content}]
    services = [_service(entry, number, path) for number, entry in enumerate(listed, start=1)]
    heartbeat, seconds = content.get("heartbeat_url", ""), content.get("heartbeat_seconds", 60)
    if heartbeat and (not isinstance(heartbeat, str) or not _is_http(heartbeat)):
        raise ConfigError("heartbeat_wrong", path=path)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 1:
        raise ConfigError("heartbeat_seconds_wrong", path=path)
    if not services and not heartbeat:
        raise ConfigError("webhooks_empty", path=path)
    return Services(services, str(content.get("cluster", "")), heartbeat, float(seconds))


def is_open(path: Path) -> bool:
    """May others than its owner read the file?"""
    return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def _service(entry: Any, number: int, path: Path) -> Service:
    kind = ""
    if isinstance(entry, dict):
        _check_keys(entry, OF_A_SERVICE, path)
        kind = str(entry.get("webhook_type", "")).lower()
        entry = next((entry[key] for key in ADDRESS if key in entry), None)
    if not isinstance(entry, str) or not entry:
        raise ConfigError("webhook_without_address", path=path, number=number)
    if kind and kind not in (*TYPES, *OWN):
        hint = did_you_mean(kind, (*TYPES, *OWN))
        raise ConfigError(
            "webhook_type_unknown", path=path, number=number, hint=hint, names=", ".join((*TYPES, *OWN))
        )
    address = _as_apprise(entry, kind)
    plugin = apprise.Apprise.instantiate(address, suppress_exceptions=True)
    wanted = "JSON" if kind in OWN else TYPES.get(kind)
    if plugin is None or (wanted and plugin.service_name != wanted):
        raise ConfigError("webhook_not_understood", path=path, number=number, kind=kind or text("none"))
    # A server may have taken the message, and answer after apprise's own 4 s: it would get it again and again.
    plugin.socket_read_timeout = max(plugin.socket_read_timeout, SLOW)
    sender = apprise.Apprise()
    sender.add(plugin)
    key = hashlib.sha256(entry.encode()).hexdigest()[:16]
    return Service(f"{plugin.service_name} {number}", key, entry, sender)


def _as_apprise(address: str, kind: str) -> str:
    """A web address in apprise's form, where the service has none that it knows by itself."""
    if not _is_http(address) or kind not in (*OWN, "ntfy"):
        return address
    parts = urlsplit(address)
    if kind == "ntfy":
        return urlunsplit(parts._replace(scheme="ntfys" if parts.scheme == "https" else "ntfy"))
    query = urlencode([(f"-{name}", value) for name, value in parse_qsl(parts.query)], quote_via=quote)
    return urlunsplit(parts._replace(scheme="jsons" if parts.scheme == "https" else "json", query=query))


def _is_http(address: str) -> bool:
    return address.startswith(("http://", "https://")) and bool(urlsplit(address).hostname)


def _check_keys(content: dict[str, Any], known: tuple[str, ...], path: Path) -> None:
    for key in content:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise ConfigError("webhooks_unknown_key", path=path, key=key, hint=hint, names=", ".join(known))


def without_secrets(said: str, address: str) -> str:
    """Without any part of the address but its host: path, user, password and what stands behind the question mark.
    What stands in the host's place without a dot or a port is a secret, too (ntfy://TOPIC)."""
    parts = urlsplit(address)
    host = parts.hostname or ""
    is_bare = "." not in host and ":" not in parts.netloc.rpartition("@")[2]
    if is_bare and parts.scheme not in ("http", "https"):
        host = ""
    for part in sorted(re.split(r"[/:@?&=#]+", address), key=len, reverse=True):
        if len(part) >= 4 and part not in (host, "https", "http", "mailto", "json", "jsons"):
            said = said.replace(part, "***")
    return said
