"""Names of places in stores: what they are, what is refused, and that no secret is shown."""

from pathlib import Path

import fsspec
import pytest

from halfstep.storage.url import (
    StoreURL,
    hide_credentials,
    is_store_url,
    local_name,
    open_filesystem,
    parse_store_url,
)

SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"


@pytest.mark.parametrize(
    ("text", "scheme", "path"),
    [
        ("s3://bucket/run", "s3", "bucket/run"),
        ("S3://bucket/runs/a b/", "s3", "bucket/runs/a b"),
        ("obs://bucket/run@2", "obs", "bucket/run@2"),
        ("memory://x", "memory", "x"),
        ("file:///tmp/run", "file", "/tmp/run"),
        ("hdfs://host:9000/run", "hdfs", "host:9000/run"),
    ],
)
def test_a_url_is_taken_apart(text: str, scheme: str, path: str) -> None:
    assert is_store_url(text)
    url = parse_store_url(text, "out")
    assert url == StoreURL(scheme, path)
    assert str(url / "step") == f"{scheme}://{path}/step"
    assert (url / "step").name == "step"


@pytest.mark.parametrize("text", ["runs/mlp", "csv:houses.csv", "/tmp/x", "C:\\x", Path("runs/s3")])
def test_paths_are_no_urls(text: str | Path) -> None:
    assert not is_store_url(text)


@pytest.mark.parametrize(
    "text",
    [
        f"s3://AKIAIOSFODNN7EXAMPLE:{SECRET}@bucket/run",
        "s3://user:hunter2@bucket/run",
        "s3://hunter2@bucket/run",
        "s3://bucket/run?X-Amz-Signature=hunter2",
        "s3://bucket/run#hunter2",
        "s3://key:hunter2/run",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_shown(text: str) -> None:
    with pytest.raises(ValueError, match="out: expected a URL without a") as caught:
        parse_store_url(text, "out")
    message = str(caught.value)
    assert "hunter2" not in message
    assert "wJalr" not in message
    assert "EXAMPLE" not in message


@pytest.mark.parametrize(
    "text", ["s3://", "s3:///run", "s3://bucket//run", "s3://bucket/../x", "simplecache::s3://b/x"]
)
def test_what_names_no_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^out: expected"):
        parse_store_url(text, "out")


def test_a_path_that_was_a_url_is_refused() -> None:
    assert is_store_url(Path("s3://bucket/run"))
    with pytest.raises(ValueError, match="got a Path, which has lost a slash: s3:/bucket/run"):
        parse_store_url(Path("s3://bucket/run"), "Checkpoint")


@pytest.mark.parametrize(
    "text",
    [
        f"GET https://k:{SECRET}@host/bucket failed",
        f"GET https://host/b?X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}&partNumber=1",
        f"Authorization: AWS4-HMAC-SHA256 Credential=x, Signature={SECRET}",
    ],
)
def test_secrets_are_masked_by_their_form(text: str) -> None:
    assert SECRET not in hide_credentials(text)
    assert "wJalr" not in hide_credentials(text)


def test_parameters_that_are_no_secret_stay() -> None:
    text = "GET https://host/b?partNumber=1&uploadId=7 gave 500"
    assert hide_credentials(text) == text


def test_secrets_of_the_environment_and_of_fsspec_are_masked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "north-pole-1")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"client_kwargs": {"password": "sesame-open"}})
    text = hide_credentials(f"north-pole-1 {SECRET} sesame-open wJalrXUtnFEMI%2FK7MDENG")
    assert text.startswith("north-pole-1 … … wJalr")
    assert SECRET not in hide_credentials(f"x{SECRET}y")


def test_urls_have_local_names_of_their_own() -> None:
    texts = ["s3://a/b-c", "s3://a-b/c", "s3://a/b/c", "gs://a/b/c", f"s3://a/{'x' * 300}"]
    names = {local_name(parse_store_url(text, "out")) for text in texts}
    assert len(names) == len(texts)
    assert all("/" not in name and len(name) < 100 for name in names)


def test_a_scheme_without_its_package_says_what_to_install() -> None:
    with pytest.raises(ValueError, match=r"out: expected a scheme that fsspec knows, got nope://"):
        open_filesystem(StoreURL("nope", "x"), "out")
    try:
        import gcsfs  # type: ignore[import-not-found] # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="pip install gcsfs"):
            open_filesystem(StoreURL("gs", "bucket/x"), "out")


def test_a_file_system_is_opened() -> None:
    filesystem = open_filesystem(StoreURL("memory", "test-url"), "out")
    filesystem.pipe_file("test-url/a", b"1")
    assert filesystem.cat_file("test-url/a") == b"1"
    filesystem.rm("test-url", recursive=True)
