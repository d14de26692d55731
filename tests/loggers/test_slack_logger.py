"""SlackLogger: Slack's own library posts to a local service that answers as Slack does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("slack_sdk")

from composerlite.errors import ConfigError
from composerlite.loggers import SlackLogger


class Service(ThreadingHTTPServer):
    """Keeps the posts, and answers with ``answer``."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posts: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.answer: dict[str, Any] = {"ok": True}


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        assert self.path == "/api/chat.postMessage"
        self.server.posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.tokens.add(self.headers["Authorization"])
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(self.server.answer).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join(60)


def logger_to(service: Service, **arguments: Any) -> SlackLogger:
    return SlackLogger(
        slack_logging_api_key="xoxb-1",
        channel_id="C1",
        base_url=f"http://127.0.0.1:{service.server_port}/api/",
        **arguments,
    )


def test_messages_have_the_requested_values(run: Any, service: Service) -> None:
    """At the first batch and at every interval, the last value of each name; the rest at the end."""
    logger = logger_to(service, include_keys=["loss/"], log_interval="2ba")
    run(logger).batches(5).finish()
    assert [post["text"] for post in service.posts] == [
        "batch 1: loss/train/total: 1.0",
        "batch 2: loss/train/total: 0.5",
        "batch 4: loss/train/total: 0.25",
        "loss/train/total: 0.20000000298023224",
    ]
    assert {post["channel"] for post in service.posts} == {"C1"}
    assert service.tokens == {"Bearer xoxb-1"}
    [block] = service.posts[1]["blocks"]
    assert block == {"type": "section", "text": {"type": "mrkdwn", "text": "*loss/train/total:* 0.5"}}
    assert logger.place == "Slack, channel C1"


def test_many_values_are_several_messages(run: Any, service: Service) -> None:
    """A message of Slack has 50 blocks at most. A custom formatter makes the blocks."""
    logger = logger_to(
        service,
        include_keys=["metric"],
        max_logs_per_message=20,
        log_interval="1ep",
        formatter_func=lambda data: [{"type": "divider"}] * len(data),
    )
    started = run(logger)
    started.logger.log_metrics({f"metric{number}": number for number in range(45)})
    started.epoch().finish()
    assert [len(post["blocks"]) for post in service.posts] == [20, 20, 5]
    assert service.posts[0]["blocks"][0] == {"type": "divider"}


def test_a_refused_message_does_not_end_training(run: Any, service: Service, caplog: pytest.LogCaptureFixture) -> None:
    """A warning has Slack's own error."""
    service.answer = {"ok": False, "error": "channel_not_found"}
    run(logger_to(service, log_interval="5ba")).batches(5).finish()
    assert "SlackLogger: a message was not posted: SlackApiError" in caplog.text
    assert "channel_not_found" in caplog.text


def test_missing_and_invalid_arguments_are_errors_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token and channel come from arguments or the environment."""
    for name in ("SLACK_LOGGING_API_KEY", "SLACK_LOGGING_CHANNEL_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="set SLACK_LOGGING_API_KEY"):
        SlackLogger()
    monkeypatch.setenv("SLACK_LOGGING_API_KEY", "xoxb-1")
    with pytest.raises(ConfigError, match="set SLACK_LOGGING_CHANNEL_ID"):
        SlackLogger()
    monkeypatch.setenv("SLACK_LOGGING_CHANNEL_ID", "C2")
    assert SlackLogger().place == "Slack, channel C2"
    for arguments, message in (
        ({"include_keys": "loss"}, "expected a list"),
        ({"include_keys": ["("]}, "cannot be read"),
        ({"log_interval": "3s"}, "expected batches or epochs"),
        ({"max_logs_per_message": 51}, "expected 1 to 50"),
    ):
        with pytest.raises(ConfigError, match=message):
            SlackLogger(**arguments)  # type: ignore[arg-type]
