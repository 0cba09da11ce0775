"""Problems are collected, raised once, and read well."""

import pickle

import pytest

from meshwright.errors import Finding, Findings, PlanError, listing, nearest, source_place


def two_findings() -> Findings:
    findings = Findings()
    findings.add(where="plan.yaml:1:8 (mesh.tpp)", given="the axis tpp", required="an axis", fix="tp: 2")
    findings.add(where="modules", given="block_b", required="a module", fix="modules:\n  block_a: {dp: shard}")
    return findings


def test_all_problems_are_raised_once_and_read_as_a_block() -> None:
    with pytest.raises(PlanError) as caught:
        two_findings().raise_if_any()
    expected = """\
2 problems in this plan

1. where:    plan.yaml:1:8 (mesh.tpp)
   given:    the axis tpp
   required: an axis
   fix:      tp: 2

2. where:    modules
   given:    block_b
   required: a module
   fix:
       modules:
         block_a: {dp: shard}"""
    assert str(caught.value) == expected
    assert [finding.where for finding in caught.value.findings] == ["plan.yaml:1:8 (mesh.tpp)", "modules"]


def test_one_problem_is_singular_and_an_empty_fix_is_left_out() -> None:
    error = PlanError([Finding("world", "3 ranks", "4 ranks")], "this run")
    assert str(error) == "1 problem in this run\n\n1. where:    world\n   given:    3 ranks\n   required: 4 ranks"


def test_wide_numbers_keep_the_columns() -> None:
    block = str(PlanError([Finding("a", "b", "c", "d")] * 10)).split("\n\n")[-1]
    assert block == "10. where:    a\n    given:    b\n    required: c\n    fix:      d"


def test_nothing_found_is_false_and_raises_nothing() -> None:
    findings = Findings()
    findings.raise_if_any()
    assert not findings and len(findings) == 0
    findings.extend(two_findings())
    assert findings and len(findings) == 2


def test_an_error_is_a_value_error_and_crosses_processes() -> None:
    error = PlanError(two_findings(), "this mesh")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(error, ValueError)
    assert str(copy) == str(error) and copy.findings == error.findings


def test_nearest_words_come_nearest_first() -> None:
    assert nearest("block_c", ["head", "blocks", "block_a"])[0] == "block_a"
    assert nearest("zzz", ["block_a"]) == ()
    assert len(nearest("aaaa", ["aaab", "aaac", "aaad", "aaae"], most=2)) == 2


@pytest.mark.parametrize(("words", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a or b"), ("abc", "a, b or c")])
def test_listing(words: list[str], text: str) -> None:
    assert listing(words) == text


def test_a_source_is_told_by_the_last_two_parts_of_its_path() -> None:
    assert source_place("/a/venv/site-packages/models/llama/modeling.py", 123) == "llama/modeling.py:123"
    assert source_place("train.py", 3, 7) == "train.py:3:7"
    assert source_place("/train.py") == "/train.py"
