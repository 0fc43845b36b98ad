"""Random requests that follow the OpenAPI description of the real server, and some that do not."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from oocgemm.jobs.options import options_of
from oocgemm.jobs.support import VERBS
from oocgemm.service.job_arguments import job_options
from oocgemm.service.job_spec import parameters
from oocgemm.service.protocol import Action
from tests.support.real_server import RealServer, running_server
from tests.support.suite import examples

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
CASES, QUICK_CASES = 10_000, 50


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with running_server(tmp_path_factory.mktemp("server"), "--share-device") as found:
        yield found


def described(server: RealServer, token: str) -> Any:
    headers = {"Authorization": f"Bearer {token}"}
    return schemathesis.openapi.from_url(f"{server.url}/v1/openapi.json", headers=headers)


def test_the_description_is_openapi_3_1_and_complete(server: RealServer) -> None:
    found = server.ask("GET", "/v1/openapi.json").json()
    assert found["openapi"].startswith("3.1.")
    calls = {(method, path) for path, methods in found["paths"].items() for method in methods}
    actions = {("post", f"/v1/jobs/{{job}}/{action}") for action in Action}
    files = {("get", f"/v1/jobs/{{job}}/{each}") for each in ("events", "log", "timeline", "report", "tiles")}
    assert calls == actions | files | {
        *(("post", path) for path in ("/v1/jobs", "/v1/batches", "/v1/drain")),
        *(("get", path) for path in ("/v1/jobs", "/v1/jobs/{job}", "/v1/events", "/v1/devices", "/v1/roots")),
        *(("get", path) for path in ("/v1/queue", "/v1/user")),
        *(("patch", "/v1/jobs/{job}"), ("delete", "/v1/jobs/{job}")),
        *(("get", path) for path in ("/livez", "/readyz", "/metrics")),
    }


def test_the_form_shows_options_as_the_table_describes_them(server: RealServer) -> None:
    schemas = server.ask("GET", "/v1/openapi.json").json()["components"]["schemas"]
    assert {*schemas["GemmOptions"]["properties"]} == {*job_options("gemm")}
    reply = server.ask("GET", "/static/options.js")
    assert reply.headers["Content-Type"].startswith("text/javascript")
    forms = json.loads(reply.body.removeprefix(b"export const VERBS = ").removesuffix(b";\n"))
    assert {*forms} == {*VERBS} - {"reduce"}
    served = forms["gemm"]["options"]
    shown = {each["name"]: each for each in served}
    assert {*job_options("gemm")} - {*shown} == {"decode", "memory", "epilogue"}
    script = server.ask("GET", "/static/fields.js").body.decode()
    groups = {*re.findall(r'of\("(\w+)"\)', script)} | {"a", "b"}
    assert {each["group"] for each in served} == groups - {"verb"} == {"a", "b", "c", "budgets", "more"}
    assert not {*shown} & {*re.findall(r'"(\w+)"', script)}  # the table alone names options
    place = "chosen by the planner"
    assert shown["tile"] == {
        "name": "tile", "label": "Tile", "help": "MxNxK, such as 4096x4096x512.", "kind": "text",
        "group": "more", "place": place,
    }  # fmt: skip
    for verb, form in forms.items():
        fields = {each["name"] for part in form.values() for each in part}
        hidden = job_options(verb).keys() - fields
        assert hidden <= {"decode", "memory", "epilogue"}, verb
        assert {*parameters(verb)} <= fields
    own = {each["name"]: each for each in forms["similarity"]["options"]}
    assert own["exclude_self"] | {"label": "Include self", "off": True} == own["exclude_self"]
    assert own["metric"]["kind"] == [["", "cosine"], ["dot", "dot"]]
    assert shown["chunks"]["kind"] == "pair"
    assert shown["verify"]["kind"] == "check"
    assert [value for value, _ in shown["compute"]["kind"]] == [
        "",
        *options_of("gemm")["compute"].choices[1:],
    ]


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_random_requests_lead_to_no_error_of_the_server_and_to_described_answers(server: RealServer) -> None:
    """In half of the cases, ids and paths are such that the request reaches what it is for."""
    token = server.token("admin")
    schema = described(server, token)
    operations = [found.ok() for found in schema.get_all_operations()]
    # Streams of all events never end.
    operations = [each for each in operations if each.path != "/v1/events"]
    count = examples(CASES, quick=QUICK_CASES)
    share = -(-count // (2 * len(operations)))
    rng = random.Random(11)
    jobs = [server.submit(f"{name}.npy", name=name)["id"] for name in ("first", "second")]
    for job in jobs:
        server.until(job, "succeeded")
    statuses: Counter[int] = Counter()
    names = iter(range(10**9))

    def send(case: Any) -> None:
        if rng.random() < 0.5:
            adapt(case)
        response = case.call(headers={"Authorization": f"Bearer {token}"}, timeout=60)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    def adapt(case: Any) -> None:
        if case.path_parameters and "job" in case.path_parameters:
            fresh = server.submit(f"fuzz{next(names)}.npy", held=True)["id"] if rng.random() < 0.1 else None
            case.path_parameters = {"job": fresh or rng.choice(jobs)}
        bodies = case.body.get("jobs", [case.body]) if isinstance(case.body, dict) else []
        for body in bodies if isinstance(bodies, list) else []:
            if isinstance(body, dict) and case.path in ("/v1/jobs", "/v1/batches"):
                body |= {
                    "a": "data:A.npy",
                    "b": "data:B.npy",
                    "c": f"out:fuzz{next(names)}.npy",
                    "held": True,
                }
                body["needs"] = []
                if rng.random() < 0.5:
                    body.pop("options", None)

    for operation in operations:
        for mode in schemathesis.GenerationMode:
            strategy = operation.as_strategy(generation_mode=mode)

            @seed(5)
            @settings(
                max_examples=share,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=strategy)
            def requests(case: Any) -> None:
                send(case)

            with suppress(Unsatisfiable):  # some operations take whatever is sent
                requests()
    print(sum(statuses.values()), dict(statuses))
    assert {200, 404, 422} <= {*statuses}
    assert server.ask("GET", "/readyz").json()["problems"] == []
    assert server.log() == ""
