import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynarl.slurm.hostlist import HostlistError, expand, fold


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("n[2,1-2]", "n2 n1 n2"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[1,01]", "n1 n01"),
        ("a[1-2]b[1-2]", "a1b1 a1b2 a2b1 a2b2"),
        ("x[1-2][3-4]", "x13 x14 x23 x24"),
        ("n[1-2]-ib", "n1-ib n2-ib"),
        ("m[3-4]x", "m3x m4x"),
        ("n1 n2", "n1 n2"),
        ("", ""),
        ("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC"),
        ("b04-[09-10]", "b04-09 b04-10"),
        ("fw0[01,11,21,42]", "fw001 fw011 fw021 fw042"),
        ("a.b.c[1-2],login", "a.b.c1 a.b.c2 login"),
        ("[1-2]", "1 2"),
        ("n1,,n2,", "n1 n2"),
    ],
)
def test_expand_as_slurm_does(text, hosts):
    assert expand(text) == hosts.split()


@pytest.mark.parametrize(
    "text, piece",
    [
        ("n[1-2", "n[1-2"),
        ("a1,n1-2]", "n1-2]"),
        ("n[[1-2]]", "n[["),
        ("n[1-x]", "1-x"),
        ("n[1,,2]", ""),
        ("n[]", ""),
        ("n[3-1]", "3-1"),
        ("n[1-2-3]", "1-2-3"),
        ("n[1-300000]", "1-300000"),
        ("n[0-999]m[0-999]", "n[0-999]m[0-999]"),
    ],
)
def test_the_error_quotes_the_faulty_piece(text, piece):
    with pytest.raises(HostlistError) as error:
        expand(text)
    assert error.value.piece == piece
    assert repr(piece) in str(error.value)


@pytest.mark.parametrize(
    "hosts, text",
    [
        ("n1 n2 n3", "n[1-3]"),
        ("n1 n2 n3 n7", "n[1-3,7]"),
        ("n098 n099 n100", "n[098-100]"),
        ("n9 n10", "n[9-10]"),
        ("n9 n010", "n[9,010]"),
        ("n1", "n1"),
        ("login n1 n2", "login,n[1-2]"),
        ("n1-ib n2-ib", "n1-ib,n2-ib"),  # no suffix after a bracket: refused before 23.11
        ("n3 n2 n2", "n[3,2,2]"),
        ("", ""),
    ],
)
def test_fold(hosts, text):
    assert fold(hosts.split()) == text


names = st.from_regex(r"[a-z]{0,2}[0-9]{1,4}(-ib)?|[a-z]{1,3}", fullmatch=True)


@given(st.lists(names, max_size=30))
def test_fold_then_expand_gives_the_same_hosts_in_the_same_order(hosts):
    assert expand(fold(hosts)) == hosts


def test_fold_refuses_what_is_not_one_host():
    with pytest.raises(HostlistError, match="one host"):
        fold(["n[1-2]"])
