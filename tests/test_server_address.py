from __future__ import annotations

import pytest

from headrace.errors import RequestError
from headrace.server_address import server_address


@pytest.mark.parametrize("tail", ["", "/", "//", "/v1", "/v1/"])
@pytest.mark.parametrize("base", ["http://127.0.0.1:8125", "https://host", "http://[::1]:8000/behind"])
def test_the_end_does_not_matter(base: str, tail: str) -> None:
    assert server_address(base + tail).geturl() == base


@pytest.mark.parametrize(
    "given", ["localhost:18100", "127.0.0.1:9", "[::1]:8000", "host:8000/v1/", "host:8000/behind"]
)
def test_host_and_port_alone_are_http(given: str) -> None:
    assert server_address(given).geturl() == "http://" + given.removesuffix("/v1/")


@pytest.mark.parametrize(
    "wrong",
    ["", "localhost", "host/v1", "http:/host:8000", ":8000", "ftp://host", "http://",
     "http://host:99999", "http://host:port", "http://host:0",
     "http://[::1", "http://host/?x=1", "x" * 5000],
)  # fmt: skip
def test_what_is_no_address_is_told(wrong: str) -> None:
    with pytest.raises(RequestError, match=r"server's address; write it as http://host:8000") as caught:
        server_address(wrong)
    assert len(str(caught.value)) < 200
