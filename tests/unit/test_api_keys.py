"""The file of keys, and the limits of a key."""

import hashlib
from pathlib import Path

import pytest

from router.api_keys import ApiKey, KeyFileError, KeyLimits, KeyRing, first_plain_key, read_keys
from router.doorkeeper import Doorkeeper
from router.errors import ErrorCode, RequestError
from router.key_quota import KeyQuota

DIGEST = hashlib.sha256(b"secret-2").hexdigest()
YAML = f"""
- {{name: one, key: secret-1, max_concurrent_requests: 2}}
- {{name: two, sha256: {DIGEST}, tokens_per_minute: 600}}
"""


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(YAML)
    return path


def test_a_line_is_a_key_and_comments_are_none(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\n  secret-1 \nsecret-2\n")
    ring = KeyRing(path)
    assert [ring.find(key) is not None for key in ("secret-1", "secret-2", "# ours", "")] == [
        True,
        True,
        False,
        False,
    ]
    assert first_plain_key(path) == "secret-1"


def test_yaml_names_keys_and_limits_them(yaml_file: Path) -> None:
    ring = KeyRing(yaml_file)
    one, two = ring.find("secret-1"), ring.find("secret-2")
    assert one is not None and (one.name, one.limits) == ("one", KeyLimits(max_concurrent_requests=2))
    assert two is not None and (two.name, two.limits) == ("two", KeyLimits(tokens_per_minute=600))
    assert ring.find(DIGEST) is None
    assert first_plain_key(yaml_file) == "secret-1"


def test_nothing_that_is_kept_shows_a_key(yaml_file: Path) -> None:
    assert "secret" not in repr(read_keys(yaml_file)) and DIGEST not in repr(read_keys(yaml_file))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("keys", "# none\n", "holds none"),
        ("keys", "secret\nsecret\n", "twice"),
        ("keys.yaml", "- {name: one}", "0: Value error, give either key or sha256"),
        ("keys.yaml", f"- {{name: one, key: secret, sha256: {DIGEST}}}", "give either key or sha256"),
        ("keys.yaml", "- {name: one, sha256: secret}", "0.sha256"),
        ("keys.yaml", "- {name: one, key: secret, limit: 1}", "0.limit"),
        ("keys.yaml", "- {name: one, key: secret, tokens_per_minute: 0}", "0.tokens_per_minute"),
        ("keys.yaml", "- secret", "0: "),
        ("keys.yaml", "[secret", "is not YAML"),
        ("keys.yaml", "secret", "valid list"),
    ],
)
def test_a_damaged_file_is_named_and_its_keys_are_not_told(
    tmp_path: Path, name: str, text: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(KeyFileError) as error:
        KeyRing(path)
    told = str(error.value).replace("sha256: secret", "")
    assert str(path) in told and said in told
    assert "secret" not in told.replace("give either key", "")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="none cannot be read"):
        KeyRing(tmp_path / "none")


@pytest.mark.parametrize("damage", ["[", ""])
def test_keys_stay_while_the_file_is_damaged_and_follow_it_when_it_is_whole(
    yaml_file: Path, damage: str
) -> None:
    ring = KeyRing(yaml_file)
    yaml_file.write_text(damage)
    assert ring.find("secret-1") is not None
    yaml_file.unlink()
    assert ring.find("secret-1") is not None
    yaml_file.write_text("[{name: three, key: secret-3}]")
    assert ring.find("secret-1") is None
    assert ring.find("secret-3") is not None


@pytest.mark.parametrize("authorization", ["Bearer secret-1", "bearer secret-1", "Bearer  secret-1 "])
def test_the_scheme_is_bearer_however_it_is_written(yaml_file: Path, authorization: str) -> None:
    assert Doorkeeper(KeyRing(yaml_file)).admit(authorization).name == "one"


@pytest.mark.parametrize("authorization", [None, "", "secret-1", "Basic secret-1", "Bearer", "Bearer x"])
def test_whoever_shows_no_key_is_unauthenticated(yaml_file: Path, authorization: str | None) -> None:
    with pytest.raises(RequestError) as error:
        Doorkeeper(KeyRing(yaml_file)).admit(authorization)
    assert error.value.code is ErrorCode.UNAUTHENTICATED


class Clock:
    """Shows what a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def limited(**limits: int) -> ApiKey:
    return ApiKey("limited", b"d" * 32, KeyLimits(**limits))


def retry_after_s(quota: KeyQuota, key: ApiKey) -> float | None:
    """None: the request is let in."""
    try:
        with quota.request(key):
            return None
    except RequestError as error:
        assert error.code is ErrorCode.RESOURCE_EXHAUSTED
        return error.retry_after_s


def test_a_place_is_free_again_when_its_request_ends_however_it_ends() -> None:
    quota, key = KeyQuota(), limited(max_concurrent_requests=1)
    with pytest.raises(KeyError), quota.request(key):
        assert retry_after_s(quota, key) == 1.0
        raise KeyError
    assert retry_after_s(quota, key) is None


def test_tokens_come_back_at_the_limits_rate() -> None:
    clock = Clock()
    quota, key = KeyQuota(clock), limited(tokens_per_minute=60)
    with quota.request(key) as spending:
        spending.charge(90)
    assert retry_after_s(quota, key) == 31
    clock.now_s += 30
    assert retry_after_s(quota, key) == 1
    clock.now_s += 1
    assert retry_after_s(quota, key) is None


def test_no_more_than_a_minutes_tokens_gather() -> None:
    clock = Clock()
    quota, key = KeyQuota(clock), limited(tokens_per_minute=60)
    clock.now_s += 3600
    with quota.request(key) as spending:
        spending.charge(61)
    assert retry_after_s(quota, key) == 2


def test_a_key_does_not_use_up_anothers_limits() -> None:
    quota, key = KeyQuota(), limited(max_concurrent_requests=1)
    other = ApiKey("other", b"o" * 32, KeyLimits(max_concurrent_requests=1))
    with quota.request(key):
        assert retry_after_s(quota, other) is None


def test_a_new_limit_holds_for_what_runs_already() -> None:
    """The file was read again."""
    quota = KeyQuota()
    with quota.request(limited()):
        assert retry_after_s(quota, limited()) is None
        assert retry_after_s(quota, limited(max_concurrent_requests=1)) == 1.0
