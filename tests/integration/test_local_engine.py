import json
import random
import time

import msgspec
import pytest

torch = pytest.importorskip("torch")

from machine import cpu_seconds  # noqa: E402
from tiny_model import write_model  # noqa: E402
from worker_harness import Harness  # noqa: E402

from dynarl import wire  # noqa: E402
from dynarl.dataflow.store import Store  # noqa: E402
from dynarl.roles.rollout.engine import Request  # noqa: E402
from dynarl.roles.rollout.local_engine import LocalEngine  # noqa: E402
from dynarl.wire import Trajectory  # noqa: E402

PROMPTS = [[5 + i, 7, 3 + 2 * i, 11, 2] + [1 + i] * i for i in range(9)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return [write_model(str(root / f"v{seed}"), seed=seed, eos=None) for seed in (0, 1)]


def request(index, tokens=40, **fields):
    return Request(f"0:{index}:0", wire.pack_ids(PROMPTS[index]), tokens, seed=3, **fields)


def run(engine, requests=()):
    engine.submit(list(requests))
    outputs = {}
    while engine.busy():
        outputs.update((output.sample, output) for output in engine.step())
    return outputs


def assert_same(a, b):
    assert wire.unpack_ids(a.response) == wire.unpack_ids(b.response)
    assert wire.unpack_floats(a.logprobs) == pytest.approx(wire.unpack_floats(b.logprobs), abs=1e-5)


def reference_logits(model_dir, tokens):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("family, tied", [("Qwen2ForCausalLM", True), ("LlamaForCausalLM", False), ("Qwen3ForCausalLM", True),
                                          ("Qwen3MoeForCausalLM", False), ("Qwen3MoeForCausalLM", True)])
def test_prefill_and_decode_agree_with_transformers(tmp_path, family, tied):
    model_dir = write_model(str(tmp_path), seed=4, family=family, tied=tied, eos=None)
    outputs = run(LocalEngine(model_dir, 0), [request(0), request(4, temperature=0.0), request(8, temperature=0.7)])
    for index, temperature in ((0, 1.0), (4, 1.0), (8, 0.7)):
        output = outputs[f"0:{index}:0"]
        answer = wire.unpack_ids(output.response)
        assert len(answer) == 40
        logits = reference_logits(model_dir, PROMPTS[index] + answer)[len(PROMPTS[index]) - 1 : -1]
        wanted = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert wire.unpack_floats(output.logprobs) == pytest.approx(wanted.tolist(), abs=1e-5)
        if index == 4:
            assert answer == logits.argmax(-1).tolist()


def test_weights_of_experts_stay_as_the_router_made_them_where_the_model_says_so(tmp_path):
    model_dir = write_model(str(tmp_path), seed=4, family="Qwen3MoeForCausalLM", tied=False, eos=None)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"norm_topk_prob": False}))
    output = run(LocalEngine(model_dir, 0), [request(8)])["0:8:0"]
    answer = wire.unpack_ids(output.response)
    logits = reference_logits(model_dir, PROMPTS[8] + answer)[len(PROMPTS[8]) - 1 : -1]
    wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert wire.unpack_floats(output.logprobs) == pytest.approx(wanted.tolist(), abs=1e-5)


