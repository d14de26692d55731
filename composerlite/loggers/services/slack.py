"""SlackLogger: metrics as messages in a channel of Slack."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

from composerlite import dist
from composerlite.core import Logger, LoggerDestination, State, TimeInput, TimeUnit, ensure_time
from composerlite.errors import ConfigError, checked_arguments
from composerlite.loggers.services.service import need_package
from composerlite.loggers.values import plain
from composerlite.storage import Background

log = logging.getLogger(__name__)

_MOST = 50
"""Largest number of blocks in a message of Slack."""
_Blocks: TypeAlias = "list[dict[str, Any]]"


@final
class SlackLogger(LoggerDestination):
    """Posts metrics, hyperparameters and traces to a channel of Slack, with `chat.postMessage
    <https://docs.slack.dev/reference/methods/chat.postMessage>`_.

    Rank 0 posts messages in the background, with the last value of each name. A message that Slack refuses is a
    warning, and training continues.

    Args:
        include_keys: regular expressions of names to post, matched from the first letter on; all names by default.
        formatter_func: gets a dict of values by name and returns Slack's blocks; by default a line per value.
        log_interval: batches or epochs between two messages, such as ``'100ba'``; a number counts epochs. The first
            batch or epoch is always posted.
        max_logs_per_message: values in a message, 50 at most.
        slack_logging_api_key: token of the app; by default ``SLACK_LOGGING_API_KEY`` of the environment.
        channel_id: id of the channel; by default ``SLACK_LOGGING_CHANNEL_ID`` of the environment.
        base_url: address of Slack's API; by default the public address.
        timeout: seconds to wait for Slack, for each message and at the end.

    Raises:
        ConfigError: slack_sdk is not installed, token or channel are missing, or an argument is invalid.

    Example:
        .. code-block:: python

            Trainer(model=model, loggers=SlackLogger(include_keys=["loss/"], log_interval="1ep"))
    """

    @checked_arguments
    def __init__(
        self,
        include_keys: Sequence[str] = (),
        formatter_func: Callable[..., _Blocks] | None = None,
        log_interval: TimeInput = "1ba",
        max_logs_per_message: int = _MOST,
        slack_logging_api_key: str | None = None,
        channel_id: str | None = None,
        *,
        base_url: str | None = None,
        timeout: float = 30.0,
    ) -> None:
        need_package("slack_sdk", who="SlackLogger", extra="slack")
        self._token = slack_logging_api_key or os.environ.get("SLACK_LOGGING_API_KEY")
        self._channel = channel_id or os.environ.get("SLACK_LOGGING_CHANNEL_ID")
        for argument, variable, value in (
            ("slack_logging_api_key", "SLACK_LOGGING_API_KEY", self._token),
            ("channel_id", "SLACK_LOGGING_CHANNEL_ID", self._channel),
        ):
            if not value:
                raise ConfigError(f"SlackLogger({argument}=None): give the argument, or set {variable}.")
        self._interval = ensure_time(log_interval, TimeUnit.EPOCH)
        if self._interval.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH) or self._interval.value < 1:
            raise ConfigError(
                f"SlackLogger(log_interval={str(log_interval)!r}): expected batches or epochs, such as '100ba'."
            )
        if not 1 <= max_logs_per_message <= _MOST:
            raise ConfigError(f"SlackLogger(max_logs_per_message={max_logs_per_message}): expected 1 to {_MOST}.")
        if isinstance(include_keys, str):
            raise ConfigError(f"SlackLogger(include_keys={include_keys!r}): expected a list of regular expressions.")
        try:
            self._wanted = re.compile("|".join(f"(?:{key})" for key in include_keys))
        except re.error as e:
            raise ConfigError(f"SlackLogger(include_keys={list(include_keys)!r}) cannot be read: {e}.") from e
        self._format = formatter_func
        self._most = max_logs_per_message
        self._base_url = base_url
        self._timeout = float(timeout)
        self._is_silent = dist.get_global_rank() != 0
        self._values: dict[str, Any] = {}
        self._client: Any = None
        self._background = Background("SlackLogger", timeout=self._timeout)

    @property
    def place(self) -> str | None:
        """The channel."""
        return None if self._is_silent else f"Slack, channel {self._channel}"

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._keep(metrics)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._keep(hyperparameters)

    def log_traces(self, traces: dict[str, Any]) -> None:
        self._keep(traces)

    def batch_end(self, state: State, logger: Logger) -> None:
        self._post_if_due(TimeUnit.BATCH, state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._post_if_due(TimeUnit.EPOCH, state)

    def post_close(self) -> None:
        """Post the remaining values, after the ``close`` of all callbacks.

        Raises:
            TimeoutError: some messages were not sent in time.
        """
        self._post()
        self._background.close()

    def _keep(self, values: dict[str, Any]) -> None:
        if not self._is_silent:
            self._values |= {name: plain(value) for name, value in values.items() if self._wanted.match(name)}

    def _post_if_due(self, unit: TimeUnit, state: State) -> None:
        count = state.timestamp.count(unit)
        if self._interval.unit is unit and (count % self._interval.value == 0 or count == 1):
            self._post(f"{unit.name.lower()} {count}")

    def _post(self, header: str | None = None) -> None:
        """Post the values since the last message, in the background."""
        values, self._values = self._values, {}
        items = iter(values.items())
        while part := dict(itertools.islice(items, self._most)):
            blocks = (
                [_block(name, value) for name, value in part.items()] if self._format is None else self._format(part)
            )
            text = ", ".join(f"{name}: {value}" for name, value in part.items())
            self._background.submit(
                f"{len(part)} values", lambda blocks=blocks, text=text: self._send(blocks, text, header)
            )

    def _send(self, blocks: _Blocks, text: str, header: str | None) -> None:
        try:
            if self._client is None:
                slack_sdk: Any = importlib.import_module("slack_sdk")
                given = {} if self._base_url is None else {"base_url": self._base_url}
                self._client = slack_sdk.WebClient(token=self._token, timeout=int(self._timeout), **given)
            self._client.chat_postMessage(
                channel=self._channel, blocks=blocks, text=text if header is None else f"{header}: {text}"
            )
        except Exception as e:  # noqa: BLE001 - logged: a message is not worth a run
            log.warning("SlackLogger: a message was not posted: %s: %s", type(e).__name__, e)


def _block(name: str, value: Any) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": f"*{name}:* {value}"}}
