"""Query parameters: the server's own routes refuse what they do not know, those of the APIs' clients take it."""

from __future__ import annotations

import pytest

from headrace.serve.app import GET_ROUTES, OPEN_ROUTES, POST_ROUTES
from tests.serve.launch import LaunchedServer
from tests.serve.test_bad_input import HELLO, refused

GET_PATHS = ["/health", "/health/ready", "/health/live", "/ping", "/version", "/metrics", "/cache"]
POST_PATHS = ["/cache/reset", "/cache/explain", "/cache/pin", "/cache/unpin", "/weights/update", "/tokenize",
              "/detokenize"]  # fmt: skip
API_POSTS = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"model": "smollm2", "messages": HELLO, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "smollm2", "messages": HELLO},
}


@pytest.mark.parametrize("path", GET_PATHS)
def test_get_routes_refuse_what_they_do_not_know(server: LaunchedServer, path: str) -> None:
    plain = server.http.get(
        path, headers={"accept": "application/openmetrics-text;q=0.9,text/html;q=0.5,*/*;q=0.1"}
    )
    assert plain.status_code == 200 and server.http.get(path + "?").status_code == 200
    for query in ("max_node=5", "x", "max_node=5&max_nodes=5", "%ff=1"):
        error = refused(server.http.get(f"{path}?{query}"))
        assert (
            error["code"] == "unknown_parameter" and f"GET {path} has no query parameter" in error["message"]
        )
    error = refused(server.http.get(f"{path}?max_node=5"), param="max_node")
    known = "it takes 'max_nodes'; did you mean 'max_nodes'?" if path == "/cache" else "it takes none"
    assert "'max_node'" in error["message"] and known in error["message"]


@pytest.mark.parametrize("path", POST_PATHS)
def test_the_servers_own_post_routes_refuse_what_belongs_into_the_body(
    server: LaunchedServer, path: str
) -> None:
    before = server.metric("weight_updates_total")
    error = refused(server.http.post(f"{path}?model=/elsewhere", json={}), param="model")
    assert error["code"] == "unknown_parameter"
    assert f"POST {path} has no query parameter 'model'" in error["message"]
    assert server.metric("weight_updates_total") == before


@pytest.mark.parametrize("path", API_POSTS)
def test_what_clients_of_the_apis_send_is_taken(server: LaunchedServer, path: str) -> None:
    for query in ("beta=true", "api-version=2024-10-21", "api-version=1&api-version=2", "x&%ff=1"):
        answer = server.http.post(f"{path}?{query}", json=API_POSTS[path])
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/smollm2"])
def test_what_clients_of_the_apis_send_when_they_ask_for_models_is_taken(
    server: LaunchedServer, path: str
) -> None:
    answer = server.http.get(f"{path}?limit=20&beta=true&api-version=2024-10-21")
    assert answer.status_code == 200 and answer.json() == server.http.get(path).json()


def test_a_query_parameter_twice(server: LaunchedServer) -> None:
    error = refused(server.http.get("/cache?max_nodes=5&max_nodes=6"), param="max_nodes")
    assert error["code"] == "repeated_parameter"


def test_every_route_is_asked() -> None:
    routes = OPEN_ROUTES.keys() | GET_ROUTES.keys() | POST_ROUTES.keys()
    own = {path for path in routes if not path.startswith("/v1/")}
    assert own == {*GET_PATHS, *POST_PATHS}
    assert POST_ROUTES.keys() - own == API_POSTS.keys()