def test_a_sample_is_the_same_alone_in_a_batch_and_over_three_engines(models):
    alone = run(LocalEngine(models[0], 0), [request(8)])["0:8:0"]
    # More requests than rows: this one waits, joins late, and changes rows when others leave.
    lengths = (3, 30, 11, 25, 2, 40, 8, 17)
    crowd = run(LocalEngine(models[0], 0, max_running=4), [request(i, n) for i, n in enumerate(lengths)] + [request(8)])
    assert [len(crowd[f"0:{i}:0"].response) // 4 for i in range(8)] == list(lengths)
    assert_same(crowd["0:8:0"], alone)

    partial = {}
    for index, steps in ((0, 1), (5, 17), (2, 9)):
        engine = LocalEngine(models[0], 0, max_running=2)
        engine.submit([request(index), request(8, response=partial.get("response", b""), logprobs=partial.get("logprobs", b""))])
        for _ in range(steps):
            engine.step()
        (output,) = engine.abort(["0:8:0"])
        assert output.finish == "abort"
        assert len(output.response) == len(partial.get("response", b"")) + 4 * steps
        partial = {"response": output.response, "logprobs": output.logprobs}
        run(engine)
    assert_same(run(LocalEngine(models[0], 0), [request(8, **partial)])["0:8:0"], alone)


def test_the_seed_and_the_sample_change_the_answer(models):
    first = Request("0:0:0", wire.pack_ids(PROMPTS[0]), 40, seed=3)
    outputs = [
        run(LocalEngine(models[0], 0), [r])[r.sample].response
        for r in (first, Request("0:0:1", first.prompt, 40, seed=3), Request("0:0:0", first.prompt, 40, seed=4))
    ]
    assert len(set(outputs)) == 3


def test_an_answer_ends_with_the_end_token_or_at_its_limit(models, tmp_path):
    whole = wire.unpack_ids(run(LocalEngine(models[0], 0), [request(1)])["0:1:0"].response)
    end = next(token for token in whole[5:] if token not in whole[:5])
    engine = LocalEngine(write_model(str(tmp_path), seed=0, eos=end), 0)
    output = run(engine, [request(1)])["0:1:0"]
    assert output.finish == "stop"
    assert wire.unpack_ids(output.response) == whole[: whole.index(end) + 1]
    assert run(engine, [request(1, 4)])["0:1:0"].finish == "length"
    # A partial answer that has ended already is returned as it is.
    again = run(engine, [request(1, response=output.response, logprobs=output.logprobs)])["0:1:0"]
    assert (again.finish, again.response, again.logprobs) == ("stop", output.response, output.logprobs)


def test_an_answer_stops_at_a_stop_token_and_goes_on_behind_what_was_put_there(models):
    """A tool's turn: what is sampled behind it depends on the tokens, and not on who wrote them."""
    engine = LocalEngine(models[0], 0)
    whole = run(engine, [request(1)])["0:1:0"]
    tokens = wire.unpack_ids(whole.response)
    stop = next(token for token in tokens[5:] if token not in tokens[:5])
    first = run(engine, [request(1, stop_ids=[stop])])["0:1:0"]
    assert first.finish == "stop" and wire.unpack_ids(first.response) == tokens[: tokens.index(stop) + 1]
    # With the very tokens that it would have sampled as the tool's output, the answer is the undisturbed one.
    at = len(first.response) // 4 + 6
    response, logprobs = whole.response[: 4 * at], first.logprobs + wire.pack_floats([0.0] * 6)
    rest = run(engine, [request(1, response=response, logprobs=logprobs, tool_calls=1)])["0:1:0"]
    assert rest.response == whole.response
    assert wire.unpack_floats(rest.logprobs)[at:] == pytest.approx(wire.unpack_floats(whole.logprobs)[at:], abs=1e-5)


def test_the_positions_of_the_model_are_a_limit(models):
    engine = LocalEngine(models[0], 0)
    output = run(engine, [request(0, 10_000)])["0:0:0"]
    assert output.finish == "length"
    assert len(output.response) // 4 + len(PROMPTS[0]) == 256


def test_abort_returns_running_and_waiting_requests_once(models):
    engine = LocalEngine(models[0], 7, max_running=2)
    came = wire.pack_ids([4, 4]), wire.pack_floats([-1.0, -2.0])
    engine.submit([request(0), request(1), request(2), request(3, response=came[0], logprobs=came[1])])
    engine.step()
    engine.step()
    outputs = {output.sample: output for output in engine.abort()}
    assert {sample: len(output.response) // 4 for sample, output in outputs.items()} == {"0:0:0": 2, "0:1:0": 2, "0:2:0": 0, "0:3:0": 2}
    assert (outputs["0:3:0"].response, outputs["0:3:0"].logprobs) == came
    assert {(output.finish, output.version) for output in outputs.values()} == {("abort", 7)}
    assert not engine.busy() and engine.step() == [] and engine.abort() == []
    run(engine, [request(0)])


def test_abort_also_returns_a_request_that_was_submitted_at_its_end(models):
    """Else the engine would be busy, and could not sleep, after it was told to give up everything."""
    engine = LocalEngine(models[0], 7)
    came = {"response": wire.pack_ids([4, 4]), "logprobs": wire.pack_floats([-1.0, -2.0])}
    engine.submit([request(0, 2, **came), request(1, 2, **came)])
    assert [(output.sample, output.finish) for output in engine.abort(["0:0:0"])] == [("0:0:0", "length")]
    assert [(output.sample, output.finish) for output in engine.abort()] == [("0:1:0", "length")]
    engine.sleep()


def test_members_of_a_group_share_one_prefill(models):
    engine = LocalEngine(models[0], 0)
    seen = []
    forward = engine._decoder.forward
    engine._decoder.forward = lambda tokens, *args: seen.append(len(tokens)) or forward(tokens, *args)
    group = [Request(f"0:5:{member}", wire.pack_ids(PROMPTS[5]), 12, seed=3) for member in range(6)]
    outputs = run(engine, group)
    assert seen == [len(PROMPTS[5])] + [6] * 11
    assert len({output.response for output in outputs.values()}) == 6
    assert_same(outputs["0:5:4"], run(LocalEngine(models[0], 0), group[4:5])["0:5:4"])


def turn(engine, output, more=(), tokens=40, **fields):
    """The request of `output` again, with what was sampled and `more` behind it, as after a tool call."""
    index = int(output.sample.split(":")[1])
    came = dict(response=output.response + wire.pack_ids(more), logprobs=output.logprobs + wire.pack_floats([0.0] * len(more)))
    return request(index, tokens, **came, **fields)


def prefilled_by(engine, requests):
    """Outputs of these requests, and (tokens that were prefilled for them, tokens that were not because the cache had them)."""
    before = engine.figures()
    outputs = run(engine, requests)
    after = engine.figures()
    return outputs, (after.prefill_tokens - before.prefill_tokens, after.reused_tokens - before.reused_tokens)


def test_lengths_that_are_reported_do_not_count_what_tools_wrote(models):
    engine = LocalEngine(models[0], 0, max_running=4)
    engine.submit([request(3)])
    for _ in range(9):
        engine.step()
    (partial,) = engine.abort()
    engine.submit([turn(engine, partial, more=[5, 6, 7], masked_tokens=3)])
    engine.step()
    assert engine.figures().lengths == [10]


def test_a_request_that_was_given_up_and_returns_needs_no_prefill(models):
    engine = LocalEngine(models[0], 0, max_running=4)
    engine.submit([request(index) for index in (3, 5, 8)])
    for _ in range(9):
        engine.step()
    partials = engine.abort(["0:5:0", "0:8:0"])
    run(engine)  # the other one goes on meanwhile
    outputs, (prefilled, reused) = prefilled_by(engine, [turn(engine, partial) for partial in partials])
    assert (prefilled, reused) == (2, len(PROMPTS[5]) + len(PROMPTS[8]) + 2 * 8)
    alone = run(LocalEngine(models[0], 0), [request(5), request(8)])
    for sample, output in outputs.items():
        assert_same(output, alone[sample])


def test_a_second_turn_prefills_only_what_the_tool_said(models):
    engine = LocalEngine(models[0], 0)
    first = run(engine, [request(index, 12) for index in range(4)])["0:2:0"]
    outputs, (prefilled, reused) = prefilled_by(engine, [turn(engine, first, more=[7, 8, 9])])
    # The last token of the first turn was sampled, but never fed.
    assert (prefilled, reused) == (1 + 3, len(PROMPTS[2]) + 11)
    fresh, (without, none) = prefilled_by(LocalEngine(models[0], 0), [turn(engine, first, more=[7, 8, 9])])
    assert (without, none) == (prefilled + reused, 0)
    assert_same(outputs["0:2:0"], fresh["0:2:0"])


def test_a_late_member_of_a_group_shares_the_prompt_of_one_that_runs_or_has_finished(models):
    members = [Request(f"0:8:{member}", wire.pack_ids(PROMPTS[8]), 12, seed=3) for member in range(3)]
    engine = LocalEngine(models[0], 0)
    engine.submit(members[:1])
    engine.step()
    engine.step()
    while_running, figures = prefilled_by(engine, members[1:2])
    assert figures == (1, len(PROMPTS[8]) - 1)
    afterwards, figures = prefilled_by(engine, members[2:])
    assert figures == (1, len(PROMPTS[8]) - 1)
    alone = run(LocalEngine(models[0], 0), members)
    for sample, output in (while_running | afterwards).items():
        assert_same(output, alone[sample])


def test_what_is_kept_gives_way_the_least_recently_used_first(models):
    engine = LocalEngine(models[0], 0, max_running=2)  # and one row more
    outputs = {}
    for index in (1, 2, 3, 4):
        outputs |= run(engine, [request(index, 6)])
    assert [kept.sample for kept in engine._cache.kept.values()] == ["0:2:0", "0:3:0", "0:4:0"]
    _, (_, reused) = prefilled_by(engine, [turn(engine, outputs["0:2:0"], tokens=9)])
    assert reused
    run(engine, [request(5, 6)])
    assert [kept.sample for kept in engine._cache.kept.values()] == ["0:4:0", "0:2:0", "0:5:0"]
    _, (_, reused) = prefilled_by(engine, [turn(engine, outputs["0:3:0"], tokens=9)])
    assert not reused


def test_new_weights_and_sleep_leave_no_prefix(models):
    for forget in (lambda engine: engine.load(models[1], 1), lambda engine: (engine.sleep(), engine.wake())):
        engine = LocalEngine(models[0], 0)
        output = run(engine, [request(3, 6)])["0:3:0"]
        forget(engine)
        _, (_, reused) = prefilled_by(engine, [turn(engine, output)])
        assert reused == 0


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_goes_and_comes_again_the_answers_are_those_of_undisturbed_requests(models, seed):
    source = random.Random(seed)
    names = [(index, member) for index in range(5) for member in range(3)]
    want = {f"0:{i}:{m}": source.randint(3, 40) for i, m in names}

    def ask(sample, response=b"", logprobs=b""):
        index = int(sample.split(":")[1])
        return Request(sample, wire.pack_ids(PROMPTS[index]), want[sample], response, logprobs, seed=3, tool_calls=source.randint(0, 2))

    engine, outside, done = LocalEngine(models[0], 0, max_running=4), {sample: ask(sample) for sample in want}, {}
    while len(done) < len(want):
        if outside and source.random() < 0.5:
            chosen = source.sample(sorted(outside), min(len(outside), source.randint(1, 4)))
            engine.submit([outside.pop(sample) for sample in chosen])
        done |= {output.sample: output for output in engine.step()}
        if source.random() < 0.2:
            aborted = engine.abort(source.sample(sorted(want), 5))
            outside |= {output.sample: ask(output.sample, output.response, output.logprobs) for output in aborted}
    assert engine.figures().reused_tokens > 200
    alone = run(LocalEngine(models[0], 0), [ask(sample) for sample in want])
    for sample in want:
        assert_same(done[sample], alone[sample])


@pytest.mark.parametrize("order, samples", [("priority", (3, 8, 1, 2, 4)), ("arrival", (1, 2, 8, 3, 4))])
def test_later_turns_and_longer_cached_prefixes_are_taken_in_first_unless_arrival_decides(models, order, samples):
    engine = LocalEngine(models[0], 0, max_running=1)
    engine.submit([request(8)])
    engine.step()
    (partial,) = engine.abort()
    waiting = [request(1, 3), request(2, 3), turn(engine, partial, tokens=9), request(3, 3, tool_calls=1), request(4, 3)]
    engine.submit([msgspec.structs.replace(one, order=order) for one in waiting])
    came = []
    while engine.busy():
        came += [output.sample for output in engine.step()]
    assert came == [f"0:{number}:0" for number in samples]


def test_load_updates_weights_in_place_and_requests_go_on_under_them(models):
    engine = LocalEngine(models[0], 1)
    before = {name: tensor.data_ptr() for name, tensor in engine._decoder._views().items()}
    engine.submit([request(0), request(1, 6)])
    for _ in range(5):
        engine.step()
    engine.load(models[1], 2)
    assert {name: tensor.data_ptr() for name, tensor in engine._decoder._views().items()} == before
    outputs = run(engine)
    answer, logprobs = wire.unpack_ids(outputs["0:0:0"].response), wire.unpack_floats(outputs["0:0:0"].logprobs)
    assert (outputs["0:0:0"].start_version, outputs["0:0:0"].version) == (1, 2)
    start = len(PROMPTS[0]) - 1
    for model, part in ((models[0], slice(0, 5)), (models[1], slice(5, 40))):
        logits = torch.log_softmax(reference_logits(model, PROMPTS[0] + answer), -1)[start:]
        wanted = [logits[i, answer[i]].item() for i in range(part.start, part.stop)]
        assert logprobs[part] == pytest.approx(wanted, abs=1e-5)
    assert_same(run(engine, [request(2)])["0:2:0"], run(LocalEngine(models[1], 2), [request(2)])["0:2:0"])


def test_weights_of_another_model_are_refused_and_nothing_is_overwritten(models, tmp_path):
    engine = LocalEngine(models[0], 0)
    wanted = run(engine, [request(0)])["0:0:0"]
    with pytest.raises(ValueError, match="another shape"):
        engine.load(write_model(str(tmp_path / "wide"), eos=None, ffn_size=128), 1)
    broken = write_model(str(tmp_path / "untied"), eos=None, layers=3)
    (tmp_path / "untied" / "config.json").write_text(open(f"{models[0]}/config.json").read())
    with pytest.raises(ValueError, match="12 are unknown.*layers.2"):
        engine.load(broken, 1)
    assert engine.version == 0
    assert_same(run(engine, [request(0)])["0:0:0"], wanted)


def test_an_uncovered_model_is_named(tmp_path):
    with pytest.raises(ValueError, match="architecture MixtralForCausalLM.*sglang"):
        LocalEngine(write_model(str(tmp_path), family="MixtralForCausalLM"), 0)


@pytest.mark.parametrize(
    "bad, text",
    [
        (dict(prompt=b""), "empty prompt"),
        (dict(prompt=wire.pack_ids([48])), "token 48 is not in a vocabulary of 48"),
        (dict(prompt=wire.pack_ids([1] * 256)), "no room in 256 positions"),
        (dict(response=wire.pack_ids([1])), "1 response tokens but 0 log-probabilities"),
        (dict(temperature=-1.0), "temperature -1.0"),
        (dict(sample="0:0:0"), "in this engine already"),
    ],
)
def test_a_bad_request_refuses_the_whole_batch(models, bad, text):
    engine = LocalEngine(models[0], 0)
    fields = dict(sample="0:1:0", prompt=wire.pack_ids([1, 2]), max_response_tokens=4) | bad
    with pytest.raises(ValueError, match=text):
        engine.submit([request(0), Request(**fields)])
    assert not engine.busy()


def test_sleep_releases_the_cache_and_wakes_into_the_same_answers(models):
    engine = LocalEngine(models[0], 0)
    wanted = run(engine, [request(0)])["0:0:0"]
    engine.submit([request(1)])
    with pytest.raises(RuntimeError, match="0 running and 1 waiting"):
        engine.sleep()
    engine.abort()
    engine.sleep()
    assert engine._cache.data is None
    with pytest.raises(RuntimeError, match="wake it first"):
        engine.submit([request(1)])
    engine.load(models[1], 1)
    engine.load(models[0], 2)
    engine.wake()
    assert_same(run(engine, [request(0)])["0:0:0"], wanted)


def as_call(request):
    return {
        "sample": request.sample,
        "prompt": request.prompt,
        "response": request.response,
        "logprobs": request.logprobs,
        "max_response_tokens": request.max_response_tokens,
        "temperature": request.temperature,
        "seed": request.seed,
    }


def test_the_worker_serves_the_engine_over_its_socket(models, tmp_path):
    with Harness(tmp_path) as harness:
        worker = harness.start("stepped_rollout_worker", "n1-rollout-0")
        with pytest.raises(wire.CallError, match="call load first"):
            worker.call("submit", requests=[])
        worker.call("go_on", steps=10**6)
        worker.call("load", model_dir=models[0], version=4)
        worker.call("submit", requests=[as_call(request(i)) for i in range(3)])
        finished = {data["sample"]: data for data in (worker.wait_event("finished") for _ in range(3))}
        wanted = run(LocalEngine(models[0], 4), [request(i) for i in range(3)])
        for sample, data in finished.items():
            assert set(data) == {"sample", "response", "logprobs", "finish", "version", "start_version"}
            assert data["response"] == wanted[sample].response
            assert (data["finish"], data["version"], data["start_version"]) == ("length", 4, 4)
        figures = worker.call("figures")
        assert figures["tokens"] == 120 and figures["running"] == figures["waiting"] == figures["kv_used_tokens"] == 0
        assert worker.wait_event("figures")["tokens"] > 0

        # Aborted on the way: nothing of it comes as an event any more, and it goes on under other weights.
        worker.events()
        worker.call("go_on", steps=20)
        worker.call("submit", requests=[as_call(request(0, 240)), as_call(request(1, 240))])
        worker.wait_event("stepped")
        (partial,) = worker.call("abort", samples=["0:0:0"])
        assert len(partial["response"]) == 4 * 20
        worker.call("load", model_dir=models[1], version=5)
        resumed = as_call(request(0, 240)) | {"response": partial["response"], "logprobs": partial["logprobs"]}
        with pytest.raises(wire.CallError, match="0:1:0.*already"):
            worker.call("submit", requests=[resumed, as_call(request(1))])
        worker.call("go_on", steps=10**6)
        assert [data["sample"] for data in (worker.wait_event("finished"),)] == ["0:1:0"]
        worker.call("submit", requests=[resumed])
        data = worker.wait_event("finished")
        assert data["sample"] == "0:0:0" and data["version"] == 5
        assert data["response"].startswith(partial["response"]) and len(data["response"]) == 4 * 240

        worker.call("sleep")
        worker.call("wake")
        worker.call("stop")
        assert worker.process.wait(60) == 0


def test_parts_say_once_what_was_sampled_also_over_new_weights(models):
    engine, store = LocalEngine(models[0], 0, max_running=2), Store()
    came = run(LocalEngine(models[0], 0), [request(3, 5)])["0:3:0"]
    store.put(Trajectory("0:3:0", b"", came.response, came.logprobs))
    engine.submit([request(0), request(3, response=came.response, logprobs=came.logprobs), request(1)])

    def tell() -> dict[str, int]:
        parts = engine.parts()
        for part in parts:
            store.extend(prompt=b"", **msgspec.structs.asdict(part))
        return {part.sample: len(part.response) // 4 for part in parts}

    assert tell() == {}
    for steps in (1, 4, 2):
        for _ in range(steps):
            engine.step()
        assert tell() == {"0:0:0": steps, "0:3:0": steps} and tell() == {}
    engine.load(models[1], 1)
    engine.step()
    assert tell() == {"0:0:0": 1, "0:3:0": 1}
    outputs = {output.sample: output for output in engine.abort()}
    for trajectory in store.get(["0:0:0", "0:3:0"]):
        output = outputs[trajectory.sample]
        assert (trajectory.response, trajectory.rollout_logprobs, trajectory.version) == (output.response, output.logprobs, 1)


def test_an_answer_of_a_killed_worker_goes_on_as_if_nothing_had_been(models, tmp_path):
    wanted = run(LocalEngine(models[0], 4), [request(0, 240)])["0:0:0"]
    store = Store()
    with Harness(tmp_path) as harness:
        worker = harness.start("dynarl.roles.rollout.worker", "n1-rollout-0")
        worker.call("load", model_dir=models[0], version=4)
        worker.call("submit", requests=[as_call(request(0, 240))])
        (part,) = worker.wait_event("parts")["parts"]
        worker.process.kill()
        store.extend(prompt=request(0).prompt, **part)
    held = store.get(["0:0:0"])[0]
    assert 0 < held.num_response_tokens < 240
    resumed = request(0, 240, response=held.response, logprobs=held.rollout_logprobs)
    assert_same(run(LocalEngine(models[0], 4), [resumed])["0:0:0"], wanted)


def test_an_idle_worker_uses_no_cpu_and_figures_are_rate_limited(models, tmp_path):
    with Harness(tmp_path) as harness:
        worker = harness.start("dynarl.roles.rollout.worker", "n1-rollout-0")
        worker.call("load", model_dir=models[0], version=0)
        start = time.monotonic()
        worker.call("submit", requests=[as_call(request(i, 240)) for i in range(9)])
        for _ in range(9):
            worker.wait_event("finished")
        worker.call("ping")
        assert 1 <= len(worker.events("figures")) <= 4 * (time.monotonic() - start) + 2
        before = cpu_seconds(worker.process.pid)
        time.sleep(1.0)
        assert cpu_seconds(worker.process.pid) - before < 0.2
