import pytest

torch = pytest.importorskip("torch")

from dynarl.roles.training import microbatch  # noqa: E402
from dynarl.wire import pack_floats, pack_ids, unpack_floats  # noqa: E402

CPU = torch.device("cpu")


def sample(name, prompt, response, **fields):
    return {"sample": name, "prompt": pack_ids(prompt), "response": pack_ids(response), **fields}


SAMPLES = [sample("0:0:0", [5, 6, 7], [8, 9]), sample("0:0:1", [5], [1, 2, 3, 4]), sample("0:0:2", [3, 4], [])]


def test_each_response_token_is_predicted_from_the_position_before_it():
    batch = microbatch.collate(SAMPLES, CPU)
    assert batch.tokens_BS.tolist() == [[5, 6, 7, 8], [5, 1, 2, 3], [3, 4, 0, 0]]
    assert batch.targets_N.tolist() == [8, 9, 1, 2, 3, 4] and batch.counts == [2, 4, 0]
    seen = batch.tokens_BS.T.flatten()[batch.picks_N].tolist()
    assert seen == [7, 8, 5, 1, 2, 3]  # the token each prediction is made at


def test_values_per_token_survive_the_way_there_and_back():
    samples = [
        dict(s, old_logprobs=pack_floats([-0.5 - i - j for j in range(len(s["response"]) // 4)]))
        for i, s in enumerate(SAMPLES)
    ]
    batch = microbatch.collate(samples, CPU)
    values = microbatch.per_token(samples, "old_logprobs", CPU)
    assert values.tolist() == [-0.5, -1.5, -1.5, -2.5, -3.5, -4.5]
    assert microbatch.split(values, batch, samples) == {s["sample"]: s["old_logprobs"] for s in samples}


def test_values_per_sample_are_repeated_for_its_tokens():
    batch = microbatch.collate(SAMPLES, CPU)
    assert microbatch.per_sample(batch, [0.5, -1.0, 9.0], CPU).tolist() == [0.5, 0.5, -1.0, -1.0, -1.0, -1.0]


def test_a_sample_without_its_logprobs_is_named():
    with pytest.raises(ValueError, match="0:0:0.*old_logprobs"):
        microbatch.per_token(SAMPLES, "old_logprobs", CPU)
    with pytest.raises(ValueError, match="0:0:1.*old_logprobs"):
        microbatch.per_token([dict(SAMPLES[1], old_logprobs=pack_floats([0.0]))], "old_logprobs", CPU)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="empty prompt"):
        microbatch.collate([sample("0:1:0", [], [1, 2])], CPU)


def test_logprobs_stay_float32_on_the_wire():
    batch = microbatch.collate(SAMPLES[:1], CPU)
    data = microbatch.split(torch.tensor([-0.25, -1.75], dtype=torch.bfloat16), batch, SAMPLES[:1])
    assert unpack_floats(data["0:0:0"]) == [-0.25, -1.75]


def test_what_a_tool_wrote_weighs_nothing_and_the_rest_what_its_sample_does():
    samples = [dict(SAMPLES[0], weight=0.5), dict(SAMPLES[1], mask=b"\1\0\0\1"), dict(SAMPLES[2], mask=b"")]
    batch = microbatch.collate(samples, CPU)
    assert microbatch.token_weights(batch, samples, CPU).tolist() == [0.5, 0.5, 1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("mask", [b"\1\0\0", b"\1\0\0\1\1"])
def test_a_mask_of_another_length_is_refused(mask):
    samples = [SAMPLES[0], dict(SAMPLES[1], mask=mask)]
    with pytest.raises(ValueError, match="0:0:1.*a mask of"):
        microbatch.token_weights(microbatch.collate(samples, CPU), samples, CPU)
