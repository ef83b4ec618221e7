"""A store's URL holds no password, for other users of the machine see it, and no message shows one."""

from __future__ import annotations

import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.wire.transport.claims import check_store


@pytest.mark.parametrize(
    "url",
    ["s3://KEY:secret@bucket/x", "s3://KEY:se/secret@bucket", "ftp://me:secret@host:21/x", "s3://KEY:[secret@bucket"],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check_store(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["file:///shared/a:b@c", "ftp://host:21/a@b", "s3://bucket/a:b@c", "ftp://me@host/x"])
def test_what_only_looks_like_a_password_is_taken(url: str) -> None:
    pytest.importorskip("s3fs")
    assert check_store(url) == url
