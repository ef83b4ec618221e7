from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.service.web.access import (
    NOBODY,
    SESSION_S,
    TRIES_AT_ONCE,
    Access,
    add_token,
    read_tokens,
    remove_token,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tokens.toml"


def access(path: Path) -> Access:
    return Access(path, reading_needs_token=False)


def test_a_token_says_who_and_what_role_and_only_its_digest_is_kept(path: Path) -> None:
    token = add_token(path, "anna", "operator")
    add_token(path, "ben", "viewer")
    somebody = access(path).by_token(token)
    assert (somebody.name, somebody.role, somebody.may_operate) == ("anna", "operator", True)
    assert token not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("token", ["", "x", "\udcff", "é" * 50])
def test_anything_else_is_nobodys(path: Path, token: str) -> None:
    add_token(path, "anna", "operator")
    assert access(path).by_token(token) is None


def test_a_token_that_is_replaced_or_taken_away_ends_its_sessions_while_the_console_runs(path: Path) -> None:
    add_token(path, "ben", "viewer")
    token = add_token(path, "anna", "operator")
    known = access(path)
    somebody = known.by_token(token)
    assert somebody is not None
    cookie = known.begin(somebody, 0.0)
    assert known.by_cookie(cookie, 1.0).name == "anna"
    assert known.by_cookie(cookie, 1.0).secret
    add_token(path, "anna", "operator")
    assert known.by_cookie(cookie, 2.0) == NOBODY
    assert known.by_token(token) is None
    remove_token(path, "anna")
    assert "anna" not in path.read_text()
    path.unlink()
    assert known.by_token(token) is None


def test_a_session_ends_by_itself(path: Path) -> None:
    token = add_token(path, "anna", "viewer")
    known = access(path)
    somebody = known.by_token(token)
    assert somebody is not None
    cookie = known.begin(somebody, 0.0)
    assert known.by_cookie(cookie, SESSION_S - 1).role == "viewer"
    assert known.by_cookie(cookie, SESSION_S) == NOBODY
    assert known.by_cookie("made up", 0.0) == NOBODY


def test_an_address_has_few_tries_of_its_own(path: Path) -> None:
    add_token(path, "anna", "viewer")
    known = access(path)
    assert [known.may_try("10.0.0.9", 0.0) for _ in range(6)] == [True] * int(TRIES_AT_ONCE) + [False]
    assert known.may_try("10.0.0.8", 0.0)
    assert known.may_try("10.0.0.9", 60.0)


@pytest.mark.parametrize(
    "text", ["x = 1", '[anna]\nrole = "root"\nsha256 = ""', '["<b>"]\nrole = "viewer"\nsha256 = ""', "[", "\x00"]
)
def test_a_file_that_is_no_list_of_tokens_is_refused_in_one_line(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SettingsError, match=r"tokens\.toml"):
        access(path)


def test_a_file_that_others_may_write_is_refused(path: Path) -> None:
    add_token(path, "anna", "viewer")
    path.chmod(0o620)
    with pytest.raises(SettingsError, match="chmod go-w"):
        access(path)


def test_a_file_that_others_may_write_by_now_lets_nobody_in(path: Path) -> None:
    token = add_token(path, "anna", "viewer")
    known = access(path)
    assert known.by_token(token) is not None
    path.chmod(0o620)
    assert known.by_token(token) is None
    path.chmod(0o600)
    assert known.by_token(token) is not None


def test_a_pipe_is_no_file_of_tokens_and_nobody_waits_for_it(path: Path) -> None:
    os.mkfifo(path, 0o600)
    with pytest.raises(SettingsError, match="is no file"):
        access(path)


def test_names_are_checked(path: Path) -> None:
    with pytest.raises(SettingsError, match="letters"):
        add_token(path, 'a"]', "viewer")
    with pytest.raises(SettingsError, match="makes it"):
        remove_token(path, "anna")


def test_tokens_that_several_add_at_the_same_time_are_all_there_also_through_a_link(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    threads = [threading.Thread(target=add_token, args=(link, f"u{number}", "viewer")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert link.is_symlink()
    assert sorted(read_tokens(path)) == [f"u{number}" for number in range(8)]


@pytest.mark.parametrize("digest", ["\u00e9", "", "A" * 64, "0" * 63, "0" * 65])
def test_a_digest_that_nobody_s_token_has_is_refused_with_its_file(path: Path, digest: str) -> None:
    add_token(path, "anna", "operator")
    path.write_text(path.read_text() + f'\n["zed"]\nrole = "viewer"\nsha256 = "{digest}"\n', encoding="utf-8")
    with pytest.raises(SettingsError, match=r"tokens\.toml: .*sha256"):
        read_tokens(path)


def test_two_names_with_one_token_are_refused(path: Path) -> None:
    add_token(path, "anna", "operator")
    path.write_text('["aaa"]\nrole = "viewer"\n' + path.read_text().split("\n", 2)[2] + path.read_text())
    with pytest.raises(SettingsError, match="have the same token; remove one"):
        read_tokens(path)


def test_why_nobody_gets_in_any_more_is_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    token = add_token(path, "anna", "operator")
    known, good = access(path), path.read_text()
    path.write_text(good + '\n["zed"]\nrole = "viewer"\nsha256 = "\u00e9"\n', encoding="utf-8")
    os.utime(path, ns=(1, 1))
    assert known.by_token(token) is None
    assert known.by_token(token) is None
    assert caplog.text.count("tokens not read") == 1
    path.write_text(good)
    os.utime(path, ns=(2, 2))
    assert known.by_token(token) is not None
    assert caplog.text.count("tokens read again") == 1
