"""The rollout worker with SGLang, in the interpreter that bin/install-sglang makes (or DYNARL_SGLANG_PYTHON names)."""

import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest

torch = pytest.importorskip("torch")

import sglang_environment  # noqa: E402
from tiny_model import write_model  # noqa: E402
from worker_harness import Harness  # noqa: E402

from dynarl import wire  # noqa: E402
from dynarl.roles.rollout.engine import Request  # noqa: E402
from dynarl.roles.rollout.local_engine import LocalEngine  # noqa: E402

CONFIG = {"rollout": {"engine": "sglang", "max_running": 4, "args": [], "start_timeout_s": 400}, "cluster": {"device": "cpu"}}
EOS = 7
POSITIONS = 2048

pytestmark = sglang_environment.NEEDED


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [write_model(str(root / f"v{seed}"), seed=seed, eos=EOS, max_position=POSITIONS) for seed in (0, 1)]


@pytest.fixture(scope="module")
def worker(models, tmp_path_factory):
    with Harness(tmp_path_factory.mktemp("agent")) as harness:
        worker = harness.start("dynarl.roles.rollout.worker", "n1-rollout-0", python=sglang_environment.PYTHON)
        worker.call("load", timeout_s=400, model_dir=models[0], version=1, config=CONFIG)
        yield worker


def request(index, limit=60, **fields):
    fields = {"temperature": 1.0, "response": b"", "logprobs": b""} | fields
    prompt = wire.pack_ids([1 + (5 * index + i) % 40 for i in range(4 + index)])
    return {"sample": f"0:{index}:0", "prompt": prompt, "max_response_tokens": limit, "seed": 9} | fields


def local(model_dir, version, requests):
    """The same answers by the engine that is compared with transformers elsewhere."""
    engine = LocalEngine(model_dir, version)
    engine.submit([Request(**fields) for fields in requests])
    outputs = {}
    while engine.busy():
        outputs.update((output.sample, output) for output in engine.step())
    return outputs


def finished(worker, count):
    return {data["sample"]: data for data in (worker.wait_event("finished") for _ in range(count))}


def assert_same(data, output):
    assert wire.unpack_ids(data["response"]) == wire.unpack_ids(output.response)
    assert wire.unpack_floats(data["logprobs"]) == pytest.approx(wire.unpack_floats(output.logprobs), abs=1e-4)
    assert data["finish"] == output.finish


