"""The short way into reasoning-gym gives what the package itself gives, and leaves the package usable."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
{make}
entries = [data[i] for i in range(20)]
scores = [data.score_answer(a, e) for e in entries for a in (e["answer"], "0", "x" + e["answer"])]
print(json.dumps([[e["question"] for e in entries], scores]))
"""
ARGS = "min_terms=2, max_terms=5, seed=11"
DIRECT = f"import reasoning_gym; data = reasoning_gym.create_dataset('chain_sum', {ARGS})"
SHORT = f"from dynarl.tasks import gym; data = gym.create_dataset('arithmetic', 'chain_sum', {ARGS})"
THEN_WHOLE = SHORT + "; import reasoning_gym; other = reasoning_gym.create_dataset('gcd', seed=1)[0]; assert other['answer']"


def output(make: str) -> list:
    ran = subprocess.run([sys.executable, "-c", PROGRAM.format(make=make)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("make", [SHORT, THEN_WHOLE])
def test_the_short_import_gives_the_same_data_set(make):
    assert output(make) == output(DIRECT)


def test_the_short_import_does_not_load_the_other_generators():
    make = SHORT + "; assert not {'sympy', 'matplotlib', 'numpy'} & set(sys.modules), 'heavy import'"
    output(make)


def test_an_unknown_module_is_named():
    from dynarl.tasks import gym

    with pytest.raises(ModuleNotFoundError, match="reasoning_gym.arithmetic.no_such_thing"):
        gym.create_dataset("arithmetic", "no_such_thing")
    assert "reasoning_gym.arithmetic" not in sys.modules
