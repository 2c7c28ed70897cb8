"""The settings of the native port: from the configuration file to the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from pydanube.api.native.server import NativeServer
from pydanube.config import Config, Flags, load
from pydanube.config.stream import StreamConfig, StreamLimits
from pydanube.errors import ConfigError
from tests.harness.brokers import BrokerFixture, simulated
from tests.harness.peers import Peer


def loaded(tmp_path: Path, text: str) -> Config:
    file = tmp_path / "danube.yml"
    file.write_text(text)
    return load(Flags(config_file=file, mode="standalone"))


def test_without_a_word_the_port_is_plain_and_has_limits(tmp_path: Path) -> None:
    assert loaded(tmp_path, "broker: {host: 127.0.0.1}").stream == StreamConfig()
    assert StreamConfig().scheme == "danube"


def test_limits_and_files_are_taken_from_the_file(tmp_path: Path) -> None:
    stream = loaded(
        tmp_path,
        """
stream:
  limits: {handshake_seconds: 3, keepalive_seconds: 5, frame_bytes: 1048576, connections: 7}
  tls: {cert_file: broker.pem, key_file: broker.key, ca_file: clients.pem}
""",
    ).stream
    assert stream.limits == StreamLimits(handshake_seconds=3, keepalive_seconds=5, frame_bytes=1048576, connections=7)
    assert (stream.cert_file, stream.key_file, stream.ca_file) == (
        Path("broker.pem"),
        Path("broker.key"),
        Path("clients.pem"),
    )
    assert stream.scheme == "danube+tls"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("limits: {frame_bytes: 100}", "stream.limits.frame_bytes"),
        ("limits: {frame_bytes: 99999999}", "stream.limits.frame_bytes"),
        ("limits: {stuck_seconds: 0}", "stream.limits.stuck_seconds"),
        ("limits: {requests: many}", "stream.limits.requests"),
        ("limits: {keepalive_seconds: 86400}", "stream.limits.keepalive_seconds"),
        ("limits: {unsent_bytes: 1}", "stream.limits.unsent_bytes"),
        ("limits: {windows: 5}", "stream.limits.windows"),
        ("tls: {cert_file: a.pem}", "stream.tls.key_file"),
        ("tls: {key_file: a.key}", "stream.tls.cert_file"),
        ("tls: {ca_file: ca.pem}", "stream.tls.cert_file"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, f"stream:\n  {text}\n")
    assert caught.value.key == key


@simulated
async def test_the_server_has_the_limits_of_its_brokers_configuration() -> None:
    host = BrokerFixture()
    host.config = Config(stream=StreamConfig(limits=StreamLimits(keepalive_seconds=7, frame_bytes=70_000)))
    broker = await host.boot()
    peer = await Peer.greeted(NativeServer(broker))
    welcome = peer.heard("welcome")[0].welcome
    assert (welcome.keepalive_seconds, welcome.frame_size_max) == (7, 70_000)