def long_request(model_dir, temperature):
    """A request whose answer does not meet the end token by itself for long, so that there is time to interrupt it."""
    candidates = [request(index, POSITIONS, temperature=temperature) for index in range(24)]
    outputs = local(model_dir, 0, candidates)
    return next(fields for fields in candidates if len(outputs[fields["sample"]].response) // 4 > 1800)


def wait_until_sampling(worker, tokens=100):
    end = time.monotonic() + 60
    while worker.call("figures")["kv_used_tokens"] < tokens:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_answers_and_log_probabilities_are_those_of_the_local_engine(worker, models):
    # More requests than the server takes at once; both ways to end; a temperature; a greedy one.
    requests = [request(i) for i in range(9)] + [request(9, temperature=0.6), request(10, temperature=0.0)]
    worker.call("submit", requests=requests)
    got, wanted = finished(worker, 11), local(models[0], 1, requests)
    for sample, data in got.items():
        assert_same(data, wanted[sample])
        assert (data["version"], data["start_version"]) == (1, 1)
    assert {data["finish"] for data in got.values()} == {"stop", "length"}
    assert all(wire.unpack_ids(data["response"])[-1] == EOS for data in got.values() if data["finish"] == "stop")
    figures = worker.call("figures")
    assert figures["tokens"] == sum(len(data["response"]) // 4 for data in got.values())
    assert figures["running"] == figures["waiting"] == 0 and figures["kv_total_tokens"] > 0


def test_an_aborted_request_goes_on_here_and_in_the_other_engine_as_if_it_had_not_been(worker, models):
    whole = long_request(models[0], 0.2)
    worker.call("submit", requests=[whole, request(30), request(31, 3)])
    wait_until_sampling(worker)
    (partial,) = worker.call("abort", samples=[whole["sample"]])
    assert partial["finish"] == "abort" and 1 < len(partial["response"]) // 4 < 1800
    assert set(finished(worker, 2)) == {"0:30:0", "0:31:0"}
    limit = len(partial["response"]) // 4 + 200
    resumed = whole | {"max_response_tokens": limit, "response": partial["response"], "logprobs": partial["logprobs"]}
    wanted = local(models[0], 1, [whole | {"max_response_tokens": limit}])[whole["sample"]]
    assert_same(msgspec.structs.asdict(local(models[0], 1, [resumed])[whole["sample"]]), wanted)
    before = worker.call("figures")
    worker.call("submit", requests=[resumed])
    assert_same(finished(worker, 1)[whole["sample"]], wanted)
    after = worker.call("figures")
    # The server still had the prefix that it had made itself.
    assert after["reused_tokens"] - before["reused_tokens"] > len(partial["response"]) // 4 / 2
    assert after["prefill_tokens"] - before["prefill_tokens"] < len(partial["response"]) // 4 / 2


def test_abort_of_all_returns_every_request_once_and_none_finishes_later(worker, models):
    # Greedy: the copies under other names are as long.
    endless = long_request(models[0], 0.0)
    requests = [endless | {"sample": f"1:{i}:0"} for i in range(12)]
    worker.call("submit", requests=requests)
    wait_until_sampling(worker)
    partials = worker.call("abort")
    assert sorted(partial["sample"] for partial in partials) == sorted(fields["sample"] for fields in requests)
    lengths = [len(partial["response"]) // 4 for partial in partials]
    assert max(lengths) > 0 and lengths.count(0) >= 12 - 6  # six may be on the server at once
    assert all(len(partial["logprobs"]) == len(partial["response"]) for partial in partials)
    time.sleep(0.5)
    assert worker.events("finished") == []
    figures = worker.call("figures")
    assert figures["running"] == figures["waiting"] == 0


def test_an_answer_stops_at_a_stop_token(worker, models):
    tokens = wire.unpack_ids(local(models[0], 1, [request(4, temperature=0.0)])["0:4:0"].response)
    stop = next(token for token in tokens[5:] if token not in tokens[:5])
    requests = [request(4, temperature=0.0, stop_ids=[stop])]
    worker.call("submit", requests=requests)
    data = finished(worker, 1)["0:4:0"]
    assert_same(data, local(models[0], 1, requests)["0:4:0"])
    assert wire.unpack_ids(data["response"])[-1] == stop


def test_weights_are_updated_in_place_and_running_requests_go_on_under_them(worker, models):
    whole = long_request(models[0], 0.0) | {"sample": "2:0:0"}
    worker.call("submit", requests=[whole])
    wait_until_sampling(worker)
    server = server_pid(worker)
    worker.call("load", model_dir=models[1], version=2)
    wait_until_sampling(worker, 20)
    (partial,) = worker.call("abort") or finished(worker, 1).values()
    assert (partial["start_version"], partial["version"]) == (1, 2)
    assert server_pid(worker) == server

    requests = [request(i) for i in range(5)]
    worker.call("submit", requests=requests)
    new, old = local(models[1], 2, requests), local(models[0], 1, requests)
    for sample, data in finished(worker, 5).items():
        assert_same(data, new[sample])
        assert data["response"] != old[sample].response
    worker.call("load", model_dir=models[0], version=1)


def test_weights_of_another_model_are_refused(worker, models, tmp_path):
    other = write_model(str(tmp_path), eos=EOS, max_position=POSITIONS, ffn_size=128)
    with pytest.raises(wire.CallError, match="another model"):
        worker.call("load", model_dir=other, version=3)
    worker.call("submit", requests=[request(0)])
    assert_same(finished(worker, 1)["0:0:0"], local(models[0], 1, [request(0)])["0:0:0"])


def test_sleep_and_wake(worker, models):
    worker.call("sleep")
    with pytest.raises(wire.CallError, match="wake it first"):
        worker.call("submit", requests=[request(0)])
    worker.call("wake")
    worker.call("submit", requests=[request(1)])
    assert_same(finished(worker, 1)["0:1:0"], local(models[0], 1, [request(1)])["0:1:0"])


def server_pid(worker):
    children = Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text().split()
    assert len(children) == 1
    return int(children[0])


def session_of(pid):
    """Process ids of the session that `pid` leads."""
    found = subprocess.run(["ps", "-o", "pid=", "-s", str(pid)], capture_output=True, text=True).stdout
    return [int(field) for field in found.split()]


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_an_idle_server_leaves_the_core_alone(worker):
    pids = session_of(server_pid(worker))
    assert len(pids) >= 3  # server, scheduler, detokenizer
    before = sum(map(cpu_s, pids))
    time.sleep(4.0)
    assert sum(map(cpu_s, pids)) - before < 0.2


def test_the_server_wants_a_key_that_no_command_line_or_child_shows(worker):
    pid = server_pid(worker)
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    address = f"http://127.0.0.1:{arguments[arguments.index(b'--port') + 1].decode()}/v1/loads"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(address, timeout=5)
    (key,) = [value.split(b"=", 1)[1] for value in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if value.startswith(b"DYNARL_SGLANG_KEY=")]
    for child in session_of(pid):
        assert key not in Path(f"/proc/{child}/cmdline").read_bytes()
        assert child == pid or key not in Path(f"/proc/{child}/environ").read_bytes()
    assert key.decode() not in worker.log.read_text()


def test_a_killed_worker_takes_its_server_with_it(worker):
    pids = session_of(server_pid(worker))
    worker.process.kill()
    worker.process.wait()
    end = time.monotonic() + 10
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.1)
